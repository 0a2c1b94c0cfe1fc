"""How a run ended: the content of ``result.json``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from llmx.errors import (
    INTERRUPTED,
    ConfigError,
    DataError,
    DiskFullError,
    LaunchError,
    RunFailed,
)

OUTCOME_EXIT_CODES = {
    "ok": 0,
    "config": ConfigError.exit_code,
    "data": DataError.exit_code,
    "disk_full": DiskFullError.exit_code,
    "interrupted": INTERRUPTED,
}
"""``RunFailed.exit_code`` for all others; ``LaunchError.exit_code`` where no rank was started."""


@dataclass
class Result:
    """Typed outcome, cause and fix, and the numbers a sweep compares (``llmx.launch``)."""

    run_token: str = ""
    outcome: str = "ok"
    cause: str = ""
    fix: str = ""
    failed_rank: int | None = None
    host: str | None = None
    log: str | None = None
    """The log file of the rank that failed first."""
    traceback: str = ""
    started: float = 0.0
    """Seconds since the epoch, as ``ended``."""
    ended: float = 0.0
    steps: int = 0
    final_loss: float | None = None
    metrics: dict[str, float | None] = dataclasses.field(default_factory=dict)
    """What the task measures besides the loss, by name, as the last evaluation did; null where it
    did not. Keys of ``result.json`` like the others."""
    tokens_per_s: float | None = None
    model: str | None = None
    exit_code: int = 0
    launched: bool = True
    """Whether ``deepspeed`` was started at all."""
    attempts: int = 1
    """How often the ranks were started, over all supervisors of the run."""
    restarts: int = 0
    """How often the supervisor started them again by itself."""
    warnings: list[str] = dataclasses.field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"

    def to_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        return {**values.pop("metrics"), **values}


def exit_code_of(outcome: str, *, launched: bool) -> int:
    """What the shell gets."""
    if not launched and outcome not in OUTCOME_EXIT_CODES:
        return LaunchError.exit_code
    return OUTCOME_EXIT_CODES.get(outcome, RunFailed.exit_code)
