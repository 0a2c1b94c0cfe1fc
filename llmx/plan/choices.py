"""What else an experiment could be, each planned; what fits instead; and ``auto``. Pure.

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
from functools import partial

from llmx import text as human
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
    intricacy,
    mixed_ways,
    said,
    uniform_ways,
    with_checkpointing,
)
from llmx.plan.make import LOCAL_NAMES, make_plan
from llmx.plan.memory import devices_of, memory_of
from llmx.plan.step_time import NOTHING, Known, tokens_per_s, with_time
from llmx.plan.storage import plan_storage, with_storage
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
"""What ``auto`` is where nothing can be compared."""

AUTO_KEYS = tuple(PLAIN)

LARGER_DEVICES = "Take a smaller model, or devices with more memory."
"""Where nothing that was planned fits."""

Rooms = Mapping[str, int]
"""Of each type of device."""
Allows = Callable[[Experiment], str]
"""Why rules refuse an experiment; empty where they do not."""


KnownFor = Callable[[Experiment, Plan], Known]
"""What finished runs have shown of a plan."""


def no_rules(exp: Experiment) -> str:
    """Allows all."""
    return ""


def no_runs(exp: Experiment, plan: Plan) -> Known:
    """Have shown anything."""
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
        return said(self.ways)

    @property
    def micro_batch(self) -> int:
        """What a rank takes at most."""
        return self.experiment.batch.micro_batch

    @property
    def memory(self) -> Mapping[str, MemoryPlan]:
        """By type of device."""
        return {one.device: one for one in self.plan.memory}

    @property
    def fits(self) -> bool:
        """On every type of device, and in the RAM of every host."""
        return all(one.fits for one in self.plan.memory) and not lacks_ram(
            self.experiment, self.plan
        )

    @property
    def most_gib(self) -> float:
        return max(one.total_gib for one in self.plan.memory)

    @property
    def fullest(self) -> MemoryPlan:
        """Of the type of device that has least left."""
        return max(self.plan.memory, key=lambda one: one.total_gib / (one.capacity_gib or 1.0))

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
        """To type, against the experiment."""
        found = []
        if self.zero != option_of(exp.zero):
            found.append(f"{ZERO}={self.zero}")
            if self.experiment.zero.hpz_partition_size < exp.zero.hpz_partition_size:
                # Typed on its own, it would stay.
                found.append("zero.hpz_partition_size=1")
        found += checkpointing_overrides(exp, self.experiment)
        if self.micro_batch != exp.batch.micro_batch:
            found.append(f"{MICRO_BATCH}={self.micro_batch}")
        return found


def option_of(zero: ZeroConfig) -> str:
    """The option of the group ``zero`` that it is, or the nearest name."""
    for name, values in OPTIONS.items():
        if zero == _plain_zero(zero, values) and zero.hpz_partition_size == 1:
            return name
    return f"stage{zero.stage}*"


def lacks_ram(exp: Experiment, plan: Plan) -> str:
    """What is missing of the RAM of a host, where that is known; empty where nothing is."""
    for host in plan_storage(exp, plan).hosts:
        needed, has = host.ram_bytes, host.ram_has_bytes
        if host.offload_bytes and needed and has and needed > has:
            return f"{human.size(needed)} of a host's RAM, which has {human.size(has)}"
    return ""


def replan(exp: Experiment, plan: Plan) -> Plan:
    """The plan of a variant of the experiment that ``plan`` is of."""
    local = {name for host in plan.hosts if host.is_local for name in (host.name, host.address)}
    return make_plan(exp, local_names=LOCAL_NAMES | local, frozen=plan.frozen, logits=plan.logits)


def traced_memory(exp: Experiment, plan: Plan, traces: Traces) -> tuple[MemoryPlan, ...] | None:
    """By the traces; None where they do not cover the plan."""
    found = []
    for device in devices_of(plan):
        size = max(rank.micro_batch for rank in plan.ranks if rank.device == device)
        trace = traces.get(plan.attention_on(device), checkpointing_on(exp, device), size)
        if trace is None:
            return None
        context_gib = traces.context_gib.get(device)
        found.append(memory_of(exp, plan, trace, device, context_gib=context_gib))
    return tuple(found)


def planned(
    exp: Experiment, name: str, like: Plan, traces: Traces, *, known: KnownFor = no_runs
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
        plan = replace(plan, memory=memory)
    shown = known(exp, plan)
    if shown.tflops:
        plan = with_time(plan, exp, known=shown)
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
    own, mine = option_of(exp.zero), checkpointing_by_device(exp)
    here = (own, mine, exp.batch.micro_batch)
    zeros = {name: _plain_zero(exp.zero, values) for name, values in OPTIONS.items()}
    zeros[own] = exp.zero
    sizes = sorted({exp.batch.micro_batch, *MICRO_BATCHES})
    ways = [*uniform_ways(exp), *(mixed_ways(exp) if by_device else ())]
    found, refused = [], _by_way(allows)
    for one in _all(exp, plan, traces, zeros, [*ways, *([] if mine in ways else [mine])], sizes):
        chosen = (one.zero, one.ways, one.micro_batch) == here
        filled = max(one.plan.batch.micro_batches) >= one.micro_batch
        if chosen or (filled and not refused(one)):
            found.append(replace(one, chosen=chosen))
    return _in_order(found)


def _all(
    exp: Experiment,
    plan: Plan,
    traces: Traces,
    zeros: Mapping[str, ZeroConfig],
    ways: Sequence[Ways],
    sizes: Sequence[int],
    *,
    all_sizes: bool = True,
    known: KnownFor = no_runs,
) -> Iterator[Choice]:
    """``all_sizes``: also micro batches that are larger than one that does not fit."""
    mine = checkpointing_by_device(exp)
    for name, zero in zeros.items():

        @functools.cache
        def room_with(how: str, size: int, name: str = name, zero: ZeroConfig = zero) -> Rooms:
            """Where all types of devices do the same."""
            way = dict.fromkeys(mine, how)
            other = with_values(with_checkpointing(exp, way), zero=zero, size=size)
            return room_of(planned(other, name, plan, traces))

        for way in ways:
            differ = len(set(way.values())) > 1
            if zero.stage == 3 and differ:
                continue  # all ranks gather together
            for size in sizes:
                other = with_values(with_checkpointing(exp, way), zero=zero, size=size)
                one = planned(other, name, plan, traces, known=known)
                if one is None:
                    continue
                if not differ or way == mine or _is_of_use(one, partial(room_with, size=size)):
                    yield one
                if not all_sizes and not one.fits:
                    break


def room_of(choice: Choice | None) -> Rooms:
    """Samples of a micro batch that each type of device has room for; 0: not one."""
    if choice is None:
        return {}
    limits = dict.fromkeys(choice.memory, choice.micro_batch)
    if choice.plan.balance is not None:
        for rank, limit in zip(choice.plan.ranks, choice.plan.balance.limits, strict=True):
            limits[rank.device] = limit
    return {name: limits[name] if one.fits else 0 for name, one in choice.memory.items()}


def _is_of_use(choice: Choice, room_with: Callable[[str], Rooms]) -> bool:
    """Whether each type of device that computes more again than another has room by it for what it
    is given: it is no gain by itself, whatever the split over the ranks makes of it."""
    ways = choice.ways
    least = min(ways.values(), key=CHECKPOINTING.index)
    plain = room_with(least)
    return all(
        max(rank.micro_batch for rank in choice.plan.ranks if rank.device == name)
        > plain.get(name, 0)
        for name, how in ways.items()
        if how != least
    )


def _in_order(found: Sequence[Choice]) -> list[Choice]:
    least = min((one.cost for one in found), default=1.0)
    relative = [replace(one, cost=one.cost / least) for one in found]
    return sorted(relative, key=lambda one: (one.cost, one.most_gib))


def with_values(
    exp: Experiment, *, zero: ZeroConfig | None = None, how: str = "", size: int = 0
) -> Experiment:
    """With those that are given."""
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
    """The plan with the memory that the traces give (its own, where they do not cover it), and
    what to change where it does not fit."""
    memory = traced_memory(exp, plan, traces)
    plan = replace(plan, memory=plan.memory if memory is None else memory, advice="")
    if not all(part.fits for part in plan.memory):
        covering = traces if memory is not None else Traces({})
        plan = replace(plan, advice=advice(exp, plan, covering, allows=allows))
    return with_storage(plan, exp)


def advice(exp: Experiment, plan: Plan, traces: Traces, *, allows: Allows = no_rules) -> str:
    """What to change where the plan does not fit: of each ZeRO option the fastest that fits with at
    most the micro batch that was asked for, each planned; with the overrides to type."""
    found = choices(exp, plan, traces, allows=allows)
    if not found:  # not even the plan itself can be planned again
        return LARGER_DEVICES
    texts = _that_fit(exp, found)
    if texts:
        return f"These fit by the plan, the fastest first: {'; '.join(texts)}."
    least = min(found, key=lambda one: one.most_gib)
    return f"No {_what(found)} fits. {least_text(least)} {next_steps(least, traces, allows)}"


def _that_fit(exp: Experiment, found: Sequence[Choice]) -> list[str]:
    """Of each ZeRO option the fastest that fits, at most three."""
    own = next((one.cost for one in found if one.chosen), None)
    fastest: dict[str, Choice] = {}
    for one in found:
        if one.fits and one.micro_batch <= exp.batch.micro_batch and not one.chosen:
            fastest.setdefault(one.zero, one)
    texts = []
    for one in list(fastest.values())[:3]:
        time = f", about {one.cost / own - 1:+.0%} time" if own else ""
        words = " ".join(one.overrides(exp))
        texts.append(f"{words} ({human.gib(one.most_gib)} GiB{time})")
    return texts


def _what(found: Sequence[Choice]) -> str:
    offload = any("offload" in one.zero for one in found)
    return (
        f"ZeRO stage{', with offload' if offload else ''}, activation checkpointing and micro batch"
    )


def least_text(least: Choice) -> str:
    """What the one takes that needs least memory."""
    part = least.fullest
    words = " ".join(least.words.values())
    ram = lacks_ram(least.experiment, least.plan)
    return (
        f"The least memory has {words}: {human.gib(part.total_gib)} GiB on {part.device}, which "
        f"has {human.gib(part.capacity_gib)}{f'; and {ram}' if ram else ''}."
    )


def next_steps(least: Choice, traces: Traces, allows: Allows = no_rules) -> str:
    """What makes the one fit that needs least memory: other hardware or another training, each
    planned."""
    exp, plan = least.experiment, least.plan
    if texts := _that_fit(exp, choices(exp, plan, traces, allows=allows)):
        return f"These fit by the plan, the fastest first: {'; '.join(texts)}."
    found = []
    larger = _on_more_hosts(exp, plan, traces, allows)
    if larger is not None:
        hosts = len(larger.experiment.hardware.hosts)
        found.append(f"{hosts} such hosts instead of {len(plan.hosts)} (zero={larger.zero})")
    if lacks_ram(exp, plan):
        disk = {"offload_optimizer": "nvme", "offload_param": "nvme", "nvme_path": "/local_nvme"}
        zero = _plain_zero(exp.zero, {"stage": 3, **disk})
        infinity = planned(with_values(exp, zero=zero), "infinity", plan, traces)
        if infinity is not None and infinity.fits and not allows(infinity.experiment):
            found.append("zero=infinity zero.nvme_path=DIR (a fast disk of every host)")
    formula = planned(exp, least.zero, plan, Traces({}))
    # The formula may see less than the trace: what only it promises is no advice.
    if formula is not None and not formula.fits:
        if exp.adapter.kind == "none" and not exp.model.freeze and exp.model.init == "pretrained":
            adapted = replace(exp, adapter=AdapterConfig(kind="lora", targets=["all-linear"]))
            one = planned(adapted, least.zero, plan, Traces({}))
            if one is not None and one.fits:
                found.append("adapter=lora, which trains little")
        length = exp.data.seq_len // 2
        while length >= 128:
            shorter = replace(exp, data=replace(exp.data, seq_len=length))
            one = planned(shorter, least.zero, plan, Traces({}))
            if one is not None and one.fits:
                found.append(f"data.seq_len={length}")
                break
            length //= 2
    if not found:
        return LARGER_DEVICES
    return f"These fit by the plan: {'; '.join(found)}; or devices with more memory."


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
            one = planned(with_values(larger, zero=zero), name, plan, traces)
            if one is not None and one.fits:
                return one
    return None


# --- auto ----------------------------------------------------------------------------------------


def auto_keys(exp: Experiment) -> tuple[str, ...]:
    """What the config leaves to the plan."""
    found = []
    if exp.zero.stage == AUTO:
        found.append(ZERO)
    if exp.model.activation_checkpointing == "auto":
        found.append(HOW)
    if exp.batch.micro_batch == AUTO:
        found.append(MICRO_BATCH)
    return tuple(found)


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
    batch, most = exp.batch, MAX_MICRO_BATCH
    if batch.global_batch is not None or batch.tokens_per_step is not None:
        whole, speeds = plan.batch.global_batch, plan.balance.speeds if plan.balance else ()
        # The strongest rank's part, where the faster ones take more.
        rates = [1 / sample_fs(speed, plan.batch.seq_len) for speed in speeds] or [1.0]
        part = max(rates) / sum(rates) if speeds else 1 / plan.world_size
        most = max(1, math.ceil(round(whole * part, 6)))
    own = batch.micro_batch
    return sorted({2**power for power in range(20) if 2**power <= most} | {most, min(own, most)})


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
    """Of ``zero=auto``: what was set beside it stays as it is."""
    found = {}
    for name, values in OPTIONS.items():
        wanted = {"offload_optimizer": "none", "offload_param": "none", **values}
        set_ = {
            key: value
            for key in ("offload_optimizer", "offload_param")
            if (value := getattr(zero, key)) != "none"
        }
        if set_:
            if wanted["stage"] == 0 or ("offload_param" in set_ and wanted["stage"] != 3):
                continue
            if "offload" in name:
                continue
            wanted |= set_
        found[name] = dataclasses.replace(zero, **wanted)  # type: ignore[arg-type]
    return found


def choose(
    exp: Experiment,
    plan: Plan,
    traces: Traces,
    *,
    allows: Allows = no_rules,
    without: Sequence[Experiment] = (),
    known: KnownFor = no_runs,
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
    every = zero_options(exp.zero) if ZERO in keys else {option_of(exp.zero): exp.zero}
    unknown = _unknown(plan)
    if unknown:
        name = next(name for name, zero in every.items() if zero == plain.zero)
        why = f"nothing could be compared: {unknown}. These are the defaults"
        return plain, ChosenPlan(keys, _words(Choice(name, plain, plan, 1.0), keys), why)
    zeros = _sensible(every, plan) if ZERO in keys else every
    if all(allows(with_values(plain, zero=zero)) for zero in zeros.values()):
        zeros = every
    ways: list[Ways] = [checkpointing_by_device(exp)]
    if HOW in keys:
        ways = [*uniform_ways(exp, keep_own=True), *mixed_ways(exp, keep_own=True)]
    sizes = micro_batches(plain, plan) if MICRO_BATCH in keys else [exp.batch.micro_batch]
    found: list[Choice] = []
    seen: set[object] = set()
    for one in _all(exp, plan, traces, zeros, ways, sizes, all_sizes=False, known=known):
        batch = one.plan.batch
        if batch.global_batch > MAX_GLOBAL_BATCH or one.experiment in without:
            continue
        run = (one.zero, one.checkpointing, batch.micro_batches, batch.sizes, batch.accumulation)
        if run not in seen:
            seen.add(run)
            found.append(one)
    if not found and traces.found:  # of another device, or one that took too long
        return choose(exp, plan, Traces({}), allows=allows, without=without, known=known)
    refused = _by_way(allows)
    ordered = _in_order([one for one in found if not refused(one)])
    if found and not ordered:
        raise ConfigError(refused(found[0]))
    if not ordered:
        raise ConfigError(f"{_typed(keys)}: no combination can be planned. Set values.")
    fitting = [one for one in ordered if one.fits]
    how = "the real micro step" if ordered[0].plan.memory[0].traced else "the formula"
    if not fitting:
        least = min(ordered, key=lambda one: (one.most_gib, one.cost))
        problem = (
            f"{_typed(keys)}: nothing fits, of {len(ordered)} that were planned. "
            f"{least_text(least)} {next_steps(least, traces, allows)}"
        )
        words = _words(least, keys)
        return least.experiment, ChosenPlan(keys, words, "needs the least memory", problem)
    if ZERO in keys:
        # A sum in 16 bits over many micro steps is another training, which nobody has asked for.
        fitting = [one for one in fitting if _sums_exactly(one.plan)] or fitting
    best = _best(fitting)
    why = _why(best, ordered, fitting, keys, how)
    if source := known(best.experiment, best.plan).source:
        why = f"{why}; speeds {source}"
    return best.experiment, ChosenPlan(keys, _words(best, keys), why)


def _best(fitting: Sequence[Choice]) -> Choice:
    """Of choices in the order of their times."""
    options = [*OPTIONS]

    def place(one: Choice) -> tuple[int, int, int]:
        stage = options.index(one.zero) if one.zero in options else len(options)
        return stage, *intricacy(one.ways)

    fast = [one for one in fitting if one.cost <= SURELY_FASTER * fitting[0].cost]
    plainest = min(map(place, fast))
    same = [one for one in fast if place(one) == plainest]
    alike = [one for one in same if one.cost <= AS_FAST * same[0].cost]
    return min(alike, key=lambda one: (one.most_gib, one.cost))


def _sums_exactly(plan: Plan) -> bool:
    return plan.batch.accumulation == 1 or plan.grad_accum_dtype == "fp32"


def first_allowed(exp: Experiment, allows: Allows) -> Experiment:
    """The first plain variant that the rules allow; ConfigError with what is wrong with the first
    where they allow none."""
    problems = []
    for one in plain_variants(exp):
        problem = allows(one)
        if not problem:
            return one
        problems.append(problem)
    raise ConfigError(problems[0])


def _by_way(allows: Allows) -> Callable[[Choice], str]:
    """Asked once for each ZeRO option and activation checkpointing: the rules look at no more."""
    known: dict[tuple[str, str], str] = {}

    def refused(one: Choice) -> str:
        way = (one.zero, one.checkpointing)
        if way not in known:
            known[way] = allows(one.experiment)
        return known[way]

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
    larger = [one for one in ordered if not one.fits and one.cost < best.cost]
    if larger:
        faster = min(larger, key=lambda one: one.most_gib)
        over = lacks_ram(faster.experiment, faster.plan) or (
            f"{human.gib(faster.fullest.total_gib)} GiB on {faster.fullest.device}"
        )
        texts.append(f"faster, but too large: {_said(faster, keys)} ({over})")
    other = next(
        (
            one
            for one in fitting
            if (one.zero, one.checkpointing) != (best.zero, best.checkpointing)
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


def _words(one: Choice, keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(one.words[key] for key in keys)


def _said(one: Choice, keys: Sequence[str]) -> str:
    return " ".join(_words(one, keys))


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
    """Without an offload from CPU ranks, which gives them nothing; and without stage 0 in 16 bits,
    which sums gradients in 16 bits: another training. It stays where there is nothing else."""
    found = {
        name: zero for name, zero in zeros.items() if plan.on_gpus or not name.endswith("_offload")
    }
    if plan.precision != "fp32":
        # Last: taken where rules refuse the others.
        found = {name: zero for name, zero in found.items() if name != "stage0"}
    return found or dict(zeros)
