"""Finished runs teach the FLOP/s that a type of device reaches.

Pure. ``llmx.lifecycle.learned`` reads and writes the file. What the model that predicts
(``llmx.plan.step_time``) does not take for communication or the update is computing, so that the
plan of the same run is then its measured time; another one differs by what the model does not know.

``python -m pytest tests/unit/test_plan_learned.py``
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llmx.config.schema import Experiment
from llmx.plan.step_time import LearnedSpeeds, computing_parts, flops_by_device, step_time
from llmx.plan.types import Plan
from llmx.text import plural

MOST_USED = 5
"""The newest of those that are nearest."""
ROUNDS = 8
"""Corrections of what communication that computing does not hide takes."""
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
    context_gib: float | None = None
    """The least of its devices: other processes on a device would only add to it. None on CPUs."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Observation:
        """The inverse of ``to_dict``, also after JSON, without what it does not know; ValueError
        for anything else."""
        names = cls.__dataclass_fields__
        try:
            observation = cls(**{name: values[name] for name in names if name in values})
        except TypeError as error:
            raise ValueError(str(error)) from error
        numbers = [observation.size, observation.tflops, observation.fill, observation.context_gib]
        numbers += [observation.slots, observation.tokens]
        for number in numbers:
            is_number = isinstance(number, (int, float)) and math.isfinite(number) and number > 0
            if number is not None and not is_number:
                raise ValueError(f"not positive: {number}")
        return observation


def observe(exp: Experiment, plan: Plan, measured: Measured) -> list[Observation]:
    """Take a finished run apart: one observation for each type of device; none where the size of
    its model is not known, or where it cannot be told which of unequal devices took how long."""
    if plan.network is None or not measured.step_s > 0 or not measured.tokens > 0:
        return []
    shares = _shares(exp, plan, measured.forward_s)
    if not shares:
        return []
    fill = min(1.0, measured.tokens / plan.batch.tokens_per_step)
    work = computing_parts(exp, plan)
    # What the model says of the rest of a step is no computing.
    computing, learned = measured.step_s, LearnedSpeeds()
    for _ in range(ROUNDS):
        learned = LearnedSpeeds(
            tflops={name: work[name] / 1e12 / (computing * part) for name, part in shares.items()},
            with_unpacking=frozenset(shares) if (exp.adapter.quantize != "none") else frozenset(),
            at_stage_3=frozenset(shares) if exp.zero.stage == 3 else frozenset(),
        )
        predicted = step_time(exp, plan, learned=learned)
        other_s = predicted.exposed_s + predicted.update_s + predicted.host_s
        computing = max(LEAST * measured.step_s, measured.step_s - other_s)
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
            quantized=(exp.adapter.quantize != "none"),
            context_gib=_least_context(plan, measured, name),
        )
        for name in plan.devices
    ]


def known_of(
    observations: Sequence[Observation], exp: Experiment, plan: Plan, *, path: str = ""
) -> LearnedSpeeds:
    """The speeds to predict a plan with: of each type of device by the newest of the runs that are
    most like it. ``observations``: the oldest first; ``path``: their file."""
    nearest = {
        name: runs for name in plan.devices if (runs := _nearest(observations, exp, plan, name))
    }
    if not nearest:
        return LearnedSpeeds()
    count = sum(map(len, nearest.values()))
    return LearnedSpeeds(
        # By positions: rows of the same data are as full as they were.
        tflops={
            name: statistics.median(
                run.tflops / (run.fill if run.data == exp.data.name else 1.0) for run in runs
            )
            for name, runs in nearest.items()
        },
        with_unpacking=frozenset(name for name, runs in nearest.items() if runs[0].quantized),
        at_stage_3=frozenset(name for name, runs in nearest.items() if runs[0].stage == 3),
        tokens={name: min(run.tokens for run in runs) for name, runs in nearest.items()},
        source=f"learned from {plural(count, 'run')}{f' in {path}' if path else ''}",
    )


def _nearest(
    observations: Sequence[Observation], exp: Experiment, plan: Plan, device: str
) -> list[Observation]:
    """The newest of the runs on a type of device that are most like a plan."""
    if not plan.num_parameters:
        return []
    runs = [run for run in observations if (run.device, run.precision) == (device, plan.precision)]
    distances = [_distance(run, exp, plan) for run in runs]
    least = min(distances, default=())
    alike = [run for run, far in zip(runs, distances, strict=True) if far == least]
    return alike[-MOST_USED:]


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
        float(run.quantized != (exp.adapter.quantize != "none")),
        float(run.task != exp.task.kind),
        float(run.model != exp.model.kind),
        float(run.attention != plan.attention_on(run.device)),
        round(abs(run.size - math.log2(plan.num_parameters))),
        round(abs(math.log2(run.tokens / tokens))),
    )


def _shares(exp: Experiment, plan: Plan, forward_s: Sequence[float]) -> dict[str, float]:
    """The computing time of each type of device, as a part of that of the slowest rank; empty where
    it cannot be told."""
    if len(forward_s) != plan.world_size or min(forward_s) <= 0:
        return dict.fromkeys(plan.devices, 1.0) if len(plan.devices) == 1 else {}
    # Of all that is computed, a rank that computes again passes forward a smaller part.
    flops = flops_by_device(exp, plan)
    seconds: dict[str, float] = {}
    for rank, forward in zip(plan.ranks, forward_s, strict=True):
        rank_s = forward * flops[rank.device].run / flops[rank.device].forward
        seconds[rank.device] = max(seconds.get(rank.device, 0.0), rank_s)
    longest = max(seconds.values())
    return {name: rank_s / longest for name, rank_s in seconds.items()}
