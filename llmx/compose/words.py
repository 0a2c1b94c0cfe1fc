"""The words of a command, sorted by what they are: what ``llmx.cli.words.parse`` makes of argv."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Words(argparse.Namespace):
    """The words of one command. A flag of its own is an attribute: ``words.json``.

    A flag may have the name of a method (``--step``), which only a command with overrides calls.
    """

    typed: Sequence[str] = ()
    """All of them, in the order in which they were typed."""
    bare: Sequence[str] = ()
    """Its arguments: a run directory, the name of a sweep."""
    overrides: Sequence[str] = ()
    """``group=option`` and ``key=value``."""
    own: Mapping[str, str] = {}
    """Its own keys, such as ``step=N``."""
    config_dir: str | None = None
    multirun: bool = False
    show: Mapping[str, str] = {}
    """What to print instead of starting anything: ``--cfg`` -> ``job``."""
    behind: Sequence[str] = ()
    """The words behind ``--``."""

    def but(self, **changes: Any) -> Words:
        """The same with other values."""
        return Words(**{**vars(self), **changes})

    @property
    def config_dirs(self) -> list[str]:
        return [self.config_dir] if self.config_dir else []

    def run_directory(self) -> Path:
        """The run directory that is the one argument."""
        return Path(self.bare[0]).expanduser()

    def flag(self, name: str) -> bool:
        """An own word that is true or false."""
        return self.own.get(name) == "true"

    def step(self, name: str) -> int | None:
        """An own word that is a step; None where it was not given."""
        return int(self.own[name]) if name in self.own else None
