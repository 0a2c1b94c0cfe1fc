"""One ``train`` line of ``metrics.jsonl``: gathered over steps, written from all ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from llmx.collectives import all_gather
from llmx.plan.balance import busy_fs, sample_fs
from llmx.plan.types import Plan
from llmx.tasks import JointTask
from llmx.train.batches import Step
from llmx.train.metrics import context_gib, memory_gib
from llmx.train.rebalance import Line
from llmx.train.schedule import lr_at, optim_of
from llmx.train.session import Session
from llmx.train.speeds import network_flops, products_of
from llmx.train.step import StepMetrics
from llmx.train.step_times import (
    FIRST,
    PHASES,
    SpeedProbe,
    StepTimes,
    StragglerWatch,
    idle_share,
    synchronize,
    usual_probes,
)
from llmx.train.stopping import NonFiniteWatch, SpikeWatch, raise_if_not_finite

LEAST_IDLE = 0.05
"""Idle share from which on the console shows it."""
SHOWN_RANKS = 8
"""Ranks whose times a warning shows."""


@dataclass(frozen=True)
class RankValues:
    """Measurements of one rank since the last ``train`` line."""

    loss_sum: float
    """Summed loss of the newest step."""
    interval_loss: float
    """Summed loss of all steps."""
    square_tokens: int
    work: int
    memory_gib: float
    context_gib: float
    data_wait_s: float
    nonfinite: list[float]
    """``NonFiniteWatch.first``."""
    phases_s: dict[str, float]
    """Seconds of each phase of a step; empty where they are not timed."""
    probe_s: float
    """``SpeedProbe.at_line``; 0 where nothing is probed."""
    clock: float
    metrics: dict[str, tuple[float, float]]
    """Sum and weight of each metric of the loss, by name."""


class StepLog:
    """Gathers the values of a ``train`` line of ``metrics.jsonl`` over steps."""

    def __init__(self, session: Session) -> None:
        self.session, self.total = session, session.length.steps
        self.optim = optim_of(session.exp.optim, session.exp.adapter)
        start = session.resume_point
        self.tokens_seen = start.tokens_seen
        self.target_tokens_seen = start.target_tokens_seen
        plan, engine = session.plan, session.engine
        self.watch = NonFiniteWatch(engine.device, gradients=engine.precision != "fp16")
        self.spikes = SpikeWatch(session.exp.task.spike_factor, losses=start.losses)
        self.flops = network_flops(engine)
        measures = plan.world_size > 1 and session.exp.batch.balance != "off"
        # A rank's forward passes wait for no other rank.
        independent = measures and engine.stage < 3 and not isinstance(session.task, JointTask)
        self.timed = StepTimes(engine.device) if independent else None
        # Where they wait for others, it times a piece of work of its own.
        self.probe: SpeedProbe | None = None
        if measures and not independent:
            self.probe = SpeedProbe(products_of(engine))
        self.probes: list[list[float]] = []
        """The first probes of all ranks."""
        self.stragglers = StragglerWatch(())
        """A watch by what each rank should take, as soon as that is known."""
        self.watch_split()
        self.restart()

    def watch_split(self) -> None:
        """Expect of each rank what the current plan gives it."""
        if self.timed:
            self.stragglers = StragglerWatch(expected_work(self.session.plan))

    def restart(self) -> None:
        """Start a new interval now."""
        self.began = time.perf_counter()
        self.data_wait_s = 0.0
        self.steps = self.tokens = self.targets = self.squares = self.work = 0
        self.loss_sum = torch.zeros((), device=self.session.engine.device)
        """Loss of the newest step."""
        self.interval_loss = self.loss_sum.clone()
        self.interval_weight = 0.0
        self.metrics = StepMetrics(self.session.engine.device)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, time does not count as training time: an evaluation within an interval."""
        device = self.session.engine.device
        synchronize(device)  # what it still has to do counts where it belongs
        began = time.perf_counter()
        try:
            yield
        finally:
            synchronize(device)
            self.began += time.perf_counter() - began

    def next_of(self, steps: Iterator[Step]) -> Step:
        """The next step. The time that this takes counts as waiting for data."""
        began = time.perf_counter()
        step = next(steps)
        self.data_wait_s += time.perf_counter() - began
        return step

    def add(self, step: Step, loss_sum: torch.Tensor) -> None:
        """Add a step to the interval. Nothing here waits for the device."""
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
        """Write one line, from all ranks. Collective. Raises Diverged, on every rank alike.

        ``extra``: the whole run would not have a line here. Returns how long each rank computed
        where that is measured.
        """
        session, done = self.session, step.step + 1
        ranks = all_gather(self._rank_values())
        elapsed = time.perf_counter() - self.began
        loss = sum(rank.loss_sum for rank in ranks) / (step.weight or 1)
        samples, tokens_per_s = session.length.samples_at(done), self.tokens / elapsed
        norm = session.engine.grad_norm()
        timings = self._timings(ranks)
        session.metrics.write(
            "train",
            step=done,
            samples=samples,
            tokens=self.tokens_seen,
            target_tokens=self.target_tokens_seen,
            epoch=samples / len(session.train_store),
            loss=loss,
            loss_mean=sum(rank.interval_loss for rank in ranks) / (self.interval_weight or 1),
            lr=lr_at(step.step, optim=self.optim, total=self.total),
            grad_norm=norm,
            loss_scale=session.engine.loss_scale(),
            skipped_steps=session.engine.engine.skipped_steps,
            step_time_s=elapsed / self.steps,
            tokens_per_s=tokens_per_s,
            mfu=self._mfu(sum(rank.square_tokens for rank in ranks), elapsed),
            memory_gib=[round(rank.memory_gib, 3) for rank in ranks],
            data_wait_s=max(rank.data_wait_s for rank in ranks),
            **timings,
            **(session.servers.take_measures() if session.servers is not None else {}),
            **session.engine.main.routing.measure(tokens=step.tokens),
            **{name: mean_over(ranks, name) for name in sorted(ranks[0].metrics)},
            **({"extra": True} if extra else {}),
        )
        text = f"step {done}/{self.total}  loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s"
        if timings.get("idle_share", 0.0) >= LEAST_IDLE:
            text += f"  idle {timings['idle_share']:.0%}"
        session.log(text)
        line = self._watch_speeds(ranks, step=done)
        loss_step, gradient_step = map(min, zip(*(rank.nonfinite for rank in ranks), strict=True))
        raise_if_not_finite(loss_step, gradient_step, lr=self.optim.lr)
        self.spikes.check(done, loss)
        self.restart()
        return line

    def _rank_values(self) -> RankValues:
        """Measurements of this rank. Waits for the device."""
        return RankValues(
            loss_sum=float(self.loss_sum),
            interval_loss=float(self.interval_loss),
            square_tokens=self.squares,
            work=self.work,
            memory_gib=memory_gib(self.session.engine.device.type),
            context_gib=context_gib(),
            data_wait_s=self.data_wait_s,
            nonfinite=self.watch.first(),
            phases_s={name: s / self.steps for name, s in self.timed.take().items()}
            if self.timed
            else {},
            probe_s=self.probe.at_line() if self.probe else 0.0,
            clock=time.perf_counter(),
            metrics=self.metrics.sums(),
        )

    def _mfu(self, square_tokens: int, elapsed_s: float) -> float | None:
        """Part of the peak of all devices that the model's operations are; None without a peak."""
        if not (peak := self.session.plan.peak_tflops * 1e12):
            return None
        counts = {"tokens": self.tokens, "target_tokens": self.targets}
        flops = self.session.task.updates * sum(
            part * model.of_step(**counts, square_tokens=square_tokens)
            for model, part in self.flops
        )
        return flops / elapsed_s / peak

    def _timings(self, ranks: Sequence[RankValues]) -> dict[str, Any]:
        """Columns of a line that only some runs measure."""
        timings: dict[str, Any] = {}
        if self.session.engine.device.type == "cuda":
            timings["context_gib"] = [round(rank.context_gib, 3) for rank in ranks]
        if self.timed:
            for name in PHASES:
                timings[f"{name}_s"] = [round(rank.phases_s[name], 6) for rank in ranks]
            timings["idle_share"] = round(idle_share([r.phases_s["forward"] for r in ranks]), 4)
        if min(rank.probe_s for rank in ranks) > 0:
            timings["probe_s"] = [float(f"{rank.probe_s:.4g}") for rank in ranks]
        return timings

    def _watch_speeds(self, ranks: Sequence[RankValues], *, step: int) -> Line | None:
        """Report stragglers. Returns how long each rank computed where that is measured."""
        clock, line = ranks[0].clock, None
        if self.timed:
            line = Line([r.phases_s["forward"] for r in ranks], [r.work for r in ranks], clock)
            for rank, factor in self.stragglers.see(line.seconds, line.work, now=clock):
                report_straggler(self.session, rank, factor, line.seconds, step=step)
        if self.probe:
            self._watch_probes([rank.probe_s for rank in ranks], step=step, now=clock)
            self.probe.after_line(clock)
        return line

    def _watch_probes(self, probe_s: list[float], *, step: int, now: float) -> None:
        """Report ranks that have become slower, or are slower than others on the same type of
        device."""
        if min(probe_s) <= 0:
            return
        if len(self.probes) < FIRST:
            self.probes.append(probe_s)
            devices = [rank.device for rank in self.session.plan.ranks]
            expected = usual_probes(self.probes, devices, planned_speeds(self.session.plan))
            self.stragglers = StragglerWatch(expected)
            return
        for rank, factor in self.stragglers.see(probe_s, now=now):
            report_straggler(self.session, rank, factor, probe_s, step=step, probed=True)


def mean_over(ranks: Sequence[RankValues], name: str) -> float | None:
    """The mean of a metric of the loss over all ranks; None where nothing was measured."""
    weight = sum(rank.metrics[name][1] for rank in ranks)
    return sum(rank.metrics[name][0] for rank in ranks) / weight if weight else None


def expected_work(plan: Plan) -> list[float]:
    """The work of each rank in a step, in any unit."""
    ranks = range(plan.world_size)
    if plan.balance is None:
        return [float(sum(plan.batch.sizes_of(rank))) for rank in ranks]
    sizes = tuple(plan.batch.sizes_of(rank) for rank in ranks)
    return [float(busy) for busy in busy_fs(sizes, plan.balance.speeds, plan.batch.seq_len)]


def planned_speeds(plan: Plan) -> list[float]:
    """How long each rank takes for the same work, in any unit, where that was measured; else 1."""
    balance = plan.balance
    if balance is None or balance.method != "measured":
        return [1.0] * plan.world_size
    return [float(sample_fs(speed, plan.batch.seq_len)) for speed in balance.speeds]


def report_straggler(
    session: Session,
    rank: int,
    factor: float,
    seconds: Sequence[float],
    *,
    step: int,
    probed: bool = False,
) -> None:
    """An event and a line in the log that name the rank and its host, with the time that each rank
    computes: its forward passes, or the same small piece of work (``probed``)."""
    plan = session.plan
    host = plan.hosts[plan.ranks[rank].host].name
    times: dict[str, Any] = {"forward_s": [round(value, 6) for value in seconds]}
    finding = "its part of a step as the other ranks"
    detail = f"forward passes of a step: {by_rank(seconds)}"
    if probed:
        times = {"probe_s": [float(f"{value:.4g}") for value in seconds]}
        finding = "a matrix product as at the start or as other ranks of its device type"
        detail = by_rank(seconds)
    session.metrics.event(
        "straggler", step=step, rank=rank, host=host, factor=round(factor, 2), **times
    )
    fix = "To measure the speeds again: remove balance.json and resume with batch.balance=measured."
    if session.rebalance is not None:
        fix = "batch.rebalance splits the batch anew where that is faster."
    session.log(
        f"WARNING: rank {rank} ({host}) takes {factor:.1f} times as long for {finding}; all ranks "
        f"wait for it ({detail}). Check whether its device is throttled or used by another "
        f"program. {fix}"
    )


def by_rank(seconds: Sequence[float]) -> str:
    """Times of all ranks, or the longest of many: ``rank 3 0.412 s, rank 0 0.201 s``."""
    order = sorted(range(len(seconds)), key=lambda rank: (-seconds[rank], rank))
    times = [f"rank {rank} {seconds[rank]:.3g} s" for rank in order[:SHOWN_RANKS]]
    if order[SHOWN_RANKS:]:
        usual = sorted(seconds)[len(seconds) // 2]
        times.append(f"median {usual:.3g} s")
    return ", ".join(times)
