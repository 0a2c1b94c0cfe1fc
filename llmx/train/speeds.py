"""The speed of each rank, measured at the start, and the split of a step that follows from it.

Each rank passes a few micro batches of real samples forward and backward, with the task's loss and
the engine's own networks, and without communication: gradients are computed and dropped
(``torch.autograd.grad`` runs none of DeepSpeed's hooks; at ZeRO-3 every rank holds the whole model
meanwhile). Where that cannot be done it multiplies matrices instead. ``balance.json`` keeps the
speeds for every later start of the run. docs/unequal.md.

Tried by ``python -m pytest -m deepspeed tests/integration/test_train_balance.py``.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from llmx.collectives import all_gather
from llmx.data.order import samples_of_step
from llmx.models.flops import ModelFlops, model_flops
from llmx.models.model import ForwardOfBase, Models
from llmx.models.parameters import whole_bytes, whole_shape
from llmx.plan.balance import FS, evened, fit_speed, identity, is_of, sample_fs, with_balance
from llmx.plan.types import Plan, RankSpeed
from llmx.run.rundir import read_json, write_json
from llmx.tasks import JointTask, OnlineTask, Task
from llmx.text import plural
from llmx.train.batches import micro_batch
from llmx.train.engine.build import Engine, free_bytes, whole_weights
from llmx.train.step import random_state, seed_step, set_random_state, transform_of
from llmx.train.step_times import Products, synchronize

if TYPE_CHECKING:
    from llmx.train.session import Session

BLOCK_S = 0.1
"""Shortest block of calls that are timed together: the period of a CPU quota in Linux."""
LEAST_BLOCKS = 4
"""Fewest blocks of a timing."""
LONGEST_S = 1.6
"""Longest timing of what varies: under a quota some calls take the whole rest of a period."""
MOST_S = 20.0
"""A further call is not begun after so long."""
STEADY = 0.01
"""A mean with such a relative standard error is known well enough."""
SAMPLES = 256
"""Samples that are looked at for long and short ones."""
MOST_TIMED = 4
"""Micro batches that a rank times: one sample, half, all and short ones."""
LINK_BYTES = 1 << 24
"""Size of the exchange that is timed."""
FORWARD_PART = 1 / 3
"""Part of the operations of training that the forward pass of a frozen model takes."""


class Timing(NamedTuple):
    """The measured time of one micro batch."""

    tokens: float
    """Tokens with padding."""
    squares: float
    """Squared tokens."""
    seconds: float
    noise: float
    """Relative standard error of ``seconds``."""


@dataclass(frozen=True)
class Change:
    """A change of the split after a step."""

    step: int
    speeds: tuple[RankSpeed, ...]


@dataclass(frozen=True)
class Record:
    """The content of ``balance.json``."""

    speeds: tuple[RankSpeed, ...]
    micro_step_fs: int | None
    changes: tuple[Change, ...]
    """Changes of the split (``batch.rebalance``), by step."""


def measure_speeds(session: Session) -> None:
    """Share the plan out by what the ranks measure; leave it as it is, where it says otherwise.

    Collective. What was measured for this run before is taken again, so that a resumed run trains
    the same micro batches.
    """
    plan, balance = session.plan, session.plan.balance
    if balance is None or balance.method != "measured":
        return
    recorded = read_record(session)
    balance = replace(balance, pending=False, source="")
    if recorded is not None:
        micro_step_fs = recorded.micro_step_fs
        balance = replace(balance, speeds=recorded.speeds, micro_step_fs=micro_step_fs)
    else:
        speeds, noise = _measured_speeds(session)
        balance = replace(balance, speeds=speeds, micro_step_fs=_micro_step_fs(session))
        balance = evened(plan, balance, noise=noise)
    session.plan = with_balance(plan, balance)
    if session.rank == 0:
        if recorded is None:
            write_json(session.run_dir.balance, record(session.plan))
        write_json(session.run_dir.plan, session.plan.to_dict())
    session.log(f"balance: {described(session.plan)}")


def described(plan: Plan) -> str:
    """Speed and micro batches, a host and device type each, on one line.

    Speeds that are not measured are proportions, and are left out.
    """
    assert plan.balance is not None
    lines: list[str] = []
    for rank, speed in zip(plan.ranks, plan.balance.speeds, strict=True):
        sizes = plan.batch.sizes_of(rank.rank)
        rate = ""
        if plan.balance.method == "measured":
            tokens_per_s = plan.batch.seq_len * FS / sample_fs(speed, plan.batch.seq_len)
            rate = f"{tokens_per_s:,.0f} tokens/s, "
        lines.append(
            f"{plan.hosts[rank.host].name} ({rank.device}) {rate}"
            f"{plural(sum(sizes), 'sample')} in {plural(len(sizes), 'micro step')}"
        )
    unique = list(dict.fromkeys(lines))
    return "; ".join(unique[:8]) + ("; ..." if len(unique) > 8 else "")


def record(plan: Plan) -> dict[str, Any]:
    """``balance.json`` of a balanced plan."""
    assert plan.balance is not None
    return {
        **identity(plan),
        "speeds": [asdict(speed) for speed in plan.balance.speeds],
        "sizes": [list(plan.batch.sizes_of(rank)) for rank in range(plan.world_size)],
        "micro_step_fs": plan.balance.micro_step_fs,
        "time": time.time(),
    }


def read_record(session: Session) -> Record | None:
    """``balance.json`` as rank 0 reads it; None where there is none of these ranks. Collective."""
    recorded: Record | None = None
    plan = session.plan
    if session.rank == 0:
        try:
            values = read_json(session.run_dir.balance)
            changes = [
                Change(change["step"], _speeds_of(change)) for change in values.get("changes", ())
            ]
            by_step = tuple(sorted(changes, key=lambda change: change.step))
            recorded = Record(_speeds_of(values), values.get("micro_step_fs"), by_step)
            if not is_of(values, plan) or len(recorded.speeds) != plan.world_size:
                recorded = None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            recorded = None
    return all_gather(recorded, group=session.consensus.group)[0]


def _speeds_of(values: dict[str, Any]) -> tuple[RankSpeed, ...]:
    return tuple(RankSpeed(**speed) for speed in values["speeds"])


def _measured_speeds(session: Session) -> tuple[tuple[RankSpeed, ...], float]:
    """The speed of every rank, and the largest relative error of one. Collective."""
    began, group = time.perf_counter(), session.consensus.group
    by, table = "", list[list[Timing]]()
    if not (problem := _no_micro_batches(session)):
        with _whole_networks(session):
            problem, table = time_together(_micro_batches(session), group=group)
    if problem:
        by = f" by matrix products ({problem})"
        failure, table = time_together(_products(session), group=group)
        if failure:
            raise RuntimeError(f"batch.balance=measured: {failure}")
    session.log(f"balance: measured{by} in {time.perf_counter() - began:.1f} s")
    # One fit for all ranks of a device type on a host: they are alike. By rank 0, for all.
    places = [(rank.host, rank.device) for rank in session.plan.ranks]
    fits: dict[tuple[int, str], tuple[RankSpeed, float]] = {}
    if session.rank == 0:
        for place in set(places):
            alike = [
                timing
                for timed_place, timings in zip(places, table, strict=True)
                for timing in timings
                if timed_place == place
            ]
            speed = fit_speed([(timing.tokens, timing.squares, timing.seconds) for timing in alike])
            fits[place] = speed, statistics.fmean(timing.noise for timing in alike)
    fits = all_gather(fits, group=group)[0]
    return tuple(fits[place][0] for place in places), max(noise for _, noise in fits.values())


def no_splits(task: Task) -> str:
    """The reason why the time of the task's micro batches says nothing about a split; may be
    empty."""
    if isinstance(task, OnlineTask):
        return f"task={task.name} generates its samples"
    if isinstance(task, JointTask):
        return f"task={task.name} has a joint loss over the step"
    return ""


def _no_micro_batches(session: Session) -> str:
    """The reason why micro batches cannot be timed; empty where they can. Collective."""
    engine = session.engine
    if reason := no_splits(session.task):
        return reason
    if engine.stage == 3:
        needed = sum((1 + p.requires_grad) * whole_bytes(p) for p in engine.module.parameters())
        if 2 * needed > min(all_gather(free_bytes(engine.device), group=session.consensus.group)):
            return "the whole model with its gradients takes over half of the free memory"
    return ""


def _micro_step_fs(session: Session) -> int | None:
    """The time of the exchanges in each micro step, by that of an exchange of some megabytes;
    None where they meet once a step. Collective.

    At stage 2 gradients are summed over all ranks in every micro step; at stage 3 weights are
    gathered twice and gradients scattered, each of which moves half as much.
    """
    engine, plan = session.engine, session.plan
    assert plan.balance is not None
    if not plan.balance.same_steps or plan.world_size == 1:
        return None

    values = torch.zeros(LINK_BYTES // 4, device=engine.device)
    torch.distributed.all_reduce(values[:1024])  # connections are made
    synchronize(engine.device)
    began = time.perf_counter()
    torch.distributed.all_reduce(values)
    synchronize(engine.device)
    slowest_s = max(all_gather(time.perf_counter() - began, group=session.consensus.group))
    size = torch.finfo(engine.dtype).bits // 8
    parameters = list(engine.module.parameters())
    moved = float(sum(math.prod(whole_shape(p)) for p in parameters if p.requires_grad))
    if engine.stage == 3:
        moved = sum(math.prod(whole_shape(p)) for p in parameters) + moved / 2
    return round(slowest_s / LINK_BYTES * moved * size * FS)


# --- Timing --------------------------------------------------------------------------------------


class Job(NamedTuple):
    """Work that is timed again and again."""

    run: Callable[[], None]
    tokens: float
    squares: float


def time_together(jobs: Iterator[Job], *, group: Any) -> tuple[str, list[list[Timing]]]:
    """Time the jobs of all ranks, at most ``MOST_TIMED`` each; returns the first problem of any
    rank, and the timings of each. Collective.

    All ranks time their jobs at the same time: a rank that knows the time of one goes on with it
    until the others do. What slows all of them for a while then counts for all alike. And ranks of
    one host have each other's load on its memory, its buses and its power, as in training.
    """
    jobs_left, problem, timings = MOST_TIMED, "", list[Timing]()

    def ready() -> Callable[[], bool]:
        """Tell the others that this rank knows its time. Returns whether all of them do."""
        nonlocal jobs_left
        jobs_left -= 1
        work = torch.distributed.barrier(group=group, async_op=True)
        return work.is_completed  # type: ignore[no-any-return]

    try:
        for job in jobs:
            job.run()  # kernels are chosen, memory is taken
            timings.append(Timing(job.tokens, job.squares, *mean_time(job.run, ready=ready)))
    except Exception as error:  # the run itself may still fit, and says so if it does not
        problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    while jobs_left:  # the others may have more to time, and do not wait for this rank
        ready()
    table = all_gather((timings, problem), group=group)
    problems = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(table) if text]
    return next(iter(problems), ""), [timings for timings, _ in table]


def mean_time(
    run: Callable[[], None],
    *,
    ready: Callable[[], Callable[[], bool]] = lambda: lambda: True,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Mean seconds of a call, and the relative standard error of this mean.

    Calls go on while their times vary, for ``LONGEST_S``: a rank under a CPU quota computes at full
    speed for a part of each period, and not at all for the rest. Then ``ready`` is called once, and
    calls go on until what it returned is true.
    """
    began, calls = clock(), 0
    means: list[float] = []
    """Mean seconds of a call in each block."""
    all_ready: Callable[[], bool] | None = None
    while all_ready is None or not all_ready():
        block_began, count = clock(), 0
        while clock() - block_began < BLOCK_S:
            run()
            count += 1
        calls += count
        means.append((clock() - block_began) / count)
        elapsed, noise = clock() - began, 0.0
        if len(means) > 1:
            noise = statistics.stdev(means) / math.sqrt(len(means)) / statistics.fmean(means)
        steady = len(means) >= LEAST_BLOCKS and (noise <= STEADY or elapsed >= LONGEST_S)
        if all_ready is None and (steady or elapsed >= MOST_S):
            all_ready = ready()
    return elapsed / calls, noise


def _products(session: Session) -> Iterator[Job]:
    """Matrix products, as so many tokens of rows of the run's length as take as many operations."""
    engine, seq_len = session.engine, session.plan.batch.seq_len
    products = products_of(engine)
    counts = {"tokens": seq_len, "target_tokens": seq_len, "square_tokens": seq_len**2}
    of_row = sum(part * sizes.of_step(**counts) for sizes, part in network_flops(engine))
    yield Job(products.run, products.flops / of_row * seq_len, 0.0)


def products_of(engine: Engine) -> Products:
    """Matrix products about as wide as the model."""
    return Products(engine.device, engine.dtype, width=getattr(engine.config, "hidden_size", 0))


def network_flops(engine: Engine) -> list[tuple[ModelFlops, float]]:
    """The sizes of each network, and the part of the operations of training that it takes."""
    return [
        (
            model_flops(model.module, causal=model.attention.causal),
            1.0 if model.spec.trained else FORWARD_PART,
        )
        for model in engine.models.values()
    ]


@contextlib.contextmanager
def _whole_networks(session: Session) -> Iterator[None]:
    """Inside, every rank can pass its networks forward and backward alone. Afterwards the random
    numbers and the peak of memory are as if nothing had been. Collective."""
    engine, state = session.engine, random_state()
    with whole_weights(engine):
        seed_step(session.exp.seed, 0, session.rank)
        yield
    set_random_state(state)
    for model in engine.models.values():
        model.routing.begin_step()
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _micro_batches(session: Session) -> Iterator[Job]:
    """Micro batches of one sample, and of as many as fit, of the longest and the shortest ones."""
    store, layout = session.train_store, session.layout
    assert session.plan.balance is not None
    samples = samples_of_step(
        0, global_batch=min(SAMPLES, len(store)), num_samples=len(store), seed=session.exp.seed
    )
    rows = layout.rows(store, samples)
    by_length = sorted(range(len(samples)), key=lambda at: (-rows.lengths[at], at))
    limit = min(session.plan.balance.limits[session.rank], len(samples))
    choices = [by_length[:size] for size in sorted({1, -(-limit // 2), limit})]
    if rows.lengths[by_length[-1]] < 0.7 * rows.lengths[by_length[0]]:
        choices.append(by_length[-limit:])
    for places in choices:
        yield _micro_batch(session, samples, sorted(places))


def _micro_batch(session: Session, samples: Any, places: list[int]) -> Job:
    """The forward and backward pass of the samples at these places."""
    engine, task = session.engine, session.task
    tensors = micro_batch(
        session.train_store,
        samples,
        places,
        step=0,
        seed=session.exp.seed,
        layout=session.layout,
        draws=task.draws,
        transform=transform_of(task, seed=session.exp.seed),
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
        synchronize(engine.device)

    lines, length = tensors["input_ids"].shape
    squares = lines * length * length
    if not session.layout.whole_rows:
        squares = sum(session.layout.rows(session.train_store, samples[places]).squares or ())
    return Job(run, float(lines * length), float(squares))
