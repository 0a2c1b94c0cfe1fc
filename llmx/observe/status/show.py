"""A run, or a table of runs, on the terminal; plain text where it is none."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from llmx import text as human
from llmx.observe.status.view import LIVE, View, duration_text

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
SHOWN_RESTARTS = 4
SHOWN_EVENTS = 4
WIDTH = 44
"""Columns of the loss curve."""
Rows = list[tuple[str, str]]


def panel(view: View, *, plain: bool = False) -> Group:
    """Everything about one run: its state, progress, numbers, hosts and events. ``plain``: ASCII
    only."""
    from rich.console import Group
    from rich.text import Text

    from llmx.observe.report.screen import pairs_table

    mark = ""
    if view.state in LIVE:
        mark = "* " if plain else "● "
    style = STYLES.get(view.state, "bold cyan")
    head = Text.assemble((f"{mark}{view.state}", style), "  ", (view.name, "bold"))
    if view.took_s is not None:
        head.append(f"  {duration_text(view.took_s)}", style="dim")
    rows = [*progress_rows(view, plain=plain), *_figures(view, plain), *activity_rows(view)]
    rows.append(("run", view.path))
    if view.report and view.is_over:
        rows.append(("report", f"{view.path}/report.html"))
    return Group(Text(""), head, pairs_table(rows))


def progress_rows(view: View, *, plain: bool = False) -> Rows:
    """Name and value of why a run stands where it does, what helps, and its step."""
    return _known(("why", view.why), ("do", view.fix), ("step", _progress(view, plain)))


def _figures(view: View, plain: bool) -> Rows:
    """Name and value of loss, metrics, speed and memory."""
    metrics = ", ".join(f"{title} {value}" for title, value in view.train_metrics)
    return _known(
        ("loss", _loss(view, plain)),
        ("metrics", metrics),
        ("eval", _evaluation(view)),
        ("speed", _speed(view)),
        ("memory", _memory(view)),
    )


def activity_rows(view: View) -> Rows:
    """Name and value of checkpoints, restarts, hosts and events."""
    events, damage = "\n".join(_events(view)), "\n".join(view.damage)
    rows = [("saved", _saved(view)), ("restarts", _restarts(view)), *view.hosts]
    return _known(*rows, ("events", events), ("damaged", damage))


def _known(*rows: tuple[str, str]) -> Rows:
    return [(name, value) for name, value in rows if value]


def _progress(view: View, plain: bool) -> str:
    if view.step is None:
        return ""
    text = f"{view.step:,}"
    if view.total:
        part = min(1.0, view.step / view.total)
        full, empty = ("#", ".") if plain else ("━", "─")
        size = round(20 * part)
        text += f" of {view.total:,}   {full * size}{empty * (20 - size)} {part:.0%}"
    if view.left_s is not None and view.step < (view.total or 0):
        done = time.strftime("%a %H:%M", time.localtime(time.time() + view.left_s))
        text += f"   {duration_text(view.left_s)} left, done {done}"
    return text


def _loss(view: View, plain: bool) -> str:
    if view.loss is None and not view.lost:
        return ""
    last = "not finite" if view.lost or view.loss is None else human.number(view.loss)
    began = "" if view.first_loss is None else f"   from {human.number(view.first_loss)}"
    return f"{last}   {sparkline(view.losses, plain=plain)}{began}"


def _evaluation(view: View) -> str:
    parts = [] if view.eval_loss is None else [f"loss {human.number(view.eval_loss)}"]
    parts += [f"{title} {value}" for title, value in view.eval_metrics]
    return f"{', '.join(parts)} at step {view.eval_step or 0:,}" if parts else ""


def _speed(view: View) -> str:
    if view.tokens_per_s is None:
        return ""
    parts = [f"{human.count(view.tokens_per_s)} tokens/s"]
    if view.mfu is not None:
        parts.append(f"MFU {human.percent(view.mfu)}")
    if view.step_time_s:
        parts.append(f"{view.step_time_s:.3g} s a step")
    if view.waited_for_data is not None:
        parts.append(f"{view.waited_for_data:.1%} waiting for data")
    return ", ".join(parts)


def _memory(view: View) -> str:
    if not view.memory_gib:
        return ""
    largest = max(view.memory_gib)
    text = f"{human.gib(largest)} GiB at most"
    if len(view.memory_gib) > 1:
        text += (
            f" (rank {view.memory_gib.index(largest)}), {human.gib(min(view.memory_gib))} at least"
        )
    return text


def _saved(view: View) -> str:
    parts = []
    if view.saved_step is not None:
        ago = "" if view.saved_ago_s is None else f", {duration_text(view.saved_ago_s)} ago"
        size = "" if not view.saved_bytes else f", {human.size(view.saved_bytes)}"
        parts.append(f"step {view.saved_step:,}{ago}{size}; {view.kept} kept")
    elif view.step and view.state != "finished":
        parts.append("nothing yet" if view.state in LIVE else "nothing")
    if view.saving_step is not None and view.saving_step != view.saved_step:
        parts.append(f"step {view.saving_step:,} is being written")
    low = view.disk_free_bytes is not None and view.disk_free_bytes < 4 * (view.saved_bytes or 0)
    if low and view.state in LIVE:
        parts.append(f"only {human.size(view.disk_free_bytes or 0)} of disk left")
    return "; ".join(parts)


def _restarts(view: View) -> str:
    if not view.restarts:
        return ""
    restarts = [line for line in view.attempts if line.get("decision") == "restart"]
    lines = [str(view.restarts)]
    for line in restarts[-SHOWN_RESTARTS:]:
        when = time.strftime("%H:%M:%S", time.localtime(float(line.get("ended") or 0.0)))
        step = line.get("last_step")
        at = f" at step {step:,}" if isinstance(step, int) else ""
        cause = human.one_line(str(line.get("cause") or ""), limit=54)
        lines.append(f"{when} {line.get('outcome')}{at}: {cause}")
    return "\n".join(lines)


def _events(view: View) -> list[str]:
    return [
        f"{time.strftime('%H:%M:%S', time.localtime(when))} {human.one_line(words, limit=76)}"
        for when, words in view.events[-SHOWN_EVENTS:]
    ]


def table(views: list[View], *, num_runs: int) -> list[Text]:
    """Two lines per run, its numbers and its path: live runs first, then the newest."""
    from rich.text import Text

    rows = [("state", "step", "loss", "tokens/s", "time", "restarts", "saved")]
    ordered = sorted(views, key=lambda view: view.state not in LIVE)
    for view in ordered:
        saved = "" if view.saved_step is None else f"{view.saved_step:,}"
        rows.append((*cells_of(view), str(view.restarts or ""), saved))
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = []
    for state, *cells in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        texts.append("  ".join([state.ljust(first), *aligned]))
    lines = [Text(texts[0], style="bold")]
    for view, text in zip(ordered, texts[1:], strict=True):
        line = Text(text)
        line.stylize(STYLES.get(view.state, "bold cyan"), 0, len(view.state))
        lines += [line, Text(f"  {view.path}")]
    if num_runs > len(views):
        lines.append(Text(f"{num_runs - len(views)} older runs are not shown (--all shows them)"))
    return lines


def cells_of(view: View) -> tuple[str, str, str, str, str]:
    """State, step, loss, tokens per second, and the time that is left or else that it took."""
    step = "" if view.step is None else f"{view.step:,}"
    took = "" if view.took_s is None else duration_text(view.took_s)
    return (
        view.state,
        f"{step}/{view.total:,}" if step and view.total else step,
        short_loss(view),
        "" if view.tokens_per_s is None else human.count(view.tokens_per_s),
        took if view.left_s is None else f"{duration_text(view.left_s)} left",
    )


def short_loss(view: View) -> str:
    """The last logged loss in a few digits."""
    if view.lost:
        return "nan"
    return "" if view.loss is None else human.number(view.loss)


def plain_line(view: View) -> str:
    """One line for a log file: the state, and what is known of the last logged step."""
    parts = [time.strftime("%H:%M:%S", time.localtime()), view.state]
    if view.step is not None:
        parts.append(f"step {view.step}/{view.total}" if view.total else f"step {view.step}")
    if view.loss is not None or view.lost:
        parts.append(f"loss {short_loss(view)}")
    if view.tokens_per_s is not None and view.state in LIVE:
        parts.append(f"{human.count(view.tokens_per_s)} tokens/s")
    if view.left_s is not None:
        parts.append(f"{duration_text(view.left_s)} left")
    if view.restarts:
        parts.append(f"{view.restarts} restarts")
    text = "  ".join(parts)
    why = "; ".join(words for words in (view.why, view.fix) if words)
    return f"{text}  {why}" if why else text


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
