"""``status`` and ``watch`` of a sweep's directory on this machine: how many trials are done, what
runs, what is left, the best so far.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmx import text as human
from llmx.observe.page import plain
from llmx.observe.report.screen import is_plain, open_console
from llmx.observe.report.sweep_data import SweepReader, axes
from llmx.observe.report.sweep_table import known_of, settings_of
from llmx.observe.status import observer
from llmx.observe.status.mirror import RunLocation
from llmx.observe.status.view import LIVE, duration_text, interpret
from llmx.run.sweepdir import (
    FILE,
    NOT_RUN,
    RUNNING,
    STOPPED,
    WAITING,
    WELL,
    Sweep,
    Trial,
    is_sweep,
)
from llmx.text import plural, shorter_path

if TYPE_CHECKING:
    from rich.console import Group

SHOWN_RUNNING = 12
SHOWN_FAILED = 6
"""The newest failures; ``report`` has them all."""
BAR = 24
SILENT_S = 90.0
"""A sweep that changes none of its files for so long, with no trial alive, runs no more."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """The trials of a sweep by what they do, and the time that is left."""

    trials: Sequence[Trial]
    failed: list[Trial]
    """The last that ended, last."""
    running: list[Trial]
    waiting: int
    left_s: float | None
    """Until the last trial ends; None where no trial has ended that could tell."""
    best: Trial | None

    @property
    def over(self) -> int:
        """Trials that nothing is left to do for."""
        return len(self.trials) - len(self.running) - self.waiting

    def count(self, *outcomes: str) -> int:
        """Trials with one of these outcomes."""
        return sum(trial.outcome in outcomes for trial in self.trials)


def progress_of(sweep: Sweep, *, now: float) -> Progress:
    """Count the trials and estimate the time that is left; pure."""
    trials = sweep.trials
    running = [trial for trial in trials if trial.state == RUNNING]
    failed = [trial for trial in trials if trial.failed]
    waiting = sum(trial.state == WAITING for trial in trials)
    left_s = _left_s(trials, running, waiting, at_once=_at_once(trials), now=now)
    failed.sort(key=lambda trial: trial.ended or 0.0)
    return Progress(trials, failed, running, waiting, left_s, sweep.best)


def _took(trial: Trial) -> float | None:
    """Seconds from the start to the end of a trial that was run."""
    if not trial.outcome or trial.outcome in NOT_RUN:
        return None
    if trial.started and trial.ended and trial.ended > trial.started:
        return trial.ended - trial.started
    return trial.seconds


def _at_once(trials: Sequence[Trial]) -> int:
    """The number that runs; between two trials, the most that ran at the same time."""
    running = sum(trial.state == RUNNING for trial in trials)
    if running:
        return running
    changes = []
    for trial in trials:
        if trial.started and _took(trial) and trial.ended:
            changes += [(trial.started, 1), (trial.ended, -1)]
    count = peak = 0
    for _, change in sorted(changes):
        count += change
        peak = max(peak, count)
    return max(1, peak)


def _left_s(
    trials: Sequence[Trial], running: Sequence[Trial], waiting: int, *, at_once: int, now: float
) -> float | None:
    """The waiting trials go, one after another, where a running one ends first."""
    if not running and not waiting:
        return 0.0
    times = [took for trial in trials if (took := _took(trial)) is not None]
    if not times:
        return None
    mean = sum(times) / len(times)
    ends = [max(0.0, mean - (now - trial.started)) if trial.started else mean for trial in running]
    ends = (ends + [0.0] * at_once)[: max(at_once, len(running))]
    heapq.heapify(ends)
    for _ in range(waiting):
        heapq.heapreplace(ends, ends[0] + mean)
    return max(ends)


def sweep_progress(
    sweep: Sweep, *, now: float, title: str = "", note: str = "", plain: bool = False
) -> Group:
    """The sweep at the moment ``now`` (seconds since the epoch) for a terminal.

    ``note`` is a line below the head, e.g. that nothing runs any more; ``plain``: ASCII only.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    progress = progress_of(sweep, now=now)
    names = axes(sweep.trials)
    head = Text.assemble((title, "bold"), "  " if title else "", _bar(progress, plain=plain))
    counts = Text(", ").join(Text(text, style) for text, style in _counts(progress, now=now))
    parts: list[Text | Table] = [Text(""), head, Text("  ").append_text(counts)]
    if note:
        parts.append(Text(f"  {note}", style="bold yellow"))
    if progress.running:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True, style="cyan")
        grid.add_column(overflow="fold")
        for _ in range(3):
            grid.add_column(no_wrap=True, justify="right")
        for trial in progress.running[:SHOWN_RUNNING]:
            grid.add_row(*map(Text, _running(trial, names, now=now)))
        parts += [Text(""), grid]
        if len(progress.running) > SHOWN_RUNNING:
            parts.append(Text(f"  and {len(progress.running) - SHOWN_RUNNING} more", style="dim"))
    below = [Text(line, style="red") for line in _failed(progress, names)]
    if best := _best(sweep, names):
        below.append(Text(best, style="bold"))
    return Group(*parts, *([Text("")] if below else []), *below)


def progress_line(sweep: Sweep, *, now: float) -> str:
    """One line for a log file: the counts, what is left, the best so far."""
    progress = progress_of(sweep, now=now)
    parts = [
        f"{progress.over}/{plural(len(progress.trials), 'trial')}",
        ", ".join(text for text, _ in _counts(progress, now=now)),
        _best(sweep, axes(sweep.trials)).strip(),
    ]
    return "  ".join(filter(None, parts))


def _bar(progress: Progress, *, plain: bool) -> str:
    full, empty = ("#", ".") if plain else ("━", "─")
    total = len(progress.trials)
    size = BAR * progress.over // max(1, total)
    return f"{progress.over} of {plural(total, 'trial')}  {full * size}{empty * (BAR - size)}"


def _counts(progress: Progress, *, now: float) -> list[tuple[str, str]]:
    """Text and style of each count that is not 0."""
    kinds = [
        (progress.count(*WELL), "done", "green"),
        (len(progress.running), "running", "cyan"),
        (len(progress.failed), "failed", "bold red"),
        (progress.count("pruned"), "pruned", "yellow"),
        (progress.count("same"), "the same as another", "dim"),
        (progress.count(STOPPED), "stopped", "dim"),
        (progress.waiting, "left", ""),
    ]
    counts = [(f"{count} {word}", style) for count, word, style in kinds if count]
    if progress.left_s is not None and (progress.running or progress.waiting):
        done = time.strftime("%a %H:%M", time.localtime(now + progress.left_s))
        counts.append((f"{human.duration(progress.left_s)} to go (done {done})", "bold"))
    return counts or [("no trial yet", "dim")]


def _running(trial: Trial, names: Sequence[str], *, now: float) -> list[str]:
    step = "" if trial.steps is None else f"step {trial.steps:,}"
    step += f"/{trial.total_steps:,}" if step and trial.total_steps else ""
    speed = "" if trial.tokens_per_s is None else f"{human.count(trial.tokens_per_s)} tokens/s"
    took = "" if not trial.started else human.duration(max(0.0, now - trial.started))
    return [f"  {trial.label}", settings_of(trial, names), step or "starting", speed, took]


def _failed(progress: Progress, names: Sequence[str]) -> list[str]:
    lines = []
    for trial in progress.failed[-SHOWN_FAILED:]:
        cause = human.one_line(trial.cause, limit=100)
        line = f"  {trial.label} {settings_of(trial, names)}: {trial.outcome}"
        lines.append(f"{line}: {cause}" if cause else line)
    before = len(progress.failed) - len(lines)
    return [f"  and {before} earlier failures", *lines] if before else lines


def _best(sweep: Sweep, names: Sequence[str]) -> str:
    best = sweep.best
    if best is None:
        return ""
    return f"  best: {best.label} {settings_of(best, names)}  ({known_of(best, sweep.objective)})"


@dataclasses.dataclass(frozen=True)
class Seen:
    """A sweep at one moment."""

    sweep: Sweep
    over: bool
    """Nothing of it runs any more."""
    note: str
    now: float

    @property
    def code(self) -> int:
        """The exit code: 1 where it is over, and a trial failed or was not run."""
        return 1 if self.over and not all(trial.is_done for trial in self.sweep.trials) else 0

    def panel(self, plain: bool) -> Any:
        """The picture for a terminal; ``plain``: ASCII only."""
        title = shorter_path(self.sweep.directory)
        return sweep_progress(self.sweep, now=self.now, title=title, note=self.note, plain=plain)


def is_here(location: RunLocation) -> bool:
    """Whether this is a sweep's directory on this machine."""
    path = Path(location.path).expanduser()
    return not location.host and not observer.is_run(location.path) and is_sweep(path)


def look(reader: SweepReader) -> Seen:
    """Read the sweep; trials whose process is gone with the sweep's are not shown as running."""
    sweep, now = reader.read(), time.time()
    silent_s = None if sweep.complete else _silent_s(sweep, now)
    if silent_s is None:
        return Seen(sweep, sweep.complete, "", now)
    note = (
        f"The process of this sweep has ended (last update {duration_text(silent_s)} ago). "
        f"To run the remaining trials: python -m llmx sweep resume {shorter_path(sweep.directory)}"
    )
    cause = "the sweep's process ended unexpectedly"
    sweep.trials = [
        dataclasses.replace(trial, outcome="interrupted", cause=cause)
        if trial.state == RUNNING
        else trial
        for trial in sweep.trials
    ]
    return Seen(sweep, True, note, now)


def _silent_s(sweep: Sweep, now: float) -> float | None:
    """Seconds since the last sign of life of a sweep that runs no more; None while it runs."""
    newest = _mtime(sweep.directory / FILE)
    alive = observer.is_alive({"pid": sweep.pid, "host": sweep.host})
    if alive:
        return None
    for trial in sweep.trials:
        if trial.state == RUNNING and trial.run_dir.is_dir():
            facts = observer.Observer(trial.run_dir, brief=True).facts()
            if interpret(facts).state in LIVE:
                return None
            newest = max(newest, _mtime(trial.run_dir / "metrics.jsonl"), _mtime(trial.run_dir))
    silent_s = max(0.0, now - newest)
    return silent_s if alive is False or silent_s > SILENT_S else None


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def status(path: str, *, as_json: bool) -> int:
    """Print how far a sweep is; the exit code."""
    snapshot = look(SweepReader(Path(path)))
    if as_json:
        print(json.dumps(_facts(snapshot), indent=2, ensure_ascii=False))
        return 0
    console = open_console(sys.stdout)
    console.print(snapshot.panel(is_plain(console)))
    if snapshot.over:
        console.print(
            f"\n  the table and the page: python -m llmx report {shorter_path(Path(path))}"
        )
    return snapshot.code


def _facts(snapshot: Seen) -> dict[str, Any]:
    """Facts of a sweep for scripts; numbers that are not finite are null."""
    sweep = snapshot.sweep
    progress = progress_of(sweep, now=snapshot.now)
    apart = ("curve", "declared", "key", "rungs", "slots", "job")
    names = ["state", *(f.name for f in dataclasses.fields(Trial) if f.name not in apart)]
    trials = [{name: getattr(trial, name) for name in names} for trial in sweep.trials]
    values = {
        "sweep": str(sweep.directory),
        "objective": sweep.objective,
        "mode": sweep.mode,
        "complete": sweep.complete,
        "over": snapshot.over,
        "note": snapshot.note,
        "left_s": progress.left_s,
        "best": progress.best.index if progress.best else None,
        "trials": trials,
    }
    return dict(plain(values))


def snapshots(path: str, *, every_s: float) -> Iterator[Seen]:
    """The sweep again and again, until nothing of it runs."""
    reader, pause = SweepReader(Path(path)), threading.Event()
    while True:
        snapshot = look(reader)
        yield snapshot
        if snapshot.over:
            return
        pause.wait(every_s)


def news(snapshot: Seen, before: Seen | None) -> Iterator[str]:
    """A line whenever a trial has begun or ended, and the note at the end."""
    if before is None or _ends(snapshot) != _ends(before):
        when = time.strftime("%H:%M:%S", time.localtime(snapshot.now))
        yield f"{when}  {progress_line(snapshot.sweep, now=snapshot.now)}"
    if snapshot.note:
        yield snapshot.note


def _ends(snapshot: Seen) -> list[tuple[int, str, str]]:
    return [(trial.index, trial.state, trial.outcome) for trial in snapshot.sweep.trials]
