"""Decides when the training state is saved, and when training waits for that.

At a boundary between two steps the state is copied to host memory and a thread writes it
(``llmx.checkpoint.save``) while training continues; where memory does not allow a copy, training
blocks until the disk has it.

A signal or a clock is seen by one rank, and all must act at the same step. So each step one small
all-reduce of flags (``Consensus``) runs in a gloo group of its own while the optimizer works:
posted after the last backward pass, read at the end of the step.

Tried by ``python -m pytest -m deepspeed tests/integration/test_resume.py``.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from llmx.checkpoint.export.model import (
    vocabulary_names,
    write_description,
)
from llmx.checkpoint.manifest import FORMAT, MODEL
from llmx.checkpoint.save import HostCopies, SaveFailed, SaveJob, fits
from llmx.checkpoint.state.engine_state import capture, state_values
from llmx.checkpoint.state.layout import state_layout
from llmx.collectives import all_gather
from llmx.config import CheckpointConfig
from llmx.run.rundir import read_json
from llmx.run.scratch import scratch_directory
from llmx.tolerance import rule, too_much
from llmx.train.status import exit_interrupted

if TYPE_CHECKING:
    from llmx.train.session import Session
    from llmx.train.step_log import StepLog


class Flags(NamedTuple):
    """Each is true where it is on at least one rank."""

    save: bool = False
    """A checkpoint is due by ``checkpoint.every_minutes``."""
    stop: bool = False
    """Save, then exit."""
    busy: bool = False
    """The last checkpoint is still being written."""


class Consensus:
    """The group, and the reduction in flight. All methods are collective."""

    def __init__(self, *, timeout_s: float) -> None:
        """``timeout_s``: how long a rank waits for the others (``launch.comm_timeout_s``)."""
        timeout = timedelta(seconds=timeout_s)
        self.group = torch.distributed.new_group(backend="gloo", timeout=timeout)
        self._values = torch.zeros(3, dtype=torch.int32)
        self._work: Any = None

    def post(self, flags: Flags) -> None:
        """Start the reduction; does not wait."""
        self._values = torch.tensor(flags, dtype=torch.int32)
        self._work = torch.distributed.all_reduce(
            self._values, op=torch.distributed.ReduceOp.MAX, group=self.group, async_op=True
        )

    def read(self) -> Flags:
        """The flags of all ranks; none where nothing was posted."""
        if self._work is None:
            return Flags()
        self._work.wait()
        self._work = None
        return Flags(*map(bool, self._values.tolist()))

    def post_and_read(self, flags: Flags) -> Flags:
        """Post, and wait for the result."""
        self.read()
        self.post(flags)
        return self.read()

    def barrier(self) -> None:
        """Wait for all ranks, in gloo: a GPU that waits in NCCL is polled, and timed out, by it."""
        torch.distributed.barrier(group=self.group)


def small_files(session: Session) -> dict[str, bytes]:
    """Relative path -> content: the run's config and plan, and the model's description with its
    tokenizer and ``Task.export_files``. They stay the same through an attempt."""
    run_dir, engine, task = session.run_dir, session.engine, session.task
    contents = {path.name: path.read_bytes() for path in (run_dir.config, run_dir.plan)}
    with scratch_directory() as directory:
        write_description(
            directory,
            engine.main.module,
            engine.config,
            tokenizer=task.tokenizer,
            vocab_size=engine.vocab_size,
            dtype=engine.dtype,
            files=task.export_files(engine.main),
            adapter=engine.main.adapter,
        )
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                contents[f"{MODEL}/{path.relative_to(directory).as_posix()}"] = path.read_bytes()
    return contents


PATIENCE_S = 10.0
"""How long training waits for the last save when the next one is due, but not twice in a row: then
the disk is slower than the interval, and saves are skipped."""
GROUP_TIMEOUT = timedelta(hours=6)
"""For the slowest disk to write one rank's file."""


class DiskFull(OSError):
    """The disk could not take the last checkpoint of a run."""


def _lost(error: SaveFailed, text: str) -> DiskFull | SaveFailed:
    """The end of a run that cannot save: a fault of the storage where the disk named one."""
    return DiskFull(error.fault, text) if error.fault else SaveFailed(text)


def ever_saves(config: CheckpointConfig) -> bool:
    """Whether a run may write checkpoints at all."""
    return bool(config.every_steps or config.every_minutes or config.at_end or config.on_signal)


class Saver:
    """Decides at every boundary, alike on all ranks. One save is in flight at a time."""

    def __init__(self, session: Session) -> None:
        self.session, self.config = session, session.checkpoint
        resume_point = session.resume_point
        self.saved_step: int | None = resume_point.step if resume_point.state else None
        self._group = torch.distributed.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
        """Used by the thread that saves, and by nothing else."""
        shared: tuple[str, dict[str, bytes]] = "", {}
        if ever_saves(self.config):
            # What cannot be saved is refused now, not hours later.
            state_layout(session.engine.engine)
            if session.topology.rank == 0:
                identity = session.run_dir.identity
                names = read_json(identity) if identity.is_file() else {}
                shared = str(names.get("run_id", "")), small_files(session)
        self._run_id, self._small = all_gather(shared, group=session.consensus.group)[0]
        self._damaged = {bad.step for bad in resume_point.damaged}
        self._copies = HostCopies()
        self._job: SaveJob | None = None
        self._began = time.monotonic()
        self._passed_over = self._reported_foreground = False
        self._num_saves = self._num_failed = 0

    # Flags: exchanged at every step.

    def flags(self) -> Flags:
        """The flags of this rank."""
        minutes = self.config.every_minutes
        due = minutes is not None and time.monotonic() - self._began >= 60 * minutes
        return Flags(
            save=due and self.session.topology.rank == 0,
            stop=bool(self.session.stop.requested),
            busy=self.busy,
        )

    def post_flags(self) -> None:
        """Post this rank's flags; all ranks read them at the end of the step."""
        self.session.consensus.post(self.flags())

    def stop_requested(self) -> bool:
        """Whether a shutdown was requested of any rank by the last call of this."""
        flags = self.session.consensus.read()
        self.post_flags()
        return flags.stop

    @property
    def busy(self) -> bool:
        """Whether the last checkpoint is still being written."""
        return self._job is not None and not self._job.wait(0)

    # When.

    def at_boundary(self, step: int, flags: Flags, progress: StepLog) -> None:
        """After each step but the last: save where one is due. Collective."""
        self._collect(over_everywhere=not flags.busy)
        interval = self.config.every_steps
        if interval and step % interval == 0:
            if flags.busy and not self._in_time():
                self._passed_over = True
                self.session.metrics.event("passed_over", step=step)
                self.session.log(
                    f"WARNING: no checkpoint at step {step}: the previous one is still being "
                    "written. The disk is too slow for checkpoint.every_steps; raise it."
                )
                return
            self._passed_over = False
            self._save(step, "interval", progress)
        elif flags.save and not flags.busy:
            self._save(step, "time", progress)

    def at_end(self, step: int, progress: StepLog) -> None:
        """After the last step: save where one is due, and wait for it. Collective.

        Raises:
            DiskFull, SaveFailed: it could not be saved.
        """
        self.wait()
        interval = self.config.every_steps
        due = self.config.at_end or bool(interval and step % interval == 0)
        if not due or step in (self.saved_step, 0):
            return
        job = self._save(step, "end", progress, wait=True)
        if isinstance(job.error, SaveFailed):
            text = (
                f"The checkpoint of the last step could not be saved: {job.error}. The steps since "
                "the previous checkpoint are lost. Free some space, or make the disk writable, "
                "then resume with `python -m llmx resume RUN`."
            )
            raise _lost(job.error, text)

    def save_and_exit(self, step: int, progress: StepLog) -> NoReturn:
        """Save unless this step is saved, then exit with the status ``interrupted``. Collective."""
        self.wait()
        if step not in (self.saved_step, self.session.resume_point.step):
            self._save(step, "signal", progress, wait=True)
        saved = "none" if self.saved_step is None else f"step {self.saved_step}"
        self.session.log(f"shutdown requested: exiting at step {step}, newest checkpoint: {saved}")
        self.session.metrics.sync()
        # A launcher kills all ranks when the first one exits: write every status before that.
        self.session.status.enter("interrupted")
        self.session.consensus.barrier()
        exit_interrupted(self.session.status)

    # How.

    def _save(self, step: int, reason: str, progress: StepLog, *, wait: bool = False) -> SaveJob:
        """Copy the state and start to write it; without memory for a copy, write it now."""
        session = self.session
        # Never save a state that has diverged.
        progress.watch.check(lr=progress.optim.lr)
        self.wait()
        began, self._began = time.perf_counter(), time.monotonic()
        fragments = capture(session.engine, world=session.plan.world_size)
        copied = not wait and self._may_copy(sum(f.tensor.nbytes for f in fragments))
        if copied:
            fragments = self._copies.copy(fragments)
        if session.topology.rank == 0:
            session.metrics.sync()
        job = SaveJob(
            step=step,
            fragments=fragments,
            state=self._state(step, reason, progress),
            small_files=self._small,
            topology=session.topology,
            group=self._group,
            hosts=[session.plan.hosts[rank.host].name for rank in session.plan.ranks],
            run_id=self._run_id,
            config=self.config,
            damaged=frozenset(self._damaged - {step}),
            num_rollbacks=session.resume_point.num_rollbacks,
            on_end=lambda job: self._ended(job, reason),
        )
        job.in_foreground = not copied
        job.blocking_s = time.perf_counter() - began
        self._job = job
        job.start()
        if not copied:
            self.wait()
        return job

    def _state(self, step: int, reason: str, progress: StepLog) -> dict[str, Any]:
        """``state.json`` (docs/development/contracts.md) but for the hash of the weights."""
        session, engine = self.session, self.session.engine
        names = vocabulary_names(engine.main.module)
        return {
            "format": FORMAT,
            "step": step,
            "samples": session.length.samples_at(step),
            "tokens_seen": progress.tokens_seen,
            "target_tokens_seen": progress.target_tokens_seen,
            **session.identity,
            "world_size": session.plan.world_size,
            "total_steps": session.length.steps,
            "vocab_size": engine.vocab_size,
            "padded_vocab_size": engine.config.get_text_config().vocab_size,
            "vocabulary": [engine.main_prefix + name for name in names],
            # Of several models, the one that is exported.
            **({"main_prefix": engine.main_prefix} if engine.main_prefix else {}),
            **state_values(engine),
            "metric": session.metrics.latest(self.config.metric),
            "time": time.time(),
            "reason": reason,
        }

    def _may_copy(self, num_bytes: int) -> bool:
        """Whether every host has memory for the copies. Collective."""
        background = self.config.background
        if background != "auto":
            return background == "always"
        extra_bytes = max(0, num_bytes - self._copies.held_bytes)
        room = fits(extra_bytes, group=self.session.consensus.group)
        if not room and not self._reported_foreground:
            self._reported_foreground = True
            self.session.log(
                "training pauses while a checkpoint is written: a host has too little free memory "
                "for a copy of the state (checkpoint.background=always copies it anyway)"
            )
        return room

    def _in_time(self) -> bool:
        """Wait a moment for the save in flight; whether it is over on all ranks. Collective."""
        if not self._passed_over and self._job is not None:
            self._job.wait(PATIENCE_S)
        return not self.session.consensus.post_and_read(Flags(busy=self.busy)).busy

    def wait(self) -> None:
        """Wait for the save in flight, however long it takes. The status ``saving`` says that this
        is no hang."""
        if self._job is not None and self.busy:
            before = self.session.status.state
            self.session.status.enter("saving")
            self._job.wait()
            self.session.status.enter(before)
        self._collect()

    def _collect(self, *, over_everywhere: bool = True) -> None:
        """Drop a save that is over. Where too many have failed, training is for nothing.

        Raises:
            DiskFull, SaveFailed: alike on all ranks.
            BaseException: an error that is not of the disk (a dead peer), at once: other ranks may
                not have noticed, and would wait for this one for hours.
        """
        job = self._job
        if job is None or self.busy:
            return
        failure = job.error
        if failure is not None and not isinstance(failure, SaveFailed):
            raise failure
        if not over_everywhere:
            return
        self._job = None
        self._num_saves += 1
        if failure is None:
            return
        self._num_failed += 1
        share, max_lost = self._num_failed / self._num_saves, self.session.exp.task.max_lost
        if too_much(share, self._num_failed, max_lost=max_lost):
            raise _lost(
                failure,
                f"{self._num_failed} of {self._num_saves} checkpoints could not be saved, the last "
                f"one because of: {failure}. {rule(share, max_lost=max_lost)}",
            )

    def _ended(self, job: SaveJob, reason: str) -> None:
        """Record how a save ended, and report it; the thread that saved calls it."""
        session = self.session
        if job.error is not None:
            newest = "no checkpoint yet"
            if self.saved_step is not None:
                newest = f"the newest checkpoint is step {self.saved_step}"
            session.metrics.event("save_failed", step=job.step, reason=str(job.error))
            session.log(
                f"WARNING: the checkpoint of step {job.step} was not saved: {job.error}. Training "
                f"continues; {newest}."
            )
            return
        self.saved_step = job.step
        self._damaged.discard(job.step)  # replaced by this one
        session.status.saved(job.step)
        session.metrics.event(
            "saved",
            step=job.step,
            reason=reason,
            stall_s=round(job.blocking_s, 4),
            background_s=round(job.background_s, 4),
            bytes=job.num_bytes,
        )
        session.log(
            f"checkpoint of step {job.step} saved: {job.num_bytes / 2**20:,.1f} MiB in "
            f"{job.blocking_s + job.background_s:.1f} s "
            f"(training paused for {job.blocking_s:.2f} s)"
        )
        if job.warning:
            session.log(f"WARNING: older checkpoints could not be removed: {job.warning}")
