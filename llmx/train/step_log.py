"""One ``train`` line of ``metrics.jsonl``: gathered over steps, written from all ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from llmx.models.flops import model_flops
from llmx.plan.balance import busy_fs, sample_fs
from llmx.plan.types import Plan
from llmx.train.batches import Step
from llmx.train.metrics import context_gib, memory_gib
from llmx.train.rebalance import Line
from llmx.train.schedule import lr_at, optim_of
from llmx.train.session import Session
from llmx.train.step import StepMetrics
from llmx.train.step_times import (
    PHASES,
    DriftWatch,
    SpeedProbe,
    StepTimes,
    StragglerWatch,
    idle_share,
)
from llmx.train.stopping import NonFiniteWatch, SpikeWatch, raise_if_not_finite

LEAST_IDLE = 0.05
"""The console says the idle share from here on."""
SHOWN_RANKS = 8
"""Whose times a warning says."""
FORWARD_PART = 1 / 3
"""Of the operations of training: what a frozen model's forward pass costs."""


class StepLog:
    """Gathers the values of a ``train`` line of ``metrics.jsonl`` over steps."""

    def __init__(self, session: Session, *, total: int) -> None:
        self.session = session
        self.total = total
        self.length = session.length
        start = session.resume_point
        self.tokens_seen = start.tokens_seen
        self.target_tokens_seen = start.target_tokens_seen
        self.watch = NonFiniteWatch(
            session.engine.device, gradients=session.engine.precision != "fp16"
        )
        self.spikes = SpikeWatch(session.exp.task.spike_factor, losses=start.losses)
        self.flops = [
            (
                model_flops(model.module, causal=model.attention.causal),
                1.0 if model.spec.trained else FORWARD_PART,
            )
            for model in session.engine.models.values()
        ]
        plan, engine = session.plan, session.engine
        measures = plan.world_size > 1 and session.exp.batch.balance != "off"
        # A rank's forward passes wait for no other rank.
        independent = measures and engine.stage < 3 and not session.task.joint
        # Before the first restart, which empties it.
        self.timed = StepTimes(engine.device, active=independent)
        # Where they wait for others, it times a piece of work of its own.
        self.probe = SpeedProbe(
            engine.device,
            engine.dtype,
            width=getattr(engine.config, "hidden_size", 0),
            active=measures and not independent,
        )
        self.drift = drift_watch(plan) if self.probe.active else None
        self.watch_split()
        self.restart()

    def watch_split(self) -> None:
        """Expect of each rank what the plan of now gives it."""
        plan = self.session.plan
        self.stragglers = StragglerWatch(expected_work(plan)) if self.timed.active else None

    def restart(self) -> None:
        """Start a new interval now."""
        self.began = time.perf_counter()
        self.data_wait_s = 0.0
        self.steps = self.tokens = self.targets = self.squares = self.work = 0
        self.loss_sum: torch.Tensor | None = None
        """Of the newest step."""
        self.interval_loss = torch.zeros((), device=self.session.engine.device)
        self.interval_weight = 0.0
        self.metrics = StepMetrics(self.session.engine.device)
        self.timed.take()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, time does not count as training time: an evaluation within an interval."""
        self._finish_steps()
        began = time.perf_counter()
        try:
            yield
        finally:
            self._finish_steps()
            self.began += time.perf_counter() - began

    def _finish_steps(self) -> None:
        """Wait for what the device still has to do, so that its time counts where it belongs."""
        if self.session.engine.device.type == "cuda":
            torch.cuda.synchronize(self.session.engine.device)

    def wait_for_data(self) -> None:
        """Evaluation and checkpoints between two steps are no waiting for data."""
        self.waiting_since = time.perf_counter()

    def data_is_here(self) -> None:
        self.data_wait_s += time.perf_counter() - self.waiting_since

    def add(self, step: Step, loss_sum: torch.Tensor) -> None:
        """After each step; nothing here waits for the device."""
        self.steps += 1
        self.tokens += step.tokens
        self.targets += step.target_tokens
        self.tokens_seen += step.tokens
        self.target_tokens_seen += step.target_tokens
        self.squares += step.square_tokens
        self.work += step.work * self.session.task.updates
        self.loss_sum = loss_sum
        self.interval_loss += loss_sum
        self.interval_weight += step.weight
        self.watch.record(step.step + 1, loss_sum, self.session.engine.last_norm())

    def write(self, step: Step, *, extra: bool = False) -> Line | None:
        """One line, from all ranks. Collective. Raises Diverged, on every rank alike.

        ``extra``: the whole run would not have a line here. Returns how long each rank computed
        where that is measured.
        """
        assert self.loss_sum is not None
        session, engine = self.session, self.session.engine
        row = torch.tensor(
            [
                float(self.loss_sum),
                self.squares,
                memory_gib(engine.device.type),
                self.data_wait_s,
                *self.watch.first(),
                float(self.interval_loss),
                *(seconds / max(self.steps, 1) for seconds in self.timed.take()),
                self.work,
                time.perf_counter(),
                self.probe.at_line(),
                context_gib(),
                *(float(value) for value in self.metrics.values()),
            ],
            dtype=torch.float64,
            device=engine.device,
        )
        rows = [torch.empty_like(row) for _ in range(session.plan.world_size)]
        torch.distributed.all_gather(rows, row)
        table = torch.stack(rows).cpu()
        loss_sum, squares = table[:, :2].sum(dim=0).tolist()
        loss_mean = float(table[:, 6].sum()) / (self.interval_weight or 1)
        elapsed = time.perf_counter() - self.began
        flops = session.task.updates * sum(
            part
            * model.of_step(tokens=self.tokens, target_tokens=self.targets, square_tokens=squares)
            for model, part in self.flops
        )
        peak = session.plan.peak_tflops * 1e12
        done = step.step + 1
        samples = self.length.samples_at(done)
        loss = loss_sum / (step.weight or 1)
        totals = table[:, 14:].sum(dim=0).tolist()
        clock, probe_s = float(table[0, 11]), table[:, 12].tolist()
        probed = self.drift is not None and min(probe_s) > 0
        forward_s, *other_phases, work = table[:, 7:11].T.tolist()
        waits: dict[str, Any] = {}
        if engine.device.type == "cuda":
            waits["context_gib"] = [round(value, 3) for value in table[:, 13].tolist()]
        if self.timed.active:
            idle = idle_share(forward_s)
            for name, seconds in zip(PHASES, (forward_s, *other_phases), strict=True):
                waits[f"{name}_s"] = [round(value, 6) for value in seconds]
            waits["idle_share"] = round(idle, 4)
        if probed:
            waits["probe_s"] = [float(f"{value:.4g}") for value in probe_s]
        measured = {
            name: totals[2 * at] / totals[2 * at + 1] if totals[2 * at + 1] else None
            for at, name in enumerate(self.metrics.names)
        }
        tokens_per_s = self.tokens / elapsed
        norm = engine.grad_norm()
        session.metrics.write(
            "train",
            step=done,
            samples=samples,
            tokens=self.tokens_seen,
            target_tokens=self.target_tokens_seen,
            epoch=samples / len(session.train_store),
            loss=loss,
            loss_mean=loss_mean,
            lr=lr_at(
                step.step, optim=optim_of(session.exp.optim, session.exp.adapter), total=self.total
            ),
            grad_norm=norm,
            loss_scale=engine.loss_scale(),
            skipped_steps=engine.engine.skipped_steps,
            step_time_s=elapsed / self.steps,
            tokens_per_s=tokens_per_s,
            mfu=flops / elapsed / peak if peak else None,
            memory_gib=[round(value, 3) for value in table[:, 2].tolist()],
            data_wait_s=float(table[:, 3].max()),
            **waits,
            **(session.servers.take_measures() if session.servers is not None else {}),
            **engine.main.routing.measure(tokens=step.tokens),
            **measured,
            **({"extra": True} if extra else {}),
        )
        text = f"step {done}/{self.total}  loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s"
        if self.timed.active and idle >= LEAST_IDLE:
            text += f"  idle {idle:.0%}"
        session.log(text)
        if self.stragglers is not None:
            for rank, factor in self.stragglers.see(forward_s, work, now=time.perf_counter()):
                report_straggler(session, rank, factor, forward_s, step=done)
        if self.drift is not None and probed:
            for rank, factor in self.drift.see(probe_s, now=clock):
                report_straggler(session, rank, factor, probe_s, step=done, probed=True)
        self.probe.after_line(clock)
        loss_step, gradient_step = table[:, 4:6].amin(dim=0).tolist()
        raise_if_not_finite(
            loss_step, gradient_step, lr=optim_of(session.exp.optim, session.exp.adapter).lr
        )
        self.spikes.check(done, loss)
        self.restart()
        return Line(forward_s, work, clock) if self.timed.active else None


def expected_work(plan: Plan) -> list[float]:
    """The work of each rank in a step, in any unit."""
    ranks = range(plan.world_size)
    if plan.balance is None:
        return [float(sum(plan.batch.sizes_of(rank))) for rank in ranks]
    sizes = tuple(plan.batch.sizes_of(rank) for rank in ranks)
    return [float(busy) for busy in busy_fs(sizes, plan.balance.speeds, plan.batch.seq_len)]


def drift_watch(plan: Plan) -> DriftWatch:
    """For the ranks of a plan: what was measured at the start is taken into account."""
    balance, expected = plan.balance, [1.0] * plan.world_size
    if balance is not None and balance.method == "measured":
        expected = [float(sample_fs(speed, plan.batch.seq_len)) for speed in balance.speeds]
    return DriftWatch([rank.device for rank in plan.ranks], expected)


def report_straggler(
    session: Session,
    rank: int,
    factor: float,
    seconds: list[float],
    *,
    step: int,
    probed: bool = False,
) -> None:
    """An event and a line in the log that name the rank and its host, with the time that each rank
    computes: its forward passes, or the same small piece of work (``probed``)."""
    plan = session.plan
    host = plan.hosts[plan.ranks[rank].host].name
    key = "probe_s" if probed else "forward_s"
    times = [float(f"{value:.4g}") if probed else round(value, 6) for value in seconds]
    session.metrics.event(
        "straggler",
        step=step,
        rank=rank,
        host=host,
        factor=round(factor, 2),
        **{key: times},
    )
    how = "To measure the speeds again: remove balance.json and resume with batch.balance=measured."
    if session.rebalance is not None:
        how = "batch.rebalance splits the batch anew where that is faster."
    finding = (
        f"takes {factor:.1f} times as long for a matrix product as at the start or as other ranks "
        f"of its device type; all ranks wait for it ({by_rank(seconds)})"
        if probed
        else f"takes {factor:.1f} times as long as the other ranks for its part of a step; all "
        f"ranks wait for it (forward passes of a step: {by_rank(seconds)})"
    )
    session.log(
        f"WARNING: rank {rank} ({host}) {finding}. Check whether its device is throttled or used "
        f"by another program. {how}"
    )


def by_rank(seconds: list[float]) -> str:
    """Times of all ranks, of many the longest: ``rank 3 0.412 s, rank 0 0.201 s``."""
    order = sorted(range(len(seconds)), key=lambda rank: (-seconds[rank], rank))
    times = [f"rank {rank} {seconds[rank]:.3g} s" for rank in order[:SHOWN_RANKS]]
    if order[SHOWN_RANKS:]:
        usual = sorted(seconds)[len(seconds) // 2]
        times.append(f"median {usual:.3g} s")
    return ", ".join(times)
