"""``python -m llmx status``: what runs are doing, from the files of their directories.

python -m llmx status                     all runs under outputs/, live ones first
python -m llmx status RUN                 one of them
python -m llmx status SWEEP_DIR           a sweep: done, running, failed, left, the best so far
python -m llmx status user@host:RUN       on another machine, over ssh; nothing is needed there
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmx.errors import ConfigError, did_you_mean
from llmx.observe.status import observer
from llmx.observe.status.remote import RunLocation, fetch_facts, parse_location
from llmx.observe.status.view import Facts, View, interpret

SHOWN = 20
OPTIONS = ("--all", "--json", "--ssh-config", "--every")

__all__ = ["Options", "main", "outputs", "parse"]


@dataclass(frozen=True)
class Options:
    """The words of ``status`` and ``watch``."""

    location: RunLocation | None = None
    most: int = SHOWN
    as_json: bool = False
    every_s: float = 1.0


def help_text() -> str:
    """What ``python -m llmx status --help`` prints."""
    return (
        "python -m llmx status [RUN | SWEEP_DIR | DIR | user@host:RUN] [options]\n\n"
        "What runs are doing, from the files of their directories. With a run: all about it; with\n"
        "a sweep's directory (on this machine): its trials, the time left, the best so far; with\n"
        "another directory, or nothing (then outputs/): two lines per run, live ones first.\n\n"
        f"  --all              all runs, not only the first {SHOWN}\n"
        "  --json             the facts as JSON, for scripts\n"
        "  --ssh-config FILE  for user@host:RUN, as ssh -F\n\n"
        "The exit code is 1 where the one run failed or is dead, or a sweep that is over has a\n"
        "trial that failed or was not run.\n"
    )


def main(words: Sequence[str]) -> int:
    """Print the status of one run or a table of runs; 0, or 1 where the one run failed."""
    from llmx.observe.report.screen import open_console
    from llmx.observe.status import sweep
    from llmx.observe.status.show import PLAIN_BLOCKS, panel, table

    options = parse(words, command="status")
    location = options.location or RunLocation(outputs())
    if sweep.is_here(location):
        return sweep.status(location.path, as_json=options.as_json)
    facts = gather(location, most=options.most)
    if options.as_json:
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
    for line in table(views, found=facts["found"]):
        console.print(line, soft_wrap=True)
    return 0


def gather(location: RunLocation, *, most: int) -> Facts:
    """Facts of one run, or of all runs under a directory (``runs``, ``found``, ``base``)."""
    if location.host:
        return fetch_facts(location, most=most)
    if not Path(location.path).expanduser().is_dir():
        raise ConfigError(
            f"no such directory: {location.path}. Give a run directory or one that contains "
            "runs, here or as user@host:path. The default is outputs/."
        )
    if observer.is_run(location.path):
        return observer.Observer(location.path).facts()
    return observer.table(location.path, most)


def outputs() -> str:
    """Where runs go when nobody says otherwise."""
    return os.environ.get("LLMX_OUTPUTS", "outputs")


def parse(words: Sequence[str], *, command: str) -> Options:
    """The command line; ConfigError names the word that is wrong."""
    values: dict[str, str] = {}
    locations, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        name, _, value = word.partition("=")
        if not word.startswith("-"):
            locations.append(word)
        elif name not in OPTIONS:
            raise ConfigError(
                f"{command}: unknown option {name}.{did_you_mean(name, OPTIONS)} "
                f"Options: {', '.join(OPTIONS)}."
            )
        elif name in ("--all", "--json") or value:
            values[name] = value
        elif rest:
            values[name] = rest.pop(0)
        else:
            raise ConfigError(f"{command}: {name} needs a value.")
    if len(locations) > 1:
        raise ConfigError(f"{command} takes one run, not {len(locations)}: {' '.join(locations)}.")
    try:
        every_s = float(values.get("--every", "1"))
    except ValueError:
        every_s = 0.0
    if not every_s >= 0.1:
        raise ConfigError(
            f"{command}: --every {values['--every']} must be a number of seconds, at least 0.1."
        )
    ssh_config = values.get("--ssh-config")
    return Options(
        location=parse_location(locations[0], ssh_config=ssh_config) if locations else None,
        most=10**6 if "--all" in values else SHOWN,
        as_json="--json" in values,
        every_s=every_s,
    )


def _short(view: View, base: str, *, is_here: bool) -> View:
    """With a path that can be typed here; of another machine's runs, relative to ``base``."""
    near = os.path.relpath(view.path, None if is_here else base)
    return replace(view, path=near if len(near) < len(view.path) else view.path)
