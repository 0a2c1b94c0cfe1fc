"""``status`` and ``watch`` of a sweep's directory on this machine: how many trials are done, what
runs, what is left, the best so far.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import json
import sys
import threading
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmx import text as human
from llmx.observe.page import block, plain, table
from llmx.observe.report.screen import is_plain, open_console, rendered
from llmx.observe.report.sweep_data import SweepReader, axes
from llmx.observe.report.sweep_table import best_and_command, failures, settings_of
from llmx.observe.run import Run, duration_text, is_alive, is_run, modified
from llmx.observe.source import RunLocation
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
class Snapshot:
    """A sweep at one moment."""

    sweep: Sweep
    now: float
    """Seconds since the epoch."""
    is_over: bool = False
    """Nothing of it runs any more."""
    note: str = ""
    """Says so, where trials are left."""

    @property
    def code(self) -> int:
        """The exit code: 1 where it is over, and a trial failed or was not run."""
        return int(self.is_over and not all(trial.is_done for trial in self.sweep.trials))

    @cached_property
    def running(self) -> list[Trial]:
        return [trial for trial in self.sweep.trials if trial.state == RUNNING]

    @cached_property
    def failed(self) -> list[Trial]:
        """The last that ended, last."""
        failed = [trial for trial in self.sweep.trials if trial.failed]
        return sorted(failed, key=lambda trial: trial.ended or 0.0)

    @property
    def waiting(self) -> int:
        return sum(trial.state == WAITING for trial in self.sweep.trials)

    @property
    def done(self) -> int:
        """Trials that nothing is left to do for."""
        return len(self.sweep.trials) - len(self.running) - self.waiting

    @cached_property
    def left_s(self) -> float | None:
        """Seconds until the last trial ends, where each waiting one begins as a running one ends;
        None where no trial has ended that could tell."""
        times = [took for trial in self.sweep.trials if (took := _took(trial)) is not None]
        if not self.running and not self.waiting:
            return 0.0
        if not times:
            return None
        mean, at_once = sum(times) / len(times), len(self.running) or _most_at_once(self.sweep)
        begins = [trial.started or self.now for trial in self.running]
        ends = [max(0.0, mean - (self.now - begin)) for begin in begins] or [0.0] * at_once
        heapq.heapify(ends)
        for _ in range(self.waiting):
            heapq.heapreplace(ends, ends[0] + mean)
        return max(ends)

    def counts(self) -> str:
        """The counts that are not 0, and the time that is left."""

        def count(*outcomes: str) -> int:
            return sum(trial.outcome in outcomes for trial in self.sweep.trials)

        kinds = {
            "done": count(*WELL),
            "running": len(self.running),
            "failed": len(self.failed),
            "pruned": count("pruned"),
            "the same as another": count("same"),
            "stopped": count(STOPPED),
            "left": self.waiting,
        }
        counts = [f"{number} {word}" for word, number in kinds.items() if number]
        if self.left_s is not None and (self.running or self.waiting):
            done = time.strftime("%a %H:%M", time.localtime(self.now + self.left_s))
            counts.append(f"{human.duration(self.left_s)} to go (done {done})")
        return ", ".join(counts) or "no trial yet"

    def line(self) -> str:
        """One line for a log file: the counts, what is left, the best so far."""
        done = f"{self.done}/{plural(len(self.sweep.trials), 'trial')}"
        return "  ".join(filter(None, [done, self.counts(), best_and_command(self.sweep)[0]]))

    def panel(self, plain: bool = False) -> Group:
        """The picture for a terminal; ``plain``: ASCII only."""
        from rich.console import Group

        names, total = axes(self.sweep.trials), len(self.sweep.trials)
        full, empty = ("#", ".") if plain else ("━", "─")
        size = BAR * self.done // max(1, total)
        bar = f"{self.done} of {plural(total, 'trial')}  {full * size}{empty * (BAR - size)}"
        running = [
            (trial.label, f"{settings_of(trial, names)}  {_progress(trial, self.now)}")
            for trial in self.running[:SHOWN_RUNNING]
        ]
        omitted = len(self.running) - SHOWN_RUNNING
        notes = [self.note] if self.note else []
        failed = failures(self.failed[::-1])
        if len(failed) > SHOWN_FAILED:
            notes.append(f"and {plural(len(failed) - SHOWN_FAILED, 'earlier kind')} of failure")
        blocks = [
            block("heading", f"{shorter_path(self.sweep.directory)}  {bar}"),
            block("text", f"  {self.counts()}"),
            table(running),
            block("text", f"  and {omitted} more" if omitted > 0 else ""),
            block("list", [*notes, *failed[:SHOWN_FAILED][::-1]]),
            block("heading", best_and_command(self.sweep)[0]),
        ]
        return Group(*rendered(blocks, is_blank=False))


def _progress(trial: Trial, now: float) -> str:
    """The step of a trial that runs, its speed, and the time since its start."""
    step = "starting" if trial.steps is None else f"step {trial.steps:,}"
    step += f"/{trial.total_steps:,}" if trial.steps is not None and trial.total_steps else ""
    speed = "" if trial.tokens_per_s is None else f"{human.count(trial.tokens_per_s)} tokens/s"
    took = "" if not trial.started else human.duration(max(0.0, now - trial.started))
    return ", ".join(filter(None, [step, speed, took]))


def _took(trial: Trial) -> float | None:
    """Seconds from the start to the end of a trial that was run."""
    if not trial.outcome or trial.outcome in NOT_RUN:
        return None
    if trial.started and trial.ended and trial.ended > trial.started:
        return trial.ended - trial.started
    return trial.seconds


def _most_at_once(sweep: Sweep) -> int:
    """The most trials that ran at the same time."""
    changes = []
    for trial in sweep.trials:
        if trial.started and trial.ended and _took(trial):
            changes += [(trial.started, 1), (trial.ended, -1)]
    return max([1, *itertools.accumulate(change for _, change in sorted(changes))])


def is_here(location: RunLocation) -> bool:
    """Whether this is a sweep's directory on this machine."""
    path = Path(location.path).expanduser()
    return not location.host and not is_run(path) and is_sweep(path)


def look(reader: SweepReader) -> Snapshot:
    """Read the sweep; trials whose process is gone with the sweep's are not shown as running."""
    sweep, now = reader.read(), time.time()
    silent_s = None if sweep.complete else _silent_s(sweep, now)
    if silent_s is None:
        return Snapshot(sweep, now, sweep.complete)
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
    return Snapshot(sweep, now, True, note)


def _silent_s(sweep: Sweep, now: float) -> float | None:
    """Seconds since the last sign of life of a sweep that runs no more; None while it runs."""
    newest = modified(sweep.directory / FILE) or 0.0
    alive = is_alive({"pid": sweep.pid, "host": sweep.host})
    if alive:
        return None
    for trial in sweep.trials:
        if trial.state == RUNNING and trial.run_dir.is_dir():
            if Run(trial.run_dir, is_brief=True).is_live:
                return None
            files = (trial.run_dir / "metrics.jsonl", trial.run_dir)
            newest = max(newest, *(modified(path) or 0.0 for path in files))
    silent_s = max(0.0, now - newest)
    return silent_s if alive is False or silent_s > SILENT_S else None


def status(path: str, *, as_json: bool) -> int:
    """Print how far a sweep is; the exit code."""
    snapshot = look(SweepReader(Path(path)))
    if as_json:
        print(json.dumps(_facts(snapshot), indent=2, ensure_ascii=False))
        return 0
    console = open_console(sys.stdout)
    console.print(snapshot.panel(is_plain(console)))
    if snapshot.is_over:
        command = f"python -m llmx report {shorter_path(Path(path))}"
        console.print(f"\n  the table and the page: {command}")
    return snapshot.code


def _facts(snapshot: Snapshot) -> dict[str, Any]:
    """Facts of a sweep for scripts; numbers that are not finite are null."""
    sweep = snapshot.sweep
    apart = ("curve", "declared", "key", "rungs", "slots", "job")
    names = ["state", *(f.name for f in dataclasses.fields(Trial) if f.name not in apart)]
    values = {
        "sweep": str(sweep.directory),
        "objective": sweep.objective,
        "mode": sweep.mode,
        "complete": sweep.complete,
        "over": snapshot.is_over,
        "note": snapshot.note,
        "left_s": snapshot.left_s,
        "best": sweep.best.index if sweep.best else None,
        "trials": [{name: getattr(trial, name) for name in names} for trial in sweep.trials],
    }
    return dict(plain(values))


def snapshots(path: str, *, every_s: float) -> Iterator[Snapshot]:
    """The sweep again and again, until nothing of it runs."""
    reader, pause = SweepReader(Path(path)), threading.Event()
    while not (snapshot := look(reader)).is_over:
        yield snapshot
        pause.wait(every_s)
    yield snapshot


def news(snapshot: Snapshot, before: Snapshot | None) -> Iterator[str]:
    """A line whenever a trial has begun or ended, and the note at the end."""
    if before is None or _ends(snapshot) != _ends(before):
        when = time.strftime("%H:%M:%S", time.localtime(snapshot.now))
        yield f"{when}  {snapshot.line()}"
    if snapshot.note:
        yield snapshot.note


def _ends(snapshot: Snapshot) -> list[tuple[int, str, str]]:
    return [(trial.index, trial.state, trial.outcome) for trial in snapshot.sweep.trials]
