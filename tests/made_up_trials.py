"""Sweeps through the command line whose trials start no rank, but leave what a run leaves."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmx.config import Experiment
from llmx.run.rundir import RunDir, write_json
from llmx.run.sweepdir import Sweep, load
from llmx.sweep.process import End


class Killed(BaseException):
    """The sweep's process dies here."""


class Trials:
    """Stand for launched runs: ``ran`` is what was trained, in the order of time."""

    death: type[BaseException] = Killed

    def __init__(self) -> None:
        self.ran: list[Any] = []
        self.deaths: set[int] = set()
        """After how many trials the sweep is killed; each once."""

    def __call__(self, exp: Experiment, run: RunDir) -> int:
        if len(self.ran) in self.deaths:
            self.deaths.remove(len(self.ran))
            raise self.death
        return self.train(exp, run)

    def train(self, exp: Experiment, run: RunDir) -> int:
        """Leave what the run would; its exit code."""
        raise NotImplementedError


class InThisProcess:
    """In the place of ``TrialProcess``: the run is over when it has started."""

    def __init__(self, run: RunDir, supervise: Callable[[], int], **_: Any) -> None:
        self.run = run
        self._end = End(supervise())

    def poll(self) -> End:
        return self._end


def enter(
    directory: Path, monkeypatch: pytest.MonkeyPatch, trials: Trials | None = None
) -> Trials | None:
    """Sweep in this empty directory; ``trials`` in the place of launched runs."""
    monkeypatch.chdir(directory)
    monkeypatch.delenv("LLMX_OUTPUTS", raising=False)
    if trials is not None:

        def supervise(exp: Experiment, plan: Any, run: RunDir, **_: Any) -> SimpleNamespace:
            return SimpleNamespace(exit_code=trials(exp, run))

        monkeypatch.setattr("llmx.sweep.sweep.TrialProcess", InThisProcess)
        monkeypatch.setattr("llmx.sweep.sweep.supervise", supervise)
        monkeypatch.setattr("llmx.sweep.sweep.start_report", lambda run: None)
    return trials


def leave(
    run: RunDir, lines: Sequence[dict[str, Any]], *, outcome: str = "ok", cause: str = ""
) -> int:
    """The files of a run that has ended; its exit code."""
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    now = time.time()
    write_json(run.result, {"outcome": outcome, "cause": cause, "started": now - 1, "ended": now})
    return 0 if outcome == "ok" else 1


def only_sweep(root: Path | None = None) -> Sweep:
    """The one sweep of a directory, this one by default."""
    (directory,) = ((root or Path.cwd()) / "outputs" / "sweeps").iterdir()
    return load(directory)


def outcomes(sweep: Sweep) -> list[str]:
    """How each trial ended."""
    return [trial.outcome for trial in sweep.trials]
