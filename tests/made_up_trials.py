"""Sweeps through the command line whose trials start nothing, but leave what a run leaves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llmx.errors import RunFailed
from llmx.run.rundir import RunDir, write_json, write_text
from llmx.sweep import journal as journals
from llmx.sweep.journal import Journal


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


def enter(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory to sweep in."""
    monkeypatch.chdir(directory)
    monkeypatch.delenv("LLMX_OUTPUTS", raising=False)
    return directory


def leave(
    run: RunDir, lines: Sequence[dict[str, Any]], *, outcome: str = "ok", cause: str = ""
) -> int:
    """The files of a run that has ended; a RunFailed where it did not end well."""
    write_text(run.metrics, "".join(json.dumps(line) + "\n" for line in lines))
    result = {"outcome": outcome, "started": 1.0, "ended": 2.0}
    write_json(run.result, result | ({"cause": cause} if cause else {}))
    if cause:
        raise RunFailed(cause)
    return 0


def only_sweep() -> Journal:
    """The one sweep of this directory."""
    (directory,) = (Path.cwd() / "outputs" / "sweeps").iterdir()
    found = journals.load(directory)
    assert found is not None
    return found
