"""Small files beside the checkpoints that name some of them: ``latest``, ``best``, ``pinned``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from llmx.checkpoint.disk import DISK, Disk, remove_tree, write_file
from llmx.checkpoint.manifest import step_name, step_of

LATEST, BEST, PINNED = "latest", "best", "pinned"
BEING_WRITTEN = tuple(f".{name}.tmp" for name in (LATEST, BEST, PINNED))
"""What a crash may leave."""


def set_pointer(checkpoints: Path, name: str, step: int, *, disk: Disk = DISK) -> None:
    """Replace ``latest`` or ``best`` atomically, durably."""
    replace_file(checkpoints / name, f"{step_name(step)}\n".encode(), disk=disk)


def read_pointer(checkpoints: Path, name: str) -> int | None:
    """The step that ``latest`` or ``best`` names; None if it is missing or invalid."""
    try:
        return step_of((checkpoints / name).read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError):
        return None


def pin(checkpoints: Path, steps: Iterable[int], *, disk: Disk = DISK) -> None:
    """Keep these from being pruned: a copy of them is being made, or is the newest that is whole.

    Written by whoever copies checkpoints to another machine, read by ranks that prune.
    """
    text = "".join(f"{step_name(step)}\n" for step in sorted(steps))
    replace_file(checkpoints / PINNED, text.encode(), disk=disk)


def pinned(checkpoints: Path) -> set[int]:
    """The steps that ``pin`` named last; none where nothing is copied."""
    try:
        names = (checkpoints / PINNED).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError):
        return set()
    return {step for name in names if (step := step_of(name)) is not None}


def replace_file(path: Path, data: bytes, *, disk: Disk = DISK) -> None:
    """A reader sees the old content or the new; returns when the new is durable."""
    temporary = path.with_name(f".{path.name}.tmp")
    remove_tree(disk, temporary)
    write_file(disk, temporary, data)
    disk.rename(temporary, path)
    disk.sync_directory(path.parent)
