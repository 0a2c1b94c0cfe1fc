"""The state of a run: how far it came, how it ended, which checkpoints it has. Reads only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmx.checkpoint.commit import committed_dir
from llmx.checkpoint.manifest import MANIFEST
from llmx.checkpoint.selection import list_steps
from llmx.run.metrics.lines import read_metrics
from llmx.run.rundir import RunDir, read_mapping


@dataclass(frozen=True)
class RunState:
    """What the files of a run say."""

    started: dict[str, Any] | None
    """The ``start`` line, with what a ``resumed`` event changed; None before training began."""
    last_step: int
    """The last step that a line of ``metrics.jsonl`` names; 0 without one."""
    finished_at: int | None
    """The step of the ``end`` line of a run that ended well."""
    outcome: str | None
    """Of ``result.json``; None while the run goes on, or where its supervisor was killed."""
    cause: str
    checkpoints: tuple[int, ...]
    """Committed steps on this machine, ascending; whether they are whole is not said."""

    stopped_early: bool = False
    """Whether ``task.early_stopping`` ended a run that ended well."""
    saved: frozenset[int] = frozenset()
    """Steps that were committed once, as the metrics tell."""

    @property
    def num_samples(self) -> int | None:
        return (self.started or {}).get("num_samples")

    @property
    def total_steps(self) -> int | None:
        return (self.started or {}).get("total_steps")

    was_launched: bool = True
    """Whether a supervisor ever took it up; False after ``dry_run=true``."""

    @property
    def ending(self) -> str:
        """``failed as oom at step 57: CUDA out of memory``."""
        if not self.was_launched:
            return "was planned and never started"
        where = f"step {self.last_step}" if self.last_step else "before the first step"
        at = f"at {where}" if self.last_step else where
        if self.outcome is None:
            return f"ended {at} without a result"
        if self.outcome == "ok":
            return f"finished {at}"
        word = "interrupted" if self.outcome == "interrupted" else f"failed ({self.outcome})"
        cause = self.cause.splitlines()[0] if self.cause else ""
        return f"{word} {at}" + (f": {cause}" if cause else "")


def read_state(run: RunDir) -> RunState:
    """Read it; torn and missing files count as not there."""
    lines = read_metrics(run.metrics)
    result = read_mapping(run.result)
    steps = [int(line["step"]) for line in lines if isinstance(line.get("step"), int)]
    ends = [int(line["step"]) for line in lines if line.get("kind") == "end"]
    ok = result.get("outcome") == "ok"
    started = next((line for line in lines if line.get("kind") == "start"), None)
    for line in lines:
        if started and line.get("event") == "resumed" and line.get("total_steps"):
            started = {**started, "total_steps": line["total_steps"]}
    return RunState(
        started=started,
        last_step=max(steps, default=0),
        finished_at=ends[-1] if ok and ends else None,
        stopped_early=ok
        and any(
            line.get("event") == "early_stopped" and ends and line.get("step") == ends[-1]
            for line in lines
        ),
        outcome=str(result["outcome"]) if result.get("outcome") else None,
        cause=str(result.get("cause") or ""),
        checkpoints=tuple(committed(run.checkpoints)),
        saved=frozenset(int(line["step"]) for line in lines if line.get("event") == "saved"),
        was_launched=any(
            path.exists() for path in (run.result, run.metrics, run.supervisor, run.attempts)
        ),
    )


def committed(directory: Path) -> list[int]:
    """Steps of the checkpoints that have a manifest, ascending."""
    steps = list_steps(directory)
    return [step for step in steps if (committed_dir(directory, step) / MANIFEST).is_file()]
