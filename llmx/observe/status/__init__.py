"""``python -m llmx status``: what runs are doing, from the files of their directories.

python -m llmx status                     all runs under outputs/, live ones first
python -m llmx status RUN                 one of them
python -m llmx status SWEEP_DIR           a sweep: done, running, failed, left, the best so far
python -m llmx status user@host:RUN       on another machine, over ssh and rsync
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from llmx.errors import ConfigError
from llmx.observe.status import observer
from llmx.observe.status.mirror import (
    FILES,
    LONG_FILES,
    Machine,
    Mirror,
    RunLocation,
    parse_location,
)
from llmx.observe.status.observer import Facts
from llmx.observe.status.view import interpret
from llmx.run.rundir import RunDir
from llmx.text import shorter_path

SHOWN = 20


def run(options: argparse.Namespace) -> int:
    """Print the status of one run or a table of runs; 0, or 1 where the one run failed."""
    from llmx.observe.report.screen import is_plain, open_console
    from llmx.observe.status import sweep
    from llmx.observe.status.show import panel, table

    location = location_of(options) or RunLocation(outputs())
    if sweep.is_here(location):
        return sweep.status(location.path, as_json=options.json)
    with Source(location) as source:
        facts = source.facts(limit=10**6 if options.all else SHOWN)
    if options.json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
        return 0
    console = open_console(sys.stdout)
    if "runs" not in facts:
        view = interpret(facts)
        console.print(panel(view, plain=is_plain(console)))
        return 1 if view.state in ("failed", "dead") else 0
    # What can be typed here; on another machine, relative to the directory that was asked for.
    start = facts["base"] if location.host else None
    views = [
        replace(view, path=shorter_path(view.path, start=start))
        for view in map(interpret, facts["runs"])
    ]
    if not views:
        raise ConfigError(
            f"no runs under {facts['base']}. Give the directory that holds them, or set "
            "LLMX_OUTPUTS: python -m llmx status DIR"
        )
    for line in table(views, num_runs=facts["found"]):
        console.print(line, soft_wrap=True)
    return 0


class Source:
    """A run or a directory of runs that is read again and again, here or, by a copy, on another
    machine."""

    def __init__(self, location: RunLocation) -> None:
        self.location = location
        self._mirror = Mirror(location) if location.host else None
        self.root = (
            self._mirror.root if self._mirror else RunDir(Path(location.path).expanduser()).root
        )
        self._observer: observer.Observer | None = None

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *error: object) -> None:
        if self._mirror is not None:
            self._mirror.__exit__(*error)

    def facts(self, *, limit: int = 1) -> Facts:
        """Facts of the run, or of ``limit`` runs of all (``runs``, ``found``, ``base``).

        Raises:
            ConfigError: there is no such directory.
            LaunchError: there is no connection.
        """
        far: Machine | None = None
        if self._mirror is not None:
            far = self._mirror.refresh((*FILES, *LONG_FILES) if self._observer else FILES)
        elif not self.root.is_dir():
            raise ConfigError(
                f"no such directory: {self.location.path}. Give a run directory or one that "
                "contains runs, here or as user@host:path. The default is outputs/."
            )
        if observer.is_run(self.root):
            if self._observer is None:
                self._observer = observer.Observer(self.root)
                return self.facts()
            return self._observer.facts(far)
        runs, num_runs = observer.chosen_runs(self.root, limit)
        names = [os.path.relpath(run, self.root) for run in runs]
        if self._mirror is not None and far is not None and names:
            metrics = [f"{name}/metrics.jsonl" for name in names]
            self._mirror.copy(far.root, ["--ignore-missing-args"], files=metrics)
        facts = [
            observer.Observer(run, brief=True).facts(far, name)
            for run, name in zip(runs, names, strict=True)
        ]
        base = far.root if far else str(self.root)
        return {"base": base, "found": num_runs, "runs": facts}

    def write_stop(self) -> None:
        """Ask the supervisor of the run to end it."""
        if self._mirror is not None:
            self._mirror.run(
                f"touch -- {shlex.quote(self.location.path)}/{RunDir(self.root).stop.name}"
            )
        else:
            RunDir(self.root).stop.touch()


def outputs() -> str:
    """The directory of runs for which none is given: ``$LLMX_OUTPUTS``, else ``outputs``."""
    return os.environ.get("LLMX_OUTPUTS", "outputs")


def location_of(options: argparse.Namespace) -> RunLocation | None:
    """The run directory that ``status`` and ``watch`` were given; None without one."""
    if options.location is None:
        return None
    ssh_config = None if options.ssh_config is None else str(options.ssh_config)
    return parse_location(options.location, ssh_config=ssh_config)
