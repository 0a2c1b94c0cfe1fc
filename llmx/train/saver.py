"""When the training state is saved, and what training waits for.

At a boundary between two steps the state is copied to host memory and a thread writes it
(``llmx.train.save_job``) while training goes on; where memory does not allow a copy, training
waits for the disk. Tried by ``python -m pytest -m deepspeed tests/integration/test_resume.py``.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch

from llmx.config import Experiment
from llmx.plan.types import Plan
from llmx.run.rundir import RunDir, read_json
from llmx.train.agreement import Agreement, Flags
from llmx.train.engine import Engine
from llmx.train.engine_state import capture
from llmx.train.host_copies import HostCopies
from llmx.train.host_memory import fits
from llmx.train.metrics import MetricsWriter
from llmx.train.place import Place, exchange
from llmx.train.resume import Start
from llmx.train.save_files import Progress, small_files, state_of
from llmx.train.save_job import SaveFailed, SaveJob
from llmx.train.save_report import SaveReport
from llmx.train.signals import ShutdownRequest, exit_interrupted
from llmx.train.state_layout import state_layout
from llmx.train.status import RankStatus

PATIENCE_S = 10.0
"""Training waits so long for the last checkpoint when the next one is due, but not twice in a
row: then the disk is slower than the interval, and checkpoints are passed over."""
GROUP_TIMEOUT = timedelta(hours=6)
"""For the slowest disk to take one rank's part."""


class DiskFull(OSError):
    """The last checkpoint of a run found no room."""


def ever_saves(exp: Experiment) -> bool:
    """Whether a run may write checkpoints at all."""
    wanted = exp.checkpoint
    return bool(wanted.every_steps or wanted.every_minutes or wanted.at_end or wanted.on_signal)


class Saver:
    """Decides at every boundary, alike on all ranks. One save is in flight at a time."""

    def __init__(
        self,
        exp: Experiment,
        plan: Plan,
        run_dir: RunDir,
        *,
        engine: Engine,
        tokenizer: Any,
        identity: dict[str, Any],
        agreement: Agreement,
        place: Place,
        metrics: MetricsWriter,
        status: RankStatus,
        stop: ShutdownRequest,
        start: Start,
        say: Callable[[str], None],
    ) -> None:
        self.exp, self.plan, self.engine = exp, plan, engine
        self.identity, self.start = identity, start
        self.agreement, self.place = agreement, place
        self.metrics, self.status, self.stop, self.say = metrics, status, stop, say
        self.saved_step: int | None = start.step if start.state else None
        self._group = torch.distributed.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
        """Used by the thread that saves, and by nothing else."""
        ours = None
        if ever_saves(exp):
            state_layout(engine.engine)  # what cannot be saved is refused now, not hours later
        if ever_saves(exp) and place.rank == 0:
            known = read_json(run_dir.identity) if run_dir.identity.is_file() else {}
            ours = (str(known.get("run_id", "")), small_files(run_dir, engine, tokenizer))
        shared = exchange(ours, group=agreement.group)
        given: tuple[str, dict[str, bytes]] = shared[0] or ("", {})
        self._run_id, self._small = given
        self._damaged = {bad.step for bad in start.damaged}
        self._copies = HostCopies()
        self._job: SaveJob | None = None
        self._reason, self._stall_s, self._began = "", 0.0, time.monotonic()
        self._passed_over = self._said_foreground = False
        self.report = SaveReport(metrics, say)

    # What this rank tells the others, and hears.

    def flags(self) -> Flags:
        """What this rank knows."""
        minutes = self.exp.checkpoint.every_minutes
        due = minutes is not None and time.monotonic() - self._began >= 60 * minutes
        return Flags(
            save=due and self.place.rank == 0, stop=bool(self.stop.requested), busy=self.busy
        )

    def tell(self) -> None:
        """Post it; the others hear it at the end of the step."""
        self.agreement.post(self.flags())

    def asked_to_stop(self) -> bool:
        """Whether any rank was asked to end, as it was known when this was last called."""
        heard = self.agreement.read()
        self.tell()
        return heard.stop

    @property
    def busy(self) -> bool:
        """Whether the last checkpoint is still being written."""
        return self._job is not None and not self._job.wait(0)

    # When.

    def at_boundary(self, step: int, flags: Flags, progress: Progress) -> None:
        """After each step but the last: save where one is due. Collective."""
        self._raise_if_broken()
        every = self.exp.checkpoint.every_steps
        if every and step % every == 0:
            if flags.busy and not self._in_time():
                self._passed_over = True
                self.report.passed_over(step)
                return
            self._passed_over = False
            self._save(step, "interval", progress)
        elif flags.save and not flags.busy:
            self._save(step, "time", progress)
        elif not flags.busy:
            self._collect()

    def at_end(self, step: int, progress: Progress) -> None:
        """After the last step: save where one is due, and wait for it. Collective.

        Raises:
            DiskFull, SaveFailed: it could not be saved.
        """
        self._wait()
        every = self.exp.checkpoint.every_steps
        due = self.exp.checkpoint.at_end or bool(every and step % every == 0)
        if not due or step in (self.saved_step, 0):
            return
        job = self._save(step, "end", progress, wait=True)
        if isinstance(job.error, SaveFailed):
            text = (
                f"The checkpoint of the last step could not be saved: {job.error}. Training is "
                "done, and is lost beyond the checkpoint before it. Free some space, then resume "
                "with `python -m llmx resume RUN`."
            )
            raise (
                DiskFull(errno.ENOSPC, text)
                if job.error.disk_full
                else SaveFailed(text, disk_full=False)
            )

    def save_and_leave(self, step: int, progress: Progress) -> NoReturn:
        """Save what is not saved, on all ranks, and end this process as interrupted."""
        self._wait()
        if step not in (self.saved_step, self.start.step):
            self._save(step, "signal", progress, wait=True)
        saved = "none" if self.saved_step is None else f"step {self.saved_step}"
        self.say(f"stop requested: exiting at step {step}, newest checkpoint: {saved}")
        self.metrics.sync()
        # A launcher ends the others with the first that leaves: they all say it before.
        self.status.enter("interrupted")
        self.agreement.barrier()
        exit_interrupted(self.status)

    def complete(self) -> None:
        """The save in flight is of a good state, whatever has come after it: wait for its end."""
        self._wait()

    # How.

    def _save(self, step: int, reason: str, progress: Progress, *, wait: bool = False) -> SaveJob:
        """Copy the state and begin to write it; or, without room for a copy, write it now."""
        # A state that has diverged is worth nothing.
        progress.watch.check(lr=self.exp.optim.lr)
        self._wait()
        began, self._began = time.perf_counter(), time.monotonic()
        fragments = capture(self.engine, world=self.plan.world_size)
        copied = not wait and self._may_copy(sum(f.tensor.nbytes for f in fragments))
        if copied:
            fragments = self._copies.copy(fragments)
        if self.place.rank == 0:
            self.metrics.sync()
        job = SaveJob(
            step=step,
            fragments=fragments,
            state=state_of(
                progress,
                step=step,
                reason=reason,
                engine=self.engine,
                plan=self.plan,
                identity=self.identity,
                metric=self.metrics.latest(self.exp.checkpoint.metric),
            ),
            small_files=self._small,
            place=self.place,
            group=self._group,
            hosts=[self.plan.hosts[rank.host].name for rank in self.plan.ranks],
            run_id=self._run_id,
            config=self.exp.checkpoint,
            damaged=frozenset(self._damaged - {step}),
            course=self.start.course,
            on_end=lambda job: self._ended(job, reason),
        )
        job.in_foreground = not copied
        job.stall_s = time.perf_counter() - began
        self._job = job
        job.start()
        if not copied:
            self._wait()
        return job

    def _may_copy(self, num_bytes: int) -> bool:
        """Whether every host has memory for the copies. Collective."""
        wanted = self.exp.checkpoint.background
        if wanted != "auto":
            return wanted == "always"
        more = max(0, num_bytes - self._copies.held_bytes)
        room = fits(more, group=self.agreement.group)
        if not room and not self._said_foreground:
            self._said_foreground = True
            self.report.in_foreground()
        return room

    def _in_time(self) -> bool:
        """Give the save in flight a moment; whether all ranks have done with it. Collective."""
        if not self._passed_over and self._job is not None:
            self._job.wait(PATIENCE_S)
        return not self.agreement.settle(Flags(busy=self.busy)).busy

    def _wait(self) -> None:
        """For the save in flight, however long it takes: who looks sees that it is no hang."""
        if self.busy:
            assert self._job is not None
            before = self.status.state
            self.status.enter("saving")
            self._job.wait()
            self.status.enter(before)
        self._collect()

    def _collect(self) -> None:
        """Forget a save that is over."""
        self._raise_if_broken()
        self._job = None

    def _raise_if_broken(self) -> None:
        """What is no failure of the disk (a dead peer) ends this rank, and with it the run: others
        may not have heard of it, and would wait for this rank's part for hours."""
        error = None if self._job is None or self.busy else self._job.error
        if error is not None and not isinstance(error, SaveFailed):
            raise error

    def _ended(self, job: SaveJob, reason: str) -> None:
        """Called by the thread that saved."""
        if job.error is not None:
            self.report.failed(job, last=self.saved_step)
            return
        self.saved_step = job.step
        self._damaged.discard(job.step)  # it has given way to this one
        self.status.saved(job.step)
        self.report.saved(job, reason)
