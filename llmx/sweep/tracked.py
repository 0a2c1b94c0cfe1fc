"""Trials that no rank ran, in the trackers: those that were left out, and those that failed before
their ranks were started. Those that ran have shown themselves, as any run does.

What a trial that was left out would have trained, and why it does not, lies below
``SWEEP_DIR/left_out``; ``python -m llmx.tracking.process DIR --replay`` sends it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from llmx.compose.complete import Composed
from llmx.config.plugins import TRACKERS
from llmx.errors import LlmxError
from llmx.launch import rank_environment
from llmx.run import snapshot
from llmx.run.rundir import RunDir, read_mapping, write_json
from llmx.run.sweepdir import Trial

DIRECTORY = "left_out"


class Replays:
    """Processes that send trials to the trackers; none of them holds up the sweep."""

    def __init__(self) -> None:
        self._running: list[tuple[subprocess.Popen[bytes], float]] = []

    def left_out(self, composed: Composed, trial: Trial, directory: Path) -> None:
        """Send a trial that is not run; ``directory``: of the sweep."""
        exp = composed.experiment
        if not _services(exp.tracking.kinds) or exp.dry_run:
            return
        root = directory / DIRECTORY / Path(exp.run_dir).name
        kinds = _services(exp.tracking.kinds)
        exp = dataclasses.replace(
            exp, run_dir=str(root), tracking=dataclasses.replace(exp.tracking, kinds=kinds)
        )
        with contextlib.suppress(LlmxError, OSError):  # it was sent in an earlier attempt
            run = snapshot.write(
                exp,
                composed.plan,
                composed.ds_config,
                overrides=[*trial.overrides],
                environment=rank_environment(exp, composed.plan),
            )
            now = time.time()
            result = {"outcome": trial.outcome, "cause": trial.cause, "fix": trial.fix}
            times = {"started": now, "ended": now}
            write_json(run.result, {"run_id": snapshot.run_id(run), **result, **times})
            self._send(run, exp.tracking.finish_timeout_s)

    def failed(self, composed: Composed, run: RunDir) -> None:
        """Send a trial whose ranks were never started."""
        tracking, result = composed.experiment.tracking, read_mapping(run.result)
        if _services(tracking.kinds) and result and not result.get("launched"):
            self._send(run, tracking.finish_timeout_s)

    def _send(self, run: RunDir, timeout_s: float) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "llmx.tracking.process", str(run.root), "--replay"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._running.append((process, time.monotonic() + timeout_s))

    def finish(self) -> None:
        """Wait for all of them, each as long as ``tracking.finish_timeout_s`` says."""
        for process, until in self._running:
            try:
                process.wait(timeout=max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()


def _services(kinds: Sequence[str]) -> list[str]:
    """Those that show runs beside each other; the others are files of one run."""
    return [kind for kind in kinds if TRACKERS.load(kind).compares_runs]
