"""Which checkpoint a run would go on from, as far as this machine can tell at once.

The ranks decide: each host hashes the files it holds. Here manifests and sizes are looked at,
and the hashes of a small checkpoint, so that the user reads it before the start and not in a log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmx.checkpoint.manifest import Manifest, Problem, read_manifest
from llmx.checkpoint.selection import check_file
from llmx.run.rundir import RunDir

HASHED_BYTES = 1 << 30
"""A checkpoint up to this size is verified here, in about a second."""


@dataclass(frozen=True)
class Chosen:
    """The newest checkpoint without a problem here, and the newer ones with one."""

    step: int | None
    damaged: dict[int, list[str]] = field(default_factory=dict)

    def words(self) -> str:
        """The damaged ones, a line each."""
        return "\n".join(
            f"  step {step}: {'; '.join(found)}" for step, found in self.damaged.items()
        )


def newest_usable(run: RunDir, steps: Sequence[int]) -> Chosen:
    """The newest of these steps that looks whole."""
    damaged: dict[int, list[str]] = {}
    for step in sorted(steps, reverse=True):
        problems = problems_of(run, step)
        if not problems:
            return Chosen(step, damaged)
        damaged[step] = problems
    return Chosen(None, damaged)


def problems_of(run: RunDir, step: int) -> list[str]:
    """What is wrong with the checkpoint of a step; empty where manifest and sizes are right, and
    of a small one the hashes (``is_hashed``).

    Without a shared file system a file may lie on the host that wrote it alone: only a host
    with none of its files missing here is held to them.
    """
    directory = run.checkpoint(step)
    manifest = read_manifest(directory)
    if isinstance(manifest, Problem):
        return [str(manifest)]
    sizes = {name: _size(directory / name) for name in manifest.files}
    elsewhere = {
        host
        for host in set(manifest.hosts.values())
        if len(set(manifest.hosts.values())) > 1
        and all(sizes[name] is None for name, owner in manifest.hosts.items() if owner == host)
    }
    found = []
    for name, entry in sorted(manifest.files.items()):
        size = sizes[name]
        if size is None and manifest.hosts.get(name) not in elsewhere:
            found.append(str(Problem(name, f"{entry.bytes:,} bytes", "is missing")))
        elif size is not None and size != entry.bytes:
            found.append(str(Problem(name, f"{entry.bytes:,} bytes", f"has {size:,}")))
        elif size is not None and manifest.num_bytes <= HASHED_BYTES:
            problem = check_file(directory, name, entry)
            found += [str(problem)] if problem else []
    return found


def is_hashed(run: RunDir, step: int) -> bool:
    """Whether ``problems_of`` has read every byte of it: it is small, and all of it is here."""
    directory = run.checkpoint(step)
    manifest = read_manifest(directory)
    return (
        isinstance(manifest, Manifest)
        and manifest.num_bytes <= HASHED_BYTES
        and all((directory / name).is_file() for name in manifest.files)
    )


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
