"""What each rank takes for a micro batch, measured at the start, and the split that follows.

Each rank passes a few micro batches of real samples forward and backward, with the task's loss and
the engine's own networks, and without communication: gradients are computed and dropped
(``torch.autograd.grad`` runs none of DeepSpeed's hooks; at ZeRO-3 every rank holds the whole model
meanwhile). ``balance.json`` keeps the speeds for every later start of the run; a cache on each host
keeps them for other runs of the same model there. docs/unequal.md.

Tried by ``python -m pytest -m deepspeed tests/integration/test_train_balance.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from llmx.collectives import all_gather
from llmx.config import Experiment, to_dict
from llmx.data.order import samples_of_step
from llmx.data.store.spec import cache_directory
from llmx.models.model import ForwardOfBase, Models
from llmx.plan.balance import FS, LEAST_GAIN, balanced_batch, fit_speed, sample_fs, step_fs
from llmx.plan.types import BalancePlan, Plan, RankSpeed
from llmx.run.rundir import RunDir, read_json, write_json
from llmx.tasks import Task
from llmx.text import plural
from llmx.train.batches import Layout, micro_batch
from llmx.train.engine.build import Engine, whole_weights
from llmx.train.step import random_state, seed_step, set_random_state, transform_of

FORMAT = 1
LEAST_S = 0.4
"""Of each micro batch: several periods of a CPU quota, and more than a clock's noise."""
MOST_S = 20.0
SAMPLES = 256
"""Samples that are looked at for long and short ones."""

Point = tuple[float, float, float]
"""Tokens with padding, squared tokens, seconds."""


@dataclass(frozen=True)
class Subject:
    """What is measured, on this rank."""

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
    mine = _read(run_dir, plan) if subject.rank == 0 else None
    speeds, known = all_gather((mine, mine is not None), group=group)[0]
    if not known:
        began = time.perf_counter()
        speeds, problem, cached = _speeds(subject, group=group)
        if problem:
            log(f"balance: not measured ({problem}); samples are shared out by the data sheets")
        elif not cached:
            log(f"balance: measured in {time.perf_counter() - began:.1f} s")
    balance = replace(plan.balance, speeds=tuple(speeds or plan.balance.speeds), pending=False)
    balanced = with_balance(plan, balance)
    if subject.rank == 0 and not known:
        write_json(run_dir.balance, _record(balanced))
    if subject.rank == 0:
        write_json(run_dir.plan, balanced.to_dict())
    log(f"balance: {described(balanced)}")
    return balanced


def with_balance(plan: Plan, balance: BalancePlan) -> Plan:
    """The plan with these speeds, and the micro batches that follow from them."""
    batch = balanced_batch(plan.batch.global_batch, balance, seq_len=plan.batch.seq_len)
    ranks = tuple(replace(rank, micro_batch=batch.micro_batches[rank.rank]) for rank in plan.ranks)
    return replace(plan, batch=batch, balance=balance, ranks=ranks)


def described(plan: Plan) -> str:
    """Speed and micro batches, a host and device type each, on one line."""
    assert plan.balance is not None
    found: dict[str, None] = {}
    for rank, speed in zip(plan.ranks, plan.balance.speeds, strict=True):
        sizes = plan.batch.sizes_of(rank.rank)
        tokens_per_s = plan.batch.seq_len * FS / sample_fs(speed, plan.batch.seq_len)
        found[
            f"{plan.hosts[rank.host].name} ({rank.device}) {tokens_per_s:,.0f} tokens/s, "
            f"{plural(sum(sizes), 'sample')} in {plural(len(sizes), 'micro step')}"
        ] = None
    shown = list(found)
    return "; ".join(shown[:8]) + ("; ..." if len(shown) > 8 else "")


def _identity(plan: Plan) -> dict[str, Any]:
    """What the speeds of a run are for; values of JSON."""
    assert plan.balance is not None
    return {
        "format": FORMAT,
        "devices": [rank.device for rank in plan.ranks],
        "seq_len": plan.batch.seq_len,
        "precision": plan.precision,
        "limits": list(plan.balance.limits),
        "same_steps": plan.balance.same_steps,
    }


def _record(plan: Plan) -> dict[str, Any]:
    assert plan.balance is not None
    sizes = [list(plan.batch.sizes_of(rank.rank)) for rank in plan.ranks]
    speeds = [asdict(speed) for speed in plan.balance.speeds]
    return {**_identity(plan), "speeds": speeds, "sizes": sizes, "time": time.time()}


def _read(run_dir: RunDir, plan: Plan) -> list[RankSpeed] | None:
    """The speeds of ``balance.json``, where it is of these ranks."""
    try:
        found = read_json(run_dir.balance)
        speeds = [RankSpeed(**speed) for speed in found["speeds"]]
        same = all(found.get(key) == value for key, value in _identity(plan).items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return speeds if same and len(speeds) == plan.world_size else None


def _speeds(subject: Subject, *, group: Any) -> tuple[list[RankSpeed] | None, str, bool]:
    """Speeds by rank, from the caches of all hosts or measured now; or why there are none.
    Collective."""
    cache = cache_directory(subject.exp.data) / "speeds" / f"{_key(subject)}.json"
    mine: RankSpeed | None = None
    with contextlib.suppress(OSError, ValueError, TypeError):
        mine = RankSpeed(**read_json(cache))
    found = all_gather(mine, group=group)
    known = [speed for speed in found if speed is not None]
    if len(known) == len(found):
        return _evened(subject.plan, known), "", True
    points, problem = measure(subject)
    table = all_gather((points, problem), group=group)
    problems = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(table) if text]
    if problems:
        return None, problems[0], False
    ranks = subject.plan.ranks
    # One fit for all ranks of a device type on a host: they are alike. By rank 0, for all.
    fits: dict[tuple[int, str], RankSpeed] = {}
    for rank in ranks:
        place = (rank.host, rank.device)
        if subject.rank == 0 and place not in fits:
            alike = [r.rank for r in ranks if (r.host, r.device) == place]
            fits[place] = fit_speed([point for one in alike for point in table[one][0]])
    fits = all_gather(fits, group=group)[0]
    own = ranks[subject.rank]
    with contextlib.suppress(OSError):  # the next run measures again
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_json(cache, asdict(fits[own.host, own.device]))
    return _evened(subject.plan, [fits[rank.host, rank.device] for rank in ranks]), "", False


def _evened(plan: Plan, speeds: list[RankSpeed]) -> list[RankSpeed]:
    """The same speed for all, where another split than the even one would hardly be faster."""
    assert plan.balance is not None
    count = len(speeds)
    mean = RankSpeed(
        sum(speed.fixed_fs for speed in speeds) // count,
        sum(speed.token_fs for speed in speeds) // count,
        sum(speed.square_fs for speed in speeds) // count,
    )
    whole, same = plan.batch, plan.balance.same_steps
    times = []
    for assumed in (speeds, [mean] * count):
        balance = replace(plan.balance, speeds=tuple(assumed))
        found = balanced_batch(whole.global_batch, balance, seq_len=whole.seq_len)
        sizes = tuple(found.sizes_of(rank) for rank in range(count))
        times.append(step_fs(sizes, speeds, whole.seq_len, same_steps=same))
    return speeds if times[0] <= (1 - LEAST_GAIN) * times[1] else [mean] * count


def _key(subject: Subject) -> str:
    """Of all that a speed depends on, on this host."""
    exp, plan, engine = subject.exp, subject.plan, subject.engine
    values = to_dict(exp)
    task = {key: value for key, value in values["task"].items() if key in ("kind", "options")}
    own = plan.ranks[subject.rank]
    parts = {
        "host": socket.gethostname(),
        "device": own.device,
        "name": torch.cuda.get_device_name() if plan.accelerator == "cuda" else "cpu",
        "ranks": sum(rank.host == own.host for rank in plan.ranks),
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


def measure(subject: Subject) -> tuple[list[Point], str]:
    """Times of a few micro batches on this rank; or why there are none. Collective at ZeRO-3."""
    task, engine = subject.task, subject.engine
    if task.generates or task.joint:
        kind = "generates its samples" if task.generates else "has one loss for all of a step"
        return [], f"task={task.name} {kind}"
    if problem := _no_room(subject):
        return [], problem
    state = random_state()
    before = [model.gradient_scale for model in engine.models.values()]
    points: list[Point] = []
    problem = ""
    with whole_weights(engine):
        try:
            seed_step(subject.exp.seed, 0, subject.rank)
            points = [_timed(subject, places) for places in _places(subject)]
        except Exception as error:  # the run itself may still fit, and says so if it does not
            problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    set_random_state(state)
    for model, scale in zip(engine.models.values(), before, strict=True):
        model.gradient_scale = scale
        model.routing.begin_step()
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return points, problem


def _no_room(subject: Subject) -> str:
    """Why ZeRO-3 cannot hold the model whole on a device; empty where it can, as far as is known.
    The same on every rank."""
    plan = subject.plan
    if subject.engine.stage != 3:
        return ""
    of_each = torch.finfo(subject.engine.dtype).bits // 8
    whole_gib = 2 * plan.num_parameters * of_each / 2**30  # weights and their gradients
    for memory in plan.memory:
        room = memory.capacity_gib * 0.9 - memory.activations_gib - memory.logits_gib
        if memory.capacity_gib and whole_gib + memory.context_gib > room:
            return f"the whole model has no room on a {memory.device} beside its activations"
    return ""


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
    found = [by_length[:size] for size in sorted({1, -(-limit // 2), limit})]
    if rows.lengths[by_length[-1]] < 0.7 * rows.lengths[by_length[0]]:
        found.append(by_length[-limit:])
    return [(samples, sorted(places)) for places in found]


def _timed(subject: Subject, chosen: tuple[Any, list[int]]) -> Point:
    """The mean time of a micro batch, forward and backward."""
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
    count, began = 0, time.perf_counter()
    while True:
        run()
        count += 1
        elapsed = time.perf_counter() - began
        if (elapsed >= LEAST_S and count >= 2) or elapsed >= MOST_S:
            break
    lines, length = tensors["input_ids"].shape
    squares = lines * length * length
    if not subject.layout.whole_rows:
        rows = subject.layout.rows(subject.store, samples[places])
        squares = sum(rows.squares or ())
    return float(lines * length), float(squares), elapsed / count
