"""``hydra/sweeper=optuna`` with trials whose losses are made up: directions, failures, resuming."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from llmx.__main__ import main
from llmx.config import Experiment
from llmx.run.rundir import RunDir
from tests.made_up_trials import enter, leave, only_sweep

pytestmark = pytest.mark.long

optuna = pytest.importorskip("optuna")

SMALL = ["hardware=cpu2", "model.config.num_hidden_layers=1", "hydra/sweeper=optuna"]
RATE = "optim.lr=tag(log, interval(1e-5, 1e-1))"


class Trials:
    """Stand for launched runs: the best loss is that of a rate of 1e-3; large ones crash."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.dies_at = -1

    def __call__(self, exp: Experiment, run: RunDir) -> int:
        if len(self.rates) == self.dies_at:
            self.dies_at = -1
            raise KeyError("killed")
        self.rates.append(exp.optim.lr)
        if exp.optim.lr > 1e-2:
            return leave(run, [], outcome="diverged", cause="loss is NaN")
        off = abs(math.log10(exp.optim.lr / 1e-3))
        lines = [
            {"kind": "train", "step": step, "loss": 1 + off, "tokens_per_s": 1000 * (1 + off)}
            for step in (2, 4, 6)
        ]
        lines += [{"kind": "eval", "step": 6, "loss": 1 + off}, {"kind": "end", "step": 6}]
        return leave(run, lines)


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trials:
    found = Trials()
    enter(tmp_path, monkeypatch, found)
    return found


def test_the_search_comes_near_the_best_and_outlives_failures(
    trials: Trials, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["-m", *SMALL, RATE, "sweep.objective=eval/loss", "hydra.sweeper.n_trials=16"]
    assert (
        main([*words, "hydra.sweeper.storage=sqlite:///study.db", "hydra.sweeper.study_name=a"])
        == 0
    )
    journal = only_sweep()
    outcomes = [entry.outcome for entry in journal.trials]
    assert len(outcomes) == 16
    assert "diverged" in outcomes
    assert min(abs(math.log10(rate / 1e-3)) for rate in trials.rates) < 0.3
    study = optuna.load_study(study_name="a", storage="sqlite:///study.db")
    assert study.direction == optuna.study.StudyDirection.MINIMIZE
    assert len(study.trials) == 16
    states = [trial.state.name == "COMPLETE" for trial in study.trials]
    assert states == [outcome == "ok" for outcome in outcomes]
    assert (journal.directory / "experiment" / "best.yaml").is_file()
    assert capsys.readouterr().out.count("Sweep: ") == 1  # one table, at the end


def test_the_direction_is_the_objective_s(trials: Trials) -> None:
    words = ["-m", *SMALL, "optim.lr=1e-3,1e-4,1e-5", "sweep.trial_steps=6"]
    stored = ["hydra.sweeper.storage=sqlite:///study.db", "hydra.sweeper.study_name=a"]
    assert main([*words, *stored, "hydra.sweeper.n_trials=6"]) == 0
    study = optuna.load_study(study_name="a", storage="sqlite:///study.db")
    assert study.direction == optuna.study.StudyDirection.MAXIMIZE
    # Suggestions that were made before are not run again, and tell what they did then.
    assert len(study.trials) == 6
    assert len(trials.rates) <= 3
    assert all(trial.state.name == "COMPLETE" for trial in study.trials)


def test_the_same_command_goes_on(trials: Trials) -> None:
    words = ["-m", *SMALL, "optim.lr=interval(1e-4, 5e-3)", "hydra.sweeper.n_trials=5",
             "sweep.objective=eval/loss"]  # fmt: skip
    trials.dies_at = 3
    assert main(words) == 0  # a trial that fails for whatever reason does not end the search
    before = list(trials.rates)
    assert len(before) == 4
    assert main(words) == 0
    assert trials.rates[:4] == before
    assert len(only_sweep().trials) == 5
    assert [entry.outcome for entry in only_sweep().trials] == ["ok"] * 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optim.lr=1e-3"], "nothing is searched"),
        ([RATE, "hydra.sweeper.sampler=best"], "must be one of tpe, random"),
    ],
)
def test_mistakes_are_said(
    words: list[str], message: str, trials: Trials, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-m", *SMALL, *words]) == 2
    assert message in capsys.readouterr().err
    assert not trials.rates
