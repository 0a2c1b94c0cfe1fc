"""The console of a supervisor: messages, the log of rank 0 and the progress of training.

On a terminal a bar with loss, tokens/s, MFU and the time left; elsewhere one line a logged
step. Both come from ``metrics.jsonl``, the truth.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TextIO

from llmx import text as human
from llmx.redact import redact
from llmx.run.metrics import Metric, declared_in, measured, metric_of
from llmx.run.metrics.declared import is_declaration
from llmx.text import clock, for_terminal, printable

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

BAR_WIDTH = 10
_AROUND_VALUES = len("step  /    ") + BAR_WIDTH
"""Columns of the live line beside the two steps, the values and the time left."""
LEAST_IDLE = 0.05
"""A line says how much of their time ranks wait for slower ones from here on."""
_NOISE = re.compile(
    r"^\[\d{4}-\d\d-\d\d [\d:,]+\] \[(INFO|WARNING)\] \[|^\s*$|^\[rank\d+\]:\[W|^\[W\d+ "
    # The same numbers come from metrics.jsonl.
    r"|^step \d+/\d+ |^evaluation at step "
    r"|^The above exception was the direct cause|^During handling of the above exception"
    r"|^Loading extension module|^Time to load "
    r"|^Using .* as PyTorch extensions root|^Detected CUDA files|^ninja: no work|^Emitting ninja"
    r"|^Building extension module|^Allowing ninja to set"
)
"""Lines of rank 0's log that the console does not show; the log file has all of them."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STACK = re.compile(r"Traceback \(most recent call last\)|(Current thread|Thread) 0x[0-9a-f]+ ")
_WARNING = re.compile(r"^\S+:\d+: \w*Warning: ")


class Console:
    """Prints to ``stream``; a progress bar where that is a terminal."""

    def __init__(self, stream: TextIO | None = None, *, total_steps: int | None = None) -> None:
        self._stream = stream or sys.stdout
        if isinstance(self._stream, io.TextIOWrapper):
            # A rank may write characters that the encoding of the terminal lacks.
            with contextlib.suppress(OSError, ValueError):
                self._stream.reconfigure(errors="replace")
        self._total = total_steps
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._declared: dict[str, Metric] = {}
        self._first: tuple[int, float] | None = None
        self._in_traceback = False
        self._in_warning = False

    def rank_line(self, line: str) -> None:
        """Show one line of rank 0's log. Tracebacks are left out: the end of the run shows that of
        the rank which failed first."""
        if _STACK.match(line):
            self._in_traceback = True
        elif self._in_traceback:
            # Indented frames, then one line with the error itself, or an empty one.
            self._in_traceback = line.startswith(" ")
        elif self._in_warning and line.startswith(" "):
            self._in_warning = False  # the line of code that a Python warning quotes
        else:
            self._in_warning = bool(_WARNING.search(line))
            if not self._in_warning and not _NOISE.search(line):
                self.print(f"  {redact(_COLOUR.sub('', line))}")

    def record(self, record: dict[str, Any]) -> None:
        """Show one record of ``metrics.jsonl``."""
        kind = record.get("kind")
        if is_declaration(record):
            self._declared = declared_in(record)
        if kind == "start" or record.get("event") == "resumed":
            self._total = int(record.get("total_steps") or 0) or self._total
            if self._stream.isatty():
                self._begin_bar()
        elif kind == "train":
            self._train(record)
        elif kind == "eval":
            self.print(eval_line(record, self._declared))

    def countdown(self, text: str, left_s: float) -> None:
        """Overwrite a line of a terminal with a text and the time left; an empty text clears it."""
        if not self._stream.isatty():
            return
        line = f"\r\033[K{text} {clock(left_s)}" if text else "\r\033[K"
        with contextlib.suppress(OSError):
            self._stream.write(line)
            self._stream.flush()

    def forget_time_left(self) -> None:
        """No step ends: when the last one will is not known, and the pause is no pace."""
        self._first = None
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, left="")

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self._first = None  # the pace of the next attempt is its own
        self._in_traceback = self._in_warning = False

    def _train(self, record: dict[str, Any]) -> None:
        step, now = int(record["step"]), float(record["time"])
        self._first = self._first or (step, now)
        left_s = self._left_s(step, now)
        if self._progress is None or self._task is None:
            self.print(train_line(record, self._declared, total=self._total, left_s=left_s))
            return
        left = "" if left_s is None else clock(left_s)
        values = [printable(value) for value in _values(record, self._declared)]
        # Fields are dropped where the terminal is narrow, the last first; the step never.
        room = self._progress.console.width - _AROUND_VALUES - 2 * len(str(self._total)) - len(left)
        while values and len("  ".join(values)) > room:
            values.pop()
        self._progress.update(self._task, completed=step, values="  ".join(values), left=left)

    def _left_s(self, step: int, now: float) -> float | None:
        """Seconds to the last step, from the pace since the first logged one."""
        assert self._first is not None
        first_step, first_time = self._first
        if not self._total or step <= first_step:
            return None
        return (now - first_time) / (step - first_step) * (self._total - step)

    def _begin_bar(self) -> None:
        if self._progress is not None:
            return
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.table import Column

        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            BarColumn(bar_width=BAR_WIDTH),
            TextColumn("{task.fields[values]}", table_column=Column(no_wrap=True)),
            TextColumn("[dim]{task.fields[left]}", table_column=Column(no_wrap=True)),
            console=RichConsole(file=self._stream),
        )
        self._task = self._progress.add_task("", total=self._total, values="", left="")
        self._progress.start()

    def print(self, text: str) -> None:
        """Print a text; a closed terminal or a finished `| head` must not end a training."""
        text = printable(text)  # data, libraries and names of metrics may hold anything
        with contextlib.suppress(OSError):
            text = for_terminal(text, self._stream)
            if self._progress is not None:
                self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                print(text, file=self._stream, flush=True)


def train_line(
    record: dict[str, Any],
    declared: Mapping[str, Metric] = MappingProxyType({}),
    *,
    total: int | None,
    left_s: float | None,
) -> str:
    """One plain line of a logged step, with the task's metrics as they are ``declared``."""
    of = f"/{total}" if total else ""
    width = len(str(total or "")) or 6
    parts = [f"step {record['step']:>{width}}{of}", *_values(record, declared)]
    if left_s is not None:
        parts.append(f"left {clock(left_s)}")
    return "  ".join(parts)


def eval_line(record: dict[str, Any], declared: Mapping[str, Metric]) -> str:
    """One line of an evaluation: the loss, and every metric that it measured."""
    parts = [f"eval at step {record.get('step')}:"]
    if record.get("loss") is not None:
        parts.append(f"loss {record['loss']:.4f}")
    return "  ".join([*parts, *_metrics(record, declared)])


def _metrics(record: dict[str, Any], declared: Mapping[str, Metric]) -> list[str]:
    metrics = {name: metric_of(name, declared) for name in measured(record, declared, shown=True)}
    # So many decimals that the numbers of a log stand one below the other.
    return [
        f"{metric.title} {metric.shown(record[n], decimals=1)}" for n, metric in metrics.items()
    ]


def _values(record: dict[str, Any], declared: Mapping[str, Metric]) -> list[str]:
    loss = record.get("loss")
    parts = ["loss not finite" if loss is None else f"loss {loss:.4f}"]
    # ``loss`` is of this step alone; the mean is over all steps since the line before.
    mean = record.get("loss_mean")
    if mean is not None and (loss is None or not math.isclose(mean, loss, rel_tol=1e-6)):
        parts.append(f"mean {mean:.4f}")
    parts += _metrics(record, declared)
    if record.get("lr") is not None:
        parts.append(f"lr {record['lr']:.1e}")
    if record.get("grad_norm") is not None:
        parts.append(f"grad {record['grad_norm']:.2f}")
    if record.get("tokens_per_s") is not None:
        parts.append(f"{record['tokens_per_s']:,.0f} tok/s")
    if (record.get("idle_share") or 0.0) >= LEAST_IDLE:
        parts.append(f"idle {human.percent(record['idle_share'], decimals=0)}")
    if record.get("mfu") is not None:
        parts.append(f"mfu {human.percent(record['mfu'], decimals=1)}")
    return parts


class RunLog:
    """Three levels, as in ``logging``: ``debug`` goes to the file alone, ``info`` also to the
    console, and ``warning`` also into ``result.json``."""

    def __init__(self, path: Path, console: Console, warnings: list[str] | None = None) -> None:
        self.path, self.console = path, console
        self.warnings = [] if warnings is None else warnings

    def debug(self, text: str) -> None:
        with (
            contextlib.suppress(OSError),  # a full disk
            self.path.open("a", encoding="utf-8") as stream,
        ):
            stream.write(f"{time.strftime('%H:%M:%S')} {redact(text)}\n")

    def info(self, text: str) -> None:
        self.console.print(redact(text))
        self.debug(text)

    def warning(self, text: str) -> None:
        self.warnings.append(redact(text))
        self.info(f"warning: {text}")
