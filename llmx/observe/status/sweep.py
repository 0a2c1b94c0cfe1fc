"""``status`` and ``watch`` of a sweep's directory on this machine."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmx.observe.report.screen import open_console
from llmx.observe.report.sweep_data import SweepReader
from llmx.observe.report.sweep_progress import progress_line, progress_of, sweep_progress
from llmx.observe.report.sweep_table import near
from llmx.observe.status import observer
from llmx.observe.status.remote import RunLocation
from llmx.observe.status.view import LIVE, duration_text, interpret
from llmx.run.sweepdir import FILE, RUNNING, Sweep, Trial, is_sweep
from llmx.text import printable

SILENT_S = 90.0
"""A sweep that changes none of its files for so long, with no trial alive, runs no more."""


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

    def panel(self, *, plain: bool) -> Any:
        title = near(self.sweep.directory)
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
        f"To run the remaining trials: python -m llmx sweep resume {near(sweep.directory)}"
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
    alive = observer._is_alive({"pid": sweep.pid, "host": sweep.host})
    if alive:
        return None
    for trial in sweep.trials:
        if trial.state == RUNNING and trial.run_dir.is_dir():
            facts = observer.Observer(str(trial.run_dir), brief=True).facts()
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
    plain = not (console.encoding or "").lower().startswith("utf")
    console.print(snapshot.panel(plain=plain))
    if snapshot.over:
        console.print(f"\n  the table and the page: python -m llmx report {near(Path(path))}")
    return snapshot.code


def _facts(snapshot: Seen) -> dict[str, Any]:
    """Facts of a sweep for scripts; numbers that are not finite are null."""
    sweep = snapshot.sweep
    progress = progress_of(sweep, now=snapshot.now)
    apart = ("config", "curve", "declared", "key", "rungs", "slots", "job")
    names = ["state", *(f.name for f in dataclasses.fields(Trial) if f.name not in apart)]
    trials = [{name: _plain(getattr(trial, name)) for name in names} for trial in sweep.trials]
    return {
        "sweep": str(sweep.directory),
        "objective": sweep.objective,
        "mode": sweep.mode,
        "complete": sweep.complete,
        "over": snapshot.over,
        "note": snapshot.note,
        "left_s": _plain(progress.left_s),
        "best": progress.best.index if progress.best else None,
        "trials": trials,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def watch(path: str, *, every_s: float) -> int:
    """Show a sweep until it is over; the exit code."""
    show = _live if sys.stdout.isatty() else _lines
    return show(_looks(path, every_s=every_s)).code


def _looks(path: str, *, every_s: float) -> Iterator[Seen]:
    reader, pause = SweepReader(Path(path)), threading.Event()
    while True:
        snapshot = look(reader)
        yield snapshot
        if snapshot.over:
            return
        pause.wait(every_s)


def _live(looks: Iterator[Seen]) -> Seen:
    from rich.live import Live

    console = open_console(sys.stdout)
    plain = not (console.encoding or "").lower().startswith("utf")
    with Live("", console=console, auto_refresh=False) as live:
        for snapshot in looks:
            live.update(snapshot.panel(plain=plain), refresh=True)
    return snapshot


def _lines(looks: Iterator[Seen]) -> Seen:
    """A line whenever a trial begins or ends."""
    printed: list[tuple[int, str, str]] | None = None
    for snapshot in looks:
        news = [(trial.index, trial.state, trial.outcome) for trial in snapshot.sweep.trials]
        if news != printed:
            line = progress_line(snapshot.sweep, now=snapshot.now)
            when = time.strftime("%H:%M:%S", time.localtime(snapshot.now))
            print(f"{when}  {printable(line)}", flush=True)
        printed = news
    if snapshot.note:
        print(printable(snapshot.note), flush=True)
    return snapshot
