"""Which checkpoint can be used: sizes and hashes against the manifest.

On one machine: ``newest_usable``; ``check_all`` verifies all of them on a terminal. Over several,
where each may hold some files: every rank makes a ``Report`` of its storage (``inspect``), the
reports are gathered, and every rank makes the same ``Assessment`` of them (``assess``).
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmx import text as human
from llmx.checkpoint.commit import committed_dir
from llmx.checkpoint.disk import CHUNK_BYTES
from llmx.checkpoint.manifest import (
    HASH_BYTES,
    MANIFEST,
    Manifest,
    Problem,
    read_manifest,
    step_of,
)
from llmx.checkpoint.pointers import BEST, LATEST, read_pointer

HASH_THREADS = 8
MISSING = "is missing"


def list_steps(checkpoints: Path) -> list[int]:
    """Steps of the committed checkpoints, oldest first, usable or not."""
    try:
        names = [path.name for path in checkpoints.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(step for name in names if (step := step_of(name)) is not None)


def verify(
    directory: Path,
    files: Collection[str] | None = None,
    *,
    hashes: bool = True,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> list[Problem]:
    """The problems of a checkpoint directory; empty where it can be used.

    Args:
        files: only these of the manifest; default all, as on a storage that holds them all.
        hashes: False compares sizes alone: quick, and blind to a flipped bit.
        on_bytes: called with the bytes of each piece that was read, from any thread.
    """
    manifest = read_manifest(directory)
    if isinstance(manifest, Problem):
        return [manifest]
    entries = manifest.files

    def check(name: str) -> Problem | None:
        path, entry = directory / name, entries[name]
        try:
            size = path.stat().st_size
            if size != entry.bytes:
                return Problem(name, f"{entry.bytes} bytes", f"damaged, it has {size} bytes")
            digest = hash_file(path, on_bytes=on_bytes) if hashes else entry.blake2b
        except FileNotFoundError:
            return Problem(name, f"{entry.bytes} bytes", MISSING)
        except OSError as error:
            return Problem(name, f"{entry.bytes} bytes", f"cannot be read ({error.strerror})")
        if digest == entry.blake2b:
            return None
        damage = f"damaged, it has hash {digest[:16]}"
        return Problem(name, f"hash {entry.blake2b[:16]}", damage)

    # Large files first: the threads end together.
    names = sorted(entries if files is None else files, key=lambda n: (-entries[n].bytes, n))
    with ThreadPoolExecutor(min(HASH_THREADS, os.cpu_count() or 1)) as pool:
        problems = filter(None, pool.map(check, names))
        return sorted(problems, key=lambda problem: problem.file)


def is_present(path: Path) -> bool:
    """Whether there is a file or directory of that name. One that a broken disk cannot describe
    counts: reading it reports the error."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def hash_file(path: Path, *, on_bytes: Callable[[int], None]) -> str:
    """blake2b of a file's content, read in pieces, outside the GIL."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    buffer = bytearray(min(CHUNK_BYTES, path.stat().st_size + 1))
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(view):
            digest.update(view[:count])
            on_bytes(count)
    return digest.hexdigest()


def newest_usable(checkpoints: Path, *, hashes: bool = True) -> int | None:
    """The step of the newest checkpoint that can be used, in a directory that holds all files: on
    one machine, or a shared file system."""
    for step in reversed(list_steps(checkpoints)):
        if not verify(committed_dir(checkpoints, step), hashes=hashes):
            return step
    return None


@dataclass(frozen=True)
class Report:
    """The findings of one rank about one checkpoint on its storage."""

    step: int
    storage: int
    """The rank that acts for the storage (``llmx.spread``)."""
    manifest: Manifest | None
    good: frozenset[str] = frozenset()
    """Files of its part that have their size, and their hash where that was compared."""
    problems: tuple[Problem, ...] = ()
    """Files of its part that are here and wrong."""


def inspect(
    checkpoints: Path,
    step: int,
    *,
    storage: int = 0,
    part: int = 0,
    parts: int = 1,
    hashes: bool = True,
) -> Report:
    """Verify one ``part`` of ``parts`` of the files that are here.

    Args:
        part, parts: how the ranks on one storage split the hashing.
        hashes: False compares sizes alone.
    """
    directory = committed_dir(checkpoints, step)
    if not is_present(directory):
        return Report(step, storage, None)
    manifest = read_manifest(directory)
    if isinstance(manifest, Problem):
        return Report(step, storage, None, problems=(manifest,))
    here = [name for name in manifest.files if is_present(directory / name)]
    assigned = sorted(here, key=lambda name: (-manifest.files[name].bytes, name))[part::parts]
    problems = verify(directory, assigned, hashes=hashes)
    bad = {problem.file for problem in problems}
    return Report(step, storage, manifest, frozenset(set(assigned) - bad), tuple(problems))


@dataclass(frozen=True)
class Assessment:
    """The state of one checkpoint over all storages, from the reports of all ranks."""

    step: int
    usable: bool
    manifest: Manifest | None
    problems: tuple[Problem, ...]
    """Files that are wrong, or on no storage."""
    lacking: dict[int, list[str]]
    """Storage -> files that it does not hold, the manifest among them; empty lists left out."""
    holder: dict[str, int]
    """File -> a storage that holds it."""

    @property
    def reason(self) -> str:
        """The problems, on one line."""
        return describe(self.problems)


ABSENT = "is on none of the hosts"


def assess(reports: Sequence[Report]) -> Assessment:
    """Assess a checkpoint by the reports of all ranks; the result is the same on every rank."""
    step = reports[0].step
    manifests = {report.manifest.digest: report.manifest for report in reports if report.manifest}
    problems = [problem for report in reports for problem in report.problems]
    if len(manifests) != 1:
        if manifests:
            problems.append(Problem(MANIFEST, "one on all hosts", f"{len(manifests)} different"))
        elif not problems:
            problems.append(Problem(MANIFEST, "a checkpoint", ABSENT))
        return Assessment(step, False, None, tuple(dict.fromkeys(problems)), {}, {})
    manifest = next(iter(manifests.values()))
    good: dict[int, set[str]] = {report.storage: set() for report in reports}
    for report in reports:
        good[report.storage] |= report.good
        if report.manifest:
            good[report.storage].add(MANIFEST)
    holder: dict[str, int] = {}
    for storage in sorted(good, reverse=True):
        holder.update(dict.fromkeys(good[storage], storage))
    bad = {problem.file for problem in problems}
    for name in sorted(set(manifest.files) - set(holder) - bad):
        size = manifest.files[name].bytes
        problems.append(Problem(name, f"{size} bytes from {manifest.hosts[name]}", ABSENT))
    expected = {MANIFEST, *manifest.files}
    lacking = {
        storage: sorted(expected - names) for storage, names in good.items() if expected - names
    }
    complete = expected <= set(holder)
    return Assessment(step, complete, manifest, tuple(dict.fromkeys(problems)), lacking, holder)


def describe(problems: Iterable[Problem], *, limit: int = 3) -> str:
    """The first ``limit`` problems and the number of others, on one line."""
    texts = [str(problem) for problem in problems]
    omitted = f"; and {len(texts) - limit} more" if len(texts) > limit else ""
    return "; ".join(texts[:limit]) + omitted


LINE_EVERY_S = 10.0
"""Between two lines of progress where there is no terminal."""


def check_all(checkpoints: Path, *, stream: Any) -> tuple[list[str], bool]:
    """A line for each checkpoint, the newest first; whether the newest is usable."""
    names = {pointer: read_pointer(checkpoints, pointer) for pointer in (LATEST, BEST)}
    lines, good = [], []
    for step in reversed(list_steps(checkpoints)):
        directory = committed_dir(checkpoints, step)
        problems = verify_with_progress(directory, stream=stream)
        manifest = read_manifest(directory)
        num_bytes = human.size(manifest.num_bytes) if isinstance(manifest, Manifest) else ""
        pointed = "".join(f"  <- {name}" for name, value in names.items() if value == step)
        outcome = f"cannot be used: {explain(directory, problems)}" if problems else "usable"
        lines.append(f"{directory.name}  {num_bytes:>10}  {outcome}{pointed}")
        good.append(not problems)
    return lines, bool(good) and good[0]


def verify_with_progress(directory: Path, *, stream: Any) -> list[Problem]:
    """``verify`` with a progress line on ``stream``."""
    manifest = read_manifest(directory)
    if isinstance(manifest, Problem):
        return [manifest]
    # Sizes first: what is missing is known at once.
    if problems := verify(directory, hashes=False):
        return problems
    progress = ProgressLine(f"verifying {directory.name}", manifest.num_bytes, stream=stream)
    try:
        return verify(directory, on_bytes=progress.add)
    finally:
        progress.end()


def explain(directory: Path, problems: Sequence[Problem]) -> str:
    """The problems in one sentence, with the hosts that have the missing files."""
    sentence = describe(problems)
    manifest = read_manifest(directory)
    if not isinstance(manifest, Manifest):
        return sentence
    absent = [problem.file for problem in problems if problem.found == MISSING]
    hosts = sorted({manifest.hosts[name] for name in absent if manifest.hosts.get(name)})
    if hosts and len(set(manifest.hosts.values())) > 1:
        sentence += (
            f". Without a shared file system each host keeps its own part: copy {directory.name} "
            f"from {', '.join(hosts)} into {directory.parent}"
        )
    return sentence + "."


class ProgressLine:
    """A line that is rewritten on a terminal; now and then a line of a log."""

    def __init__(self, title: str, total: int, *, stream: Any) -> None:
        self._title, self._total, self._stream = title, total, stream
        self._done = 0
        self._began = self._said = time.monotonic()
        self._live = stream.isatty()

    def add(self, count: int) -> None:
        """Count ``count`` more bytes as done, and rewrite the line where it is time."""
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
        """Remove the line from the terminal."""
        if self._live:
            print("\r\033[K", end="", file=self._stream, flush=True)
