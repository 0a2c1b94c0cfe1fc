"""Whether a run that ended is started again, and how. Pure: history in, ``Decision`` out.

The rule: what came from outside (a dead host, a kill, the network) is tried again, with a budget
that each new checkpoint gives back; what would come again (the config, the data, the same error
at the same step) ends the run with its cause. ``cat RUN_DIR/attempts.jsonl`` shows the decisions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from llmx.config.schema import LaunchConfig, TaskConfig

_WORDS = {
    "crash": "it crashed",
    "comm": "the ranks lost each other",
    "host_lost": "a host was lost",
    "hang": "it hung",
    "disk_full": "a disk was full",
    "oom": "a host ran out of memory",
    "nan": "training diverged",
}
_FROM_OUTSIDE = frozenset({"comm", "host_lost", "disk_full"})
"""Says nothing about the run itself: may happen at the same step twice by chance."""
_KILLED = frozenset({"killed", "kernel_oom"})
"""Rows of the catalogue for a process that somebody else ended."""


@dataclass(frozen=True)
class Ended:
    """One attempt that is over, as far as the decision needs it."""

    outcome: str
    cause: str = ""
    name: str = ""
    """The row of the catalogue of known failures; empty where none matched."""
    launched: bool = True
    """Whether a rank was started."""
    first_step: int | None = None
    """The step it began at; None when training did not begin."""
    last_step: int | None = None
    """The last step that is known to be trained; None when none was."""
    saved_step: int | None = None
    """The newest checkpoint at its end."""
    new_checkpoint: bool = False
    failed_step: int | None = None
    """Where training diverged, as the rank said."""
    lost_hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """What comes next."""

    action: str
    """``restart``, ``stop`` or ``finished``."""
    why: str
    wait_s: float = 0.0
    skip_steps: tuple[int, ...] = ()
    """Further steps that the next attempt does not train."""
    wait_for: str = ""
    """What must be there before the restart: ``hosts``, ``disk`` or nothing."""
    restart: int = 0
    """The how manieth in a row without a new checkpoint."""


def decide(history: Sequence[Ended], launch: LaunchConfig, task: TaskConfig) -> Decision:
    """The decision after ``history[-1]``; earlier attempts of the same supervisor come first."""
    last = history[-1]
    if last.outcome == "ok":
        return Decision("finished", "every rank finished")
    if last.outcome == "interrupted":
        return Decision("stop", "a stop was requested")
    if launch.max_restarts == 0:
        return Decision("stop", "launch.max_restarts=0")
    hopeless = _recurs(history)
    if hopeless:
        return Decision("stop", hopeless)
    skip_steps: tuple[int, ...] = ()
    if last.outcome == "nan" and _diverged_before(history):
        skip_steps, hopeless = _passed_over(last, task)
        if hopeless:
            return Decision("stop", hopeless)
    number = in_a_row(history)
    if number > launch.max_restarts:
        return Decision(
            "stop",
            f"{_times(launch.max_restarts, 'restart')} in a row without a new checkpoint "
            f"(launch.max_restarts={launch.max_restarts})",
        )
    doubled = min(number - 1, 60)  # a float has an end
    wait_s = min(launch.restart_backoff_s * 2**doubled, launch.restart_backoff_max_s)
    why = _WORDS.get(last.outcome, last.outcome)
    if skip_steps:
        why += f" at the same step twice; skipping {_steps(skip_steps)}"
    return Decision(
        "restart",
        why,
        wait_s=wait_s,
        skip_steps=skip_steps,
        wait_for={"host_lost": "hosts", "disk_full": "disk"}.get(last.outcome, ""),
        restart=number,
    )


def in_a_row(history: Sequence[Ended]) -> int:
    """Which restart in a row without a new checkpoint the next one is: 1 for the first."""
    count = 0
    for ended in reversed(history):
        count += 1
        if ended.new_checkpoint:
            break
    return count


def _recurs(history: Sequence[Ended]) -> str:
    """Why starting again would end the same way; empty where it might not."""
    last, earlier = history[-1], history[:-1]
    if last.outcome in ("config", "data"):
        return f"the same {last.outcome} error would occur again"
    if not last.launched and not earlier:
        return "it could not be started"
    if last.outcome == "oom":
        killed = [ended for ended in history if ended.name == "kernel_oom"]
        if last.name != "kernel_oom":
            return "device memory would run out again"
        return "" if len(killed) == 1 else f"the host's memory was full {len(killed)} times"
    if last.outcome == "nan" or last.outcome in _FROM_OUTSIDE or last.name in _KILLED:
        return ""
    if last.last_step is None and not any(ended.last_step is not None for ended in earlier):
        return "it failed before the first step, and would fail there again"
    same = [ended for ended in earlier if _same(ended, last)]
    if same and not last.new_checkpoint:
        at = "before the first step" if last.last_step is None else f"at step {last.last_step}"
        return f"the same failure {at} in {len(same) + 1} attempts: it would occur again"
    return ""


def _same(one: Ended, other: Ended) -> bool:
    """The same failure at the same place: outcome, cause without its numbers, and step."""
    return (one.outcome, _shape(one.cause), one.last_step) == (
        other.outcome,
        _shape(other.cause),
        other.last_step,
    )


def _shape(cause: str) -> str:
    """A cause without what differs by chance: process numbers, addresses, seconds."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", cause)


def _diverged_before(history: Sequence[Ended]) -> bool:
    last = history[-1]
    return any(
        ended.outcome == "nan" and ended.failed_step == last.failed_step for ended in history[:-1]
    )


def _passed_over(last: Ended, task: TaskConfig) -> tuple[tuple[int, ...], str]:
    """The steps to skip after the second divergence at one step, or why there is no way on."""
    step = last.failed_step
    where = "at an unknown step" if step is None else f"at step {step}"
    if task.on_divergence == "stop" or step is None:
        return (), (
            f"training diverged {where} again after going back to the last checkpoint "
            "(task.on_divergence=stop)"
        )
    if task.on_divergence == "skip":
        return (step,), ""
    return tuple(range((last.saved_step or 0) + 1, step + 1)), ""


def _steps(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _times(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
