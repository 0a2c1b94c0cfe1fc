"""Other ways to run an experiment, each planned: the advice where a plan does not fit, and
``auto``. Pure.

ZeRO options x activation checkpointing x micro batches. Each of them is a plan of its own
(``make_plan``: its batch, its sums, its buckets, its share of the adapter), with the memory of the
traced micro step. They stand in the order of their predicted time, which
``llmx.plan.step_time`` alone knows.

``python -m llmx plan zero=auto model=llama3_8b hardware=a100x8``
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from llmx import text as human
from llmx.config.fields import AUTO
from llmx.config.schema import Experiment, ZeroConfig
from llmx.errors import ConfigError
from llmx.plan.balance import sample_fs
from llmx.plan.by_device import CHECKPOINTING, checkpointing_by_device, in_words
from llmx.plan.knowledge import Knowledge
from llmx.plan.make import make_plan
from llmx.plan.step_time import tokens_per_s
from llmx.plan.types import ChosenPlan, MemoryPlan, Plan

MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Columns of the table, beside the plan's own."""
MAX_MICRO_BATCH = 512
"""The largest micro batch where the global batch is not given."""
AS_FAST, SURELY_FASTER = 1.01, 1.05
"""Predicted times that differ by less are the same. Of two micro batches the one is taken that
needs less memory, of two ZeRO options or settings of checkpointing the simpler one: what ZeRO-3 and
copies to the host cost beside their traffic is in no prediction."""

OPTIONS: dict[str, dict[str, object]] = {
    "stage0": {"stage": 0},
    "stage1": {"stage": 1},
    "stage2": {"stage": 2},
    "stage2_offload": {"stage": 2, "offload_optimizer": "cpu"},
    "stage3": {"stage": 3},
    "stage3_offload": {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
}
"""Options of the group ``zero`` that are compared, with what each sets."""
ZERO, MICRO_BATCH = "zero", "batch.micro_batch"
CHECKPOINTING_KEY = "model.activation_checkpointing"
PLAIN = {ZERO: "stage2", CHECKPOINTING_KEY: "none", MICRO_BATCH: "1"}
"""The values that ``auto`` stands for where nothing can be compared."""

AUTO_KEYS = tuple(PLAIN)

LARGER_DEVICES = "Take a smaller model, or devices with more memory."
"""The advice where nothing that was planned fits."""

Allows = Callable[[Experiment], str]
"""Why rules refuse an experiment; empty where they do not."""


@dataclass(frozen=True)
class Choice:
    """One way to run the experiment, planned."""

    zero: str
    """The option of the group."""
    experiment: Experiment
    plan: Plan
    cost: float
    """Predicted time of a token, against that of the fastest of all."""
    chosen: bool = False
    """Whether it is the plan."""

    @property
    def checkpointing(self) -> str:
        """Activation checkpointing: one word, where all types of devices have the same."""
        return in_words(checkpointing_by_device(self.experiment))

    @property
    def micro_batch(self) -> int:
        """The most samples that a rank takes at once."""
        return self.experiment.batch.micro_batch

    @property
    def fits(self) -> bool:
        """Whether it fits on every type of device, and in the RAM of every host."""
        return all(part.fits for part in self.plan.memory) and not lacks_ram(self.plan)

    @property
    def most_gib(self) -> float:
        return max(part.total_gib for part in self.plan.memory)

    @property
    def fullest(self) -> MemoryPlan:
        """The memory of the type of device that has least left."""
        return max(self.plan.memory, key=lambda part: part.total_gib / (part.capacity_gib or 1.0))

    @property
    def complexity(self) -> tuple[int, int]:
        """The place among the simplest, by ZeRO option, then by activation checkpointing."""
        names = [*OPTIONS]
        stage = names.index(self.zero) if self.zero in names else len(names)
        return stage, CHECKPOINTING.index(self.experiment.model.activation_checkpointing)

    @property
    def words(self) -> dict[str, str]:
        """The values as overrides, by what ``auto`` may stand for."""
        checkpointing = self.experiment.model.activation_checkpointing
        return {
            ZERO: f"{ZERO}={self.zero}",
            CHECKPOINTING_KEY: f"{CHECKPOINTING_KEY}={checkpointing}",
            MICRO_BATCH: f"{MICRO_BATCH}={self.micro_batch}",
        }

    def overrides(self, exp: Experiment) -> list[str]:
        """The words that make this choice of the experiment."""
        overrides = []
        if self.zero != option_of(exp.zero):
            overrides.append(f"{ZERO}={self.zero}")
            if self.experiment.zero.hpz_partition_size < exp.zero.hpz_partition_size:
                # Typed on its own, it would stay.
                overrides.append("zero.hpz_partition_size=1")
        if self.experiment.model.activation_checkpointing != exp.model.activation_checkpointing:
            overrides.append(self.words[CHECKPOINTING_KEY])
        if self.micro_batch != exp.batch.micro_batch:
            overrides.append(f"{MICRO_BATCH}={self.micro_batch}")
        return overrides


def option_of(zero: ZeroConfig) -> str:
    """The option of the group ``zero`` that it is, or the nearest name."""
    for name, values in OPTIONS.items():
        if zero == _plain_zero(zero, values) and zero.hpz_partition_size == 1:
            return name
    return f"stage{zero.stage}*"


def lacks_ram(plan: Plan) -> str:
    """The first host with less RAM than an offload needs, as text; empty where none is known."""
    for host in plan.storage.hosts if plan.storage else ():
        needed, has = host.ram_bytes, host.ram_has_bytes
        if host.offload_bytes and needed and has and needed > has:
            return f"{human.size(needed)} of a host's RAM, which has {human.size(has)}"
    return ""


def planned(exp: Experiment, name: str, knowledge: Knowledge) -> Choice | None:
    """A variant of the experiment that ``knowledge`` is of; None where it cannot be planned, or was
    not traced. ``cost`` is seconds a token."""
    try:
        plan = make_plan(exp, knowledge)
    except ConfigError:  # its batch cannot be cut so
        return None
    if not plan.memory:
        return None
    return Choice(name, exp, plan, 1 / tokens_per_s(exp, plan))


def choices(exp: Experiment, knowledge: Knowledge, *, allows: Allows) -> list[Choice]:
    """ZeRO stages and offloads x activation checkpointing x micro batches, each planned; the
    fastest first. Without those that were not traced or that the rules refuse, and micro batches
    that no rank can fill."""
    option = option_of(exp.zero)
    zeros = {name: _plain_zero(exp.zero, values) for name, values in OPTIONS.items()}
    zeros[option] = exp.zero
    sizes = sorted({exp.batch.micro_batch, *MICRO_BATCHES})
    allowed, refused = [], _by_setting(allows)
    for choice in _all(exp, knowledge, zeros, CHECKPOINTING, sizes):
        chosen = choice.zero == option and choice.experiment == exp
        filled = max(choice.plan.batch.micro_batches) >= choice.micro_batch
        if chosen or (filled and not refused(choice)):
            allowed.append(replace(choice, chosen=chosen))
    return _in_order(allowed)


def compared(exp: Experiment, plan: Plan, knowledge: Knowledge, *, allows: Allows) -> list[Choice]:
    """The ``choices`` of a table beside the plan; empty where no device has a known memory."""
    if not any(part.capacity_gib for part in plan.memory):
        return []
    return choices(exp, knowledge, allows=allows)


def _all(
    exp: Experiment,
    knowledge: Knowledge,
    zeros: Mapping[str, ZeroConfig],
    checkpointing: Sequence[str],
    sizes: Sequence[int],
    *,
    all_sizes: bool = True,
) -> Iterator[Choice]:
    """Each variant that can be planned. A type of device with activation checkpointing of its own
    keeps it. ``all_sizes``: also micro batches that are larger than one that does not fit."""
    for (name, zero), setting in itertools.product(zeros.items(), checkpointing):
        for size in sizes:
            variant = with_values(exp, zero=zero, checkpointing=setting, size=size)
            choice = planned(variant, name, knowledge)
            if choice is None:
                continue
            yield choice
            if not all_sizes and not choice.fits:
                break


def _in_order(candidates: Sequence[Choice]) -> list[Choice]:
    least = min((choice.cost for choice in candidates), default=1.0)
    relative = [replace(choice, cost=choice.cost / least) for choice in candidates]
    return sorted(relative, key=lambda choice: (choice.cost, choice.most_gib))


def with_values(
    exp: Experiment, *, zero: ZeroConfig | None = None, checkpointing: str = "", size: int = 0
) -> Experiment:
    """The experiment with those values that are given."""
    model, batch = exp.model, exp.batch
    return replace(
        exp,
        zero=zero or exp.zero,
        model=replace(model, activation_checkpointing=checkpointing) if checkpointing else model,
        batch=replace(batch, micro_batch=size) if size else batch,
    )


def _plain_zero(zero: ZeroConfig, values: Mapping[str, object]) -> ZeroConfig:
    plain = replace(
        zero, offload_optimizer="none", offload_param="none", hpz_partition_size=1, nvme_path=None
    )
    return replace(plain, **values)  # type: ignore[arg-type]


# --- A plan that does not fit --------------------------------------------------------------------


def advice(exp: Experiment, plan: Plan, knowledge: Knowledge, *, allows: Allows) -> str:
    """Say what to change where the plan does not fit: of each ZeRO option the fastest that fits
    with at most the micro batch that was asked for, each planned; with the overrides to type. Empty
    where it fits."""
    if all(part.fits for part in plan.memory):
        return ""
    candidates = choices(exp, knowledge, allows=allows)
    if not candidates:  # not even the plan itself can be planned again
        return LARGER_DEVICES
    if text := _that_fit(exp, candidates):
        return text
    least = min(candidates, key=lambda choice: choice.most_gib)
    offload = ", with offload" if any("offload" in choice.zero for choice in candidates) else ""
    return (
        f"No ZeRO stage{offload}, activation checkpointing and micro batch fits. "
        f"{_next_steps(least, knowledge, allows)}"
    )


def _that_fit(exp: Experiment, candidates: Sequence[Choice]) -> str:
    """Name the fastest choice that fits of each ZeRO option, at most three; empty without one."""
    cost_of_plan = next((choice.cost for choice in candidates if choice.chosen), None)
    fastest: dict[str, Choice] = {}
    for choice in candidates:
        if choice.fits and choice.micro_batch <= exp.batch.micro_batch and not choice.chosen:
            fastest.setdefault(choice.zero, choice)
    texts = []
    for choice in list(fastest.values())[:3]:
        time = f", about {choice.cost / cost_of_plan - 1:+.0%} time" if cost_of_plan else ""
        words = " ".join(choice.overrides(exp))
        texts.append(f"{words} ({human.gib(choice.most_gib)} GiB{time})")
    return f"These fit by the plan, the fastest first: {'; '.join(texts)}." if texts else ""


def _next_steps(least: Choice, knowledge: Knowledge, allows: Allows) -> str:
    """Describe the memory of the choice that needs least, and say which settings, hardware or
    training would make it fit, each planned."""
    exp, part, ram = least.experiment, least.fullest, lacks_ram(least.plan)
    text = (
        f"The least memory has {' '.join(least.words.values())}: {human.gib(part.total_gib)} GiB "
        f"on {part.device}, which has {human.gib(part.capacity_gib)}{f'; and {ram}' if ram else ''}"
    )
    if fitting := _that_fit(exp, choices(exp, knowledge, allows=allows)):
        return f"{text}. {fitting}"
    larger = _on_more_hosts(exp, least.plan, knowledge, allows)
    hardware = LARGER_DEVICES
    if larger is not None:
        hardware = (
            f"These fit by the plan: {len(larger.plan.hosts)} such hosts instead of "
            f"{len(least.plan.hosts)} (zero={larger.zero}); or devices with more memory."
        )
    lora = ""
    if exp.adapter.kind == "none" and not exp.model.freeze and exp.model.init == "pretrained":
        lora = " adapter=lora trains little, and takes less (it was not planned)."
    return f"{text}. {hardware}{lora}"


def _on_more_hosts(
    exp: Experiment, plan: Plan, knowledge: Knowledge, allows: Allows
) -> Choice | None:
    """The choice on the fewest of the same hosts that it fits on, with a micro batch of 1."""
    zeros = {name: _plain_zero(exp.zero, OPTIONS[name]) for name in ("stage3", "stage3_offload")}
    if not plan.on_gpus:
        del zeros["stage3_offload"]
    zeros = {name: zero for name, zero in zeros.items() if not allows(with_values(exp, zero=zero))}
    batch = replace(
        exp.batch, global_batch=None, tokens_per_step=None, accumulation=None, micro_batch=1
    )
    for times in (2, 4, 8, 16):
        hosts = list(exp.hardware.hosts)
        for number in range(1, times):
            for host in exp.hardware.hosts:
                name = f"{host.name or host.address}-{number + 1}"
                hosts.append(replace(host, name=name, address=None))
        larger = replace(exp, hardware=replace(exp.hardware, hosts=hosts), batch=batch)
        for name, zero in (zeros or {option_of(exp.zero): exp.zero}).items():
            choice = planned(with_values(larger, zero=zero), name, knowledge)
            if choice is not None and choice.fits:
                return choice
    return None


# --- auto ----------------------------------------------------------------------------------------


def auto_keys(exp: Experiment) -> tuple[str, ...]:
    """The keys that the config leaves to the plan."""
    is_auto = {
        ZERO: exp.zero.stage == AUTO,
        CHECKPOINTING_KEY: exp.model.activation_checkpointing == "auto",
        MICRO_BATCH: exp.batch.micro_batch == AUTO,
    }
    return tuple(key for key in AUTO_KEYS if is_auto[key])


def size_of_a_step(exp: Experiment) -> None:
    """ConfigError where the samples of a step, and so the training, would follow from the memory of
    a device."""
    batch = exp.batch
    if batch.micro_batch != AUTO or batch.global_batch is not None or batch.tokens_per_step:
        return
    beside = (
        f" (batch.accumulation={batch.accumulation} alone follows it)" if batch.accumulation else ""
    )
    raise ConfigError(
        "batch.micro_batch=auto: the size of a step is not set, so the training itself would "
        f"depend on the memory of the devices{beside}. Set batch.global_batch=64 (samples), or "
        "batch.tokens_per_step=5e5; the accumulation follows."
    )


def micro_batches(exp: Experiment, plan: Plan) -> list[int]:
    """Powers of two up to what a rank has of the global batch, and that."""
    batch, largest = exp.batch, MAX_MICRO_BATCH
    if batch.global_batch is not None or batch.tokens_per_step is not None:
        global_batch, speeds = plan.batch.global_batch, plan.balance.speeds if plan.balance else ()
        # The strongest rank's part, where the faster ones take more.
        rates = [1 / sample_fs(speed, plan.batch.seq_len) for speed in speeds] or [1.0]
        part = max(rates) / sum(rates) if speeds else 1 / plan.world_size
        largest = max(1, math.ceil(round(global_batch * part, 6)))
    powers = {2**power for power in range(20) if 2**power <= largest}
    return sorted(powers | {largest, min(batch.micro_batch, largest)})


def plain_variants(exp: Experiment) -> Iterator[Experiment]:
    """The experiment with the documented defaults in the place of ``auto``: of ``zero`` each
    option, that which is the default first, since rules may refuse it."""
    keys = auto_keys(exp)
    checkpointing = PLAIN[CHECKPOINTING_KEY] if CHECKPOINTING_KEY in keys else ""
    size = int(PLAIN[MICRO_BATCH]) if MICRO_BATCH in keys else 0
    if ZERO not in keys:
        yield with_values(exp, checkpointing=checkpointing, size=size)
        return
    zeros = zero_options(exp.zero)
    for name in sorted(zeros, key=lambda name: name != PLAIN[ZERO]):
        yield with_values(exp, zero=zeros[name], checkpointing=checkpointing, size=size)


def zero_options(zero: ZeroConfig) -> dict[str, ZeroConfig]:
    """The options that ``zero=auto`` stands for; a value that is set beside it stays."""
    offloads = {
        key: value
        for key in ("offload_optimizer", "offload_param")
        if (value := getattr(zero, key)) != "none"
    }
    options = {}
    for name, values in OPTIONS.items():
        stage = values["stage"]
        cannot_offload = stage == 0 or ("offload_param" in offloads and stage != 3)
        if not (offloads and (cannot_offload or "offload" in name)):
            settings = {"offload_optimizer": "none", "offload_param": "none", **values, **offloads}
            options[name] = replace(zero, **settings)
    return options


def choose(
    exp: Experiment,
    knowledge: Knowledge,
    *,
    allows: Allows,
    without: Sequence[Experiment] = (),
) -> tuple[Experiment, ChosenPlan]:
    """The experiment with plain values in the place of ``auto``, and why: the fastest that fits;
    where nothing does, the one that needs least memory (``ChosenPlan.problem``).

    Args:
        allows: why the rules refuse a variant.
        without: variants that do not fit after all.
    """
    keys = auto_keys(exp)
    plain = first_allowed(exp, allows)
    plan = make_plan(plain, knowledge)
    options = zero_options(exp.zero) if ZERO in keys else {option_of(exp.zero): exp.zero}
    if unknown := _unknown(plan, knowledge):
        name = next(name for name, zero in options.items() if zero == plain.zero)
        why = f"nothing could be compared: {unknown}. These are the defaults"
        return plain, ChosenPlan(keys, _words(Choice(name, plain, plan, 1.0), keys), why)
    zeros = _sensible(options, plan) if ZERO in keys else options
    if all(allows(with_values(plain, zero=zero)) for zero in zeros.values()):
        zeros = options
    checkpointing = [exp.model.activation_checkpointing]
    if CHECKPOINTING_KEY in keys:
        checkpointing = [*CHECKPOINTING]
    sizes = micro_batches(plain, plan) if MICRO_BATCH in keys else [exp.batch.micro_batch]
    different: dict[object, Choice] = {}
    for choice in _all(exp, knowledge, zeros, checkpointing, sizes, all_sizes=False):
        if choice.experiment not in without:
            different.setdefault((choice.zero, choice.checkpointing, choice.plan.batch), choice)
    refused = _by_setting(allows)
    ordered = _in_order([choice for choice in different.values() if not refused(choice)])
    if different and not ordered:
        raise ConfigError(refused(next(iter(different.values()))))
    if not ordered:
        raise ConfigError(f"{_typed(keys)}: no combination can be planned. Set values.")
    fitting = [choice for choice in ordered if choice.fits]
    if not fitting:
        least = min(ordered, key=lambda choice: choice.most_gib)
        problem = (
            f"{_typed(keys)}: nothing fits, of {len(ordered)} that were planned. "
            f"{_next_steps(least, knowledge, allows)}"
        )
        words = _words(least, keys)
        return least.experiment, ChosenPlan(keys, words, "needs the least memory", problem)
    if ZERO in keys:
        # A sum in 16 bits over many micro steps is another training, which nobody has asked for.
        fitting = [
            choice
            for choice in fitting
            if choice.plan.batch.accumulation == 1 or choice.plan.grad_accum_dtype == "fp32"
        ] or fitting
    best = _best(fitting)
    why = _why(best, fitting, len(ordered))
    if source := knowledge.learned(best.experiment, best.plan).source:
        why = f"{why}; speeds {source}"
    return best.experiment, ChosenPlan(keys, _words(best, keys), why)


def _best(fitting: Sequence[Choice]) -> Choice:
    """The plainest of the fastest choices. ``fitting``: in the order of their times."""
    fast = [choice for choice in fitting if choice.cost <= SURELY_FASTER * fitting[0].cost]
    simplest = min(choice.complexity for choice in fast)
    as_simple = [choice for choice in fast if choice.complexity == simplest]
    alike = [choice for choice in as_simple if choice.cost <= AS_FAST * as_simple[0].cost]
    return min(alike, key=lambda choice: (choice.most_gib, choice.cost))


def first_allowed(exp: Experiment, allows: Allows) -> Experiment:
    """The first plain variant that the rules allow; ConfigError with what is wrong with the first
    where they allow none."""
    problems = []
    for variant in plain_variants(exp):
        problem = allows(variant)
        if not problem:
            return variant
        problems.append(problem)
    raise ConfigError(problems[0])


def _by_setting(allows: Allows) -> Callable[[Choice], str]:
    """Ask once for each ZeRO option and activation checkpointing: the rules look at no more."""
    refusals: dict[tuple[str, str], str] = {}

    def refused(choice: Choice) -> str:
        key = (choice.zero, choice.checkpointing)
        if key not in refusals:
            refusals[key] = allows(choice.experiment)
        return refusals[key]

    return refused


def _why(best: Choice, fitting: Sequence[Choice], num_planned: int) -> str:
    """The reason of the choice, in one sentence."""
    part = best.fullest
    rank = "the fastest"
    if best.cost > AS_FAST * fitting[0].cost:
        rank = f"within {SURELY_FASTER - 1:.0%} of the fastest, and simpler,"
    return (
        f"{rank} by the plan of {len(fitting)} that fit, of {num_planned}: "
        f"{human.gib(part.total_gib)} of {human.gib(part.capacity_gib)} GiB on {part.device}"
    )


def _words(choice: Choice, keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(choice.words[key] for key in keys)


def _typed(keys: Sequence[str]) -> str:
    return " ".join(f"{key}=auto" for key in keys)


def _unknown(plan: Plan, knowledge: Knowledge) -> str:
    """Why nothing can be compared; empty where it can."""
    if not plan.memory:
        problem = knowledge.traces.problem
        return f"the memory of a step is not known{f' ({problem})' if problem else ''}"
    for part in plan.memory:
        if not part.capacity_gib:
            return (
                f"the memory of {part.device} is not known (hardware.devices.{part.device}."
                "memory_gib)"
            )
    return ""


def _sensible(zeros: Mapping[str, ZeroConfig], plan: Plan) -> dict[str, ZeroConfig]:
    """Leave out an offload from CPU ranks, which gives them nothing, and stage 0 in 16 bits, which
    sums gradients in 16 bits: another training. It stays where there is nothing else."""
    sensible = {
        name: zero for name, zero in zeros.items() if plan.on_gpus or not name.endswith("_offload")
    }
    if plan.precision != "fp32":
        # Last: taken where rules refuse the others.
        sensible = {name: zero for name, zero in sensible.items() if name != "stage0"}
    return sensible or dict(zeros)
