"""The time of a micro batch on each rank, measured at the start, and the split that follows.

Each rank passes a few micro batches of real samples forward and backward, with the task's loss and
the engine's own networks, and without communication: gradients are computed and dropped
(``torch.autograd.grad`` runs none of DeepSpeed's hooks; at ZeRO-3 every rank holds the whole model
meanwhile, or as many of its blocks as it has room for). ``balance.json`` keeps the speeds for every
later start of the run; a cache on each host keeps them for other runs of the same model there.
docs/unequal.md.

Tried by ``python -m pytest -m deepspeed tests/integration/test_train_balance.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from llmx.collectives import all_gather
from llmx.config import Experiment, to_dict
from llmx.data.order import samples_of_step
from llmx.models.blocks import Stack, stack_of
from llmx.models.model import ForwardOfBase, Models
from llmx.models.parameters import whole_shape
from llmx.plan.balance import FS, evened, fit_speed, identity, is_of, sample_fs, with_balance
from llmx.plan.by_device import on_device
from llmx.plan.types import BalancePlan, MemoryPlan, Plan, RankSpeed
from llmx.run.rundir import RunDir, read_json, write_json
from llmx.run.speeds import keep_speeds, speeds_directory
from llmx.tasks import Task
from llmx.text import plural
from llmx.train.batches import Layout, micro_batch
from llmx.train.engine.build import Engine, first_blocks, whole_weights
from llmx.train.step import random_state, seed_step, set_random_state, transform_of

CACHE_FORMAT = 2
LEAST_S = 0.4
"""Shortest timing of a micro batch: several periods of a CPU quota, more than a clock's noise."""
LONGEST_S = 1.6
"""Longest timing of one whose times vary: under a quota some take the whole rest of a period."""
VARIED_CALLS = 5
"""Fewest timings of one whose times vary: what two differ by says little
of the noise, and a measured split that seems to be noise is given up for the even one."""
MOST_S = 20.0
"""A further run of a micro batch is not begun after so long."""
STEADY = 0.01
"""A mean with such a relative standard error is known well enough."""
BLOCK_S = 0.1
"""Times vary from block to block of such a length: the period of a CPU quota in Linux."""
OTHER_SPEED = 1.25
"""Speeds of a cache are measured anew where one rank's has changed so much against another's."""
SAMPLES = 256
"""Samples that are looked at for long and short ones."""
MOST_TIMED = 8
"""Micro batches that a rank times: one sample, half, all and short ones, each with some blocks and
with fewer."""
LINK_BYTES = (1 << 20, 1 << 24)
"""An exchange of the first number is timed, and one of the second where that takes no long time."""
LINK_S = 0.05

Point = tuple[float, float, float]
"""Tokens with padding, squared tokens, seconds."""


@dataclass(frozen=True)
class Timing:
    """The measured time of one micro batch."""

    point: Point
    noise: float
    """Relative standard error of its seconds."""


@dataclass(frozen=True)
class Measured:
    """The speed of one rank, from a measurement or a cache."""

    speed: RankSpeed
    noise: float = 0.0
    micro_step_fs: int | None = None
    """``BalancePlan.micro_step_fs``, the same on all ranks."""

    @classmethod
    def of(cls, values: dict[str, Any]) -> Measured:
        """Restore from what ``asdict`` gave."""
        return cls(**{**values, "speed": RankSpeed(**values["speed"])})


@dataclass(frozen=True)
class Subject:
    """The engine, task and data of a measurement on this rank."""

    exp: Experiment
    plan: Plan
    engine: Engine
    task: Task
    store: Any
    layout: Layout

    @property
    def rank(self) -> int:
        return torch.distributed.get_rank()

    @property
    def limit(self) -> int:
        """The largest micro batch of this rank."""
        assert self.plan.balance is not None
        return self.plan.balance.limits[self.rank]


def with_measured_speeds(
    subject: Subject, run_dir: RunDir, *, group: Any, log: Callable[[str], None]
) -> Plan:
    """The plan, shared out by what the ranks measure; as it is, where it says otherwise.

    Collective over ``group``. What was measured for this run before is taken again, so that a
    resumed run trains the same micro batches.
    """
    plan = subject.plan
    if plan.balance is None or plan.balance.method != "measured":
        return plan
    stored = _read(run_dir, plan) if subject.rank == 0 else None
    balance = all_gather(stored, group=group)[0]
    was_measured = False
    if balance is None:
        began = time.perf_counter()
        measurements, problem, cached = _speeds(subject, group=group)
        balance = replace(plan.balance, pending=False)
        if measurements is None:
            by = "as measured in an earlier run" if plan.balance.source else "by the data sheets"
            log(f"balance: not measured ({problem}); samples are split {by}")
        else:
            if not cached:
                part, _ = held_part(subject)
                by = f" by {part}" if part else ""
                log(f"balance: measured{by} in {time.perf_counter() - began:.1f} s")
            balance = replace(
                balance,
                speeds=tuple(m.speed for m in measurements),
                micro_step_fs=measurements[0].micro_step_fs,
            )
            was_measured = True
            balance = evened(plan, balance, noise=max(m.noise for m in measurements))
        if subject.rank == 0:
            write_json(run_dir.balance, record(with_balance(plan, balance)))
    balanced = with_balance(plan, replace(balance, source=""))
    if subject.rank == 0 and was_measured:
        keep_speeds(subject.exp, balanced, run_dir=run_dir.root)
    if subject.rank == 0:
        write_json(run_dir.plan, balanced.to_dict())
    # A pending plan has the speeds of an earlier run, or of the data sheets until others are known.
    measured = bool(plan.balance.source) or balance.speeds != plan.balance.speeds
    log(f"balance: {described(balanced, measured=measured)}")
    return balanced


def described(plan: Plan, *, measured: bool = True) -> str:
    """Speed and micro batches, a host and device type each, on one line.

    Speeds that are not measured are proportions, and are left out.
    """
    assert plan.balance is not None
    measured = measured and plan.balance.method == "measured"
    lines: list[str] = []
    for rank, speed in zip(plan.ranks, plan.balance.speeds, strict=True):
        sizes = plan.batch.sizes_of(rank.rank)
        tokens_per_s = plan.batch.seq_len * FS / sample_fs(speed, plan.batch.seq_len)
        lines.append(
            f"{plan.hosts[rank.host].name} ({rank.device}) "
            f"{f'{tokens_per_s:,.0f} tokens/s, ' if measured else ''}"
            f"{plural(sum(sizes), 'sample')} in {plural(len(sizes), 'micro step')}"
        )
    unique = list(dict.fromkeys(lines))
    return "; ".join(unique[:8]) + ("; ..." if len(unique) > 8 else "")


def record(plan: Plan) -> dict[str, Any]:
    """``balance.json`` of a balanced plan."""
    assert plan.balance is not None
    sizes = [list(plan.batch.sizes_of(rank)) for rank in range(plan.world_size)]
    values: dict[str, Any] = {
        "speeds": [asdict(speed) for speed in plan.balance.speeds],
        "sizes": sizes,
        "time": time.time(),
    }
    if plan.balance.micro_step_fs is not None:
        values["micro_step_fs"] = plan.balance.micro_step_fs
    return {**identity(plan), **values}


def _read(run_dir: RunDir, plan: Plan) -> BalancePlan | None:
    """The speeds of ``balance.json``, where it is of these ranks."""
    assert plan.balance is not None
    try:
        stored = read_json(run_dir.balance)
        speeds = tuple(RankSpeed(**speed) for speed in stored["speeds"])
        micro_step_fs = stored.get("micro_step_fs")
        same_ranks = is_of(stored, plan)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not same_ranks or len(speeds) != plan.world_size:
        return None
    return replace(plan.balance, speeds=speeds, micro_step_fs=micro_step_fs, pending=False)


def _speeds(subject: Subject, *, group: Any) -> tuple[list[Measured] | None, str, bool]:
    """The speed of every rank, from the caches of all hosts or measured now; or why it is unknown.
    Collective."""
    cache = speeds_directory(subject.exp.data) / f"{_key(subject)}.json"
    cached_here: Measured | None = None
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        cached_here = Measured.of(read_json(cache))
    caches = all_gather(cached_here, group=group)
    cached = [measured for measured in caches if measured is not None]
    if len(cached) == len(caches) and _still_right(subject, cached, group=group):
        return cached, "", True
    timings, problem = measure(subject, group=group)
    table = all_gather((timings, problem), group=group)
    problems = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(table) if text]
    if problems:
        return None, problems[0], False
    micro_step_fs = _micro_step_fs(subject, group=group)
    ranks = subject.plan.ranks
    # One fit for all ranks of a device type on a host: they are alike. By rank 0, for all.
    fits: dict[tuple[int, str], Measured] = {}
    for rank in ranks:
        place = (rank.host, rank.device)
        if subject.rank == 0 and place not in fits:
            alike: list[Timing] = []
            for other in ranks:
                if (other.host, other.device) == place:
                    alike += table[other.rank][0]
            noise = sum(timing.noise for timing in alike) / len(alike)
            speed = fit_speed([timing.point for timing in alike])
            fits[place] = Measured(speed, noise, micro_step_fs)
    fits = all_gather(fits, group=group)[0]
    this_rank = ranks[subject.rank]
    with contextlib.suppress(OSError):  # the next run measures again
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_json(cache, asdict(fits[this_rank.host, this_rank.device]))
    return [fits[rank.host, rank.device] for rank in ranks], "", False


def _still_right(subject: Subject, cached: list[Measured], *, group: Any) -> bool:
    """Whether one micro batch of each rank takes what the caches say, up to a factor that is the
    same everywhere: a host may be throttled now, or no longer. Collective."""
    ranks = subject.plan.ranks
    if len({(rank.host, rank.device) for rank in ranks}) == 1:
        return True  # whatever its speed, all ranks have it
    timings, problem = measure(subject, group=group, check=True)
    rate = 0.0
    for tokens, squares, seconds in (timing.point for timing in timings):
        rate = seconds * FS / cached[subject.rank].speed.time_fs(int(tokens), int(squares))
    rates = all_gather(0.0 if problem else rate, group=group)
    return min(rates) > 0 and max(rates) <= OTHER_SPEED * min(rates)


def _micro_step_fs(subject: Subject, *, group: Any) -> int | None:
    """The time of the exchanges in each micro step, by that of an exchange of some megabytes;
    None where they meet once a step. Collective.

    At stage 2 gradients are summed over all ranks in every micro step; at stage 3 weights are
    gathered twice and gradients scattered, each of which moves half as much.
    """
    engine, plan = subject.engine, subject.plan
    assert plan.balance is not None
    if not plan.balance.same_steps or plan.world_size == 1:
        return None

    def seconds(size: int) -> float:
        values = torch.zeros(size // 4, device=engine.device)
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)
        began = time.perf_counter()
        torch.distributed.all_reduce(values)
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)
        return time.perf_counter() - began

    def slowest(size: int) -> float:
        return max(all_gather(seconds(size), group=group))

    small, large = LINK_BYTES
    seconds(small)  # connections are made
    per_byte = slowest(small) / small
    if per_byte * small <= LINK_S:
        per_byte = slowest(large) / large
    size = torch.finfo(engine.dtype).bits // 8
    parameters = list(engine.module.parameters())
    trained = sum(math.prod(whole_shape(p)) for p in parameters if p.requires_grad)
    moved = float(trained)
    if engine.stage == 3:
        moved = sum(math.prod(whole_shape(p)) for p in parameters) + trained / 2
    return round(per_byte * moved * size * FS)


def _key(subject: Subject) -> str:
    """A digest of everything that the speed of this rank depends on."""
    exp, plan, engine = subject.exp, subject.plan, subject.engine
    this_rank = plan.ranks[subject.rank]
    values = to_dict(on_device(exp, this_rank.device))
    task = {key: value for key, value in values["task"].items() if key in ("kind", "options")}
    parts = {
        "format": CACHE_FORMAT,
        "host": socket.gethostname(),
        "device": this_rank.device,
        "name": torch.cuda.get_device_name() if plan.on_gpus else "cpu",
        "ranks": sum(rank.host == this_rank.host for rank in plan.ranks),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "model": {**values["model"], "config": engine.config.to_dict()},
        "adapter": values["adapter"],
        "task": task,
        "seq_len": exp.data.seq_len,
        "layout": dataclasses.asdict(subject.layout),
        "zero": exp.zero.stage,
        "precision": plan.precision,
        "attention": [m.attention.implementation for m in engine.models.values()],
        "limit": subject.limit,
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def measure(subject: Subject, *, group: Any, check: bool = False) -> tuple[list[Timing], str]:
    """Times of a few micro batches on this rank; or why there are none. Collective.

    ``check``: of the largest one only.
    """
    task, engine = subject.task, subject.engine
    if task.generates or task.joint:
        kind = "generates its samples" if task.generates else "has a joint loss over the step"
        return [], f"task={task.name} {kind}"
    part, problem = held_part(subject)
    if problem:
        return [], problem
    state = random_state()
    before = [model.gradient_scale for model in engine.models.values()]
    timings: list[Timing] = []
    weights = first_blocks(engine, part.stacks, part.held) if part else whole_weights(engine)
    with weights, AtOnce(group) as at_once:
        try:
            seed_step(subject.exp.seed, 0, subject.rank)
            chosen = _places(subject)
            chosen = [max(chosen, key=lambda choice: len(choice[1]))] if check else chosen
            timings = [_timed(subject, places, part, at_once) for places in chosen]
        except Exception as error:  # the run itself may still fit, and says so if it does not
            problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    set_random_state(state)
    for model, scale in zip(engine.models.values(), before, strict=True):
        model.gradient_scale = scale
        model.routing.begin_step()
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return timings, problem


class AtOnce:
    """Has all ranks time their micro batches at the same time: a rank that knows the time of one
    goes on with it until the others do.

    What slows all of them for a while then counts for all alike. And ranks of one host have each
    other's load on its memory, its buses and its power while they measure, as in training.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.left = MOST_TIMED

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Others may have more to time: they do not wait for this rank."""
        if kind is not None:
            return  # it is interrupted, and waits for nobody
        while self.left:
            self.ready()
        torch.distributed.barrier(group=self.group)

    def ready(self) -> Callable[[], bool]:
        """Tells the others that this rank knows its time. Returns whether all of them do."""
        assert self.left, f"more than {MOST_TIMED} micro batches"
        self.left -= 1
        work = torch.distributed.barrier(group=self.group, async_op=True)
        return work.is_completed  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Part:
    """The blocks that ranks hold while they measure, where the whole networks have no room."""

    stacks: tuple[Stack, ...]
    """Blocks of every network; each has ``blocks`` of them."""
    least: int
    """Blocks that are the fewest that are timed."""
    held: int
    blocks: int

    def __str__(self) -> str:
        return f"{self.held} of {self.blocks} blocks"


def held_part(subject: Subject) -> tuple[Part | None, str]:
    """The blocks that every rank holds while it measures, None: all; or why that cannot be.
    The same on every rank."""
    plan, engine = subject.plan, subject.engine
    if engine.stage != 3:
        return None, ""
    parameter_gib = torch.finfo(engine.dtype).bits // 8 / 2**30

    def gib(module: torch.nn.Module) -> float:
        """GiB of the module's weights and their gradients."""
        return sum(
            (1 + p.requires_grad) * math.prod(whole_shape(p)) * parameter_gib
            for p in module.parameters()
        )

    whole_gib = gib(engine.module)
    room_gib, tightest = min(
        ((_room_gib(memory), memory.device) for memory in plan.memory if memory.capacity_gib),
        default=(math.inf, ""),
    )
    if whole_gib <= room_gib:
        return None, ""
    no_room = f"the whole model does not fit on a {tightest} beside its activations"
    stacks = [stack_of(model.module) for model in engine.networks.values()]
    divisible = tuple(stack for stack in stacks if stack is not None)
    if len(divisible) < len(stacks) or len({len(stack.blocks) for stack in divisible}) != 1:
        return None, f"{no_room}, and its blocks are not alike"
    blocks, least = len(divisible[0].blocks), max(stack.least for stack in divisible)
    block_gib = sum(gib(stack.blocks[-1]) for stack in divisible)
    num_held = math.floor(blocks - (whole_gib - room_gib) / block_gib)
    if num_held <= least:
        return None, f"{no_room}, nor do {least + 1} of its {blocks} blocks"
    return Part(divisible, least, num_held, blocks), ""


def _room_gib(memory: MemoryPlan) -> float:
    """Memory of a device left beside the shards and the values saved for the backward pass."""
    shards = memory.parameters_gib + memory.gradients_gib + memory.optimizer_gib
    saved_gib = memory.activations_gib + memory.logits_gib + memory.context_gib
    return memory.capacity_gib * 0.9 - shards - saved_gib


def of_all_blocks(with_least: Timing, with_held: Timing, part: Part) -> Timing:
    """The time with all blocks, from that with the fewest and that with those that are held: each
    further block takes as long as the others."""
    times = (part.blocks - part.least) / (part.held - part.least)
    (tokens, squares, least_s), (_, _, held_s) = with_least.point, with_held.point
    seconds = max(held_s, least_s + times * (held_s - least_s))
    apart = math.hypot((times - 1) * least_s * with_least.noise, times * held_s * with_held.noise)
    return Timing((tokens, squares, seconds), apart / seconds)


def _places(subject: Subject) -> list[tuple[Any, list[int]]]:
    """Micro batches: one sample, and as many as fit, of the longest and of the shortest ones.
    Each is the samples of a step and the places of those that are taken."""
    store, layout = subject.store, subject.layout
    samples = samples_of_step(
        0, global_batch=min(SAMPLES, len(store)), num_samples=len(store), seed=subject.exp.seed
    )
    rows = layout.rows(store, samples)
    by_length = sorted(range(len(samples)), key=lambda at: (-rows.lengths[at], at))
    limit = min(subject.limit, len(samples))
    choices = [by_length[:size] for size in sorted({1, -(-limit // 2), limit})]
    if rows.lengths[by_length[-1]] < 0.7 * rows.lengths[by_length[0]]:
        choices.append(by_length[-limit:])
    return [(samples, sorted(places)) for places in choices]


def _timed(
    subject: Subject, chosen: tuple[Any, list[int]], part: Part | None, at_once: AtOnce
) -> Timing:
    """The mean time of a micro batch, forward and backward."""
    with_held = _timed_as_it_is(subject, chosen, at_once)
    if part is None:
        return with_held
    for stack in part.stacks:
        stack.cut(part.least)
    with_least = _timed_as_it_is(subject, chosen, at_once)
    for stack in part.stacks:
        stack.cut(part.held)
    return of_all_blocks(with_least, with_held, part)


def _timed_as_it_is(subject: Subject, chosen: tuple[Any, list[int]], at_once: AtOnce) -> Timing:
    """The time of a micro batch with the blocks that the networks have now."""
    engine, task = subject.engine, subject.task
    samples, places = chosen
    tensors = micro_batch(
        subject.store,
        samples,
        places,
        step=0,
        seed=subject.exp.seed,
        layout=subject.layout,
        draws=task.draws,
        transform=transform_of(task, seed=subject.exp.seed),
    )
    models = Models(
        {
            name: replace(
                model,
                forward=ForwardOfBase(model.module, model.module)
                if model.of_base
                else model.module,
                gradient_scale=1.0,
            )
            for name, model in engine.models.items()
        }
    )
    trained = [p for p in engine.module.parameters() if p.requires_grad]

    def run() -> None:
        for model in models.values():
            model.routing.begin_step()
        loss = task.loss(models, tensors).sum
        for model in models.values():
            loss = model.routing.objective(loss, factor=1.0)
        torch.autograd.grad(loss, trained, allow_unused=True)
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)

    run()  # kernels are chosen, memory is taken
    seconds, noise = mean_time(run, ready=at_once.ready)
    lines, length = tensors["input_ids"].shape
    squares = lines * length * length
    if not subject.layout.whole_rows:
        rows = subject.layout.rows(subject.store, samples[places])
        squares = sum(rows.squares or ())
    return Timing((float(lines * length), float(squares), seconds), noise)


def mean_time(
    run: Callable[[], None],
    *,
    ready: Callable[[], Callable[[], bool]] = lambda: lambda: True,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Mean seconds of a call, and the relative standard error of this mean.

    Calls go on while their times vary, for ``LONGEST_S`` and ``VARIED_CALLS``: a rank under a CPU
    quota computes at full speed for a part of each period, and not at all for the rest. Then
    ``ready`` is called once, and calls go on until what it returned is true.
    """
    began = last = clock()
    all_ready: Callable[[], bool] | None = None
    blocks: list[tuple[int, float]] = []
    calls = count = 0
    while True:
        run()
        now = clock()
        calls, count = calls + 1, count + 1
        if now - last >= BLOCK_S:
            blocks.append((count, now - last))
            count, last = 0, now
        elapsed, noise = now - began, _noise(blocks)
        steady = noise <= STEADY or (elapsed >= LONGEST_S and calls >= VARIED_CALLS)
        enough = (elapsed >= LEAST_S and calls >= 2 and steady) or elapsed >= MOST_S
        if all_ready is None and enough:
            all_ready = ready()
        if all_ready is not None and all_ready():
            return elapsed / calls, noise if math.isfinite(noise) else 0.0


def _noise(blocks: Sequence[tuple[int, float]]) -> float:
    """Relative standard error of the mean time of a call, from the differences between blocks."""
    if len(blocks) < 2:
        return math.inf
    times = [seconds / calls for calls, seconds in blocks]
    return statistics.stdev(times) / math.sqrt(len(times)) / statistics.fmean(times)
