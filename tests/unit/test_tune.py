"""``python -m llmx tune`` with trials whose speeds are made up: what is tried, said and left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from llmx.__main__ import main
from llmx.cli.arguments import with_searched
from llmx.cli.sweeps import tune_words
from llmx.compose.overrides import check_overrides
from llmx.config import Experiment
from llmx.errors import ConfigError, RunFailed
from llmx.run.rundir import RunDir
from tests.composing import composed
from tests.made_up_trials import Deaths, Killed, enter, leave, only_sweep
from tests.unit.test_checkpoint_export import make_model

pytestmark = pytest.mark.long

SMALL = [
    *("hardware=cpu2", "model.config.num_hidden_layers=1", "batch.global_batch=32"),
    *("zero=stage0,stage1,stage2", "model.activation_checkpointing=none,full"),
]
SPEEDS = {"3": 1.6, "1": 1.0, "2": 1.5, "4": 1.8, "8": 1.7, "16": 1.6}


class Trials(Deaths):
    """Stand for launched runs: fastest with stage 1 and a micro batch of 4; 16 does not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.run: list[str] = []
        self.batches: list[int | None] = []

    def __call__(self, exp: Experiment, run: RunDir) -> int:
        self.may_die(len(self.run))
        self.batches.append(exp.batch.global_batch)
        micro = str(exp.batch.micro_batch)
        self.run.append(f"stage{exp.zero.stage} {micro} {exp.model.activation_checkpointing}")
        oom = exp.batch.micro_batch >= 16
        speed = 1000.0 * SPEEDS[micro] / (1 + 0.1 * abs(exp.zero.stage - 1))
        lines = [
            {"kind": "train", "step": step, "tokens_per_s": speed, "loss": 1.0, "memory_gib": [0.4]}
            for step in (0 if oom else 2, 4, 6, 8, 10)
        ]
        lines.append({"kind": "end", "step": 10})
        if oom:
            return leave(run, lines, outcome="oom", cause="CUDA out of memory")
        return leave(run, lines)


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trials:
    found = Trials()
    enter(tmp_path, monkeypatch, found)
    return found


def test_it_finds_the_fastest_and_leaves_an_experiment(
    trials: Trials, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *SMALL]) == 0
    assert trials.run[0].startswith("stage1 16")  # by the plan the fastest; it does not fit
    assert "stage1 4 none" in trials.run
    assert len(trials.run) <= 10
    said = capsys.readouterr().out
    assert "30 candidates" in said
    assert "the fastest: zero=stage1 batch.micro_batch=4" in said
    assert "not worth trying" in said
    journal = only_sweep()
    assert [entry.outcome for entry in journal.trials].count("oom") == 1
    assert journal.complete
    best = yaml.safe_load((journal.directory / "experiment" / "best.yaml").read_text())
    assert {"override /zero": "stage1"} in best["defaults"]
    assert best["batch"]["micro_batch"] == 4
    assert "sweep" not in best
    table = (journal.directory / "tune.md").read_text()
    assert table.count("\n|") == 31
    assert f"experiment={journal.directory.relative_to(Path.cwd())}/best" in said
    words = with_searched([f"experiment={journal.directory}/best"])
    exp = composed(check_overrides(words).words).experiment
    assert (exp.zero.stage, exp.batch.micro_batch, exp.batch.global_batch) == (1, 4, 32)


def test_fail_fast_is_not_for_trials_that_run_out_of_memory(trials: Trials) -> None:
    few = [*SMALL, "zero=stage1,stage2", "model.activation_checkpointing=none"]
    assert main(["tune", *few, "hydra.sweep.dir=outputs/sweeps/whole"]) == 0
    whole, trials.run = trials.run, []
    assert main(["tune", *few, "sweep.fail_fast=true", "hydra.sweep.dir=outputs/sweeps/fast"]) == 0
    assert trials.run == whole
    assert any(trial.split()[1] == "16" for trial in whole), "one does not fit"


def test_a_search_that_was_killed_goes_on_where_it_was(
    trials: Trials, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [*SMALL, "zero=stage1,stage2", "model.activation_checkpointing=none"]
    assert main(["tune", *few, "hydra.sweep.dir=outputs/sweeps/whole"]) == 0
    whole, trials.run = trials.run, []
    trials.dies_at = 3
    command = ["tune", *few, "hydra.sweep.dir=outputs/sweeps/killed"]
    with pytest.raises(Killed):
        main(command)
    first, trials.run = trials.run, []
    capsys.readouterr()
    assert main(command) == 0
    assert first + trials.run == whole  # the one that ran out of memory is not run again, either
    assert "in an earlier attempt" in capsys.readouterr().out
    assert main(["sweep", "resume", "outputs/sweeps/killed"]) == 0
    assert first + trials.run == whole


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["zero=stage2", "batch.micro_batch=2"], {"stage2 2"}),
        (["zero=stage3,stage2", "batch.micro_batch=8,2,4"], {"stage2 4", "stage3 4", "stage2 8"}),
        (["sweep.max_trials=1", "batch.micro_batch=1,2"], {"stage1 2"}),
    ],
)
def test_keys_that_are_given_stay_or_are_the_axes(
    words: list[str], expected: set[str], trials: Trials, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *SMALL, *words]) == 0
    found = {trial.removesuffix(" none") for trial in trials.run}
    assert expected <= found, trials.run
    assert len(trials.run) <= 6
    if "sweep.max_trials=1" in words:
        assert len(trials.run) == 1
        assert "sweep.max_trials=1 was reached" in capsys.readouterr().out


def test_a_dry_run_shows_the_candidates_and_leaves_nothing(
    trials: Trials, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *SMALL, "dry_run=true"]) == 0
    said = capsys.readouterr().out
    assert "zero: stage0, stage1, stage2" in said
    assert "batch.micro_batch: 1, 2, 4, 8, 16" in said
    assert "every candidate trains 32 samples a step" in said
    assert not trials.run
    assert not Path("outputs").exists()


def test_what_the_plan_rules_out_is_never_started(
    trials: Trials, capsys: pytest.CaptureFixture[str]
) -> None:
    hardware = ["hardware=a100x8", "model=llama2_7b", "batch.global_batch=256", "data=demo"]
    words = [
        "batch.micro_batch=1,32",
        "data.seq_len=4096",
        "model.activation_checkpointing=none",
        "dry_run=true",
    ]
    assert main(["tune", *hardware, *words]) == 0
    said = capsys.readouterr().out
    assert "zero: stage1, stage2, stage3, stage2_offload, stage3_offload" in said
    assert "would not fit by the plan" in said
    assert main(["tune", *hardware, *words, "zero=stage0,stage1"]) == 0
    assert "alone take 100.4 GiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["sweep.objective=eval/loss"],
            "sweep.objective=eval/loss: a loss or a metric is tuned by successive halving",
        ),
        (["objective=tokens_per_s"], "objective: no such key. It exists as sweep.objective."),
        (["zero=stage9"], "zero"),
        (["batch.micro_batch=0"], "batch.micro_batch=0: must be a whole number"),
        (["batch.micro_batch=1,3", "batch.accumulation=5"], "disagree"),
        (["batch.micro_batch=range(1,700)"], "at most 2000 are planned"),
        (["hydra/sweeper=basic"], "tune has its own"),
    ],
)
def test_mistakes_are_said(
    words: list[str], message: str, trials: Trials, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *SMALL, *words]) == 2
    assert message in capsys.readouterr().err
    assert not trials.run


def test_the_default_batch_of_a_task_is_the_same_for_all_candidates(
    trials: Trials, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks of 3 take 30 of the 32, two of 8 would take 32."""
    make_model(vocab_size=1024).save_pretrained(tmp_path / "base")
    words = [
        f"model.path={tmp_path / 'base'}",
        "model.tokenizer=demo",
        "hardware=cpu2",
        "data=demo",
        "zero=stage1",
    ]
    words += ["data.seq_len=16", "model.activation_checkpointing=none", "batch.micro_batch=3,8"]
    assert main(["tune", *words]) == 0, capsys.readouterr().err
    assert trials.batches == [30, 30]
    assert "every candidate trains 30 samples a step" in capsys.readouterr().out


def test_a_free_batch_is_said(trials: Trials, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["batch=default", "hardware=cpu2", "batch.micro_batch=1,2", "dry_run=true"]
    assert main(["tune", *words]) == 0
    assert "batch.global_batch is not set" in capsys.readouterr().out


def test_failures_that_are_not_memory_end_it(
    trials: Trials, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any, **__: Any) -> int:
        trials.run.append("failed")
        raise RunFailed("no such data")

    monkeypatch.setattr("llmx.sweep.sweep.prepare", fails)
    assert main(["tune", *SMALL]) == 1
    assert len(trials.run) == 3
    said = capsys.readouterr()
    assert "it is not the configuration" in said.out
    assert "no such data" in said.err


def test_an_unknown_objective_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"objective=speed: .*Use tokens_per_s .*eval/loss"):
        tune_words(["sweep.objective=speed"])
