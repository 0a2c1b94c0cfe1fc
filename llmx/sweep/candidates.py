"""What ``python -m llmx tune`` chooses from: the axes that can matter on this hardware, and the
plan of each combination of their values. Nothing is started.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from llmx.compose.complete import Composed, plan_experiment
from llmx.config import Experiment, experiment_from_dict, to_dict
from llmx.errors import ConfigError, LlmxError
from llmx.plan.by_device import checkpointing_by_device
from llmx.plan.choices import micro_batches
from llmx.plan.ds_config import bucket_sizes
from llmx.plan.geometry import model_geometry
from llmx.plan.step_time import tokens_per_s
from llmx.plan.types import MemoryPlan
from llmx.run.provenance.differences import flattened
from llmx.sweep.prune import impossible, key_of
from llmx.sweep.search import MICRO_BATCH, Axis, Candidate

ZERO, CHECKPOINTING = "zero", "model.activation_checkpointing"
BUCKETS = "zero.reduce_bucket_size"
USUAL = (ZERO, MICRO_BATCH, CHECKPOINTING, BUCKETS)
"""The keys of the axes that there are unless something else is typed."""
MAX_CANDIDATES = 2000
DIRECT = (
    MICRO_BATCH, CHECKPOINTING, BUCKETS, "batch.accumulation", "batch.balance",
    "zero.allgather_bucket_size", "zero.prefetch_bucket_size", "zero.param_persistence_threshold",
    "zero.max_live_parameters", "zero.max_reuse_distance", "zero.sub_group_size",
    "zero.overlap_comm", "model.fused_loss", "model.compile", "model.liger_kernel",
)  # fmt: skip
"""Keys that nothing else of a config follows from: set without composing it anew."""
AT_MOST = {"none": 1.0, "selective": 0.97, "full": 0.85}
"""The speed that recomputing activations leaves, at best: a fourth of the work is done again."""
OFFLOAD_AT_MOST = 0.9
"""The same of an offload of the optimizer, or of the parameters."""

Compose = Callable[[Sequence[str]], tuple[Experiment, list[str]]]
"""Overrides -> the completed experiment, and what is wrong with it."""


def default_axes(base: Composed, chosen: Sequence[str]) -> list[Axis]:
    """The axes that can matter for this config on this hardware, without ``chosen`` keys (those
    that the user has set or varies)."""
    exp, plan = base.experiment, base.plan
    cuda, world = plan.on_gpus, plan.world_size
    axes = []
    zero = [key for key in chosen if key == ZERO or key in ("zero.stage", "zero.offload_optimizer")]
    if not zero:
        # Stage 0 sums 16 bit gradients in 16 bits: another training.
        stages = ["stage0"] if plan.precision == "fp32" else []
        stages += ["stage1", "stage2", "stage3"] if world > 1 else ["stage1"]
        offloads = ["stage2_offload", "stage3_offload"] if cuda else []
        axes.append(Axis(ZERO, (*stages, *offloads)))
    if MICRO_BATCH not in chosen:
        axes.append(Axis(MICRO_BATCH, tuple(map(str, micro_batches(exp, plan)))))
    if CHECKPOINTING not in chosen:
        axes.append(Axis(CHECKPOINTING, ("none", "selective", "full")))
    if BUCKETS not in chosen and world > 1:
        sizes = bucket_sizes(exp.model, exp.zero, plan.accelerator)["reduce"]
        shape = model_geometry(exp.model)
        trained = plan.num_trained or plan.num_parameters
        values = [str(sizes // 4)] if cuda and shape and trained > sizes // 4 else []
        values += ["null"]
        values += [str(4 * sizes)] if trained > sizes else []
        if len(values) > 1:
            axes.append(Axis(BUCKETS, tuple(values)))
    return axes


def in_order(axis: Axis, compose: Compose) -> Axis:
    """An axis that the user has typed, its values in ascending order where there is one."""
    values = list(dict.fromkeys(axis.values))
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        numbers = []
    if numbers:
        return Axis(axis.key, tuple(v for _, v in sorted(zip(numbers, values, strict=True))))
    if axis.key == CHECKPOINTING and set(values) <= set(AT_MOST):
        return Axis(axis.key, tuple(value for value in AT_MOST if value in values))
    if axis.key == ZERO:
        ranked = []
        for value in values:
            zero = compose([f"{ZERO}={value}"])[0].zero
            offloads = (zero.offload_optimizer != "none") + (zero.offload_param != "none")
            ranked.append(((offloads, zero.stage), value))
        return Axis(axis.key, tuple(value for _, value in sorted(ranked, key=lambda r: r[0])))
    return Axis(axis.key, tuple(values), ordered=False)


def plan_candidates(axes: Sequence[Axis], compose: Compose, *, ram_gib: float) -> list[Candidate]:
    """Plan every combination of the axes' values.

    ``ram_gib``: of this machine; what CPU ranks have, where the hardware does not say.

    Raises:
        ConfigError: there are too many, or none has a config that is allowed.
    """
    count = 1
    for axis in axes:
        count *= len(axis.values)
    if count > MAX_CANDIDATES:
        sizes = ", ".join(f"{axis.key}: {len(axis.values)}" for axis in axes)
        raise ConfigError(
            f"tune: {count} candidates ({sizes}); at most {MAX_CANDIDATES} are planned. Give fewer "
            "values, or fix a key: batch.micro_batch=8."
        )
    composed = [number for number, axis in enumerate(axes) if axis.key not in DIRECT]
    bases: dict[tuple[int, ...], tuple[Experiment, list[str]] | LlmxError] = {}
    values: dict[tuple[str, str], Any] = {}
    alike: dict[str, list[int]] = {}
    candidates: list[Candidate] = []
    for place in itertools.product(*(range(len(axis.values)) for axis in axes)):
        words = [f"{axis.key}={axis.values[at]}" for axis, at in zip(axes, place, strict=True)]
        chosen = tuple(place[number] for number in composed)
        if chosen not in bases:
            try:
                bases[chosen] = compose([words[number] for number in composed])
            except LlmxError as error:
                bases[chosen] = error
        base = bases[chosen]
        try:
            if isinstance(base, LlmxError):
                raise base
            exp, problems = base
            for number, axis in enumerate(axes):
                if number not in composed:
                    exp = _with(exp, axis.key, axis.values[place[number]], values)
            # Values by themselves, with each base; what rules of several keys are left refuses
            # the trial.
            varied = sum(at > 0 for number, at in enumerate(place) if number not in composed)
            planned = plan_experiment(exp, problems, is_checked=varied > 1)
        except LlmxError as error:
            cause = f"{error}".splitlines()[0]
            candidates.append(Candidate(place, tuple(words), ruled_out=f"refused: {cause}"))
            continue
        alike.setdefault(_same_key(planned), []).append(len(candidates))
        candidates.append(_candidate(place, words, planned, ram_gib=ram_gib))
    for numbers in alike.values():
        fastest = max(numbers, key=lambda number: (candidates[number].speed, -number))
        place = candidates[fastest].place
        for number in numbers:
            if number != fastest:
                candidates[number] = dataclasses.replace(candidates[number], same_as=place)
    if all(candidate.ruled_out for candidate in candidates):
        first = candidates[0]
        raise ConfigError(f"tune: no candidate can run. The first: {first.text}: {first.ruled_out}")
    return candidates


def given_place(axes: Sequence[Axis], base: Composed) -> tuple[int, ...] | None:
    """The place of the config as it was given, by the values of its keys; None where an axis does
    not have it."""
    values = flattened(to_dict(base.experiment))
    zero = base.experiment.zero
    place = []
    for axis in axes:
        words = [str(values.get(axis.key)).lower()]
        if axis.key == ZERO:
            offload = "_offload" if zero.offload_optimizer != "none" else ""
            words = [f"stage{zero.stage}{offload}"]
        elif words == ["none"] and axis.key != CHECKPOINTING:
            words = ["null"]
        if words[0] not in axis.values:
            return None
        place.append(axis.values.index(words[0]))
    return tuple(place)


def _with(exp: Experiment, key: str, word: str, typed: dict[tuple[str, str], Any]) -> Experiment:
    """Set one key, as Hydra and the schema read its word."""
    section, name = key.split(".")
    if (key, word) not in typed:
        import yaml

        values = to_dict(exp)
        values[section][name] = yaml.safe_load(word)
        typed[key, word] = getattr(getattr(experiment_from_dict(values), section), name)
    part = dataclasses.replace(getattr(exp, section), **{name: typed[key, word]})
    return dataclasses.replace(exp, **{section: part})


def _same_key(planned: Composed) -> str:
    """A key that two candidates share if they run alike: a micro batch that no rank can fill,
    buckets that nothing is put into."""
    exp, plan = planned.experiment, planned.plan
    batch = dataclasses.replace(exp.batch, micro_batch=max(plan.batch.micro_batches))
    zero = exp.zero
    if zero.stage == 0 or plan.world_size == 1:  # nothing is put into them
        zero = dataclasses.replace(zero, reduce_bucket_size=None, allgather_bucket_size=None)
    shares = f"{plan.batch.micro_batches} {plan.batch.accumulation} {plan.batch.sizes}"
    return f"{key_of(dataclasses.replace(exp, batch=batch, zero=zero))} {shares}"


def _candidate(
    place: tuple[int, ...], words: Sequence[str], planned: Composed, *, ram_gib: float
) -> Candidate:
    exp, plan = planned.experiment, planned.plan
    memory, capacity = _fullest(planned, ram_gib)
    bound = max(AT_MOST[how] for how in checkpointing_by_device(exp).values())
    bound *= OFFLOAD_AT_MOST if exp.zero.offload_optimizer != "none" else 1.0
    bound *= OFFLOAD_AT_MOST if exp.zero.offload_param != "none" else 1.0
    return Candidate(
        place,
        tuple(words),
        speed=tokens_per_s(exp, plan),
        memory_gib=memory,
        capacity_gib=capacity,
        at_most=bound,
        ruled_out=impossible(exp, plan),
    )


def _fullest(planned: Composed, ram_gib: float) -> tuple[float, float]:
    """Predicted and present memory of the rank that has least left; 0: not known."""
    ranks = []
    for part in planned.plan.memory:
        capacity = part.capacity_gib or _ram_of_a_rank(planned, part, ram_gib)
        share = part.total_gib / capacity if capacity else 0.0
        ranks.append((share, part.total_gib, capacity))
    return max(ranks)[1:] if ranks else (0.0, 0.0)


def _ram_of_a_rank(planned: Composed, part: MemoryPlan, ram_gib: float) -> float:
    exp, plan = planned.experiment, planned.plan
    if plan.on_gpus:
        return 0.0
    rams = []
    for config, host in zip(exp.hardware.hosts, plan.hosts, strict=True):
        if host.device == part.device:
            rams.append((config.memory_gib or (ram_gib if host.is_local else 0.0)) / host.slots)
    return min(rams, default=0.0)
