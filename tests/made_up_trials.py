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


class Deaths:
    """Kills the sweep once, at its trial number ``dies_at``."""

    def __init__(self) -> None:
        self.dies_at = -1

    def may_die(self, number: int) -> None:
        if number == self.dies_at:
            self.dies_at = -1
            raise Killed


class InThisProcess:
    """In the place of ``TrialProcess``: the run is over when it has started."""

    def __init__(self, run: RunDir, supervise: Callable[[], int], **_: Any) -> None:
        self.run = run
        self._end = End(supervise())

    def poll(self) -> End:
        return self._end


def enter(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    trained: Callable[[Experiment, RunDir], int] | None = None,
) -> Path:
    """An empty directory to sweep in; ``trained`` stands for a launched run, and returns its exit
    code."""
    monkeypatch.chdir(directory)
    monkeypatch.delenv("LLMX_OUTPUTS", raising=False)
    if trained is not None:

        def supervise(exp: Experiment, plan: Any, run: RunDir, **_: Any) -> SimpleNamespace:
            return SimpleNamespace(exit_code=trained(exp, run))

        monkeypatch.setattr("llmx.sweep.sweep.TrialProcess", InThisProcess)
        monkeypatch.setattr("llmx.sweep.sweep.supervise", supervise)
        monkeypatch.setattr("llmx.sweep.sweep.start_report", lambda run: None)
    return directory


def leave(
    run: RunDir, lines: Sequence[dict[str, Any]], *, outcome: str = "ok", cause: str = ""
) -> int:
    """The files of a run that has ended; its exit code."""
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    now = time.time()
    write_json(run.result, {"outcome": outcome, "cause": cause, "started": now - 1, "ended": now})
    return 0 if outcome == "ok" else 1


def only_sweep() -> Sweep:
    """The one sweep of this directory."""
    (directory,) = (Path.cwd() / "outputs" / "sweeps").iterdir()
    return load(directory)
