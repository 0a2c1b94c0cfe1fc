"""Successive halving with trials whose losses are made up: who goes on, what is left behind."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmx.__main__ import main
from llmx.config import Experiment
from llmx.run import snapshot
from llmx.run.rundir import RunDir, write_json
from llmx.run.sweepdir import Sweep
from llmx.sweep.halving import Halving, continued, ranking, up_to
from tests.composing import composed
from tests.made_up_trials import Deaths, Killed, enter, leave, only_sweep

pytestmark = pytest.mark.long

RATES = ["1e-4", "2e-4", "3e-4", "4e-4", "5e-4", "6e-4", "7e-4"]
LOSSES = dict(zip(RATES, [5.0, 3.0, 1.0, 2.0, 4.0, 6.0, 7.0], strict=True))
SMALL = ["hardware=cpu2", "model.config.num_hidden_layers=1", "task.steps=100", "batch=demo"]
WORDS = ["sweep.objective=eval/loss", "sweep.halving=10", f"optim.lr={','.join(RATES)}", *SMALL]


class Trials(Deaths):
    """Stand for launched runs, which leave a checkpoint and a loss that is LOSSES of the rate."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[str, int]] = []
        """Learning rate and last step, as trained."""
        self.most = 0
        """Checkpoints that were there at a time."""
        self.fails = ""

    def __call__(self, exp: Experiment, run: RunDir) -> int:
        self.may_die(len(self.ran))
        assert snapshot.load(run) == exp
        rate = f"{exp.optim.lr:.0e}".replace("e-0", "e-")
        step = exp.task.stop_at_step or 100
        self.ran.append((rate, step))
        if rate == self.fails:
            return leave(run, [], outcome="crash", cause="broken")
        run.checkpoints.mkdir(exist_ok=True)
        (run.checkpoints / "state").touch()
        self.most = max(self.most, len(list(run.root.parent.glob("*/checkpoints"))))
        lines = [
            {"kind": "start", "step": 0, "total_steps": 100},
            {"kind": "train", "step": step, "loss": 1.0},
            {"kind": "eval", "step": step, "loss": LOSSES[rate]},
            {"kind": "end", "step": step},
        ]
        return leave(run, lines)


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trials:
    found = Trials()
    enter(tmp_path, monkeypatch, found)
    return found


FIRST = [(rate, 10) for rate in RATES]
LATER = [(rate, 20) for rate in ("2e-4", "3e-4", "4e-4", "5e-4")]
THEN = [("3e-4", 40), ("4e-4", 40)]
LAST = [("3e-4", 100)]


def test_the_better_half_goes_on(trials: Trials, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *WORDS]) == 0
    assert trials.ran == [*FIRST, *LATER, *THEN, *LAST]
    assert trials.most <= 5  # half of them, and the one that has just ended
    journal = only_sweep()
    outcomes = [entry.outcome for entry in journal.trials]
    assert outcomes == [*["stopped"] * 2, "ok", *["stopped"] * 4]
    causes = [entry.cause for entry in journal.trials]
    assert causes[0] == "at rung 1 of 4, after 10 steps"
    assert causes[1] == "at rung 2 of 4, after 20 steps"
    assert causes[3] == "at rung 3 of 4, after 40 steps"
    assert journal.trials[2].rungs == [[10, 1.0], [20, 1.0], [40, 1.0], [100, 1.0]]
    assert journal.is_finished
    assert len(list(journal.directory.glob("*/checkpoints"))) == 1
    best = (journal.directory / "experiment" / "best.yaml").read_text()
    assert "lr: 0.0003" in best
    said = capsys.readouterr().out
    assert "rung 2 of 4, to step 20: [1], [2], [3], [4]" in said
    assert "rung 4 of 4, to their whole run: [2]" in said
    assert "[0, 5, 6] stopped: at rung 1 of 4, after 10 steps" in said
    assert "1 of 7 trials succeeded; 6 stopped" in said


@pytest.mark.parametrize("dies_at", [3, 9, 13])
def test_a_halving_that_was_killed_goes_on(dies_at: int, trials: Trials) -> None:
    trials.dies_at = dies_at
    with pytest.raises(Killed):
        main(["tune", *WORDS])
    before = list(trials.ran)
    assert main(["tune", *WORDS]) == 0
    assert before == trials.ran[:dies_at]
    assert trials.ran == [*FIRST, *LATER, *THEN, *LAST]
    assert [entry.outcome for entry in only_sweep().trials].count("stopped") == 6


def test_one_that_fails_is_no_rival(trials: Trials) -> None:
    trials.fails = "3e-4"
    assert main(["-m", *WORDS]) == 1
    assert trials.ran[-1] == ("4e-4", 100)
    assert [rate for rate, step in trials.ran if step == 20] == ["2e-4", "4e-4", "5e-4"]
    outcomes = [entry.outcome for entry in only_sweep().trials]
    assert outcomes[2:4] == ["crash", "ok"]


def test_a_run_that_is_shorter_than_the_first_rung_is_trained_whole(trials: Trials) -> None:
    words = [word for word in WORDS if not word.startswith(("sweep.halving", "optim.lr"))]
    assert main(["tune", *words, "sweep.halving=100", "optim.lr=1e-4,3e-4"]) == 0
    assert trials.ran == [("1e-4", 100), ("3e-4", 100)]
    assert [entry.outcome for entry in only_sweep().trials] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep.objective=eval/loss", "optim.lr=1e-4,3e-4"], "needs sweep.halving=N"),
        (["sweep.halving=10", "optim.lr=1e-4,3e-4"], "sweep.trial_steps=10: short trials"),
        ([*WORDS, "sweep.trial_steps=5"], "Set one of them"),
        ([*WORDS, "sweep.halving_factor=1"], "sweep.halving_factor=1"),
    ],
)
def test_mistakes_are_said(
    words: list[str], message: str, trials: Trials, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *SMALL, *words]) == 2
    assert message in capsys.readouterr().err
    assert not trials.ran


def test_rungs() -> None:
    rungs = Halving(Sweep(Path()), 10, 2)
    assert [rungs.step(rung) for rung in range(4)] == [10, 20, 40, 80]
    assert [rungs.survivors(count) for count in (8, 7, 3, 2, 1)] == [4, 4, 2, 1, 1]
    assert rungs.count(8, None) == 4
    assert rungs.count(8, 40) == 3  # the third would be the whole run
    assert rungs.count(1, 100) == 1
    assert Halving(Sweep(Path()), 10, 3).count(9, 1000) == 3


def test_values_that_are_no_number_come_last() -> None:
    assert ranking({0: 2.0, 1: None, 2: float("nan"), 3: 1.0, 4: float("inf")}, "min") == [3, 0]
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


def test_a_trial_goes_on_as_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through all of it but the ranks: snapshot, resume, a process of its own for each rung."""

    def supervise(exp: Experiment, plan: Any, run: RunDir, **_: Any) -> Any:
        step = exp.task.stop_at_step or 100
        loss = LOSSES[f"{exp.optim.lr:.0e}".replace("e-0", "e-")]
        with run.metrics.open("a") as stream:
            if not run.result.exists():
                print(json.dumps({"kind": "start", "step": 0, "total_steps": 100}), file=stream)
            for kind in ("train", "eval", "end"):
                print(json.dumps({"kind": kind, "step": step, "loss": loss}), file=stream)
        write_json(run.result, {"outcome": "ok", "started": 1.0, "ended": 2.0})
        return SimpleNamespace(exit_code=0)

    enter(tmp_path, monkeypatch)
    monkeypatch.setattr("llmx.sweep.sweep.supervise", supervise)
    monkeypatch.setattr("llmx.sweep.sweep.start_report", lambda run: None)
    words = [word for word in WORDS if not word.startswith("optim.lr")]
    assert main(["tune", *words, "optim.lr=2e-4,3e-4,4e-4"]) == 0, capsys.readouterr().err
    journal = only_sweep()
    assert [entry.outcome for entry in journal.trials] == ["stopped", "ok", "stopped"]
    run = RunDir(journal.directory / journal.trials[1].run_dir)
    exp = snapshot.load(run)
    assert exp.task.stop_at_step is None
    assert exp.task.save_model
    assert len(list((run.root / "history").iterdir())) == 2
    changes = json.loads((run.root / "history" / "001" / "changes.json").read_text())["changes"]
    assert changes == {"task.stop_at_step": [10, 20], "task.eval_every_steps": [10, 20]}
    whole = json.loads((run.root / "history" / "002" / "changes.json").read_text())["changes"]
    assert whole["task.stop_at_step"] == [20, None]
    assert "changed   task.stop_at_step" in run.console_log.read_text()
