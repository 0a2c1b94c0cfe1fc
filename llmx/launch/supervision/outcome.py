"""What an attempt and a run leave: evidence, attempts, ``result.json`` and the exit code. Pure.

``classify`` finds the failure in the evidence.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from llmx.errors import (
    INTERRUPTED,
    ConfigError,
    DataError,
    DiskFullError,
    LaunchError,
    RunFailed,
)
from llmx.failures.diagnose import Failure
from llmx.plan.types import Plan


@dataclass(frozen=True)
class RankExit:
    """The end of a rank's process, as its agent reported it."""

    time: float
    """When it exited, on the supervisor's clock."""
    oom_kills: int = 0
    """Processes that the kernel of its host has ended for memory since the run began."""
    disk_free: int | None = None
    """Free bytes on the disk of the run directory there; None where unknown."""
    code: int | None = None
    """Its exit code, negative for a signal; None where the agent did not start it."""


@dataclass
class Evidence:
    """The observations of the supervisor during an attempt."""

    statuses: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rank -> content of its status file, of this attempt only."""
    exits: dict[int, RankExit] = field(default_factory=dict)
    offsets_s: dict[int, float] = field(default_factory=dict)
    """Rank -> clock of its host minus the supervisor's."""
    lost_hosts: dict[str, float] = field(default_factory=dict)
    """Host -> time of the last message from its agent."""
    agent_ends: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Host -> the report of an agent that ended its ranks without a supervisor."""
    runner_code: int | None = None
    """Exit code of ``deepspeed``; None while it runs, or where the supervisor ended it."""
    launcher_log: str = ""
    rank_logs: dict[int, str] = field(default_factory=dict)
    """Rank -> the end of its log."""
    stopped: Failure | None = None
    """Set where the end was requested."""
    hang: Failure | None = None
    """Set where no rank made progress for too long."""
    ended_at: float | None = None
    """When the supervisor began to end the attempt: later errors of ranks follow from that."""
    start_timeout_s: float | None = None
    """Set where ranks did not start within this time."""


@dataclass(frozen=True)
class AttemptRecord:
    """One attempt that is over."""

    outcome: Failure
    launched: bool = True
    """Whether ``deepspeed`` was started."""
    first_step: int | None = None
    """The step it began at; None where training did not begin."""
    last_step: int | None = None
    """The last step that is known to be trained; None where none was."""
    saved_step: int | None = None
    """The newest checkpoint at its end."""
    new_checkpoint: bool = False
    """Whether this attempt committed one."""
    started: float = 0.0
    """Seconds since the epoch, as ``ended``."""
    ended: float = 0.0
    hosts: tuple[str, ...] = ()

    def to_json(self, number: int) -> dict[str, Any]:
        """The line of ``attempts.jsonl``, without the decision that followed."""
        return {
            "attempt": number,
            "started": self.started,
            "ended": self.ended,
            "outcome": self.outcome.kind,
            "cause": self.outcome.cause,
            "rank": self.outcome.rank,
            "host": self.outcome.host,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "saved_step": self.saved_step,
            "hosts": list(self.hosts),
        }


def all_finished(evidence: Evidence, plan: Plan) -> bool:
    """Whether the status of every rank is ``finished``."""
    return all(
        evidence.statuses.get(rank.rank, {}).get("state") == "finished" for rank in plan.ranks
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

    run_id: str = ""
    outcome: str = "ok"
    cause: str = ""
    fix: str = ""
    other_fix: str = ""
    """``fix`` of an interrupted run, without the command that resumes it."""
    failure: str = ""
    """The name of the known failure (``llmx.failures``); empty where none matches."""
    stopped_by: str = ""
    """Who asked an interrupted run to end: ``user``, ``time_limit`` or ``scheduler``."""
    signal: str = ""
    """The signal to the supervisor by which it was asked, such as ``SIGUSR1``."""
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
    """Metric of the task -> its value in the last evaluation; null where it has none. Keys of
    ``result.json`` like the others."""
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
    """The exit code of the command for an outcome (``result.json``)."""
    if not launched and outcome not in OUTCOME_EXIT_CODES:
        return LaunchError.exit_code
    return OUTCOME_EXIT_CODES.get(outcome, RunFailed.exit_code)
