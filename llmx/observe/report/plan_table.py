"""The plan as a person reads it, before a GPU is touched. Only rich, imported late.

``python -m llmx dry_run=true hardware=a100x2_v100x2`` prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

from llmx import text as human
from llmx.compose.task_rules import origin_of_batch, origin_of_lr, rollout_line
from llmx.config import (
    AdapterConfig,
    DataConfig,
    Experiment,
    ModelConfig,
    OptimConfig,
    TaskConfig,
    ZeroConfig,
)
from llmx.config.accelerators import ACCELERATORS
from llmx.config.fields import plain
from llmx.config.model_rules import added_tokens, whole_number
from llmx.config.optimizers import EMBEDDINGS, HEAD, layer_factor
from llmx.observe.page import Block, block, table
from llmx.observe.report.screen import open_console, print_blocks
from llmx.plan.by_device import checkpointing_by_device, checkpointing_on, in_words
from llmx.plan.choices import Choice
from llmx.plan.trace import Traces
from llmx.plan.types import (
    USABLE,
    HostPlan,
    HostStorage,
    MemoryPlan,
    Plan,
    RankPlan,
    StoragePlan,
    TimePlan,
)
from llmx.text import plural, printable

MEMORY_PARTS = (
    ("parameters", "parameters_gib"),
    ("gradients", "gradients_gib"),
    ("optimizer, master weights", "optimizer_gib"),
    ("activations, logits, loss", "activations_gib"),
    ("communication buckets", "buffers_gib"),
    ("update", "update_gib"),
    ("drawing samples", "drawing_gib"),
)
MAX_HOSTS = 8
SHOWN_STEPS = 1000
"""Steps whose time is shown where the number of steps is not known."""
FARTHEST_DAYS = 36_500
UNKNOWN = "unknown"


def print_plan(
    plan: Plan,
    exp: Experiment,
    *,
    command: str | None,
    run_dir: Path | None,
    stream: TextIO,
    width: int | None = None,
    traces: Traces | None = None,
    options: Sequence[Choice] = (),
    here: Mapping[str, Any] | None = None,
    copied: Sequence[tuple[str, str, str]] = (),
    overrides: Sequence[str] = (),
) -> None:
    """Print the whole plan: hosts, batch algebra, memory by part, RAM and disks, time, warnings and
    the exact command; then where the run directory lies.

    Args:
        options: what else would fit, as tables by micro batch.
        here: what this machine has now (``llmx.hardware.survey.space_facts``).
        copied: what ``launch.sync=rsync`` will copy to each other host (kind, path, size).
    """
    blocks: list[Block | None] = [
        block("heading", f"Plan of {exp.name or exp.model.name or 'the run'}"),
        hosts_table(plan),
        table(facts_rows(plan, exp, traces, overrides)),
    ]
    if plan.memory:
        blocks += [*memory_blocks(plan), *choice_tables(plan, options)]
    elif traces is not None and traces.problem:
        title = f"Predicted peak memory of one rank: not known ({traces.problem})"
        blocks.append(block("heading", title))
    blocks += [*storage_blocks(plan, here or {}), *time_blocks(plan, now=datetime.now())]
    blocks.append(block("list", plan.warnings))
    if command:
        head = block("heading", "Command (its secret: command.txt)")
        blocks += [head, block("text", f"{command.rstrip()}\n")]
    if copied:
        lines = [f"  {path}: {kind}, {size}" for kind, path, size in copied]
        head = block("heading", "Copied to each other host (launch.sync=rsync)")
        blocks += [head, block("text", "\n".join(lines))]
    last = f"Nothing was started (dry_run=true). Rendered in {run_dir}"
    if run_dir is None:
        last = "Nothing was started or written. run_dir=DIR keeps the files and shows the command."
    print_blocks(open_console(stream, width=width), [*blocks, block("text", last)])


def hosts_table(plan: Plan) -> Block | None:
    """One row a host: its ranks, devices, micro batches, accumulation and precision."""
    rows = []
    for index, host in enumerate(plan.hosts):
        ranks = [rank for rank in plan.ranks if rank.host == index]
        first_and_last = dict.fromkeys(str(rank.rank) for rank in (ranks[:1] + ranks[-1:]))
        counts = [len(plan.batch.sizes_of(rank.rank)) for rank in ranks]
        if len(set(counts)) == 1:
            counts = counts[:1]
        rows.append(
            [
                _host_name(host),
                "-".join(first_and_last) or "none",
                f"{len(ranks)}{human.TIMES}{host.device}",
                _micro_batches(ranks),
                " + ".join(map(str, counts)),
                plan.precision,
            ]
        )
    for host in plan.rollout_hosts:
        servers = f"{host.slots}{human.TIMES}{host.device}"
        rows.append([_host_name(host), "draws samples", servers, "", "", plan.precision])
    heads = ["host", "ranks", "device", "micro batch", "accumulation", "precision"]
    return table(rows, heads=heads, kinds=["name", "short", "short", "number", "number", "short"])


def facts_rows(
    plan: Plan, exp: Experiment, traces: Traces | None = None, overrides: Sequence[str] = ()
) -> list[tuple[str, str]]:
    """Facts of the whole run: precision and why, batch, steps, learning rate and what set it,
    model, ZeRO, transport."""
    accum = plan.grad_accum_dtype
    chosen = plan.chosen
    choice = f"{' '.join(chosen.words)}: {chosen.problem or chosen.reason}" if chosen else ""
    rows = [
        ("precision", f"{plan.precision}: {plan.precision_reason}"),
        ("batch", f"{batch_line(plan)} ({origin_of_batch(exp, overrides)})"),
        ("balance", balance_line(plan) if plan.balance is not None else ""),
        ("by device", "\n".join(device_lines(plan, exp))),
        ("steps", _steps_line(plan, exp.task)),
        ("lr", f"{_lr_line(exp.optim, exp.adapter)} ({origin_of_lr(exp, overrides)})"),
        ("model", _model_line(plan, exp.model, exp.adapter) + _reach(traces)),
        ("tokens", _tokens_line(exp.model, exp.adapter)),
        ("rollouts", rollout_line(exp)),
        ("rates", _rates_line(exp.optim, exp.adapter, exp.model)),
        ("zero", _zero_line(exp)),
        ("chosen", choice),
        ("gradients", f"summed over micro steps in {accum}" if accum else ""),
        ("attention", _attention_line(plan, exp.data)),
        ("launch", launch_line(plan)),
    ]
    return [(name, text) for name, text in rows if text]


def launch_line(plan: Plan) -> str:
    """The transport, and where rank 0 listens."""
    return f"{plan.transport}, rank 0 at {plan.master_addr}"


def batch_line(plan: Plan) -> str:
    """The batch algebra: ``(4 + 4 + 2 + 2) x 8 = 96 samples of 4,096 = ...``."""
    batch = plan.batch
    # Where micro steps differ, all samples of a rank.
    sizes = batch.micro_batches
    if batch.sizes:
        sizes = tuple(sum(batch.sizes_of(rank.rank)) for rank in plan.ranks)
    if len(sizes) <= 8:
        total = " + ".join(map(str, sizes))
    else:
        runs = [(size, len(list(run))) for size, run in groupby(sizes)]
        total = " + ".join(f"{length} ranks{human.TIMES}{size}" for size, length in runs)
    if len(sizes) > 1:
        total = f"({total})"
    steps = "" if batch.sizes else f"{human.TIMES}{batch.accumulation}"
    return (
        f"{total}{steps} = {batch.global_batch:,} samples "
        f"of {batch.seq_len:,} = {batch.tokens_per_step:,} tokens a step"
    )


def balance_line(plan: Plan) -> str:
    """What the samples of a step are shared out by; the predicted time says what that gains."""
    balance = plan.balance
    assert balance is not None
    if balance.pending:
        until_then = balance.source or "by the data sheets"
        return f"measured by the ranks at the start; until then {until_then}"
    return {
        "even": "evenly at the start (batch.rebalance)",
        "spec": "by the data sheets",
        "weights": "by batch.weights",
        "measured": "as measured",
    }[balance.method]


def device_lines(plan: Plan, exp: Experiment) -> list[str]:
    """Micro batch with its limit and activation checkpointing of each type of device, and what
    cannot differ between them; empty with one type."""
    names = list(dict.fromkeys(rank.device for rank in plan.ranks))
    if len(names) < 2:
        return []
    lines = []
    for name in names:
        ranks = [rank for rank in plan.ranks if rank.device == name]
        how = checkpointing_on(exp, name)
        recomputed = "nothing recomputed" if how == "none" else f"{how} activation checkpointing"
        size = max(rank.micro_batch for rank in ranks)
        lines.append(f"{name}: micro batch {size} ({_limited_by(plan, exp, ranks)}), {recomputed}")
    where = ", ".join(_offloaded(exp.zero)) or "none"
    alike = (
        f"offload ({where}), since DeepSpeed lays out and sums gradients by one setting of all "
        "ranks"
    )
    if exp.zero.stage == 3:
        alike += "; activation checkpointing, since at stage 3 all ranks gather together"
    return [*lines, f"all alike: {alike}"]


def _offloaded(zero: ZeroConfig) -> list[str]:
    parts = []
    if zero.offload_optimizer != "none":
        parts.append(f"optimizer on {zero.offload_optimizer}")
    if zero.offload_param != "none":
        parts.append(f"parameters on {zero.offload_param}")
    return parts


def _limited_by(plan: Plan, exp: Experiment, ranks: list[RankPlan]) -> str:
    """Name the limit of the micro batch on a type of device."""
    configured, size = exp.batch.micro_batch, max(rank.micro_batch for rank in ranks)
    if plan.balance is None:
        return f"batch.balance={exp.batch.balance}: one for all"
    limit = max(plan.balance.limits[rank.rank] for rank in ranks)
    if size < limit:
        return f"its share of the step; at most {limit}" + (
            " by memory" if limit < configured else " by batch.micro_batch"
        )
    return f"memory; batch.micro_batch={configured}" if limit < configured else "batch.micro_batch"


def _steps_line(plan: Plan, task: TaskConfig) -> str:
    if task.steps is not None:
        tokens = human.count(task.steps * plan.batch.tokens_per_step)
        return f"{task.steps:,}, {tokens} tokens in all"
    if task.epochs is not None:
        epochs = plural(task.epochs, "epoch")
        return f"{epochs}; steps follow from the number of samples"
    return "not set; give task.steps or task.epochs"


def _lr_line(optim: OptimConfig, adapter: AdapterConfig) -> str:
    """The peak learning rate and its schedule."""
    beside = adapter.kind != "none" and adapter.lr not in (None, optim.lr)
    peak = plain(optim.lr)
    if beside and adapter.lr is not None:
        peak = f"{plain(adapter.lr)} (adapter; {peak} beside it)"
    warm_up = "no warm-up"
    if optim.warmup_steps:
        warm_up = f"{plural(optim.warmup_steps, 'step')} of warm-up"
    elif optim.warmup_fraction and optim.warmup_steps is None:
        warm_up = f"warm-up {optim.warmup_fraction:.0%}"
    floor = "" if optim.schedule == "constant" else f" to {optim.min_lr_ratio:.0%}"
    return f"{peak}, {warm_up}, {optim.schedule}{floor}"


def _reach(traces: Traces | None) -> str:
    """What the adapter reaches, where experts are left out."""
    trace = next(iter(traces.found.values()), None) if traces else None
    return f". {trace.reach}" if trace is not None and trace.reach else ""


def _model_line(plan: Plan, model: ModelConfig, adapter: AdapterConfig) -> str:
    size = human.count(plan.num_parameters) if plan.num_parameters else "an unknown number of"
    start = "from scratch" if model.init == "scratch" else "pretrained"
    trained = "an unknown number"
    if plan.num_trained is not None:
        part = plan.num_trained / plan.num_parameters
        trained = f"{human.count(plan.num_trained)} ({part:.2%})"
    if adapter.kind == "none":
        line = f"{model.name or model.kind}, {size} parameters, {start}"
        return f"{line}, {trained} trained" if model.freeze else line
    how = f"{adapter.kind} of rank {adapter.rank}"
    return f"{model.name or model.kind}, {size} parameters, {trained} trained: {how}"


def _tokens_line(model: ModelConfig, adapter: AdapterConfig) -> str:
    """Tokens that the tokenizer gets in addition; empty where there are none."""
    added = added_tokens(model)
    if not added:
        return ""
    listed = ", ".join(added[:5]) + (", ..." if len(added) > 5 else "")
    line = f"{len(added)} added: {printable(listed)}"
    if adapter.kind == "none":
        return line
    return f"{line}; embedding and output head are trained whole beside the adapter"


def _rates_line(optim: OptimConfig, adapter: AdapterConfig, model: ModelConfig) -> str:
    """Learning rates of parts of the network; empty where there is one for all."""
    peak = optim.lr if adapter.lr is None else adapter.lr
    decay = optim.layer_decay
    count = whole_number(model.network, "num_hidden_layers", "n_layer")
    words = []
    if decay is not None and count is not None:
        places: dict[str, int | str] = {"embeddings": EMBEDDINGS, "layer 0": 0}
        places |= {f"layer {count - 1}": count - 1, "head": HEAD}
        words = [
            f"{name} {peak * layer_factor(decay, place, num_layers=count):.3g}"
            for name, place in places.items()
        ]
    elif decay is not None:
        words = [f"head {peak:.3g}, each layer below{human.TIMES}{decay:g}"]
    words += [f"{pattern}{human.TIMES}{scale:g}" for pattern, scale in optim.lr_scale.items()]
    return ", ".join(words)


def _zero_line(exp: Experiment) -> str:
    zero = exp.zero
    ways = checkpointing_by_device(exp) or {"": exp.model.activation_checkpointing}
    words = [f"stage {zero.stage}", *_offloaded(zero)]
    if zero.hpz_partition_size > 1:
        words.append(f"hpZ {zero.hpz_partition_size}")
    if zero.quantized_weights:
        words.append("qwZ")
    if zero.quantized_gradients:
        words.append("qgZ")
    if set(ways.values()) != {"none"}:
        words.append(
            f"activation checkpointing: {in_words(ways)}"
            if len(set(ways.values())) > 1
            else f"{in_words(ways)} activation checkpointing"
        )
    return ", ".join(words)


def _attention_line(plan: Plan, data: DataConfig) -> str:
    kinds = dict(plan.attention)
    listed = ", ".join(f"{way} ({name})" for name, way in kinds.items())
    rows = {
        "auto": "rows are packed where the model isolates them",
        "packed": "rows are packed",
        "padded": "each row in a line of its own",
    }[data.layout]
    is_uniform = len(set(kinds.values())) == 1
    return f"{next(iter(kinds.values())) if is_uniform else listed}; {rows}"


def memory_blocks(plan: Plan) -> list[Block | None]:
    """Title and table of the predicted memory; parts as rows, device types as columns: it stays
    narrow with many parts."""

    def row(name: str, value: Callable[[MemoryPlan], str | float]) -> list[str]:
        values = map(value, plan.memory)
        return [name, *(v if isinstance(v, str) else human.gib(v) for v in values)]

    rows = []
    for name, attribute in MEMORY_PARTS:
        sizes = [getattr(memory, attribute) for memory in plan.memory]
        if attribute == "drawing_gib" and not any(sizes):
            continue
        rows.append([name, *map(human.gib, sizes)])
    rows += [
        row(ACCELERATORS[plan.accelerator].context, lambda memory: memory.context_gib),
        [],
        row("total", lambda memory: memory.total_gib),
        row("device has", lambda memory: memory.capacity_gib or UNKNOWN),
    ]
    if any(memory.capacity_gib for memory in plan.memory):
        name = f"kept free ({1 - USABLE:.0%}: fragmentation)"
        rows.append(row(name, lambda memory: (1 - USABLE) * memory.capacity_gib or ""))
    rows.append(row("", verdict))
    if plan.storage is None:  # else RAM has a table of its own
        if any(memory.host_gib for memory in plan.memory):
            rows.append(row("host RAM", lambda memory: memory.host_gib))
        if any(memory.saves_host_gib for memory in plan.memory):
            rows.append(row("host RAM of saves", lambda memory: memory.saves_host_gib))
    title = "Predicted peak memory of one rank, GiB"
    return [block("heading", title), by_column([memory.device for memory in plan.memory], rows)]


def by_column(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Block | None:
    """A table with a column of numbers for each name, and a name for each row."""
    return table(rows, heads=["", *names], kinds=["name", *["number"] * len(names)])


def choice_tables(plan: Plan, options: Sequence[Choice]) -> list[Block | None]:
    """A table for each type of device: ZeRO option and activation checkpointing by rows, micro
    batches by columns; ``*`` is the plan."""
    blocks: list[Block | None] = []
    sizes = sorted({choice.micro_batch for choice in options})
    by_row: dict[tuple[str, str], dict[int, Choice]] = {}
    for choice in sorted(options, key=lambda choice: choice.complexity):
        by_row.setdefault((choice.zero, choice.checkpointing), {})[choice.micro_batch] = choice
    for memory in plan.memory if options else ():
        if not memory.capacity_gib:
            continue
        rows = [
            [*names, *(_cell(choices.get(size), memory.device) for size in sizes)]
            for names, choices in by_row.items()
        ]
        title = (
            f"Peak on {memory.device} ({human.gib(memory.capacity_gib)} GiB) by micro batch; "
            "! is too large, * is this plan"
        )
        heads = ["zero", "checkpointing", *map(str, sizes)]
        kinds = ["name", "short", *["number"] * len(sizes)]
        blocks += [block("heading", title), table(rows, heads=heads, kinds=kinds)]
    return blocks


def _cell(choice: Choice | None, device: str) -> str:
    """Memory of a choice on a type of device, with marks; empty without a choice."""
    if choice is None:
        return ""
    memory = next(part for part in choice.plan.memory if part.device == device)
    before, after = "* " if choice.chosen else "", "" if memory.fits else " !"
    return f"{before}{human.gib(memory.total_gib)}{after}"


VERDICTS = ("not checked", "does not fit", "fits")
"""What is said of a device's memory, the worst first."""


def verdict(memory: MemoryPlan) -> str:
    """Whether a rank fits on its device: one of ``VERDICTS``."""
    if memory.capacity_gib == 0:
        return "not checked"
    return "fits" if memory.fits else "does not fit"


def _host_name(host: HostPlan) -> str:
    if host.is_local:
        return host.name
    port = f":{host.ssh_port}" if host.ssh_port != 22 else ""
    address = f" ({host.address}{port})" if host.address != host.name or port else ""
    return host.name + address


def _micro_batches(ranks: list[RankPlan]) -> str:
    sizes = [rank.micro_batch for rank in ranks]
    if len(sizes) > 1 and len(set(sizes)) == 1:
        return f"{sizes[0]} each"
    return " + ".join(map(str, sizes))


def time_blocks(plan: Plan, *, now: datetime | None = None) -> list[Block | None]:
    """Title and rows of the predicted time; nothing where the plan has none."""
    if plan.time is None:
        return []
    return [block("heading", "Predicted time of a step"), table([*time_rows(plan, now=now)])]


def time_rows(plan: Plan, *, now: datetime | None = None) -> Iterator[tuple[str, str]]:
    """Name and value, one line each; with ``now`` also when the run would end."""
    time = plan.time
    assert time is not None
    if not time.step_s:
        yield "time", f"not known: {time.unknown}"
        return
    parts = ", ".join(_parts(time))
    if rollout := time.rollout:
        order = "at the same time" if rollout.overlaps else "one after the other"
        weights = f", weights {seconds(rollout.weights_s)}" if rollout.weights_s else ""
        yield (
            "time",
            (
                f"{seconds(time.step_s)}: drawing {seconds(rollout.draws_s)}, training "
                f"{seconds(rollout.trains_s)}{weights}; {order} (rollout.max_staleness)"
            ),
        )
        if rollout.drawing_idle:
            shares = [("training hosts", rollout.training_idle), *rollout.drawing_idle]
            texts = [
                f"{name} {human.percent(share, decimals=0)}"
                for name, share in shares[: MAX_HOSTS + 1]
            ]
            yield "idle", f"{', '.join(texts)} of a step"
        yield "training", parts
    else:
        yield "time", f"{seconds(time.step_s)}: {parts}"
        if plan.drawn is not None:
            yield "drawing", "not known: the architecture of the model is not known"
    yield "bottleneck", time.bottleneck
    mfu = ", ".join(f"{name} {human.percent(part)}" for name, part in time.mfu)
    yield "speed", f"{time.tokens_per_s:,.0f} tokens/s{f'; MFU {mfu}' if mfu else ''}"
    if max(time.idle, default=0.0) >= 0.005:
        yield "waiting", f"of a step: {waiting(plan, time.idle)}"
    if time.even_step_s:
        gain = time.step_s / time.even_step_s
        yield "even split", f"{seconds(time.even_step_s)}; this one takes {gain:.2f} of it"
    if time.exchanges:
        sent = (
            f"{exchange.name} {exchange.gb:.3g} GB"
            if exchange.gb >= 1
            else f"{exchange.name} {1000 * exchange.gb:.3g} MB"
            for exchange in time.exchanges
        )
        yield "sent", f"by each rank in a step: {', '.join(sent)}"
    yield "whole run", whole_run(plan, now=now)
    if time.sources:
        yield "from", f"{'; '.join(time.sources)} (docs/planner.md)"


def whole_run(plan: Plan, *, now: datetime | None = None) -> str:
    """Hours, device hours, cost, and the date of the end; without evaluation and saves."""
    time = plan.time
    assert time is not None
    devices = "GPU" if plan.on_gpus else "rank"
    if not plan.total_steps:
        of_some = human.duration(SHOWN_STEPS * time.step_s)
        return (
            f"{of_some} per {SHOWN_STEPS:,} steps (number of steps unknown until the data is read)"
        )
    hours = time.device_hours
    words = [
        f"{plural(plan.total_steps, 'step')} in {human.duration(3600 * time.hours)}",
        f"{hours:,.0f} {devices} hours" if hours >= 100 else f"{hours:.3g} {devices} hours",
    ]
    if time.cost is not None:
        words.append(f"cost {time.cost:,.2f}")
    if now is not None and time.hours < 24 * FARTHEST_DAYS:
        end = now + timedelta(hours=time.hours)
        words.append(f"ends {end:%a %d %b %Y %H:%M} if started now")
    return f"{', '.join(words)}; without evaluation and saves"


def waiting(plan: Plan, idle: Sequence[float]) -> str:
    """The longest that a rank of each host waits for slower ones, from the idle share of each."""
    longest: dict[str, float] = {}
    for rank, share in zip(plan.ranks, idle, strict=True):
        name = f"{plan.hosts[rank.host].name} ({rank.device})"
        longest[name] = max(share, longest.get(name, 0.0))
    texts = [f"{name} {human.percent(share)}" for name, share in longest.items()]
    if len(texts) > MAX_HOSTS:
        texts = [*texts[:MAX_HOSTS], "..."]
    return ", ".join(texts)


def seconds(value: float) -> str:
    """``12.3 ms``, ``4.56 s``, ``1 min 20 s``: three digits."""
    if value < 1:
        return f"{1000 * value:.3g} ms"
    return f"{value:.3g} s" if value < 100 else human.duration(value)


def _parts(time: TimePlan) -> Iterator[str]:
    yield f"computing {seconds(time.computing_s)}"
    if time.communication_s:
        hidden = time.communication_s - time.exposed_s
        beside = f" and {seconds(hidden)} behind computing" if hidden > 0 else ""
        yield f"communication {seconds(time.exposed_s)}{beside}"
    if time.host_s:
        yield f"offload {seconds(time.host_s)}"
    if time.update_s:
        yield f"update {seconds(time.update_s)}"


RAM_PARTS = (
    ("RAM: processes", "processes_bytes"),
    ("RAM: loading", "loading_bytes"),
    ("RAM: training", "training_bytes"),
    ("RAM: offload", "offload_bytes"),
    ("RAM: weights for rollout servers", "push_bytes"),
)


def storage_blocks(plan: Plan, here: Mapping[str, Any]) -> list[Block | None]:
    """RAM and disk of each host, those that are alike in one column; nothing where the plan has no
    storage. What no host needs is left out.

    ``here``: what this machine has now; it stands below what it needs.
    """
    storage = plan.storage
    if storage is None:
        return []
    hosts = storage.hosts
    local = {host.name for host in plan.hosts if host.is_local}

    def needed(name: str, attribute: str, *, always: bool = False) -> list[list[str]]:
        values = [getattr(host, attribute) for host in hosts]
        if not always and all(value == 0 for value in values):
            return []
        return [[name, *(UNKNOWN if size is None else human.size(size) for size in values)]]

    def available(name: str, key: str) -> list[list[str]]:
        is_local = [bool(local & set(host.hosts)) for host in hosts]
        if here.get(key) is None or not any(is_local):
            return []
        return [[name, *(human.size(here[key]) if is_here else "" for is_here in is_local)]]

    copies = "RAM: copies for saves"
    if all(host.saves_optional for host in hosts):
        copies += ", if free"
    limit = storage.checkpoints_at_once
    rows = [row for name, attribute in RAM_PARTS for row in needed(name, attribute)]
    rows += needed("RAM at most", "ram_bytes", always=True)
    rows += needed(copies, "saves_bytes")
    if any(host.ram_has_bytes for host in hosts):
        rows += needed("RAM of the host", "ram_has_bytes", always=True)
    rows += available("RAM available now", "ram_available_bytes")
    rows.append([])
    rows += needed("NVMe", "nvme_bytes")
    rows += needed("disk: one checkpoint", "checkpoint_bytes", always=True)
    at_once = "no limit" if limit is None else str(limit)
    rows.append(["disk: checkpoints at once", *[at_once] * len(hosts)])
    rows += needed("disk: model/", "model_bytes")
    rows.append(["disk at most", *(_disk(storage, host) for host in hosts)])
    rows += available("disk free now", "free_bytes")
    rows += needed("disk: weights of the Hub", "download_bytes")
    rows += needed("/dev/shm without P2P", "shm_bytes")
    title = "Each host, beside device memory"
    return [block("heading", title), by_column([host.names for host in hosts], rows)]


def _disk(storage: StoragePlan, host: HostStorage) -> str:
    if host.checkpoint_bytes is None or host.model_bytes is None:
        return UNKNOWN
    max_bytes = storage.disk_bytes(host.checkpoint_bytes, host.model_bytes)
    return "no limit" if max_bytes is None else human.size(max_bytes)
