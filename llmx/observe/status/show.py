"""A run, or a table of runs, on the terminal; plain text where it is none."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmx import text as human
from llmx.observe.report.wording import event_text, summary_rows
from llmx.observe.run import FINAL, LIVE, SILENT_S, Run, duration_text
from llmx.run.metrics import measured, metric_of
from llmx.run.metrics.lines import Record

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

STYLES = {
    "training": "bold green",
    "finished": "green",
    "failed": "bold red",
    "dead": "bold red",
    "interrupted": "yellow",
    "waiting": "bold yellow",
    "planned": "dim",
}
BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN_BLOCKS = ".:-=+*#@"
SHOWN_EVENTS = 4
WIDTH = 44
"""Columns of the loss curve."""
Rows = list[tuple[str, str]]


def panel(run: Run, plain: bool = False) -> Group:
    """Everything about one run: its state, progress, numbers, hosts and events. ``plain``: ASCII
    only."""
    from rich.console import Group
    from rich.text import Text

    from llmx.observe.report.screen import pairs_table

    mark = ""
    if run.is_live:
        mark = "* " if plain else "● "
    style = STYLES.get(run.state, "bold cyan")
    head = Text.assemble((f"{mark}{run.state}", style), "  ", (run.name, "bold"))
    if run.took_s is not None:
        head.append(f"  {duration_text(run.took_s)}", style="dim")
    curve = sparkline([loss for _, loss in run.losses], plain=plain)
    if run.is_lost:
        curve += "   not finite"
    metrics = ", ".join(shown_metrics(run, run.last))
    rows = [
        *progress_rows(run, plain=plain),
        *_known([("curve", curve), ("metrics", metrics)]),
        *summary_rows(run, is_brief=True),
        *activity_rows(run),
        ("run", str(run.path)),
    ]
    if run.dir.report.exists() and run.state in FINAL:
        rows.append(("report", f"{run.path}/report.html"))
    return Group(Text(""), head, pairs_table(rows))


def progress_rows(run: Run, *, plain: bool = False) -> Rows:
    """Name and value of why a run stands where it does, what helps, and its step."""
    rows = [("why", run.standing.why), ("do", run.standing.fix), ("step", _progress(run, plain))]
    return _known(rows)


def activity_rows(run: Run) -> Rows:
    """Name and value of checkpoints, hosts and events."""
    newest = [
        f"{_clock(record.get('time'))} {human.one_line(event_text(record), limit=76)}"
        for record in run.events[-SHOWN_EVENTS:]
    ]
    rows = [("saved", _saved(run)), *host_rows(run)]
    rows += [("events", "\n".join(newest)), ("damaged", "\n".join(run.damage))]
    return _known(rows)


def _known(rows: Rows) -> Rows:
    return [(name, value) for name, value in rows if value]


def _clock(when: float | None) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when or 0.0))


def shown_metrics(run: Run, line: Record) -> list[str]:
    """Title and value of every metric of a line, as the run declares them."""
    values = measured(line, run.declared, shown=True)
    metrics = {name: metric_of(name, run.declared) for name in values}
    return [f"{metric.title} {metric.shown(line[name])}" for name, metric in metrics.items()]


def _progress(run: Run, plain: bool) -> str:
    if run.step is None:
        return ""
    text = f"{run.step:,}"
    if run.total:
        part = min(1.0, run.step / run.total)
        full, empty = ("#", ".") if plain else ("━", "─")
        size = round(20 * part)
        text += f" of {run.total:,}   {full * size}{empty * (20 - size)} {part:.0%}"
    if run.left_s is not None and run.step < (run.total or 0):
        done = time.strftime("%a %H:%M", time.localtime(time.time() + run.left_s))
        text += f"   {duration_text(run.left_s)} left, done {done}"
    return text


def evaluated(run: Run) -> list[str]:
    """The loss and every metric of the last evaluation, in words."""
    if not run.evals:
        return []
    loss = run.evals[-1].get("loss")
    parts = [] if loss is None else [f"loss {human.number(loss)}"]
    return [*parts, *shown_metrics(run, run.evals[-1])]


def _saved(run: Run) -> str:
    parts = []
    newest, writing = run.checkpoints["newest"] or {}, run.checkpoints["writing"]
    if newest:
        ago = ""
        if newest["time"]:
            ago = f", {duration_text(max(0.0, run.now - newest['time']))} ago"
        size = f", {human.size(newest['bytes'])}" if newest["bytes"] else ""
        num_kept = len(run.checkpoints["steps"])
        parts.append(f"step {newest['step']:,}{ago}{size}; {num_kept} kept")
    elif run.step and run.state != "finished":
        parts.append("nothing yet" if run.is_live else "nothing")
    if run.is_live and writing not in (None, newest.get("step")):
        parts.append(f"step {writing:,} is being written")
    free = run.machine.free_bytes
    if run.is_live and free is not None and free < 4 * newest.get("bytes", 0):
        parts.append(f"only {human.size(free)} of disk left")
    return "; ".join(parts)


def host_rows(run: Run) -> Rows:
    """Name of each host, and what its ranks do."""
    statuses = {status.get("rank"): status for status in run.ranks}
    return [(name, _ranks_text(run, ranks, statuses)) for name, ranks in run.hosts]


def _ranks_text(run: Run, ranks: Sequence[int], statuses: Mapping[Any, dict[str, Any]]) -> str:
    """What the ranks of a host do, those that do the same together."""
    groups: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
    for rank in ranks:
        status, note = statuses.get(rank, {}), ""
        state = str(status["state"]) if status else "no status yet"
        if state == "failed" and status.get("error"):
            note = f": {status['error'].get('type')}"
        silent_s = run.now - float(status.get("time") or run.now)
        if run.is_live and state in LIVE and silent_s > SILENT_S:
            note += f", silent for {duration_text(silent_s)}"
        together, steps = groups.setdefault((state, note), ([], []))
        together.append(rank)
        if state in ("training", "interrupted", "saving"):
            steps.append(int(status.get("step") or 0))
    parts = [
        f"{_numbers(together)} {state}{_at(steps)}{note}"
        for (state, note), (together, steps) in groups.items()
    ]
    return "; ".join(parts) or "no rank"


def _at(steps: Sequence[int]) -> str:
    """Ranks tell their steps every few seconds, so those of one host differ a little."""
    if not steps:
        return ""
    low, high = min(steps), max(steps)
    return f" at step {low:,}" if low == high else f" at steps {low:,} to {high:,}"


def _numbers(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-3``, ``ranks 0, 2``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


def table(runs: Sequence[Run], *, num_runs: int) -> list[Text]:
    """Two lines per run, its numbers and its path: live runs first, then the newest."""
    from rich.text import Text

    rows = [("state", "step", "loss", "tokens/s", "time", "restarts", "saved")]
    ordered = sorted(runs, key=lambda run: not run.is_live)
    for run in ordered:
        newest = run.checkpoints["newest"]
        saved = f"{newest['step']:,}" if newest else ""
        rows.append((*cells_of(run), str(len(run.restarts) or ""), saved))
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = []
    for state, *cells in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        texts.append("  ".join([state.ljust(first), *aligned]))
    lines = [Text(texts[0], style="bold")]
    for run, text in zip(ordered, texts[1:], strict=True):
        line = Text(text)
        line.stylize(STYLES.get(run.state, "bold cyan"), 0, len(run.state))
        # What can be typed here; on another machine, relative to the directory of all.
        path = human.shorter_path(run.path, start=run.machine.root if run.is_far else None)
        lines += [line, Text(f"  {path}")]
    if num_runs > len(runs):
        lines.append(Text(f"{num_runs - len(runs)} older runs are not shown (--all shows them)"))
    return lines


def cells_of(run: Run) -> tuple[str, str, str, str, str]:
    """State, step, loss, tokens per second, and the time that is left or else that it took."""
    step = "" if run.step is None else f"{run.step:,}"
    took = "" if run.took_s is None else duration_text(run.took_s)
    loss, speed = run.last.get("loss"), run.last.get("tokens_per_s")
    loss_text = "" if loss is None else human.number(loss)
    return (
        run.state,
        f"{step}/{run.total:,}" if step and run.total else step,
        "nan" if run.is_lost else loss_text,
        "" if speed is None else human.count(speed),
        took if run.left_s is None else f"{duration_text(run.left_s)} left",
    )


def plain_line(run: Run) -> str:
    """One line for a log file: the state, and what is known of the last logged step."""
    state, step, loss, speed, time_text = cells_of(run)
    parts = [
        _clock(time.time()),
        state,
        f"step {step}" if step else "",
        f"loss {loss}" if loss else "",
        f"{speed} tokens/s" if speed and run.is_live else "",
        "" if run.left_s is None else time_text,
        f"{len(run.restarts)} restarts" if run.restarts else "",
        "; ".join(filter(None, [run.standing.why, run.standing.fix])),
    ]
    return "  ".join(filter(None, parts))


def sparkline(values: list[float | None], *, plain: bool = False, width: int = WIDTH) -> str:
    """The curve in one line; a value that is not finite is an x."""
    finite = [value for value in values if value is not None]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    blocks = PLAIN_BLOCKS if plain else BLOCKS
    count = min(width, len(values))
    text = ""
    for number in range(count):
        part = values[len(values) * number // count : len(values) * (number + 1) // count]
        losses = [value for value in part if value is not None]
        if len(losses) < len(part):
            text += "x"
            continue
        level = (sum(losses) / len(losses) - low) / (high - low) if high > low else 0.0
        text += blocks[min(len(blocks) - 1, int(level * len(blocks)))]
    return text
