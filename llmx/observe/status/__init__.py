"""``python -m llmx status``: what runs are doing, from the files of their directories.

python -m llmx status                     all runs under outputs/, live ones first
python -m llmx status RUN                 one of them
python -m llmx status SWEEP_DIR           a sweep: done, running, failed, left, the best so far
python -m llmx status user@host:RUN       on another machine, over ssh; nothing is needed there
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from llmx.errors import ConfigError
from llmx.observe.status import observer
from llmx.observe.status.remote import RunLocation, fetch_facts, parse_location
from llmx.observe.status.view import Facts, View, interpret

SHOWN = 20


def run(options: argparse.Namespace) -> int:
    """Print the status of one run or a table of runs; 0, or 1 where the one run failed."""
    from llmx.observe.report.screen import open_console
    from llmx.observe.status import sweep
    from llmx.observe.status.show import PLAIN_BLOCKS, panel, table

    location = location_of(options) or RunLocation(outputs())
    if sweep.is_here(location):
        return sweep.status(location.path, as_json=options.json)
    facts = gather(location, limit=10**6 if options.all else SHOWN)
    if options.json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
        return 0
    console = open_console(sys.stdout)
    if "runs" not in facts:
        view = interpret(facts)
        fine = (console.encoding or "").lower().startswith("utf")
        console.print(panel(view) if fine else panel(view, blocks=PLAIN_BLOCKS))
        return 1 if view.state in ("failed", "dead") else 0
    is_here = not location.host
    views = [_short(interpret(run), facts["base"], is_here=is_here) for run in facts["runs"]]
    if not views:
        raise ConfigError(
            f"no runs under {facts['base']}. Give the directory that holds them, or set "
            "LLMX_OUTPUTS: python -m llmx status DIR"
        )
    for line in table(views, num_runs=facts["found"]):
        console.print(line, soft_wrap=True)
    return 0


def gather(location: RunLocation, *, limit: int) -> Facts:
    """Facts of one run, or of all runs under a directory (``runs``, ``found``, ``base``)."""
    if location.host:
        return fetch_facts(location, limit=limit)
    if not Path(location.path).expanduser().is_dir():
        raise ConfigError(
            f"no such directory: {location.path}. Give a run directory or one that contains "
            "runs, here or as user@host:path. The default is outputs/."
        )
    if observer.is_run(location.path):
        return observer.Observer(location.path).facts()
    return observer.table(location.path, limit)


def outputs() -> str:
    """The directory of runs for which none is given: ``$LLMX_OUTPUTS``, else ``outputs``."""
    return os.environ.get("LLMX_OUTPUTS", "outputs")


def location_of(options: argparse.Namespace) -> RunLocation | None:
    """The run directory that ``status`` and ``watch`` were given; None without one."""
    if options.location is None:
        return None
    ssh_config = None if options.ssh_config is None else str(options.ssh_config)
    return parse_location(options.location, ssh_config=ssh_config)


def _short(view: View, base: str, *, is_here: bool) -> View:
    """Shorten the path to one that can be typed here; on another machine, relative to ``base``."""
    near = os.path.relpath(view.path, None if is_here else base)
    return replace(view, path=near if len(near) < len(view.path) else view.path)
