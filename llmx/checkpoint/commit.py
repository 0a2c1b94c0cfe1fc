"""How a checkpoint is committed and removed: docs/development/contracts.md, "Checkpoints".

Each step is durable before it returns; between them the ranks agree. After a crash at any
moment a step's name is there with all its files, or not at all.

    one rank of each storage   begin
    every rank                 rank_writer(...).reserve(), then .write(...)
    one rank of each storage   add_file                    (config, plan, state, model/)
                               -- all-gather of the entries, one makes the manifest --
    one rank of each storage   write_manifest, publish
                               -- all have published --
    one rank of each storage   set_pointer (llmx.checkpoint.pointers), prune

Where a step fails before all have published, all call ``abandon``; afterwards the checkpoint
counts, and a pointer or a removal that fails is a warning.

A *storage* is a ``checkpoints/`` directory: one for all hosts that share a file system, else
one for each (``llmx.spread``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from llmx.checkpoint.disk import DISK, Disk, make_directories, remove_tree, write_file
from llmx.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    FileEntry,
    Manifest,
    digest_bytes,
    rank_file,
    read_manifest,
    step_name,
    step_of,
)
from llmx.checkpoint.pointers import BEING_WRITTEN
from llmx.checkpoint.tensors import TensorSpec, TensorWriter

PARTIAL, REPLACED, PRUNED = ".partial", ".replaced", ".pruned"
MARK = ".mark-"
"""Prefix of the files by which ranks find out who shares the directory (``llmx.spread``)."""


def partial_dir(checkpoints: Path, step: int) -> Path:
    """``.step-00000140.partial``: where the files are written."""
    return _aside(checkpoints, step, PARTIAL)


def committed_dir(checkpoints: Path, step: int) -> Path:
    """``step-00000140``: the directory of a committed checkpoint."""
    return checkpoints / step_name(step)


def begin(checkpoints: Path, step: int, *, disk: Disk = DISK) -> Path:
    """An empty partial directory; what a failed try left there is removed."""
    make_directories(disk, checkpoints)
    partial = partial_dir(checkpoints, step)
    remove_tree(disk, partial)
    disk.make_directory(partial)
    return partial


def rank_writer(
    checkpoints: Path,
    step: int,
    rank: int,
    specs: Iterable[TensorSpec],
    *,
    disk: Disk = DISK,
) -> TensorWriter:
    """The writer of what one rank contributes; nothing is created yet."""
    metadata = {"format": "llmx-fragments", "step": str(step), "rank": str(rank)}
    path = partial_dir(checkpoints, step) / rank_file(rank)
    return TensorWriter(path, specs, metadata=metadata, disk=disk)


def add_file(
    checkpoints: Path, step: int, name: str, data: bytes, *, disk: Disk = DISK
) -> FileEntry:
    """One small file of the checkpoint. ``name``: relative, with ``/``."""
    path = partial_dir(checkpoints, step) / name
    if path.parent != partial_dir(checkpoints, step):
        make_directories(disk, path.parent)
    write_file(disk, path, data)
    return digest_bytes(data)


def write_manifest(checkpoints: Path, step: int, manifest: Manifest, *, disk: Disk = DISK) -> None:
    """The last file. Afterwards everything in the partial directory is durable.

    Raises:
        CheckpointError: a file that is here is not in the manifest, or has another size.
    """
    partial = partial_dir(checkpoints, step)
    directories, files = _walk(partial)
    for path in files:
        name, size = path.relative_to(partial).as_posix(), path.stat().st_size
        entry = manifest.files.get(name)
        if entry is None or entry.bytes != size:
            problem = "is not in the manifest" if entry is None else f"should have {entry.bytes}"
            raise CheckpointError(f"{path} has {size} bytes and {problem}. Nothing was committed.")
    write_file(disk, partial / MANIFEST, manifest.to_text().encode())
    for directory in directories:
        disk.sync_directory(directory)


def _walk(directory: Path) -> tuple[list[Path], list[Path]]:
    """All directories, the innermost first, and all files. Unlike a glob it hides no error."""
    directories, files = [directory], []
    with os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                inner, inside = _walk(directory / entry.name)
                directories = [*inner, *directories]
                files += inside
            else:
                files.append(directory / entry.name)
    return directories, files


def publish(checkpoints: Path, step: int, *, disk: Disk = DISK) -> Path:
    """Give the checkpoint its name; returns when that is durable.

    One of the same name that is there gives way: only one that is not usable may be written
    again (``prune`` or ``recover`` remove it).
    """
    final = committed_dir(checkpoints, step)
    if final.exists():
        aside = _aside(checkpoints, step, REPLACED)
        remove_tree(disk, aside)
        disk.rename(final, aside)
        disk.sync_directory(checkpoints)
    disk.rename(partial_dir(checkpoints, step), final)
    disk.sync_directory(checkpoints)
    return final


def abandon(
    checkpoints: Path, step: int, *, published: Manifest | None = None, disk: Disk = DISK
) -> None:
    """Remove the files of a save that failed.

    Args:
        published: its manifest, if there was one: where this storage has given the checkpoint
            its name already, it is removed again.

    Raises:
        OSError: some of it is still there; ``recover`` removes it.
    """
    if published and read_manifest(committed_dir(checkpoints, step)) == published:
        prune(checkpoints, [step], disk=disk)
    remove_tree(disk, partial_dir(checkpoints, step))
    if checkpoints.is_dir():
        _remove_aside(checkpoints, disk=disk)


def prune(checkpoints: Path, steps: Iterable[int], *, disk: Disk = DISK) -> None:
    """Remove committed checkpoints, and what earlier removals left.

    A checkpoint loses its name first, durably, then its files: a reader never sees a part of it.
    """
    for step in steps:
        if committed_dir(checkpoints, step).exists():
            aside = _aside(checkpoints, step, PRUNED)
            remove_tree(disk, aside)
            disk.rename(committed_dir(checkpoints, step), aside)
    if checkpoints.is_dir():
        disk.sync_directory(checkpoints)
        _remove_aside(checkpoints, disk=disk)


def recover(checkpoints: Path, *, disk: Disk = DISK) -> list[str]:
    """Remove what saves that did not end have left; returns the names. Before any rank saves.

    Nothing that was committed is removed: one that was about to be replaced gets its name back.
    """
    if not checkpoints.is_dir():
        return []
    removed = _remove_aside(checkpoints, disk=disk)
    for path in sorted(checkpoints.iterdir()):
        stale = _step_aside(path.name, PARTIAL) is not None or path.name.startswith(MARK)
        if stale or path.name in BEING_WRITTEN:
            remove_tree(disk, path)
            removed.append(path.name)
    disk.sync_directory(checkpoints)
    return removed


def _remove_aside(checkpoints: Path, *, disk: Disk) -> list[str]:
    removed = []
    for path in sorted(checkpoints.iterdir()):
        replaced = _step_aside(path.name, REPLACED)
        if replaced is not None and not committed_dir(checkpoints, replaced).exists():
            disk.rename(path, committed_dir(checkpoints, replaced))
            disk.sync_directory(checkpoints)
        elif replaced is not None or _step_aside(path.name, PRUNED) is not None:
            remove_tree(disk, path)
            removed.append(path.name)
    return removed


def _aside(checkpoints: Path, step: int, suffix: str) -> Path:
    return checkpoints / f".{step_name(step)}{suffix}"


def _step_aside(name: str, suffix: str) -> int | None:
    if not (name.startswith(".") and name.endswith(suffix)):
        return None
    return step_of(name[1 : -len(suffix)])
