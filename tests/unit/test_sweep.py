"""A sweep through the command line, nothing started: what is left out, continued, best."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl

from llmx.__main__ import main
from llmx.cli.arguments import read_words
from llmx.errors import ConfigError
from llmx.run import sweepdir
from llmx.run.rundir import RunDir
from llmx.run.snapshot import put_aside, write_identity
from llmx.run.sweepdir import Sweep, Trial
from llmx.sweep.best import write_best
from tests.composing import composed
from tests.made_up_trials import enter, only_sweep, outcomes

pytestmark = pytest.mark.long

PLAN_ONLY = ["dry_run=true", "hardware=cpu2", "model.config.num_hidden_layers=1"]
GRID = ["-m", "zero=stage1,stage2", "optim.lr=1e-3,-1", *PLAN_ONLY]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    enter(tmp_path, monkeypatch)
    return tmp_path


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where GRID was swept once."""
    directory = tmp_path_factory.mktemp("swept")
    with pytest.MonkeyPatch.context() as patch:
        enter(directory, patch)
        assert main(GRID) == 2
    return directory


@pytest.fixture
def grid(swept: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """The sweep of GRID; the test is where it was started."""
    enter(swept, monkeypatch)
    return only_sweep()


# --- What is continued -----------------------------------------------------------------------


def test_the_same_command_continues_a_sweep_and_runs_only_what_failed(grid: Sweep, capsys) -> None:
    assert outcomes(grid) == ["planned", "refused"] * 2
    assert (grid.complete, grid.is_finished) == (True, False)
    assert grid.words == ["experiment=demo", *GRID[1:]]

    assert main(GRID) == 2
    said = capsys.readouterr()
    assert f"Continuing the sweep of {grid.directory}: 2 of 4 trials done" in said.out
    assert "[0] zero=stage1 optim.lr=0.001: planned in an earlier attempt at this sweep" in said.out
    assert "[1] zero=stage1 optim.lr=-1: refused: optim.lr=-1" in said.err
    assert only_sweep().directory == grid.directory

    assert main(["sweep", "resume", str(grid.directory), "sweep.retry=[oom]"]) == 2
    said = capsys.readouterr()
    assert "[2] zero=stage2 optim.lr=0.001: planned in an earlier attempt" in said.out
    assert only_sweep().directory == grid.directory


def test_a_sweep_that_runs_or_another_grid_or_directory_is_not_continued(
    grid: Sweep, swept: Path
) -> None:
    root, words = grid.directory.parent, grid.words
    same: dict[str, Any] = {"cwd": swept, "config_dir": None}
    assert sweepdir.unfinished(root, words, **same) is not None
    assert sweepdir.unfinished(root, [*words, "sweep.fail_fast=true"], **same) is not None
    assert sweepdir.unfinished(root, [*words, "seed=1"], **same) is None
    assert sweepdir.unfinished(root, words, cwd=swept.parent, config_dir=None) is None
    assert sweepdir.unfinished(root, words, cwd=swept, config_dir="/etc") is None
    descriptor = os.open(grid.directory / sweepdir.LOCK, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go of when the sweep ended
    assert sweepdir.is_running(grid.directory)
    assert sweepdir.unfinished(root, words, **same) is None
    with pytest.raises(ConfigError, match="this sweep is running"):
        sweepdir.lock(grid.directory)
    os.close(descriptor)
    assert not sweepdir.is_running(grid.directory)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sweep resume nowhere", "not a sweep directory: it has no sweep.json"),
        ("sweep resume DIR seed=3", "seed=3: would make it a different sweep"),
        ("-m seed=1,2 hydra.sweep.dir=DIR", "contains another sweep"),
        ("-m optim.cycles=3 optim.lr=1e-3,1e-4", "optim.cycles=3: has no effect"),
    ],
)
def test_what_cannot_be_swept_is_said_once_before_the_first_trial(
    swept: Path, here: Path, words: str, message: str, capsys
) -> None:
    typed = words.replace("DIR", str(only_sweep(swept).directory)).split()
    assert main([*typed, *(PLAN_ONLY if typed[0] == "-m" else [])]) == 2
    assert capsys.readouterr().err.count(message) == 1
    assert not list(here.rglob("config.yaml"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sweep.prune=true,false", "sweep.prune: must be the same for all trials"),
        ("sweep.slots_per_trial=3 seed=1", "sweep.slots_per_trial=3, but hardware has 2 slots "),
        ("+tracking.tags=1,2", "tracking.tags=2: must be a list."),  # as any value is
    ],
)
def test_a_trial_that_cannot_be_started_says_why(
    here: Path, words: str, message: str, capsys
) -> None:
    assert main(["-m", *words.split(), *PLAN_ONLY]) == 2
    assert message in capsys.readouterr().err


# --- What is run -----------------------------------------------------------------------------


def test_one_look_ahead_for_each_choice_of_files(here: Path, monkeypatch) -> None:
    """Where Hydra's own sweeper composes each trial before the first starts, and again then."""
    composed, load = [], ConfigLoaderImpl.load_sweep_config

    def counted(loader: Any, master_config: Any, sweep_overrides: Any) -> Any:
        composed.append(list(sweep_overrides))
        return load(loader, master_config, sweep_overrides)

    monkeypatch.setattr(ConfigLoaderImpl, "load_sweep_config", counted)
    assert main(["-m", "zero=stage1,stage2", "optim.lr=1e-3,2e-3", *PLAN_ONLY]) == 0
    # Two looks ahead, the first trial for words that nothing reads, and each trial when it starts.
    assert len(composed) == 2 + 1 + 4
    assert {words[1] for words in composed[:3]} == {"zero=stage1", "zero=stage2"}


def test_trials_of_the_same_config_are_planned_once(here: Path, capsys) -> None:
    """One of them reads a word that the other does not. A finished sweep is started anew."""
    words = ["optim.cycles=3", "zero=1,stage1", "optim.schedule=constant,cosine_restarts"]
    assert main(["-m", *words, *PLAN_ONLY]) == 0
    journal = only_sweep()
    assert outcomes(journal) == ["planned", "planned", "same", "same"]
    assert [entry.same_as for entry in journal.trials] == [None, None, 0, 1]
    said = capsys.readouterr().out
    assert "[2] optim.schedule=constant: same: the same config as trial 0" in said
    assert "eval loss ," not in said
    assert len(list(journal.directory.glob("*/config.yaml"))) == 2
    second = journal.directory / journal.trials[1].run_dir / "config.yaml"
    tracking = yaml.safe_load(second.read_text())["tracking"]
    assert tracking["group"] == journal.directory.name
    assert tracking["tags"] == ["optim.schedule=cosine_restarts"]
    assert journal.is_finished
    root = journal.directory.parent
    assert sweepdir.unfinished(root, journal.words, cwd=here, config_dir=None) is None


def test_a_trial_with_long_words_has_a_directory(here: Path) -> None:
    assert main(["-m", f"data.cache_dir={'c' * 250},{'d' * 250}", *PLAN_ONLY]) == 0
    assert outcomes(only_sweep()) == ["planned", "planned"]


@pytest.mark.usefixtures("made_up_traces")
def test_what_cannot_fit_is_left_out_unless_it_is_asked_for(here: Path, capsys) -> None:
    words = ["-m", "zero=stage0,stage3", "model=llama2_7b", "data=demo", "dry_run=true",
             "hardware=a100x2_v100x2", "precision=fp32"]  # fmt: skip
    assert main(words) == 0
    first = only_sweep().trials[0]
    assert first.outcome == "pruned"
    assert "alone take" in first.cause
    assert "[0] zero=stage0: pruned: parameters, gradients" in capsys.readouterr().out
    assert main([*words, "sweep.prune=false", "hydra.sweep.dir=all"]) == 0
    assert sweepdir.load(here / "all").trials[0].outcome == "planned"


def test_fail_fast_ends_at_the_first_failure(here: Path, capsys) -> None:
    assert main([*GRID, "sweep.fail_fast=true"]) == 2
    assert "trials not started: 2" in capsys.readouterr().err
    journal = only_sweep()
    assert [entry.state for entry in journal.trials] == ["ended", "ended", "waiting", "waiting"]
    assert not journal.complete


def test_a_refused_first_trial_does_not_turn_the_objective_round(here: Path) -> None:
    """The direction follows from the objective, which a refused trial does not tell."""
    assert main(["-m", "optim.lr=-1,1e-3", "sweep.trial_steps=3", *PLAN_ONLY]) == 2
    journal = only_sweep()
    assert outcomes(journal) == ["refused", "planned"]
    assert (journal.objective, journal.mode) == ("tokens_per_s", "max")


def test_a_short_trial_keeps_the_schedule_and_writes_nothing() -> None:
    words = ["hardware=cpu2", "sweep.trial_steps=20"]
    exp = composed([*words, "checkpoint.every_steps=5"]).experiment
    assert exp.task.stop_at_step == 20
    assert (exp.task.steps, exp.task.epochs) == (None, 5.5), "the schedule is that of the whole run"
    assert (exp.task.save_model, exp.task.evaluate) == (False, False)
    assert exp.checkpoint.every_steps is None
    assert exp.task.log_every_steps == 5
    measured = composed([*words, "sweep.objective=eval/loss"]).experiment.task
    assert (measured.evaluate, measured.eval_every_steps) == (True, 20)


# --- What is left ----------------------------------------------------------------------------


def test_the_best_trial_is_a_file_of_words_that_compose(here: Path) -> None:
    assert main(["-m", "zero=stage1,stage3", "optim.lr=1e-3", *PLAN_ONLY]) == 0
    journal = only_sweep()
    journal.objective = "train/loss"
    for entry in journal.trials:
        entry.outcome, entry.loss = "ok", 3.0 - entry.index
    write_best(journal)
    assert journal.best is journal.trials[1]
    place = journal.directory.relative_to(here)
    assert main([f"{place}/best.yaml", "dry_run=true", "run_dir=run", "seed=7"]) == 0
    values = yaml.safe_load((here / "run" / "config.yaml").read_text())
    assert (values["zero"]["stage"], values["optim"]["lr"], values["seed"]) == (3, 1e-3, 7)
    assert values["data"]["path"] == "demo"
    assert values["sweep"]["trial_steps"] is None


def test_what_is_of_the_sweep_is_not_of_the_best_run(tmp_path: Path) -> None:
    kept = ["experiment=demo", "~experiment", "data.columns={a: b}", "++model.name='a, \\'b\\''"]
    words = ["sweep.trial_steps=20", "dry_run=true", "+run_dir=x", "name=y", "hydra/sweeper=grid"]
    best = Trial(0, [*kept, *words], tmp_path / "0", "ok", loss=1.0)
    write_best(Sweep(tmp_path, [best], "train/loss", words=[], cwd="/x", started=1.0))
    assert read_words(tmp_path / "best.yaml") == kept


def test_a_torn_or_foreign_file_is_refused(tmp_path: Path) -> None:
    for text in ("", "[]", '{"version": 1}', '{"version": 9}', '{"version": 1, "trials": [3]}'):
        (tmp_path / sweepdir.FILE).write_text(text)
        with pytest.raises(ConfigError, match=r"sweep\.json: (cannot be read|is of version 9)"):
            sweepdir.load(tmp_path)
    trials = [Trial(0, ["seed=1"], tmp_path / "0_seed-1", "ok", key="k", rungs=[[10, 1.5]])]
    sweep = Sweep(tmp_path, trials, "eval/loss", words=["seed=1"], cwd="/x", started=1.0)
    sweep.write()
    assert sweepdir.load(tmp_path) == sweep


def test_directories_of_earlier_attempts_are_kept(tmp_path: Path) -> None:
    run = tmp_path / "0_zero-1"
    for number in (1, 2):
        run.mkdir()
        (run / "config.yaml").write_text(str(number))
        write_identity(RunDir(run))
        aside = put_aside(run)
        assert aside.name == f"0_zero-1.attempt-{number}"
    assert put_aside(run) is None
    assert (tmp_path / "0_zero-1.attempt-1" / "config.yaml").read_text() == "1"


def test_trials_over_relative_paths_stay_in_the_sweep(here: Path, monkeypatch) -> None:
    work = here / "a" / "b" / "c" / "d"
    foreign = work / "outputs" / "one.jsonl"
    foreign.mkdir(parents=True)
    (foreign / "notes.txt").write_text("mine")
    rows = "".join(f'{{"prompt": "say {n}", "response": "it is {n}"}}\n' for n in range(40))
    (here / "one.jsonl").write_text(rows)
    (here / "two.jsonl").write_text(rows.replace("it is", "no"))
    monkeypatch.chdir(work)
    paths = "data.path=../../../../one.jsonl,../../../../two.jsonl"
    for _ in range(2):
        assert main(["plan", "-m", "data=file", paths, "hardware=cpu2", "sweep.resume=false"]) == 0
    assert sorted(path.name for path in (work / "outputs").iterdir()) == ["one.jsonl", "sweeps"]
    assert [path.name for path in foreign.iterdir()] == ["notes.txt"]
    for journal in (work / "outputs" / "sweeps").iterdir():
        trials = sweepdir.load(journal).trials
        assert [trial.run_dir.parent for trial in trials] == [journal] * 2
        data = [yaml.safe_load((t.run_dir / "config.yaml").read_text())["data"] for t in trials]
        assert [Path(values["path"]).name for values in data] == ["one.jsonl", "two.jsonl"]


def test_a_trial_has_a_directory_of_its_own_below_the_sweep(here: Path, capsys) -> None:
    two = ["-m", "seed=1,2", *PLAN_ONLY]
    own = here / "own" / "experiment" / "mine.yaml"
    own.parent.mkdir(parents=True)
    for place, ended in (("../mine", ["refused"] * 2), ("s/one", ["planned", "refused"])):
        own.write_text(f"# @package _global_\nrun_dir: {place}\n")
        words = ["--config-dir", "own", "experiment=mine", "sweep.resume=false"]
        assert main([*two, *words, "hydra.sweep.dir=s"]) == 2
        assert "each trial has a directory of its own below" in capsys.readouterr().err
        assert outcomes(sweepdir.load(here / "s")) == ended
        shutil.rmtree(here / "s")
    (here / "u" / "0_seed-1").mkdir(parents=True)
    (here / "u" / "0_seed-1" / "config.yaml").write_text("of another tool")
    assert main([*two, "hydra.sweep.dir=u"]) == 2
    assert "is no run of llmx" in capsys.readouterr().err
    assert [path.name for path in (here / "u" / "0_seed-1").iterdir()] == ["config.yaml"]
