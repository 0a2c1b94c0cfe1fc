"""Verifying checkpoints on a terminal: progress, one line each, what to do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmx import text as human
from llmx.checkpoint import selection
from llmx.checkpoint.commit import committed_dir
from llmx.checkpoint.manifest import Manifest, Problem, read_manifest
from llmx.checkpoint.pointers import BEST, LATEST, read_pointer

LINE_EVERY_S = 10.0
"""Between two lines of progress where there is no terminal."""


def check_all(checkpoints: Path, *, stream: Any) -> tuple[list[str], bool]:
    """A line for each checkpoint, the newest first; whether the newest is usable."""
    names = {pointer: read_pointer(checkpoints, pointer) for pointer in (LATEST, BEST)}
    lines, good = [], []
    for step in reversed(selection.list_steps(checkpoints)):
        directory = committed_dir(checkpoints, step)
        problems = verify(directory, stream=stream)
        manifest = read_manifest(directory)
        num_bytes = human.size(manifest.num_bytes) if isinstance(manifest, Manifest) else ""
        pointed = "".join(f"  <- {name}" for name, value in names.items() if value == step)
        outcome = f"cannot be used: {explain(directory, problems)}" if problems else "usable"
        lines.append(f"{directory.name}  {num_bytes:>10}  {outcome}{pointed}")
        good.append(not problems)
    return lines, bool(good) and good[0]


def verify(directory: Path, *, stream: Any) -> list[Problem]:
    """``selection.verify`` with progress on ``stream``."""
    manifest = read_manifest(directory)
    if isinstance(manifest, Problem):
        return [manifest]
    # Sizes first: what is missing is known at once.
    if problems := selection.verify(directory, hashes=False):
        return problems
    progress = ProgressLine(f"verifying {directory.name}", manifest.num_bytes, stream=stream)
    try:
        return selection.verify(directory, on_bytes=progress.add)
    finally:
        progress.end()


def explain(directory: Path, problems: Sequence[Problem]) -> str:
    """One sentence; where files are on other hosts, it names those."""
    words = selection.describe(problems)
    manifest = read_manifest(directory)
    if not isinstance(manifest, Manifest):
        return words
    absent = [each.file for each in problems if each.found == selection.MISSING]
    hosts = sorted({manifest.hosts[name] for name in absent if manifest.hosts.get(name)})
    if hosts and len(set(manifest.hosts.values())) > 1:
        words += (
            f". Without a shared file system each host keeps its own part: copy {directory.name} "
            f"from {', '.join(hosts)} into {directory.parent}"
        )
    return words + "."


class ProgressLine:
    """A line that is rewritten on a terminal; now and then a line of a log."""

    def __init__(self, title: str, total: int, *, stream: Any) -> None:
        self._title, self._total, self._stream = title, total, stream
        self._done = 0
        self._began = self._said = time.monotonic()
        self._live = stream.isatty()

    def add(self, count: int) -> None:
        """``count`` more bytes are done."""
        self._done += count
        now = time.monotonic()
        if now - self._said >= (0.1 if self._live else LINE_EVERY_S):
            self._said = now
            rate = self._done / max(now - self._began, 1e-9)
            left_s = (self._total - self._done) / max(rate, 1e-9)
            line = (
                f"{self._title}: {human.size(self._done)} of {human.size(self._total)}, "
                f"{rate / 2**20:.0f} MiB/s, {left_s:.0f} s left"
            )
            print(f"\r{line}\033[K" if self._live else line, end="" if self._live else "\n",
                  file=self._stream, flush=True)  # fmt: skip

    def end(self) -> None:
        """Clear the line."""
        if self._live:
            print("\r\033[K", end="", file=self._stream, flush=True)
