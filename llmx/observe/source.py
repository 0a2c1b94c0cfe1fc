"""A run or a directory of runs that is read again and again: here, or by a copy of one on another
machine."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from llmx.errors import ConfigError
from llmx.observe.mirror import FILES, LONG_FILES, Machine, Mirror, RunLocation, parse_location
from llmx.observe.run import Run, find_runs, is_run, live_first
from llmx.run.rundir import RunDir


class Source:
    """Whoever reads from it may get a ConfigError, that there is no such directory, or a
    LaunchError, that there is no connection."""

    def __init__(self, location: RunLocation) -> None:
        self.location = location
        self._mirror = Mirror(location) if location.host else None
        path = self._mirror.root if self._mirror else Path(location.path).expanduser()
        self.root = RunDir(path).root
        self._machine: Machine | None = None
        self._run: Run | None = None

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *error: object) -> None:
        if self._mirror is not None:
            self._mirror.__exit__(*error)

    @property
    def base(self) -> str:
        """The directory, as it is called on its machine."""
        return self._machine.root if self._machine else str(self.root)

    def is_run(self) -> bool:
        """Whether the directory is that of one run."""
        self._copy(FILES)
        return is_run(self.root)

    def run(self) -> Run:
        """The run as it is now; ConfigError where the directory is not that of one."""
        if self._run is None and not self.is_run():
            raise ConfigError(
                f"{self.location} is not a run directory. Runs there: python -m llmx status "
                f"{self.location}"
            )
        self._copy((*FILES, *LONG_FILES))
        self._run = Run(self.root, machine=self._machine, before=self._run)
        return self._run

    def runs(self, limit: int) -> tuple[list[Run], int]:
        """At most ``limit`` runs, those that may be alive first, then the newest; and how many
        there are. ``is_run`` comes first."""
        directories = find_runs(self.root)
        names = [os.path.relpath(root, self.root) for root in live_first(directories)[:limit]]
        if self._mirror is not None and names:
            metrics = [f"{name}/metrics.jsonl" for name in names]
            self._mirror.copy(self.base, ["--ignore-missing-args"], files=metrics)
        runs = [
            Run(self.root / name, is_brief=True, machine=self._machine, name=name) for name in names
        ]
        return runs, len(directories)

    def write_stop(self) -> None:
        """Ask the supervisor of the run to end it."""
        stop = RunDir(self.root).stop
        if self._mirror is not None:
            self._mirror.run(f"touch -- {shlex.quote(self.location.path)}/{stop.name}")
        else:
            stop.touch()

    def _copy(self, names: Sequence[str]) -> None:
        if self._mirror is not None:
            self._machine = self._mirror.refresh(names)
        elif not self.root.is_dir():
            raise ConfigError(
                f"no such directory: {self.location.path}. Give a run directory or one that "
                "contains runs, here or as user@host:path. The default is outputs/."
            )


def outputs() -> str:
    """The directory of runs for which none is given: ``$LLMX_OUTPUTS``, else ``outputs``."""
    return os.environ.get("LLMX_OUTPUTS", "outputs")


def location_of(options: argparse.Namespace) -> RunLocation:
    """The directory that a command was given, else that of all runs."""
    ssh_config = None if options.ssh_config is None else str(options.ssh_config)
    return parse_location(options.location or outputs(), ssh_config=ssh_config)
