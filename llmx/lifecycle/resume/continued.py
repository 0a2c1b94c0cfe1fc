"""A run that its sweep stopped on the way, and that goes on (``sweep.halving``)."""

from __future__ import annotations

import contextlib
from pathlib import Path

from llmx.compose.apply_overrides import RunCommand
from llmx.config import Experiment
from llmx.lifecycle.resume.command import resume
from llmx.lifecycle.start import Launch
from llmx.run import snapshot
from llmx.run.rundir import RunDir
from llmx.sweep.halving import continued


def continue_run(now: Experiment, *, instead: Launch | None = None) -> int:
    """Go on from its newest checkpoint, to where ``now`` stops; returns the exit code.

    What ``resume`` says goes to ``logs/console.log``. Where nothing is left to train, nothing is
    started.
    """
    run = RunDir(Path(now.run_dir))
    asked = continued(snapshot.load(run), now)
    run.logs.mkdir(parents=True, exist_ok=True)
    with (
        run.console_log.open("a", encoding="utf-8") as stream,
        contextlib.redirect_stdout(stream),
    ):
        return resume(RunCommand(run.root, {}, (), ()), asked=asked, instead=instead)
