"""Finished runs teach about a cluster: FLOP/s that a device reaches, bytes/s of collectives.

Pure. ``llmx.lifecycle.learned`` reads and writes the file. A run is taken apart by the same model
that predicts (``llmx.plan.step_time``), so that the plan of the same run is then its measured time;
another one differs by what the model does not know.

``python -m pytest tests/unit/test_plan_learned.py``
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from llmx.config.schema import Experiment
from llmx.plan.adapter import adapter_size
from llmx.plan.geometry import model_geometry
from llmx.plan.step_time import LearnedSpeeds, computing_parts, flops_by_device, step_time
from llmx.plan.types import Plan

MOST_USED = 5
"""The newest of those that are nearest."""
LINK_FROM = 0.05
"""Part of a step that collectives must take, for their speed to be told from noise."""
ROUNDS = 8
SLOWEST_LINK, FASTEST_LINK = 1e-6, 1e6
"""GB/s."""
LEAST = 0.01
"""The smallest part of a step that is computing, whatever the model says of the rest."""


@dataclass(frozen=True)
class Measured:
    """A finished run: medians over its logged lines."""

    step_s: float
    """Seconds of a step without waiting for data."""
    tokens: float
    """Tokens of a step, without padding."""
    forward_s: tuple[float, ...] = ()
    """Seconds of the forward passes of each rank; empty where they were not timed."""
    context_gib: tuple[float, ...] = ()
    """The least that each rank's device held outside PyTorch's allocator; empty on CPUs."""


@dataclass(frozen=True)
class Observation:
    """One run on one type of device."""

    device: str
    precision: str
    task: str
    model: str
    """Kind, as in the config."""
    size: float
    """log2 of the number of parameters."""
    attention: str
    slots: int
    """Ranks on a host, which on CPUs share its cores."""
    tokens: int
    """Tokens of a micro batch, padding included."""
    tflops: float
    """Reached; recomputed activations and real tokens alone counted."""
    data: str = ""
    fill: float = 1.0
    """Part of the positions of a step that are no padding."""
    stage: int = 1
    """The ZeRO stage."""
    quantized: bool = False
    """Whether each pass unpacked weights of 4 bits."""
    hosts: tuple[str, ...] = ()
    link_gb_per_s: float | None = None
    """Bytes/s of collectives in 10^9; None: not told from noise."""
    context_gib: float | None = None
    """The least of its devices: other processes on a device would only add to it. None on CPUs."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Observation:
        """The inverse of ``to_dict``, also after JSON; ValueError for anything else."""
        try:
            observation = cls(**{**values, "hosts": tuple(values.get("hosts", ()))})
        except TypeError as error:
            raise ValueError(str(error)) from error
        numbers = [observation.size, observation.tflops, observation.fill]
        numbers += [
            n for n in (observation.link_gb_per_s, observation.context_gib) if n is not None
        ]
        if not all(isinstance(n, (int, float)) and math.isfinite(n) and n > 0 for n in numbers):
            raise ValueError(f"not positive: {numbers}")
        if not all(isinstance(n, int) and n > 0 for n in (observation.slots, observation.tokens)):
            raise ValueError(f"not whole and above 0: {observation.slots}, {observation.tokens}")
        return observation


def observe(exp: Experiment, plan: Plan, measured: Measured) -> list[Observation]:
    """Take a finished run apart: one observation for each type of device; none where the size of
    its model is not known, or where it cannot be told which of unequal devices took how long."""
    shape = model_geometry(exp.model)
    timed = len(measured.forward_s) == plan.world_size and min(measured.forward_s) > 0
    positions = plan.batch.tokens_per_step
    if shape is None or not measured.step_s > 0 or not measured.tokens > 0:
        return []
    if len(plan.devices) > 1 and not timed:
        return []
    fill = min(1.0, measured.tokens / positions)
    flops = flops_by_device(exp, plan, shape)
    times = measured.forward_s if timed else ()
    if timed and plan.checkpointing:
        # Of all that is computed, a rank that computes again passes forward a smaller part.
        parts = [flops[rank.device].run / flops[rank.device].forward for rank in plan.ranks]
        times = tuple(seconds * part for seconds, part in zip(times, parts, strict=True))
    shares, work = _shares(plan, times), computing_parts(exp, plan)
    step_s = measured.step_s
    quantized = _quantized(exp)

    def known_if(computing: float, link: float | None) -> LearnedSpeeds:
        rates = {name: work[name] / 1e12 / (computing * part) for name, part in shares.items()}
        return LearnedSpeeds(
            tflops=rates,
            link_gb_per_s=link,
            with_unpacking=frozenset(rates) if quantized else frozenset(),
            at_stage_3=frozenset(rates) if exp.zero.stage == 3 else frozenset(),
        )

    link: float | None = None
    computing = step_s
    if timed:
        usual = flops[plan.ranks[0].device]
        computing = max(times) * (1 if plan.checkpointing else usual.run / usual.forward)
        predicted = step_time(exp, plan, learned=known_if(computing, None))
        remainder = step_s - computing - predicted.update_s - predicted.host_s
        if predicted.exchanges and remainder > LINK_FROM * step_s:
            link = _link(exp, plan, known_if(computing, None), remainder)
    # What the model says of the rest of a step is no computing.
    for _ in range(ROUNDS):
        predicted = step_time(exp, plan, learned=known_if(computing, link))
        left = step_s - predicted.exposed_s - predicted.update_s - predicted.host_s
        computing = max(LEAST * step_s, left)
    learned = known_if(computing, link)
    hosts = tuple(host.name for host in plan.hosts)
    return [
        Observation(
            device=name,
            precision=plan.precision,
            task=exp.task.kind,
            model=exp.model.kind,
            size=math.log2(plan.num_parameters),
            attention=plan.attention_on(name),
            slots=plan.slots_on(name),
            tokens=plan.batch.seq_len * plan.micro_batch_on(name),
            tflops=learned.tflops[name] * fill,
            data=exp.data.name,
            fill=fill,
            stage=exp.zero.stage,
            quantized=quantized,
            hosts=hosts,
            link_gb_per_s=link,
            context_gib=_least_context(plan, measured, name),
        )
        for name in plan.devices
    ]


def known_of(
    observations: Sequence[Observation], exp: Experiment, plan: Plan, *, path: str = ""
) -> LearnedSpeeds:
    """The speeds to predict a plan with: of each type of device by the newest of the runs that are
    most like it, and of the collectives by those on the same hosts. ``observations``: the oldest
    first; ``path``: their file."""
    tflops, tokens, used = {}, {}, []
    with_unpacking, at_stage_3 = set(), set()
    for name in plan.devices:
        like = [
            run for run in observations if (run.device, run.precision) == (name, plan.precision)
        ]
        if like and plan.num_parameters:
            distances = [_distance(run, exp, plan) for run in like]
            nearest = min(distances)
            like = [run for run, far in zip(like, distances, strict=True) if far == nearest]
            like = like[-MOST_USED:]
            # By positions: rows of the same data are as full as they were.
            tflops[name] = statistics.median(
                run.tflops / (run.fill if run.data == exp.data.name else 1.0) for run in like
            )
            tokens[name] = min(run.tokens for run in like)
            used += like
            if all(run.quantized for run in like):
                with_unpacking.add(name)
            if all(run.stage == 3 for run in like):
                at_stage_3.add(name)
    hosts = tuple(host.name for host in plan.hosts)
    links = [run.link_gb_per_s for run in observations if run.hosts == hosts and run.link_gb_per_s]
    if not tflops:
        return LearnedSpeeds()
    runs = "1 run" if len(used) == 1 else f"{len(used)} runs"
    return LearnedSpeeds(
        tflops=tflops,
        link_gb_per_s=statistics.median(links[-MOST_USED:]) if links else None,
        with_unpacking=frozenset(with_unpacking),
        at_stage_3=frozenset(at_stage_3),
        tokens=tokens,
        source=f"learned from {runs}{f' in {path}' if path else ''}",
    )


def contexts_gib(observations: Sequence[Observation]) -> dict[str, float]:
    """The largest context of the newest runs, by type of device. ``observations``: the oldest
    first."""
    sizes: dict[str, list[float]] = {}
    for observation in observations:
        if observation.context_gib is not None:
            sizes.setdefault(observation.device, []).append(observation.context_gib)
    return {device: max(recent[-MOST_USED:]) for device, recent in sizes.items()}


def _least_context(plan: Plan, measured: Measured, device: str) -> float | None:
    if len(measured.context_gib) != plan.world_size:
        return None
    sizes = (measured.context_gib[rank.rank] for rank in plan.ranks if rank.device == device)
    return min(sizes, default=0.0) or None


def _distance(run: Observation, exp: Experiment, plan: Plan) -> tuple[float, ...]:
    """How unlike a plan an observation on one of its types of devices is, the weightiest first."""
    tokens = plan.batch.seq_len * plan.micro_batch_on(run.device)
    return (
        float(run.slots != plan.slots_on(run.device)),
        # What stage 3 adds to each module counts as computing: it cannot be told apart.
        float((run.stage == 3) != (exp.zero.stage == 3)),
        float(run.quantized != _quantized(exp)),
        float(run.task != exp.task.kind),
        float(run.model != exp.model.kind),
        float(run.attention != plan.attention_on(run.device)),
        round(abs(run.size - math.log2(plan.num_parameters))),
        round(abs(math.log2(run.tokens / tokens))),
    )


def _quantized(exp: Experiment) -> bool:
    adapter = adapter_size(exp.model, exp.adapter)
    return adapter is not None and adapter.quantized > 0


def _link(exp: Experiment, plan: Plan, learned: LearnedSpeeds, exposed: float) -> float:
    """GB/s of the collectives of all ranks, where computing does not hide so much of them."""
    low, high = SLOWEST_LINK, FASTEST_LINK
    for _ in range(60):
        middle = math.sqrt(low * high)
        predicted = step_time(exp, plan, learned=replace(learned, link_gb_per_s=middle))
        low, high = (middle, high) if predicted.exposed_s > exposed else (low, middle)
    return high


def _shares(plan: Plan, forward_s: Sequence[float]) -> dict[str, float]:
    """The computing time of each type of device, as a part of that of the slowest rank."""
    if not forward_s:
        return {plan.ranks[0].device: 1.0}
    longest = max(forward_s)
    shares: dict[str, float] = {}
    for rank, seconds in zip(plan.ranks, forward_s, strict=True):
        shares[rank.device] = max(shares.get(rank.device, 0.0), seconds / longest)
    return shares
