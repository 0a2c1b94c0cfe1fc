"""The plan as a person reads it, before a GPU is touched. Only rich, imported late.

``python -m llmx dry_run=true hardware=a100x2_v100x2`` prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

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
from llmx.config.model_rules import added_tokens
from llmx.config.optimizers import EMBEDDINGS, HEAD, layer_factor
from llmx.observe.report.screen import columns_table, open_console, pairs_table
from llmx.plan.balance import against_even
from llmx.plan.by_device import checkpointing_by_device, checkpointing_on, in_words
from llmx.plan.choices import Choice
from llmx.plan.geometry import model_geometry
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

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

MEMORY_PARTS = (
    ("parameters", "parameters_gib"),
    ("gradients", "gradients_gib"),
    ("optimizer, master weights", "optimizer_gib"),
    ("activations", "activations_gib"),
    ("logits, loss", "logits_gib"),
    ("communication buckets", "buffers_gib"),
    ("update", "update_gib"),
    ("drawing samples", "drawing_gib"),
)
MAX_HOSTS = 8
SHOWN_STEPS = 1000
"""Where the number of steps is not known."""
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
    """Print the whole plan to ``stream``, and where the run directory lies, where it is kept; with
    ``options`` also what else would fit, with ``here`` what this machine has now. ``copied``: what
    ``launch.sync=rsync`` will copy to each other host (kind, path, size)."""
    from rich.text import Text

    console = open_console(stream, width=width)
    parts = render_plan(
        plan, exp, command, traces=traces, options=options, here=here, overrides=overrides
    )
    for part in parts:
        # Text is never wrapped by us: the command is there to be copied.
        console.print(part, soft_wrap=isinstance(part, Text))
    if copied:
        console.print(Text("Copied to each other host (launch.sync=rsync)", style="bold"))
        for kind, path, size in copied:
            console.print(Text(f"  {printable(path)}: {kind}, {size}"), soft_wrap=True)
    last = f"Nothing was started (dry_run=true). Rendered in {run_dir}"
    if run_dir is None:
        last = "Nothing was started or written. run_dir=DIR keeps the files and shows the command."
    console.print(last, soft_wrap=True)


def render_plan(
    plan: Plan,
    exp: Experiment,
    command: str | None,
    *,
    traces: Traces | None = None,
    options: Sequence[Choice] = (),
    here: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> list[RenderableType]:
    """Hosts, batch algebra, memory by part, other choices, RAM and disks, time, warnings and the
    exact command, in this order."""
    from rich.text import Text

    title = Text(f"Plan of {exp.name or exp.model.name or 'the run'}", style="bold")
    facts = facts_table(plan, exp, traces, overrides)
    parts: list[RenderableType] = [title, hosts_table(plan), facts]
    if plan.memory:
        table = memory_table(plan)
        parts += [Text(f"\n{memory_title(plan, traces)}", style="bold"), table]
        parts += choice_tables(plan, options)
    elif traces is not None and traces.problem:
        unknown = f"\nPredicted peak memory of one rank: not known ({traces.problem})"
        parts.append(Text(unknown, style="bold yellow"))
    parts += storage_parts(plan, here)
    parts += time_parts(plan)
    if plan.warnings:
        # A table ends with an empty line of its own.
        parts += [] if (plan.memory or plan.storage) and not plan.time else [Text("")]
        parts.append(warnings_table(plan.warnings))
    if command:
        head = Text("\nCommand (its secret: command.txt)", style="bold")
        parts += [head, Text(command.rstrip() + "\n")]
    return parts


def hosts_table(plan: Plan) -> Table:
    """One row a host: its ranks, devices, micro batches, accumulation and precision."""
    table = columns_table()
    for name, justify in (
        ("host", "left"),
        ("ranks", "left"),
        ("device", "left"),
        ("micro batch", "right"),
        ("accumulation", "right"),
        ("precision", "left"),
    ):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for index, host in enumerate(plan.hosts):
        ranks = [rank for rank in plan.ranks if rank.host == index]
        counts = [len(plan.batch.sizes_of(rank.rank)) for rank in ranks]
        table.add_row(
            _host_name(host),
            "-".join(dict.fromkeys(str(rank.rank) for rank in ranks[:1] + ranks[-1:])) or "none",
            f"{len(ranks)}{human.TIMES}{host.device}",
            _micro_batches(ranks),
            " + ".join(map(str, counts[:1] if len(set(counts)) == 1 else counts)),
            plan.precision,
        )
    for host in plan.rollout_hosts:
        servers = f"{host.slots}{human.TIMES}{host.device}"
        table.add_row(_host_name(host), "draws samples", servers, "", "", plan.precision)
    return table


def facts_table(
    plan: Plan, exp: Experiment, traces: Traces | None = None, overrides: Sequence[str] = ()
) -> Table:
    """Facts of the whole run: precision and why, batch, steps, learning rate and what set it,
    model, ZeRO, transport."""
    accum = plan.grad_accum_dtype
    rows = [
        ("precision", f"{plan.precision}: {plan.precision_reason}"),
        ("batch", f"{batch_line(plan)} ({origin_of_batch(exp, overrides)})"),
        ("balance", balance_line(plan) if plan.balance is not None else ""),
        ("by device", "\n".join(device_lines(plan, exp))),
        ("steps", _steps_line(plan, exp.task)),
        ("lr", f"{_lr_line(exp.optim, exp.adapter)} ({origin_of_lr(exp, overrides)})"),
        ("model", _model_line(_sized(plan, traces), exp.model, exp.adapter) + _reach(traces)),
        ("tokens", _tokens_line(exp.model, exp.adapter)),
        ("rollouts", rollout_line(exp)),
        ("rates", _rates_line(exp.optim, exp.adapter, exp.model)),
        ("zero", _zero_line(exp)),
        ("chosen", f"{' '.join(c.words)}: {c.problem or c.reason}" if (c := plan.chosen) else ""),
        ("gradients", f"summed over micro steps in {accum}" if accum else ""),
        ("attention", _attention_line(plan, exp.data)),
        ("launch", f"{plan.transport}, rank 0 at {plan.master_addr}"),
    ]
    return pairs_table((name, text) for name, text in rows if text)


def warnings_table(warnings: tuple[str, ...]) -> Table:
    """Each warning behind a ``!``, wrapped under itself."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    for warning in warnings:
        table.add_row(Text(" !", style="bold yellow"), Text(warning, style="yellow"))
    return table


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
    """Predicted time of a step against that of the even split, and who waits how long."""
    balance = plan.balance
    assert balance is not None
    how = {
        "even": "evenly at the start (batch.rebalance)",
        "spec": "by the data sheets",
        "weights": "by batch.weights",
        "measured": "as measured",
    }
    method = how[balance.method]
    if balance.pending:
        method = "measured by the ranks at the start; until then by the data sheets"
        if balance.source:
            method = f"as an earlier run here has measured ({balance.source}); checked at the start"
    if plan.time is not None and plan.time.even_step_s:
        return method  # what it gains stands with the predicted time, with communication
    step_as_planned, even, idle = against_even(plan)
    gain = "there is no even split of this batch"
    if even:
        gain = f"a step takes {step_as_planned / even:.2f} of the time of the even split"
    return f"{method}; {gain}; idle: {waiting(plan, idle)} (without communication)"


def device_lines(plan: Plan, exp: Experiment) -> list[str]:
    """Where types of devices differ: of each its micro batch with what limits it, and its
    activation checkpointing; and what cannot differ."""
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
    return [*lines, _alike(exp)]


def _alike(exp: Experiment) -> str:
    """Name the settings that cannot differ by type of device, and why."""
    where = _offloaded(exp.zero)
    texts = [
        f"offload ({', '.join(where) or 'none'}), since DeepSpeed lays out and sums gradients by "
        "one setting of all ranks"
    ]
    if exp.zero.stage == 3:
        texts.append("activation checkpointing, since at stage 3 all ranks gather together")
    return f"all alike: {'; '.join(texts)}"


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


def _sized(plan: Plan, traces: Traces | None) -> Plan:
    """Fill in the size of a model that only its trace knows."""
    trace = next(iter(traces.found.values()), None) if traces else None
    if plan.num_parameters or trace is None:
        return plan
    parameters, trained = trace.num_parameters, trace.num_trained
    return replace(
        plan, num_parameters=parameters, num_trained=None if trained == parameters else trained
    )


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
    shape, decay = model_geometry(model), optim.layer_decay
    words = []
    if decay is not None and shape is not None:
        count = shape.num_layers
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


def memory_table(plan: Plan) -> Table:
    """Parts as rows, device types as columns: stays narrow with many parts."""
    from rich.text import Text

    table = columns_table()
    table.add_column("")
    for memory in plan.memory:
        table.add_column(memory.device, justify="right", overflow="fold")
    traced = all(memory.traced for memory in plan.memory)
    for name, attribute in MEMORY_PARTS:
        if traced and attribute == "logits_gib":
            continue
        if attribute == "drawing_gib" and not any(memory.drawing_gib for memory in plan.memory):
            continue
        name = "activations, logits, loss" if traced and name == "activations" else name
        table.add_row(name, *(human.gib(getattr(memory, attribute)) for memory in plan.memory))
    context = (human.gib(memory.context_gib) for memory in plan.memory)
    table.add_row(ACCELERATORS[plan.accelerator].context, *context)
    table.add_section()
    table.add_row("total", *(Text(human.gib(m.total_gib), style="bold") for m in plan.memory))
    sizes = [memory.capacity_gib for memory in plan.memory]
    table.add_row("device has", *(human.gib(size) if size else UNKNOWN for size in sizes))
    if any(sizes):
        reserve = (human.gib((1 - USABLE) * size) if size else "" for size in sizes)
        table.add_row(f"kept free ({1 - USABLE:.0%}: fragmentation)", *reserve)
    verdicts = map(verdict, plan.memory)
    table.add_row("", *(Text(words, style=VERDICTS[words]) for words in verdicts))
    if plan.storage is not None:
        return table  # RAM has a table of its own
    if any(memory.host_gib for memory in plan.memory):
        table.add_row("host RAM", *(human.gib(memory.host_gib) for memory in plan.memory))
    if any(memory.saves_host_gib for memory in plan.memory):
        copies = (human.gib(memory.saves_host_gib) for memory in plan.memory)
        table.add_row("host RAM of saves", *copies)
    return table


def memory_title(plan: Plan, traces: Traces | None) -> str:
    """The title of the table of memory, with the source of its numbers."""
    title = "Predicted peak memory of one rank, GiB"
    if all(memory.traced for memory in plan.memory):
        return f"{title}: the real micro step on fake tensors, by DeepSpeed's rules"
    if traces is not None and traces.problem:
        return f"{title}: by formula ({traces.problem})"
    return title


def choice_tables(plan: Plan, options: Sequence[Choice]) -> list[RenderableType]:
    """For each type of device: ZeRO option and activation checkpointing by rows, micro batches by
    columns; ``*`` is the plan."""
    from rich.text import Text

    parts: list[RenderableType] = []
    sizes = sorted({choice.micro_batch for choice in options})
    ways = dict.fromkeys(
        (choice.zero, choice.checkpointing)
        for choice in sorted(options, key=lambda choice: choice.intricacy)
    )
    for memory in plan.memory if options else ():
        if not memory.capacity_gib:
            continue
        table = columns_table()
        for name in ("zero", "checkpointing"):
            table.add_column(name)
        for size in sizes:
            table.add_column(str(size), justify="right")
        cells = {
            (choice.zero, choice.checkpointing, choice.micro_batch): _cell(choice, memory.device)
            for choice in options
        }
        for option, how in ways:
            table.add_row(option, how, *(cells.get((option, how, size), "") for size in sizes))
        title = (
            f"Peak on {memory.device} ({human.gib(memory.capacity_gib)} GiB) by micro batch; "
            "! is too large, * is this plan"
        )
        parts += [Text(f"\n{title}", style="bold"), table]
    return parts


def _cell(choice: Choice, device: str) -> Text:
    from rich.text import Text

    memory = choice.memory[device]
    words = (
        "* " if choice.chosen else "",
        human.gib(memory.total_gib),
        "" if memory.fits else " !",
    )
    return Text("".join(words), style="green" if memory.fits else "red")


VERDICTS = {"not checked": "", "does not fit": "bold red", "fits": "green"}
"""What is said of a device's memory, the worst first, and its style."""


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


def time_parts(plan: Plan) -> list[RenderableType]:
    """Title and table of the predicted time; nothing where the plan has none."""
    from rich.text import Text

    if plan.time is None:
        return []
    table = pairs_table(time_rows(plan, now=datetime.now()))
    # A table of memory ends with an empty line of its own.
    before = "" if plan.memory or plan.storage else "\n"
    return [Text(f"{before}Predicted time of a step", style="bold"), table]


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
    return ", ".join(texts[:MAX_HOSTS]) + ", ..." * (len(texts) > MAX_HOSTS)


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


RAM_PARTS: tuple[tuple[str, Callable[[HostStorage], int | None]], ...] = (
    ("RAM: processes", lambda host: host.processes_bytes),
    ("RAM: loading", lambda host: host.loading_bytes),
    ("RAM: training", lambda host: host.training_bytes),
    ("RAM: offload", lambda host: host.offload_bytes),
    ("RAM: offload buffers", lambda host: host.staging_bytes),
    ("RAM: weights for rollout servers", lambda host: host.push_bytes),
)


def storage_parts(plan: Plan, here: Mapping[str, Any] | None = None) -> list[RenderableType]:
    """The table, hosts that are alike in one column; nothing where the plan has no storage.

    ``here``: what this machine has now (``llmx.hardware.survey.space_facts``).
    """
    from rich.text import Text

    storage = plan.storage
    if storage is None:
        return []
    table = columns_table()
    table.add_column("")
    for host in storage.hosts:
        table.add_column(host.names, justify="right", overflow="fold")
    for name, values in rows(plan, storage, here or {}):
        if name:
            table.add_row(name, *values)
        else:
            table.add_section()
    return [Text("\nEach host, beside device memory", style="bold"), table]


def rows(
    plan: Plan, storage: StoragePlan, here: Mapping[str, Any]
) -> list[tuple[str, tuple[str, ...]]]:
    """(what, by host); what no host needs is left out. An empty name: a line between sections."""
    hosts = storage.hosts
    local = {host.name for host in plan.hosts if host.is_local}
    lines: list[tuple[str, tuple[str, ...]]] = []

    def row(name: str, of: Callable[[HostStorage], int | None], *, always: bool = False) -> None:
        values = [of(host) for host in hosts]
        if always or any(value is None or value for value in values):
            lines.append((name, tuple(_size(value) for value in values)))

    def now(name: str, key: str) -> None:
        """Add the size that this machine has now, below the one that it needs."""
        if here.get(key) is not None and any(local & set(host.hosts) for host in hosts):
            size = human.size(here[key])
            lines.append((name, tuple(size if local & set(h.hosts) else "" for h in hosts)))

    for name, of in RAM_PARTS:
        row(name, of)
    row("RAM at most", lambda host: host.ram_bytes, always=True)
    optional = all(host.saves_optional for host in hosts)
    row("RAM: copies for saves" + ", if free" * optional, lambda host: host.saves_bytes)
    if any(host.ram_has_bytes for host in hosts):
        row("RAM of the host", lambda host: host.ram_has_bytes, always=True)
    now("RAM available now", "ram_available_bytes")
    lines.append(("", ()))
    row("NVMe", lambda host: host.nvme_bytes)
    row("disk: one checkpoint", lambda host: host.checkpoint_bytes, always=True)
    at_once = storage.checkpoints_at_once
    limit = "no limit" if at_once is None else str(at_once)
    lines.append(("disk: checkpoints at once", (limit,) * len(hosts)))
    row("disk: model/", lambda host: host.model_bytes)
    lines.append(("disk at most", tuple(_disk(storage, host) for host in hosts)))
    now("disk free now", "free_bytes")
    row("disk: weights of the Hub", lambda host: host.download_bytes)
    row("/dev/shm without P2P", lambda host: host.shm_bytes)
    return lines


def _disk(storage: StoragePlan, host: HostStorage) -> str:
    if host.checkpoint_bytes is None or host.model_bytes is None:
        return UNKNOWN
    max_bytes = storage.disk_bytes(host.checkpoint_bytes, host.model_bytes)
    return "no limit" if max_bytes is None else human.size(max_bytes)


def _size(value: int | None) -> str:
    return UNKNOWN if value is None else human.size(value)
