"""``python -m llmx watch RUN``: a run, live, until it is over.

    python -m llmx watch                      the newest run under outputs/
    python -m llmx watch SWEEP_DIR            a sweep
    python -m llmx watch user@host:RUN        on another machine; it connects again by itself

On a terminal a picture, refreshed every second (``--every S``); elsewhere a line a logged step.
Ctrl-C ends the watching, never the run. The exit code is 0 for a run that finished.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from llmx.errors import ConfigError, LaunchError
from llmx.observe.report.wording import event_text
from llmx.observe.run import FINAL, Run, find_runs, is_run, live_first
from llmx.observe.source import RunLocation, Source, location_of
from llmx.observe.status import show
from llmx.text import printable

T = TypeVar("T")
LONGEST_PAUSE_S = 30.0
START_S = 30.0
"""A run that has a snapshot and no supervisor for so long was only planned."""


def run(options: argparse.Namespace) -> int:
    """Watch until the run is over; 0 where it finished, 1 where not."""
    from llmx.observe.status import sweep

    location = location_of(options)
    if sweep.is_here(location):
        snapshots = sweep.snapshots(location.path, every_s=options.every)
        last = follow(snapshots, picture=sweep.Snapshot.panel, news=sweep.news)
        return last.code if last is not None else 1
    if not location.host and not is_run(location.path):
        runs = live_first(find_runs(Path(location.path).expanduser().absolute()))
        if not runs:
            raise ConfigError(
                f"no run under {location.path} to watch. Give its directory, here or as "
                "user@host:path."
            )
        location = RunLocation(str(runs[0]))
    run = follow(_runs(location, every_s=options.every), picture=show.panel, news=_news)
    return 0 if run is not None and run.state == "finished" else 1


def _runs(location: RunLocation, *, every_s: float) -> Iterator[Run | str]:
    """Yield a run again and again until it is over; a text while there is no connection."""
    pause, tries = threading.Event(), 0
    with Source(location) as source:
        while True:
            try:
                run = source.run()
            except LaunchError as error:
                pause_s = min(LONGEST_PAUSE_S, 2.0**tries)
                tries += 1
                yield from _again_in(pause_s, str(error))
                continue
            tries = 0
            yield run
            is_only_planned = run.state == "planned" and run.now - (run.started or 0.0) > START_S
            if run.state in FINAL or is_only_planned:
                return
            pause.wait(every_s)


def _again_in(pause_s: float, why: str) -> Iterator[str]:
    """Say every second how long it is until the next try."""
    until = time.monotonic() + pause_s
    pause = threading.Event()
    while (left_s := until - time.monotonic()) > 0:
        yield f"no connection ({why.rstrip('.')}); again in {left_s:.0f} s"
        pause.wait(min(1.0, left_s))


def follow(
    snapshots: Iterable[T | str],
    *,
    picture: Callable[[T, bool], Any],
    news: Callable[[T, T | None], Iterator[str]],
) -> T | None:
    """Show snapshots of a run or a sweep until they end; returns the last one.

    Args:
        snapshots: a text among them says why there is no connection.
        picture: for a terminal, where it is refreshed in place; the flag: ASCII only.
        news: the lines for a log file, given also the snapshot before.
    """
    last: T | None = None
    if not sys.stdout.isatty():
        is_connected = True
        for item in snapshots:
            if not isinstance(item, str):
                for line in news(item, last):
                    print(printable(line), flush=True)
                last = item
            elif is_connected:
                print(f"{time.strftime('%H:%M:%S')} {printable(item)}", flush=True)
            is_connected = not isinstance(item, str)
        return last
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from llmx.observe.report.screen import is_plain, open_console

    console = open_console(sys.stdout)
    current: Any = Text("connecting ...", style="dim")
    with Live(current, console=console, auto_refresh=False) as live:
        for item in snapshots:
            if isinstance(item, str):
                note = Text(f"\n  {item}", style="yellow")
                live.update(Group(current, note), refresh=True)
            else:
                last, current = item, picture(item, is_plain(console))
                live.update(current, refresh=True)
    return last


def _news(run: Run, before: Run | None) -> Iterator[str]:
    """Damage and events since the time before, and a line whenever a number has changed."""
    if before is None or run.damage != before.damage:
        yield from run.damage
    if before is not None:
        newest_s = max((event.get("time") or 0.0 for event in before.events), default=0.0)
        for event in run.events:
            when = event.get("time") or 0.0
            if when > newest_s:
                clock = time.strftime("%H:%M:%S", time.localtime(when))
                yield f"{clock} {event_text(event)}"
    if before is None or _numbers(run) != _numbers(before):
        yield show.plain_line(run)


def _numbers(run: Run) -> tuple[Any, ...]:
    loss, is_held = run.last.get("loss"), bool(run.standing.why)
    return run.state, len(run.train), loss, len(run.restarts), is_held
