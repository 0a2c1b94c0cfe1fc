"""What a run says of its checkpoints: events in ``metrics.jsonl``, lines in rank 0's log."""

from __future__ import annotations

from collections.abc import Callable

from llmx.checkpoint.save.job import SaveJob
from llmx.train.metrics import MetricsWriter


class SaveReport:
    """Used on all ranks; only rank 0's is heard."""

    def __init__(self, metrics: MetricsWriter, say: Callable[[str], None]) -> None:
        self._metrics = metrics
        self._say = say

    def saved(self, job: SaveJob, reason: str) -> None:
        """A checkpoint is committed."""
        self._metrics.event(
            "saved",
            step=job.step,
            reason=reason,
            stall_s=round(job.stall_s, 4),
            background_s=round(job.background_s, 4),
            bytes=job.num_bytes,
        )
        self._say(
            f"checkpoint of step {job.step} saved: {job.num_bytes / 2**20:,.1f} MiB in "
            f"{job.stall_s + job.background_s:.1f} s; training waited {job.stall_s:.2f} s"
        )
        if job.warning:
            self._say(f"WARNING: older checkpoints could not be removed: {job.warning}")

    def failed(self, job: SaveJob, *, last: int | None) -> None:
        """A checkpoint was given up. ``last``: the step of the one that stands."""
        self._metrics.event("save_failed", step=job.step, reason=str(job.error))
        stands = "there is none yet" if last is None else f"the newest one is of step {last}"
        self._say(
            f"WARNING: the checkpoint of step {job.step} was not saved: {job.error}. Training "
            f"continues; {stands}."
        )

    def passed_over(self, step: int) -> None:
        """One was due while the one before was being written."""
        self._metrics.event("passed_over", step=step)
        self._say(
            f"WARNING: no checkpoint at step {step}: the one before it is still being written. The "
            "disk is slower than checkpoint.every_steps asks for."
        )

    def in_foreground(self) -> None:
        """A copy of the state does not fit."""
        self._say(
            "checkpoints are written while training waits: a host's free memory does not hold a "
            "copy of the state (checkpoint.background=always insists)"
        )
