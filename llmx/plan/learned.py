"""What finished runs teach about a cluster: FLOP/s that a device reaches, bytes/s of collectives.

Pure. ``llmx.lifecycle.learned`` reads and writes the file. A run is taken apart by the same model
that predicts (``llmx.plan.step_time``), so that the plan of the same run is then its measured time;
another one differs by what the model does not know.

``python -m pytest tests/unit/test_plan_learned.py``
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from llmx.config.schema import Experiment
from llmx.plan.geometry import model_geometry
from llmx.plan.step_time import Known, computing_parts, flops_by_device, step_time
from llmx.plan.types import Plan

MOST_USED = 5
"""The newest of those that are nearest."""
LINK_FROM = 0.05
"""Part of a step that collectives must take, for their speed to be told from noise."""
ROUNDS = 8
SLOWEST_LINK, FASTEST_LINK = 1e-6, 1e6
"""GB/s."""
LEAST = 0.01
"""Of a step is computing, whatever the model says of the rest."""


@dataclass(frozen=True)
class Measured:
    """Of the steps of a finished run; medians over its logged lines."""

    step_s: float
    """Without waiting for data."""
    tokens: float
    """In a step, without padding."""
    forward_s: tuple[float, ...] = ()
    """Of each rank; empty where they were not timed."""
    context_gib: tuple[float, ...] = ()
    """The least that each rank's device held outside PyTorch's allocator; empty on CPUs."""


@dataclass(frozen=True)
class Observation:
    """What one run has shown of one type of device."""

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
    """Of a micro batch, padding included."""
    tflops: float
    """Reached; recomputed activations and real tokens alone counted."""
    data: str = ""
    fill: float = 1.0
    """Part of the positions of a step that are no padding."""
    stage: int = 1
    """Of ZeRO."""
    hosts: tuple[str, ...] = ()
    link_gb_per_s: float | None = None
    """None: not told from noise."""
    context_gib: float | None = None
    """The least of its devices: other processes on a device would only add to it. None on CPUs."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Observation:
        """The inverse of ``to_dict``, also after JSON; ValueError for anything else."""
        try:
            found = cls(**{**values, "hosts": tuple(values.get("hosts", ()))})
        except TypeError as error:
            raise ValueError(str(error)) from error
        numbers = [found.size, found.tflops, found.fill]
        numbers += [n for n in (found.link_gb_per_s, found.context_gib) if n is not None]
        if not all(isinstance(n, (int, float)) and math.isfinite(n) and n > 0 for n in numbers):
            raise ValueError(f"not positive: {numbers}")
        if not all(isinstance(n, int) and n > 0 for n in (found.slots, found.tokens)):
            raise ValueError(f"not whole numbers above 0: {found.slots}, {found.tokens}")
        return found


def observe(exp: Experiment, plan: Plan, measured: Measured) -> list[Observation]:
    """What a run has shown, one observation for each type of device; none where the size of its
    model is not known, or where it cannot be told which of unequal devices took how long."""
    shape = model_geometry(exp.model)
    devices = list(dict.fromkeys(rank.device for rank in plan.ranks))
    timed = len(measured.forward_s) == plan.world_size and min(measured.forward_s) > 0
    positions = plan.batch.tokens_per_step
    if shape is None or not measured.step_s > 0 or not measured.tokens > 0:
        return []
    if len(devices) > 1 and not timed:
        return []
    fill = min(1.0, measured.tokens / positions)
    flops = flops_by_device(exp, plan, shape)
    times = measured.forward_s if timed else ()
    if timed and plan.checkpointing:
        # Of all that is computed, a rank that computes again passes forward a smaller part.
        parts = [flops[rank.device].run / flops[rank.device].forward for rank in plan.ranks]
        times = tuple(one * part for one, part in zip(times, parts, strict=True))
    shares = _shares(plan, times)
    whole = measured.step_s

    def known_if(computing: float, link: float | None) -> Known:
        rates = {name: _rate(exp, plan, name, computing * part) for name, part in shares.items()}
        at_stage_3 = frozenset(rates) if exp.zero.stage == 3 else frozenset[str]()
        return Known(tflops=rates, link_gb_per_s=link, at_stage_3=at_stage_3)

    link: float | None = None
    computing = whole
    if timed:
        usual = flops[plan.ranks[0].device]
        computing = max(times) * (1 if plan.checkpointing else usual.run / usual.forward)
        found = step_time(exp, plan, known=known_if(computing, None))
        rest = whole - computing - found.update_s - found.host_s
        if found.exchanges and rest > LINK_FROM * whole:
            link = _link(exp, plan, known_if(computing, None), rest)
    # What the model says of the rest of a step is no computing.
    for _ in range(ROUNDS):
        found = step_time(exp, plan, known=known_if(computing, link))
        left = whole - found.exposed_s - found.update_s - found.host_s
        computing = max(LEAST * whole, left)
    known = known_if(computing, link)
    hosts = tuple(host.name for host in plan.hosts)
    return [
        Observation(
            device=name,
            precision=plan.precision,
            task=exp.task.kind,
            model=exp.model.kind,
            size=math.log2(plan.num_parameters),
            attention=plan.attention_on(name),
            slots=max(host.slots for host in plan.hosts if host.device == name),
            tokens=plan.batch.seq_len
            * max(rank.micro_batch for rank in plan.ranks if rank.device == name),
            tflops=known.tflops[name] * fill,
            data=exp.data.name,
            fill=fill,
            stage=exp.zero.stage,
            hosts=hosts,
            link_gb_per_s=link,
            context_gib=_least_context(plan, measured, name),
        )
        for name in devices
    ]


def known_of(found: Sequence[Observation], exp: Experiment, plan: Plan, *, path: str = "") -> Known:
    """What they say of a plan: of each type of device the newest of those that are most like it,
    and the speed of collectives on the same hosts. ``found``: the oldest first."""
    tflops, tokens, used, at_stage_3 = {}, {}, [], set()
    for name in dict.fromkeys(rank.device for rank in plan.ranks):
        like = [one for one in found if (one.device, one.precision) == (name, plan.precision)]
        if like and plan.num_parameters:
            apart = _distance(exp, plan, name)
            away = [apart(one) for one in like]
            nearest = min(away)
            like = [one for one, far in zip(like, away, strict=True) if far == nearest][-MOST_USED:]
            tflops[name] = statistics.median(_of_whole_rows(one, exp) for one in like)
            tokens[name] = min(one.tokens for one in like)
            used += like
            if all(one.stage == 3 for one in like):
                at_stage_3.add(name)
    hosts = tuple(host.name for host in plan.hosts)
    links = [one.link_gb_per_s for one in found if one.hosts == hosts and one.link_gb_per_s]
    if not tflops:
        return Known()
    runs = "1 run" if len(used) == 1 else f"{len(used)} runs"
    return Known(
        tflops=tflops,
        link_gb_per_s=statistics.median(links[-MOST_USED:]) if links else None,
        at_stage_3=frozenset(at_stage_3),
        tokens=tokens,
        source=f"learned from {runs}{f' in {path}' if path else ''}",
    )


def contexts_gib(observations: Sequence[Observation]) -> dict[str, float]:
    """By type of device, the largest context of the newest runs on it. ``observations``: the oldest
    first."""
    sizes: dict[str, list[float]] = {}
    for observation in observations:
        if observation.context_gib is not None:
            sizes.setdefault(observation.device, []).append(observation.context_gib)
    return {device: max(seen[-MOST_USED:]) for device, seen in sizes.items()}


def _least_context(plan: Plan, measured: Measured, device: str) -> float | None:
    if len(measured.context_gib) != plan.world_size:
        return None
    sizes = (measured.context_gib[rank.rank] for rank in plan.ranks if rank.device == device)
    return min(sizes, default=0.0) or None


def _of_whole_rows(one: Observation, exp: Experiment) -> float:
    """TFLOP/s by positions: rows of the same data are as full as they were."""
    return one.tflops / (one.fill if one.data == exp.data.name else 1.0)


def _distance(exp: Experiment, plan: Plan, name: str) -> Callable[[Observation], tuple[float, ...]]:
    """How unlike a plan an observation is, the weightiest first."""
    tokens = plan.batch.seq_len * max(r.micro_batch for r in plan.ranks if r.device == name)
    slots = max(host.slots for host in plan.hosts if host.device == name)
    attention, size = plan.attention_on(name), math.log2(plan.num_parameters)

    def apart(one: Observation) -> tuple[float, ...]:
        return (
            float(one.slots != slots),
            # What stage 3 adds to each module counts as computing: it cannot be told apart.
            float((one.stage == 3) != (exp.zero.stage == 3)),
            float(one.task != exp.task.kind),
            float(one.model != exp.model.kind),
            float(one.attention != attention),
            round(abs(one.size - size)),
            round(abs(math.log2(one.tokens / tokens))),
        )

    return apart


def _link(exp: Experiment, plan: Plan, known: Known, exposed: float) -> float:
    """GB/s of the collectives of all ranks, where computing does not hide so much of them."""
    low, high = SLOWEST_LINK, FASTEST_LINK
    for _ in range(60):
        middle = math.sqrt(low * high)
        found = step_time(exp, plan, known=replace(known, link_gb_per_s=middle))
        low, high = (middle, high) if found.exposed_s > exposed else (low, middle)
    return high


def _shares(plan: Plan, forward_s: Sequence[float]) -> dict[str, float]:
    """Of the computing time of the slowest rank, that of each type of device."""
    if not forward_s:
        return {plan.ranks[0].device: 1.0}
    longest = max(forward_s)
    found: dict[str, float] = {}
    for rank, seconds in zip(plan.ranks, forward_s, strict=True):
        found[rank.device] = max(found.get(rank.device, 0.0), seconds / longest)
    return found


def _rate(exp: Experiment, plan: Plan, name: str, seconds: float) -> float:
    """TFLOP/s at which a type of device computes its part of a step in so many seconds."""
    return computing_parts(exp, plan)[name] / 1e12 / seconds
