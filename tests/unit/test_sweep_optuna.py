"""``hydra/sweeper=optuna`` with trials whose losses are made up: directions, failures, resuming."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from llmx.__main__ import main
from llmx.config import Experiment
from llmx.run.rundir import RunDir
from tests.made_up_trials import Trials, enter, leave, only_sweep, outcomes

pytestmark = pytest.mark.long

optuna = pytest.importorskip("optuna")

SMALL = ["-m", "hardware=cpu2", "model.config.num_hidden_layers=1", "hydra/sweeper=optuna"]
RATE = "optim.lr=tag(log, interval(1e-5, 1e-1))"
STORED = ["hydra.sweeper.storage=sqlite:///study.db", "hydra.sweeper.study_name=a"]


class Rates(Trials):
    """The best loss is that of a rate of 1e-3; large ones diverge; ``ran`` has the rates."""

    death = KeyError

    def train(self, exp: Experiment, run: RunDir) -> int:
        self.ran.append(exp.optim.lr)
        if exp.optim.lr > 1e-2:
            return leave(run, [], outcome="diverged", cause="loss is NaN")
        values = {"loss": 1 + abs(math.log10(exp.optim.lr / 1e-3))}
        train = {"kind": "train", **values, "tokens_per_s": 1000 * values["loss"]}
        lines = [{**train, "step": step} for step in (2, 4, 6)]
        return leave(run, [*lines, {"kind": "eval", "step": 6, **values}, {"kind": "end"}])


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rates:
    return enter(tmp_path, monkeypatch, Rates())


def test_the_search_comes_near_the_best_and_outlives_failures(trials: Rates, capsys) -> None:
    words = [RATE, "sweep.objective=eval/loss", "hydra.sweeper.n_trials=12"]
    assert main([*SMALL, *words, *STORED]) == 0
    journal = only_sweep()
    assert len(journal.trials) == 12
    assert "diverged" in outcomes(journal)
    assert min(abs(math.log10(rate / 1e-3)) for rate in trials.ran) < 0.3
    study = optuna.load_study(study_name="a", storage="sqlite:///study.db")
    assert study.direction == optuna.study.StudyDirection.MINIMIZE
    states = [trial.state.name == "COMPLETE" for trial in study.trials]
    assert states == [outcome == "ok" for outcome in outcomes(journal)]
    assert (journal.directory / "best.yaml").is_file()
    assert capsys.readouterr().out.count("Sweep: ") == 1  # one table, at the end


def test_the_direction_is_the_objective_s(trials: Rates) -> None:
    words = ["optim.lr=1e-3,1e-4,1e-5", "sweep.trial_steps=6", "hydra.sweeper.n_trials=5"]
    assert main([*SMALL, *words, *STORED]) == 0
    study = optuna.load_study(study_name="a", storage="sqlite:///study.db")
    assert study.direction == optuna.study.StudyDirection.MAXIMIZE
    # Suggestions that were made before are not run again, and tell what they did then.
    assert len(trials.ran) <= 3
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 5


def test_the_same_command_goes_on(trials: Rates) -> None:
    words = ["optim.lr=interval(1e-4, 5e-3)", "hydra.sweeper.n_trials=4"]
    words = [*SMALL, *words, "sweep.objective=eval/loss"]
    trials.deaths = {2}
    assert main(words) == 0  # a trial that fails for whatever reason does not end the search
    before = list(trials.ran)
    assert len(before) == 3
    assert main(words) == 0
    assert trials.ran[:3] == before
    assert outcomes(only_sweep()) == ["ok"] * 4


def test_a_study_and_a_sweep_are_extended_by_other_trials(trials: Rates, capsys) -> None:
    words = [*SMALL, RATE.replace("1e-1", "1e-2"), "sweep.objective=eval/loss", *STORED]

    def search(directory: str, count: int, *more: str) -> int:
        place = f"hydra.sweep.dir={directory}"
        return main([*words, place, f"hydra.sweeper.n_trials={count}", *more])

    assert search("a", 2) == search("b", 2) == search("b", 3) == 0
    assert main(["sweep", "resume", "a", "hydra.sweeper.n_trials=4"]) == 0
    study = optuna.load_study(study_name="a", storage="sqlite:///study.db")
    assert sorted(trial.params["optim.lr"] for trial in study.trials) == sorted(trials.ran)
    assert len(set(trials.ran)) == len(trials.ran) == 7
    capsys.readouterr()
    assert search("c", 1, "optim.lr=1e-3,1e-4") == 2
    assert "hydra.sweeper.study_name: Cannot set different distribution" in capsys.readouterr().err
    assert search("d", 1, "sweep.objective=tokens_per_s") == 2
    assert "study_name=a: does not maximize its objective" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optim.lr=1e-3"], "nothing is searched"),
        ([RATE, "hydra.sweeper.sampler=best"], "must be one of tpe, random"),
        ([RATE, "hydra.sweeper.n_trials=0"], "n_trials=0: must be a whole number from 1"),
        ([RATE, "hydra.sweeper.storage=foo"], "storage=foo: Could not parse"),
        ([RATE, "hydra.sweeper.storage=sqlite:////no/where.db"], "unable to open database file"),
        (["optim.lr=interval(5, 1)"], "optim.lr=interval(5, 1): `low <= high` must hold"),
        (["batch.micro_batch=range(5, 1)"], "batch.micro_batch=range(5, 1): has no values"),
    ],
)
def test_mistakes_are_said(words: list[str], message: str, trials: Rates, capsys) -> None:
    assert main([*SMALL, *words]) == 2
    assert message in capsys.readouterr().err
    assert not trials.ran
