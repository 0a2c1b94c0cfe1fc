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
from collections.abc import Iterator
from typing import Any

from llmx.errors import ConfigError, LaunchError
from llmx.observe.status import gather, location_of, outputs
from llmx.observe.status.observer import Observer, find_runs, is_over
from llmx.observe.status.remote import RunLocation, stream_facts
from llmx.observe.status.view import View, interpret
from llmx.text import printable

LONGEST_PAUSE_S = 30.0
START_S = 30.0
"""A run that has a snapshot and no supervisor for so long was only planned."""


def run(options: argparse.Namespace) -> int:
    """Watch until the run is over; 0 where it finished, 1 where not."""
    from llmx.observe.status import sweep

    location = location_of(options) or _newest()
    if sweep.is_here(location):
        return sweep.watch(location.path, every_s=options.every)
    if not location.host:
        facts = gather(location, limit=1)
        if "runs" in facts:
            location = _newest(location.path)
    show = _live if sys.stdout.isatty() else _lines
    view = show(_views(location, every_s=options.every))
    return 0 if view is not None and view.state == "finished" else 1


def _newest(base: str | None = None) -> RunLocation:
    """The run under ``base`` that lives, or else the newest."""
    base = base or outputs()
    runs = find_runs(base)
    if not runs:
        raise ConfigError(
            f"no run under {base} to watch. Give its directory, here or as user@host:path."
        )
    live = [run for run in runs if not is_over(run)]
    return RunLocation((live or runs)[0])


def _views(location: RunLocation, *, every_s: float) -> Iterator[View | str]:
    """Yield the view of a run until it is over; a text while there is no connection."""
    if not location.host:
        observer = Observer(location.path)
        pause = threading.Event()
        while True:
            view = interpret(observer.facts())
            yield view
            if view.is_over or _only_planned(view):
                return
            pause.wait(every_s)
    tries = 0
    while True:
        try:
            for facts in stream_facts(location, every_s=every_s):
                if "runs" in facts:
                    raise ConfigError(
                        f"{location} is not a run directory. Runs there: "
                        f"python -m llmx status {location.host}:{facts['base']}"
                    )
                tries = 0
                view = interpret(facts)
                yield view
                if view.is_over or _only_planned(view):
                    return
        except LaunchError as error:
            pause_s = min(LONGEST_PAUSE_S, 2.0**tries)
            tries += 1
            yield from _again_in(pause_s, str(error))


def _only_planned(view: View) -> bool:
    """Nobody starts it any more: there is nothing to watch."""
    return view.state == "planned" and view.now - (view.started or 0.0) > START_S


def _again_in(pause_s: float, why: str) -> Iterator[str]:
    """Say every second how long it is until the next try."""
    until = time.monotonic() + pause_s
    pause = threading.Event()
    while (left_s := until - time.monotonic()) > 0:
        yield f"no connection ({why.rstrip('.')}); again in {left_s:.0f} s"
        pause.wait(min(1.0, left_s))


def _live(views: Iterator[View | str]) -> View | None:
    """A picture that is refreshed in place; the last one stays on the screen."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from llmx.observe.report.screen import Harmless, open_console
    from llmx.observe.status.show import BLOCKS, PLAIN_BLOCKS, panel

    console = open_console(sys.stdout)
    blocks = BLOCKS if (console.encoding or "").lower().startswith("utf") else PLAIN_BLOCKS
    last: View | None = None
    picture: Any = Text("connecting ...", style="dim")
    with Live(picture, console=console, auto_refresh=False) as live:
        for view in views:
            if isinstance(view, View):
                last = view
                picture = Harmless(panel(view, blocks=blocks))
                live.update(picture, refresh=True)
            else:
                note = Text(f"\n  {printable(view)}", style="yellow")
                live.update(Group(picture, note), refresh=True)
    return last


def _lines(views: Iterator[View | str]) -> View | None:
    """A line whenever there is something new to say."""
    from llmx.observe.status.show import plain_line

    last: View | None = None
    last_shown: tuple[Any, ...] = ()
    is_connected, newest_s = True, 0.0
    damage: list[str] = []
    for view in views:
        if isinstance(view, str):
            if is_connected:
                print(f"{time.strftime('%H:%M:%S')} {printable(view)}", flush=True)
            is_connected = False
            continue
        is_connected = True
        if view.damage and view.damage != damage:
            print(printable("\n".join(view.damage)), flush=True)
        damage = view.damage
        for when, words in view.events:
            if when > newest_s and last is not None:
                moment = time.strftime("%H:%M:%S", time.localtime(when))
                print(f"{moment} {printable(words)}", flush=True)
            newest_s = max(newest_s, when)
        news = (view.state, len(view.losses), view.loss, view.restarts, bool(view.why))
        if news != last_shown:
            print(printable(plain_line(view)), flush=True)
        last_shown, last = news, view
    return last
