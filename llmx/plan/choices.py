"""Other ways to run an experiment, each planned: the advice where a plan does not fit, and
``auto``. Pure.

ZeRO options x activation checkpointing x micro batches. Each of them is a plan of its own
(``make_plan``: its batch, its sums, its buckets, its share of the adapter), with the memory of the
traced micro step where that is known. They stand in the order of their predicted time, which
``llmx.plan.step_time`` alone knows.

``python -m llmx plan zero=auto model=llama3_8b hardware=a100x8``
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from llmx import text as human
from llmx.config.addresses import LOCAL_NAMES
from llmx.config.fields import AUTO
from llmx.config.schema import AdapterConfig, Experiment, ZeroConfig
from llmx.errors import ConfigError
from llmx.plan.balance import sample_fs
from llmx.plan.batch import MAX_GLOBAL_BATCH
from llmx.plan.by_device import (
    CHECKPOINTING,
    HOW,
    Ways,
    checkpointing_by_device,
    checkpointing_on,
    checkpointing_overrides,
    in_words,
    intricacy,
    mixed_ways,
    uniform_ways,
    with_checkpointing,
)
from llmx.plan.make import make_plan
from llmx.plan.memory import memory_of
from llmx.plan.step_time import NOTHING, LearnedSpeeds, tokens_per_s, with_time, with_traced_time
from llmx.plan.storage import ModelSize, with_storage
from llmx.plan.trace import Traces
from llmx.plan.types import ChosenPlan, MemoryPlan, Plan

MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Columns of the table, beside the plan's own."""
MAX_MICRO_BATCH = 512
"""Where the global batch is not given."""
AS_FAST, SURELY_FASTER = 1.01, 1.05
"""Predicted times that differ by less are the same. Of two micro batches the one is taken that
needs less memory, of two ZeRO options or ways of checkpointing the plainer one: what ZeRO-3 and
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
PLAIN = {ZERO: "stage2", HOW: "none", MICRO_BATCH: "1"}
"""The values that ``auto`` stands for where nothing can be compared."""

AUTO_KEYS = tuple(PLAIN)

LARGER_DEVICES = "Take a smaller model, or devices with more memory."
"""Where nothing that was planned fits."""

Allows = Callable[[Experiment], str]
"""Why rules refuse an experiment; empty where they do not."""


KnownFor = Callable[[Experiment, Plan], LearnedSpeeds]
"""Returns the speeds that finished runs have shown for a plan."""


def no_rules(exp: Experiment) -> str:
    """The ``Allows`` that refuses nothing."""
    return ""


def no_runs(exp: Experiment, plan: Plan) -> LearnedSpeeds:
    """The ``KnownFor`` where no run has finished yet."""
    return NOTHING


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
    """It is the plan."""

    @property
    def ways(self) -> Ways:
        """Activation checkpointing by type of device."""
        return checkpointing_by_device(self.experiment)

    @property
    def checkpointing(self) -> str:
        """The same in words: one, where all types have the same."""
        return in_words(self.ways)

    @property
    def micro_batch(self) -> int:
        """The most samples that a rank takes at once."""
        return self.experiment.batch.micro_batch

    @property
    def memory(self) -> Mapping[str, MemoryPlan]:
        """The prediction for each type of device."""
        return {part.device: part for part in self.plan.memory}

    @property
    def fits(self) -> bool:
        """On every type of device, and in the RAM of every host."""
        return all(part.fits for part in self.plan.memory) and not lacks_ram(self.plan)

    @property
    def most_gib(self) -> float:
        return max(part.total_gib for part in self.plan.memory)

    @property
    def fullest(self) -> MemoryPlan:
        """The memory of the type of device that has least left."""
        return max(self.plan.memory, key=lambda part: part.total_gib / (part.capacity_gib or 1.0))

    @property
    def intricacy(self) -> tuple[int, int, int]:
        """The plainest first, by ZeRO option, then by activation checkpointing."""
        names = [*OPTIONS]
        stage = names.index(self.zero) if self.zero in names else len(names)
        return stage, *intricacy(self.ways)

    @property
    def words(self) -> dict[str, str]:
        """Its values as overrides, by what ``auto`` may stand for."""
        model = self.experiment.model
        auto = replace(self.experiment, model=replace(model, activation_checkpointing="auto"))
        plain = with_checkpointing(auto, dict.fromkeys(self.ways, "auto"))
        return {
            ZERO: f"{ZERO}={self.zero}",
            HOW: " ".join(checkpointing_overrides(plain, self.experiment)),
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
        overrides += checkpointing_overrides(exp, self.experiment)
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


def replan(exp: Experiment, plan: Plan) -> Plan:
    """The plan of a variant of the experiment that ``plan`` is of."""
    local = {name for host in plan.hosts if host.is_local for name in (host.name, host.address)}
    names = LOCAL_NAMES | local
    return make_plan(
        exp, local_names=names, beside=plan.beside, logits=plan.logits, drawn=plan.drawn
    )


def traced_memory(exp: Experiment, plan: Plan, traces: Traces) -> tuple[MemoryPlan, ...] | None:
    """By the traces; None where they do not cover the plan."""
    memory = []
    for device in plan.devices:
        checkpointing, size = checkpointing_on(exp, device), plan.micro_batch_on(device)
        trace = traces.get(plan.attention_on(device), checkpointing, size)
        if trace is None:
            return None
        context_gib = traces.context_gib.get(device)
        memory.append(memory_of(exp, plan, trace, device, context_gib=context_gib))
    return tuple(memory)


def planned(
    exp: Experiment, name: str, like: Plan, traces: Traces, *, learned_for: KnownFor = no_runs
) -> Choice | None:
    """A variant of the experiment that ``like`` is of; None where it cannot be planned. ``cost`` is
    seconds a token."""
    try:
        plan = replan(exp, like)
    except ConfigError:  # its batch cannot be cut so
        return None
    if traces.found:
        memory = traced_memory(exp, plan, traces)
        if memory is None:
            return None
        plan = with_storage(replace(plan, memory=memory), exp)
    learned = learned_for(exp, plan)
    if learned.tflops:
        plan = with_time(plan, exp, learned=learned)
    return Choice(name, exp, plan, 1 / tokens_per_s(exp, plan)) if plan.memory else None


def choices(
    exp: Experiment,
    plan: Plan,
    traces: Traces,
    *,
    allows: Allows = no_rules,
    by_device: bool = True,
) -> list[Choice]:
    """ZeRO stages and offloads x activation checkpointing x micro batches, each planned; the
    fastest first; those of them that were traced, where anything was. Without those that the rules
    refuse, and micro batches that no rank can fill. ``by_device``: also with activation
    checkpointing that differs by type of device."""
    option, ways_of_plan = option_of(exp.zero), checkpointing_by_device(exp)
    here = (option, ways_of_plan, exp.batch.micro_batch)
    zeros = {name: _plain_zero(exp.zero, values) for name, values in OPTIONS.items()}
    zeros[option] = exp.zero
    sizes = sorted({exp.batch.micro_batch, *MICRO_BATCHES})
    ways = [*uniform_ways(exp), *(mixed_ways(exp) if by_device else ())]
    if ways_of_plan not in ways:
        ways.append(ways_of_plan)
    allowed, refused = [], _by_way(allows)
    for choice in _all(exp, plan, traces, zeros, ways, sizes):
        chosen = (choice.zero, choice.ways, choice.micro_batch) == here
        filled = max(choice.plan.batch.micro_batches) >= choice.micro_batch
        if chosen or (filled and not refused(choice)):
            allowed.append(replace(choice, chosen=chosen))
    return _in_order(allowed)


def compared(exp: Experiment, plan: Plan, traces: Traces, *, allows: Allows) -> list[Choice]:
    """The ``choices`` of a table beside the plan, by traces where its own memory is; empty where no
    device has a known memory."""
    if not any(part.capacity_gib for part in plan.memory):
        return []
    usable = traces if all(part.traced for part in plan.memory) else Traces({})
    return choices(exp, plan, usable, allows=allows, by_device=False)


def _all(
    exp: Experiment,
    plan: Plan,
    traces: Traces,
    zeros: Mapping[str, ZeroConfig],
    ways: Sequence[Ways],
    sizes: Sequence[int],
    *,
    all_sizes: bool = True,
    learned_for: KnownFor = no_runs,
) -> Iterator[Choice]:
    """Each variant that can be planned and is of use. ``all_sizes``: also micro batches that are
    larger than one that does not fit."""
    ways_of_plan = checkpointing_by_device(exp)
    for name, zero in zeros.items():

        @functools.cache
        def choice_with(
            hows: tuple[str, ...], size: int, name: str = name, zero: ZeroConfig = zero
        ) -> Choice | None:
            way = dict(zip(ways_of_plan, hows, strict=True))
            variant = with_values(with_checkpointing(exp, way), zero=zero, size=size)
            return planned(variant, name, plan, traces, learned_for=learned_for)

        for way in ways:
            if zero.stage == 3 and len(set(way.values())) > 1:
                continue  # all ranks gather together
            least = min(way.values(), key=CHECKPOINTING.index)
            for size in sizes:
                choice = choice_with(tuple(way.values()), size)
                if choice is None:
                    continue
                plain = choice_with((least,) * len(way), size)
                if way == ways_of_plan or _is_of_use(choice, plain):
                    yield choice
                if not all_sizes and not choice.fits:
                    break


def _is_of_use(choice: Choice, plain: Choice | None) -> bool:
    """Whether each type of device that computes more again than another has room by it for what it
    is given: it is no gain by itself, whatever the split over the ranks makes of it. ``plain``:
    where all compute the least again."""
    rooms = {} if plain is None else _rooms(plain)
    least = min(choice.ways.values(), key=CHECKPOINTING.index)
    return all(
        choice.plan.micro_batch_on(name) > rooms.get(name, 0)
        for name, checkpointing in choice.ways.items()
        if checkpointing != least
    )


def _rooms(choice: Choice) -> dict[str, int]:
    """Samples of a micro batch that each type of device has room for; 0: not one."""
    limits = dict.fromkeys(choice.memory, choice.micro_batch)
    if choice.plan.balance is not None:
        for rank, limit in zip(choice.plan.ranks, choice.plan.balance.limits, strict=True):
            limits[rank.device] = limit
    return {name: limits[name] if memory.fits else 0 for name, memory in choice.memory.items()}


def _in_order(candidates: Sequence[Choice]) -> list[Choice]:
    least = min((choice.cost for choice in candidates), default=1.0)
    relative = [replace(choice, cost=choice.cost / least) for choice in candidates]
    return sorted(relative, key=lambda choice: (choice.cost, choice.most_gib))


def with_values(
    exp: Experiment, *, zero: ZeroConfig | None = None, how: str = "", size: int = 0
) -> Experiment:
    """The experiment with those values that are given."""
    return replace(
        exp,
        zero=zero or exp.zero,
        model=replace(exp.model, activation_checkpointing=how) if how else exp.model,
        batch=replace(exp.batch, micro_batch=size) if size else exp.batch,
    )


def _plain_zero(zero: ZeroConfig, values: Mapping[str, object]) -> ZeroConfig:
    plain = replace(
        zero, offload_optimizer="none", offload_param="none", hpz_partition_size=1, nvme_path=None
    )
    return dataclasses.replace(plain, **values)  # type: ignore[arg-type]


# --- A plan that does not fit --------------------------------------------------------------------


def with_traces(plan: Plan, exp: Experiment, traces: Traces, *, allows: Allows = no_rules) -> Plan:
    """The plan with the memory that the traces give (its own, where they do not cover it), what to
    change where it does not fit, the time by a trace where only that knows the size of the model,
    and what hosts need by that size."""
    memory = traced_memory(exp, plan, traces)
    plan = replace(plan, memory=plan.memory if memory is None else memory, advice="")
    if not all(part.fits for part in plan.memory):
        covering = traces if memory is not None else Traces({})
        plan = replace(plan, advice=advice(exp, plan, covering, allows=allows))
    rank = max(plan.ranks, key=lambda rank: rank.micro_batch)
    checkpointing = checkpointing_on(exp, rank.device)
    trace = traces.get(plan.attention_on(rank.device), checkpointing, rank.micro_batch)
    if trace is None:
        return with_storage(plan, exp)
    if trace.flops and not plan.num_parameters:
        tokens = rank.micro_batch * plan.batch.seq_len
        plan = with_traced_time(plan, exp, trace, tokens=tokens, device=rank.device)
    # The trace has read the tokenizer, too.
    return with_storage(plan, exp, size=ModelSize(trace.num_parameters, trace.num_trained))


def advice(exp: Experiment, plan: Plan, traces: Traces, *, allows: Allows = no_rules) -> str:
    """Say what to change where the plan does not fit: of each ZeRO option the fastest that fits
    with at most the micro batch that was asked for, each planned; with the overrides to type."""
    candidates = choices(exp, plan, traces, allows=allows)
    if not candidates:  # not even the plan itself can be planned again
        return LARGER_DEVICES
    texts = _that_fit(exp, candidates)
    if texts:
        return f"These fit by the plan, the fastest first: {'; '.join(texts)}."
    least = min(candidates, key=lambda choice: choice.most_gib)
    offload = ", with offload" if any("offload" in choice.zero for choice in candidates) else ""
    return (
        f"No ZeRO stage{offload}, activation checkpointing and micro batch fits. "
        f"{least_text(least)} {next_steps(least, traces, allows)}"
    )


def _that_fit(exp: Experiment, candidates: Sequence[Choice]) -> list[str]:
    """Describe the fastest choice that fits of each ZeRO option, at most three."""
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
    return texts


def least_text(least: Choice) -> str:
    """Describe the memory of the choice that needs least."""
    part = least.fullest
    words = " ".join(least.words.values())
    ram = lacks_ram(least.plan)
    return (
        f"The least memory has {words}: {human.gib(part.total_gib)} GiB on {part.device}, which "
        f"has {human.gib(part.capacity_gib)}{f'; and {ram}' if ram else ''}."
    )


def next_steps(least: Choice, traces: Traces, allows: Allows = no_rules) -> str:
    """Say which hardware or training would make the choice fit that needs least memory, each
    planned."""
    exp, plan = least.experiment, least.plan
    if texts := _that_fit(exp, choices(exp, plan, traces, allows=allows)):
        return f"These fit by the plan, the fastest first: {'; '.join(texts)}."
    steps = []
    larger = _on_more_hosts(exp, plan, traces, allows)
    if larger is not None:
        hosts = len(larger.experiment.hardware.hosts)
        steps.append(f"{hosts} such hosts instead of {len(plan.hosts)} (zero={larger.zero})")
    if lacks_ram(plan):
        disk = {"offload_optimizer": "nvme", "offload_param": "nvme", "nvme_path": "/local_nvme"}
        zero = _plain_zero(exp.zero, {"stage": 3, **disk})
        infinity = planned(with_values(exp, zero=zero), "infinity", plan, traces)
        if infinity is not None and infinity.fits and not allows(infinity.experiment):
            steps.append("zero=infinity zero.nvme_path=DIR (a fast disk of every host)")
    formula = planned(exp, least.zero, plan, Traces({}))
    # The formula may see less than the trace: what only it promises is no advice.
    if formula is not None and not formula.fits:
        if exp.adapter.kind == "none" and not exp.model.freeze and exp.model.init == "pretrained":
            adapted = replace(exp, adapter=AdapterConfig(kind="lora", targets=["all-linear"]))
            choice = planned(adapted, least.zero, plan, Traces({}))
            if choice is not None and choice.fits:
                steps.append("adapter=lora, which trains little")
        length = exp.data.seq_len // 2
        while length >= 128:
            shorter = replace(exp, data=replace(exp.data, seq_len=length))
            choice = planned(shorter, least.zero, plan, Traces({}))
            if choice is not None and choice.fits:
                steps.append(f"data.seq_len={length}")
                break
            length //= 2
    if not steps:
        return LARGER_DEVICES
    return f"These fit by the plan: {'; '.join(steps)}; or devices with more memory."


def _on_more_hosts(exp: Experiment, plan: Plan, traces: Traces, allows: Allows) -> Choice | None:
    """On the fewest of the same hosts that it fits on, with a micro batch of 1."""
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
            choice = planned(with_values(larger, zero=zero), name, plan, traces)
            if choice is not None and choice.fits:
                return choice
    return None


# --- auto ----------------------------------------------------------------------------------------


def auto_keys(exp: Experiment) -> tuple[str, ...]:
    """The keys that the config leaves to the plan."""
    is_auto = {
        ZERO: exp.zero.stage == AUTO,
        HOW: exp.model.activation_checkpointing == "auto",
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
    how = PLAIN[HOW] if HOW in keys else ""
    size = int(PLAIN[MICRO_BATCH]) if MICRO_BATCH in keys else 0
    if ZERO not in keys:
        yield with_values(exp, how=how, size=size)
        return
    zeros = zero_options(exp.zero)
    for name in sorted(zeros, key=lambda name: name != PLAIN[ZERO]):
        yield with_values(exp, zero=zeros[name], how=how, size=size)


def zero_options(zero: ZeroConfig) -> dict[str, ZeroConfig]:
    """The options that ``zero=auto`` stands for; a value that is set beside it stays."""
    options = {}
    for name, values in OPTIONS.items():
        settings = {"offload_optimizer": "none", "offload_param": "none", **values}
        offloads = {
            key: value
            for key in ("offload_optimizer", "offload_param")
            if (value := getattr(zero, key)) != "none"
        }
        if offloads:
            if settings["stage"] == 0 or ("offload_param" in offloads and settings["stage"] != 3):
                continue
            if "offload" in name:
                continue
            settings |= offloads
        options[name] = dataclasses.replace(zero, **settings)  # type: ignore[arg-type]
    return options


def choose(
    exp: Experiment,
    plan: Plan,
    traces: Traces,
    *,
    allows: Allows = no_rules,
    without: Sequence[Experiment] = (),
    learned_for: KnownFor = no_runs,
) -> tuple[Experiment, ChosenPlan]:
    """The experiment with plain values in the place of ``auto``, and why: the fastest that fits;
    where nothing does, the one that needs least memory (``ChosenPlan.problem``).

    Args:
        plan: of any variant of it.
        allows: why the rules refuse a variant.
        without: variants that do not fit after all.
        known: what finished runs have shown.
    """
    keys = auto_keys(exp)
    plain = first_allowed(exp, allows)
    options = zero_options(exp.zero) if ZERO in keys else {option_of(exp.zero): exp.zero}
    unknown = _unknown(plan)
    if unknown:
        name = next(name for name, zero in options.items() if zero == plain.zero)
        why = f"nothing could be compared: {unknown}. These are the defaults"
        return plain, ChosenPlan(keys, _words(Choice(name, plain, plan, 1.0), keys), why)
    zeros = _sensible(options, plan) if ZERO in keys else options
    if all(allows(with_values(plain, zero=zero)) for zero in zeros.values()):
        zeros = options
    ways: list[Ways] = [checkpointing_by_device(exp)]
    if HOW in keys:
        ways = [*uniform_ways(exp, keep_own=True), *mixed_ways(exp, keep_own=True)]
    sizes = micro_batches(plain, plan) if MICRO_BATCH in keys else [exp.batch.micro_batch]
    candidates: list[Choice] = []
    runs: set[object] = set()
    for choice in _all(
        exp, plan, traces, zeros, ways, sizes, all_sizes=False, learned_for=learned_for
    ):
        batch = choice.plan.batch
        if batch.global_batch > MAX_GLOBAL_BATCH or choice.experiment in without:
            continue
        run = (
            choice.zero,
            choice.checkpointing,
            batch.micro_batches,
            batch.sizes,
            batch.accumulation,
        )
        if run not in runs:
            runs.add(run)
            candidates.append(choice)
    if not candidates and traces.found:  # of another device, or one that took too long
        return choose(
            exp, plan, Traces({}), allows=allows, without=without, learned_for=learned_for
        )
    refused = _by_way(allows)
    ordered = _in_order([choice for choice in candidates if not refused(choice)])
    if candidates and not ordered:
        raise ConfigError(refused(candidates[0]))
    if not ordered:
        raise ConfigError(f"{_typed(keys)}: no combination can be planned. Set values.")
    fitting = [choice for choice in ordered if choice.fits]
    how = "the real micro step" if ordered[0].plan.memory[0].traced else "the formula"
    if not fitting:
        least = min(ordered, key=lambda choice: (choice.most_gib, choice.cost))
        problem = (
            f"{_typed(keys)}: nothing fits, of {len(ordered)} that were planned. "
            f"{least_text(least)} {next_steps(least, traces, allows)}"
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
    why = _why(best, ordered, fitting, keys, how)
    if source := learned_for(best.experiment, best.plan).source:
        why = f"{why}; speeds {source}"
    return best.experiment, ChosenPlan(keys, _words(best, keys), why)


def _best(fitting: Sequence[Choice]) -> Choice:
    """The plainest of the fastest choices. ``fitting``: in the order of their times."""
    fast = [choice for choice in fitting if choice.cost <= SURELY_FASTER * fitting[0].cost]
    plainest = min(choice.intricacy for choice in fast)
    as_plain = [choice for choice in fast if choice.intricacy == plainest]
    alike = [choice for choice in as_plain if choice.cost <= AS_FAST * as_plain[0].cost]
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


def _by_way(allows: Allows) -> Callable[[Choice], str]:
    """Asked once for each ZeRO option and activation checkpointing: the rules look at no more."""
    refusals: dict[tuple[str, str], str] = {}

    def refused(choice: Choice) -> str:
        way = (choice.zero, choice.checkpointing)
        if way not in refusals:
            refusals[way] = allows(choice.experiment)
        return refusals[way]

    return refused


def _why(
    best: Choice,
    ordered: Sequence[Choice],
    fitting: Sequence[Choice],
    keys: Sequence[str],
    how: str,
) -> str:
    part = best.fullest
    least = "the fastest"
    if best.cost > AS_FAST * fitting[0].cost:
        least = f"within {SURELY_FASTER - 1:.0%} of the fastest, and simpler,"
    texts = [
        f"{least} by the plan of {len(fitting)} that fit, of {len(ordered)}: "
        f"{human.gib(part.total_gib)} of {human.gib(part.capacity_gib)} GiB on {part.device}, by "
        f"{how}"
    ]
    larger = [choice for choice in ordered if not choice.fits and choice.cost < best.cost]
    if larger:
        faster = min(larger, key=lambda choice: choice.most_gib)
        over = lacks_ram(faster.plan) or (
            f"{human.gib(faster.fullest.total_gib)} GiB on {faster.fullest.device}"
        )
        texts.append(f"faster, but too large: {_said(faster, keys)} ({over})")
    other = next(
        (
            choice
            for choice in fitting
            if (choice.zero, choice.checkpointing) != (best.zero, best.checkpointing)
        ),
        None,
    )
    if other is not None:
        times = other.cost / best.cost
        texts.append(
            f"next: {_said(other, keys)} ({times:.2f} times the time, "
            f"{human.gib(other.fullest.total_gib)} GiB)"
        )
    return "; ".join(texts)


def _words(choice: Choice, keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(choice.words[key] for key in keys)


def _said(choice: Choice, keys: Sequence[str]) -> str:
    return " ".join(_words(choice, keys))


def _typed(keys: Sequence[str]) -> str:
    return " ".join(f"{key}=auto" for key in keys)


def _unknown(plan: Plan) -> str:
    """Why nothing can be compared; empty where it can."""
    if not plan.memory:
        return "the size of the model's architecture is not known on this machine"
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
