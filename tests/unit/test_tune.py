"""``tune``, by speed and by successive halving, with trials whose results are made up."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmx.__main__ import main
from llmx.cli.arguments import read_words
from llmx.compose.overrides import check_overrides
from llmx.config import Experiment
from llmx.errors import RunFailed
from llmx.run import snapshot
from llmx.run.rundir import RunDir, write_json
from llmx.run.sweepdir import Sweep, Trial
from llmx.sweep.halving import Halving, continued, ranking, up_to
from tests.composing import composed
from tests.made_up_trials import Killed, Trials, enter, leave, only_sweep, outcomes
from tests.unit.test_checkpoint_export import make_model

pytestmark = pytest.mark.long

SMALL = ["hardware=cpu2", "model.config.num_hidden_layers=1"]
SEARCH = [
    *SMALL, "batch.global_batch=32", "zero=stage1,stage2",
    "model.activation_checkpointing=none,full",
]  # fmt: skip
FEW = [*SEARCH, "model.activation_checkpointing=none"]
SPEEDS = {1: 1.0, 2: 1.5, 3: 1.6, 4: 1.8, 8: 1.7, 16: 1.6}


class Speeds(Trials):
    """Fastest with stage 1 and a micro batch of 4; 16 does not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int | None] = []

    def train(self, exp: Experiment, run: RunDir) -> int:
        micro, stage = exp.batch.micro_batch, exp.zero.stage
        self.batches.append(exp.batch.global_batch)
        self.ran.append(f"stage{stage} {micro} {exp.model.activation_checkpointing}")
        oom = micro >= 16
        line = {"kind": "train", "loss": 1.0, "memory_gib": [0.4]}
        line["tokens_per_s"] = 1000.0 * SPEEDS[micro] / (1 + 0.1 * abs(stage - 1))
        lines = [{**line, "step": step} for step in (0 if oom else 2, 4, 6, 8, 10)]
        lines.append({"kind": "end", "step": 10})
        if oom:
            return leave(run, lines, outcome="oom", cause="CUDA out of memory")
        return leave(run, lines)


@pytest.fixture
def speeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_up_traces: None) -> Speeds:
    return enter(tmp_path, monkeypatch, Speeds())


# --- By speed --------------------------------------------------------------------------------


def test_it_finds_the_fastest_leaves_an_experiment_and_goes_on_when_killed(
    speeds: Speeds, capsys
) -> None:
    assert main(["tune", *SEARCH]) == 0
    assert speeds.ran[0].startswith("stage1 16")  # by the plan the fastest; it does not fit
    assert "stage1 4 none" in speeds.ran
    assert len(speeds.ran) <= 10
    said = capsys.readouterr().out
    assert "20 candidates" in said
    assert "the fastest: zero=stage1 batch.micro_batch=4" in said
    assert "not worth tryi" in said
    journal = only_sweep()
    assert outcomes(journal).count("oom") == 1
    assert journal.complete
    best = read_words(journal.directory / "best.yaml")
    assert {"zero=stage1", "batch.micro_batch=4"} <= set(best)
    assert not [word for word in best if "sweep" in word]
    assert (journal.directory / "tune.md").read_text().count("\n|") == 21
    assert f"llmx {journal.directory.relative_to(Path.cwd())}/best.yaml" in said
    exp = composed(check_overrides(best)).experiment
    assert (exp.zero.stage, exp.batch.micro_batch, exp.batch.global_batch) == (1, 4, 32)
    # A search that was killed goes on where it was; also one that is to fail fast: running out of
    # memory is an answer.
    whole, speeds.ran, speeds.deaths = speeds.ran, [], {3}
    assert any(trial.split()[1] == "16" for trial in whole[:3]), "one does not fit"
    command = ["tune", *SEARCH, "sweep.fail_fast=true", "hydra.sweep.dir=outputs/sweeps/killed"]
    with pytest.raises(Killed):
        main(command)
    assert speeds.ran == whole[:3]
    capsys.readouterr()
    assert main(command) == 0
    assert speeds.ran == whole  # the one that ran out of memory is not run again, either
    assert "in an earlier attempt" in capsys.readouterr().out
    assert main(["sweep", "resume", "outputs/sweeps/killed"]) == 0
    assert speeds.ran == whole


@pytest.mark.parametrize(
    ("words", "expected", "at_most", "says"),
    [
        ("zero=stage2 batch.micro_batch=2", {"stage2 2"}, 6, ""),
        ("zero=stage3,stage2 batch.micro_batch=8,2,4", {"stage2 4", "stage3 4", "stage2 8"}, 6, ""),
        ("sweep.max_trials=1 batch.micro_batch=1,2", {"stage1 2"}, 1, "max_trials=1 was reached"),
    ],
)
def test_keys_that_are_given_stay_or_are_the_axes(
    words: str, expected: set[str], at_most: int, says: str, speeds: Speeds, capsys
) -> None:
    assert main(["tune", *SEARCH, *words.split()]) == 0
    assert expected <= {trial.removesuffix(" none") for trial in speeds.ran}, speeds.ran
    assert len(speeds.ran) <= at_most
    assert says in capsys.readouterr().out


LARGE = "hardware=a100x8 model=llama2_7b batch.global_batch=256 data=demo batch.micro_batch=1,32 "
LARGE += "data.seq_len=4096 model.activation_checkpointing=none"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (" ".join(FEW), ("zero: stage1, stage2", "batch.micro_batch: 1, 2, 4, 8, 16",
                         "every candidate trains 32 samples a step")),
        ("batch=default hardware=cpu2 batch.micro_batch=1,2", ("batch.global_batch is not set",)),
        (LARGE, ("zero: stage1, stage2, stage2_offload, stage3, stage3_offload",
                 "would not fit by the plan")),
        (f"{LARGE} zero=stage0,stage1", ("alone take 100.4 GiB",)),
    ],
    ids=["small", "free batch", "large", "impossible"],
)  # fmt: skip
def test_a_dry_run_shows_the_candidates_and_leaves_nothing(
    words: str, says: tuple[str, ...], speeds: Speeds, capsys
) -> None:
    assert main(["tune", *words.split(), "dry_run=true"]) == 0
    said = capsys.readouterr().out
    for part in says:
        assert part in said
    assert not speeds.ran
    assert not Path("outputs").exists()


def test_the_default_batch_of_a_task_is_the_same_for_all_candidates(
    speeds: Speeds, tmp_path: Path, capsys
) -> None:
    """Two ranks of 3 take 30 of the 32, two of 8 would take 32."""
    make_model(vocab_size=1024).save_pretrained(tmp_path / "base")
    words = "model.tokenizer=demo hardware=cpu2 data=demo zero=stage1 data.seq_len=16 "
    words += "model.activation_checkpointing=none batch.micro_batch=3,8 task.max_lost=1"
    assert main(["tune", f"model.path={tmp_path / 'base'}", *words.split()]) == 0
    assert speeds.batches == [30, 30]
    assert "every candidate trains 30 samples a step" in capsys.readouterr().out


def test_failures_that_are_not_memory_end_it(speeds: Speeds, monkeypatch, capsys) -> None:
    def fails(*_: Any, **__: Any) -> int:
        speeds.ran.append("failed")
        raise RunFailed("no such data")

    monkeypatch.setattr("llmx.sweep.sweep.prepare", fails)
    assert main(["tune", *FEW]) == 1
    assert len(speeds.ran) == 3
    said = capsys.readouterr()
    assert "it is not the configuration" in said.out
    assert "no such data" in said.err


HALVED = "sweep.objective=eval/loss sweep.halving=10 optim.lr=1e-4,3e-4"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sweep.objective=eval/loss", "eval/loss: a loss or a metric is tuned by successive halvi"),
        ("sweep.objective=eval/loss optim.lr=1e-4,3e-4", "needs sweep.halving=N"),
        ("sweep.objective=speed", "speed: no such objective. Use tokens_per_s (the default), eval"),
        ("objective=tokens_per_s", "objective: no such key. It exists as sweep.objective."),
        ("batch.micro_batch=0", "batch.micro_batch=0: must be a whole number"),
        ("batch.micro_batch=1,3 batch.accumulation=5", "disagree"),
        ("batch.micro_batch=range(1,700)", "at most 2000 are planned"),
        ("hydra/sweeper=basic", "tune has its own"),
        ("sweep.halving=10 optim.lr=1e-4,3e-4", "sweep.trial_steps=10: short trials"),
        (f"{HALVED} sweep.trial_steps=5", "Set one of them"),
        (f"{HALVED} sweep.halving_factor=1", "sweep.halving_factor=1"),
    ],
)
def test_mistakes_are_said(words: str, message: str, speeds: Speeds, capsys) -> None:
    common = SMALL if "halving" in words else SEARCH
    assert main(["tune", *common, *words.split()]) == 2
    assert message in capsys.readouterr().err
    assert not speeds.ran


# --- By halving ------------------------------------------------------------------------------

LOSSES = {"1e-4": 5.0, "2e-4": 3.0, "3e-4": 1.0, "4e-4": 2.0}
LOSS = ["sweep.objective=eval/loss", *SMALL, "task.steps=100", "batch=demo"]
HALVING = [*LOSS, "sweep.halving=10", f"optim.lr={','.join(LOSSES)}"]
RUNGS = [*((rate, 10) for rate in LOSSES), ("3e-4", 20), ("4e-4", 20), ("3e-4", 100)]


def rate_of(exp: Experiment) -> str:
    return f"{exp.optim.lr:.0e}".replace("e-0", "e-")


class Rates(Trials):
    """Leave a checkpoint and a loss that is LOSSES of the rate; ``ran`` has the rate, the step."""

    most = 0
    """Checkpoints that were there at a time."""
    fails = ""

    def train(self, exp: Experiment, run: RunDir) -> int:
        assert snapshot.load(run) == exp
        rate, step = rate_of(exp), exp.task.stop_at_step or 100
        self.ran.append((rate, step))
        if rate == self.fails:
            return leave(run, [], outcome="crash", cause="broken")
        run.checkpoints.mkdir(exist_ok=True)
        (run.checkpoints / "state").touch()
        self.most = max(self.most, len(list(run.root.parent.glob("*/checkpoints"))))
        lines = [{"kind": kind, "step": step, "loss": 1.0} for kind in ("train", "eval", "end")]
        lines[1]["loss"] = LOSSES[rate]
        return leave(run, [{"kind": "start", "step": 0, "total_steps": 100}, *lines])


@pytest.fixture
def rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rates:
    return enter(tmp_path, monkeypatch, Rates())


def test_the_better_half_goes_on(rates: Rates, capsys) -> None:
    assert main(["tune", *HALVING]) == 0
    assert rates.ran == RUNGS
    assert rates.most <= 3  # half of them, and the one that has just ended
    journal = only_sweep()
    assert outcomes(journal) == ["stopped", "stopped", "ok", "stopped"]
    causes = [journal.trials[index].cause for index in (0, 1, 3)]
    assert causes == [*["at rung 1 of 3, after 10 steps"] * 2, "at rung 2 of 3, after 20 steps"]
    assert journal.trials[2].rungs == [[10, 1.0], [20, 1.0], [100, 1.0]]
    assert journal.is_finished
    assert len(list(journal.directory.glob("*/checkpoints"))) == 1
    assert "- optim.lr=0.0003" in (journal.directory / "best.yaml").read_text()
    said = capsys.readouterr().out
    for words in (
        "rung 2 of 3, to step 20: [2], [3]", "rung 3 of 3, to their whole run: [2]",
        "[0, 1] stopped: at rung 1 of 3, after 10 steps", "1 of 4 trials succeeded; 3 stopped",
    ):  # fmt: skip
        assert words in said


def test_a_halving_that_was_killed_goes_on(rates: Rates) -> None:
    """Within a rung, between two, and three times."""
    rates.deaths = {3, 4, 6}
    for done in (3, 4, 6):
        with pytest.raises(Killed):
            main(["tune", *HALVING])
        assert rates.ran == RUNGS[:done]
    assert main(["tune", *HALVING]) == 0
    assert rates.ran == RUNGS
    assert outcomes(only_sweep()).count("stopped") == 3


def test_one_that_fails_is_no_rival(rates: Rates) -> None:
    rates.fails = "3e-4"
    assert main(["-m", *HALVING]) == 1  # by a sweep, too
    assert rates.ran[-1] == ("4e-4", 100)
    assert [rate for rate, step in rates.ran if step == 20] == ["2e-4", "4e-4"]
    assert outcomes(only_sweep())[2:4] == ["crash", "ok"]


def test_a_run_that_is_shorter_than_the_first_rung_is_trained_whole(rates: Rates) -> None:
    assert main(["tune", *LOSS, "sweep.halving=100", "optim.lr=1e-4,3e-4"]) == 0
    assert rates.ran == [("1e-4", 100), ("3e-4", 100)]
    assert outcomes(only_sweep()) == ["ok", "ok"]


def test_rungs() -> None:
    rungs = Halving(Sweep(Path()), 10, 2)
    assert [rungs.step(rung) for rung in range(4)] == [10, 20, 40, 80]
    assert [rungs.survivors(count) for count in (8, 7, 3, 2, 1)] == [4, 4, 2, 1, 1]
    assert rungs.count(8, None) == 4
    assert rungs.count(8, 40) == 3  # the third would be the whole run
    assert rungs.count(1, 100) == 1
    assert Halving(Sweep(Path()), 10, 3).count(9, 1000) == 3
    trials = [Trial(n, [], Path(), rungs=[[10, 1.0]] * (n < 3)) for n in range(5)]
    assert Halving(Sweep(Path(), trials), 10, 2).total_rungs == 4, "those that wait are rivals"
    values = {0: 2.0, 1: None, 2: float("nan"), 3: 1.0, 4: float("inf"), 5: 2.0}
    assert ranking(values, "min") == [3, 0, 5], "no number is no rival"
    assert ranking({0: 2.0, 1: 2.0, 2: 3.0}, "max") == [2, 0, 1]


def test_what_a_rung_changes_is_taken_back_for_the_whole_run() -> None:
    exp = composed(["hardware=cpu2", "task.steps=100", "task.eval_every_steps=30"]).experiment
    first = up_to(exp, 20, evaluates=True)
    assert (first.task.stop_at_step, first.task.eval_every_steps) == (20, 20)
    assert not first.task.save_model
    assert first.checkpoint.at_end
    assert up_to(exp, 60, evaluates=True).task.eval_every_steps == 30
    assert continued(first, exp) == exp
    found_out = dataclasses.replace(first, data=dataclasses.replace(first.data, layout="padded"))
    assert continued(found_out, exp).data.layout == "padded"


def test_a_trial_goes_on_as_a_resumed_run(tmp_path: Path, monkeypatch) -> None:
    """Through all of it but the ranks: snapshot, resume, a process of its own for each rung."""

    def supervise(exp: Experiment, plan: Any, run: RunDir, **_: Any) -> Any:
        kinds = ["start", "train", "eval", "end"][run.result.exists() :]
        line = {"step": exp.task.stop_at_step or 100, "loss": LOSSES[rate_of(exp)]}
        with run.metrics.open("a") as stream:
            for kind in kinds:
                values = {"step": 0, "total_steps": 100} if kind == "start" else line
                print(json.dumps({"kind": kind, **values}), file=stream)
        write_json(run.result, {"outcome": "ok", "started": 1.0, "ended": 2.0})
        return SimpleNamespace(exit_code=0)

    enter(tmp_path, monkeypatch)
    monkeypatch.setattr("llmx.sweep.sweep.supervise", supervise)
    monkeypatch.setattr("llmx.sweep.sweep.start_report", lambda run: None)
    assert main(["tune", *LOSS, "sweep.halving=10", "optim.lr=2e-4,3e-4,4e-4"]) == 0
    journal = only_sweep()
    assert outcomes(journal) == ["stopped", "ok", "stopped"]
    run = RunDir(journal.directory / journal.trials[1].run_dir)
    exp = snapshot.load(run)
    assert exp.task.stop_at_step is None
    assert exp.task.save_model
    first, whole = (
        json.loads((kept / "changes.json").read_text())["changes"]
        for kept in sorted((run.root / "history").iterdir())
    )
    assert first == {"task.stop_at_step": [10, 20], "task.eval_every_steps": [10, 20]}
    assert whole["task.stop_at_step"] == [20, None]
    assert "changed   task.stop_at_step" in run.console_log.read_text()
