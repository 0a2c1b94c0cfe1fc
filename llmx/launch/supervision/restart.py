"""Whether an attempt is followed by another one, and how. Pure: history in, ``Decision`` out.

A failure from outside (a dead host, a killed process, the network) is followed by a restart, from
a budget that each new checkpoint restores. A failure that would occur again (the config, the data,
the same error at the same step) ends the run. ``cat RUN_DIR/attempts.jsonl`` shows the decisions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from llmx.config.schema import LaunchConfig, TaskConfig
from llmx.failures.diagnose import Failure
from llmx.launch.supervision.outcome import AttemptRecord
from llmx.text import plural

_REASONS = {
    "crash": "it crashed",
    "comm": "the ranks lost their connections",
    "host_lost": "a host was lost",
    "orphaned": "the ranks had no supervisor",
    "hang": "it hung",
    "disk_full": "a disk was full or could not be written",
    "oom": "a host ran out of memory",
    "nan": "training diverged",
}
_EXTERNAL = frozenset({"comm", "host_lost", "orphaned", "disk_full"})
"""Not caused by the run itself: may happen at the same step twice by chance."""
_KILLED = frozenset({"killed", "kernel_oom"})
"""Known failures of a process that was killed from outside."""


@dataclass(frozen=True)
class Decision:
    """The decision after an attempt: a restart, or the end of the run."""

    action: str
    """``restart``, ``stop`` or ``finished``."""
    why: str
    wait_s: float = 0.0
    skip_steps: tuple[int, ...] = ()
    """Further steps that the next attempt does not train."""
    wait_for: str = ""
    """What the restart needs: ``hosts``, ``disk`` or nothing."""
    restart: int = 0
    """The number of this restart since the last new checkpoint, from 1."""


def decide(history: Sequence[AttemptRecord], launch: LaunchConfig, task: TaskConfig) -> Decision:
    """The decision after ``history[-1]``; ``history`` has all attempts of this supervisor."""
    last = history[-1]
    kind = last.outcome.kind
    if kind == "ok":
        return Decision("finished", "every rank finished")
    if kind == "interrupted":
        return Decision("stop", "a stop was requested")
    if launch.max_restarts == 0:
        return Decision("stop", "launch.max_restarts=0")
    recurring = _recurring_failure(history)
    if recurring:
        return Decision("stop", recurring)
    skip_steps: tuple[int, ...] = ()
    if kind == "nan" and _diverged_before(history):
        if task.on_divergence == "stop" or last.outcome.step is None:
            step = last.outcome.step
            where = "at an unknown step" if step is None else f"at step {step}"
            return Decision(
                "stop",
                f"training diverged {where} again after the rollback to the last checkpoint "
                f"(task.on_divergence={task.on_divergence})",
            )
        skip_steps = _steps_to_skip(last.saved_step or 0, last.outcome.step, task)
    number = consecutive_failures(history)
    if number > launch.max_restarts:
        return Decision(
            "stop",
            f"{plural(launch.max_restarts, 'restart')} in a row without a new checkpoint "
            f"(launch.max_restarts={launch.max_restarts})",
        )
    doubled = min(number - 1, 60)  # 2.0**1024 overflows
    wait_s = min(launch.restart_backoff_s * 2**doubled, launch.restart_backoff_max_s)
    why = _REASONS.get(kind, kind)
    if skip_steps:
        first, final = skip_steps[0], skip_steps[-1]
        skipped = f"step {first}" if first == final else f"steps {first} to {final}"
        why += f" at the same step twice; skipping {skipped}"
    return Decision(
        "restart",
        why,
        wait_s=wait_s,
        skip_steps=skip_steps,
        wait_for={"host_lost": "hosts", "disk_full": "disk"}.get(kind, ""),
        restart=number,
    )


def consecutive_failures(history: Sequence[AttemptRecord]) -> int:
    """Failed attempts since the one that made the last new checkpoint, which counts too."""
    count = 0
    for record in reversed(history):
        count += 1
        if record.new_checkpoint:
            break
    return count


def _recurring_failure(history: Sequence[AttemptRecord]) -> str:
    """Why a restart would end in the same failure; empty where it might not."""
    last, earlier = history[-1], history[:-1]
    kind, name = last.outcome.kind, last.outcome.name
    if kind in ("config", "data"):
        return f"the same {kind} error would occur again"
    if not last.launched and not earlier:
        return "it could not be started"
    if kind == "oom":
        killed = [record for record in history if record.outcome.name == "kernel_oom"]
        if name != "kernel_oom":
            return "device memory would run out again"
        return "" if len(killed) == 1 else f"the host's memory was full {len(killed)} times"
    if kind == "nan" or kind in _EXTERNAL or name in _KILLED:
        return ""
    if last.last_step is None and not any(record.last_step is not None for record in earlier):
        return "it failed before the first step, and would fail there again"
    alike = [record for record in earlier if _same_failure(record, last)]
    if alike and not last.new_checkpoint:
        at = "before the first step" if last.last_step is None else f"at step {last.last_step}"
        return f"the same failure {at} in {len(alike) + 1} attempts: it would occur again"
    return ""


def _same_failure(record: AttemptRecord, other: AttemptRecord) -> bool:
    def key(outcome: Failure) -> tuple[str, str]:
        # Process numbers, addresses and seconds differ by chance.
        return outcome.kind, re.sub(r"0x[0-9a-f]+|\d+", "#", outcome.cause)

    return key(record.outcome) == key(other.outcome) and record.last_step == other.last_step


def _diverged_before(history: Sequence[AttemptRecord]) -> bool:
    last = history[-1]
    return any(
        record.outcome.kind == "nan" and record.outcome.step == last.outcome.step
        for record in history[:-1]
    )


def _steps_to_skip(saved_step: int, failed_step: int, task: TaskConfig) -> tuple[int, ...]:
    """After the second divergence at ``failed_step``."""
    if task.on_divergence == "skip":
        return (failed_step,)
    return tuple(range(saved_step + 1, failed_step + 1))
