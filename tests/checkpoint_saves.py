"""Small checkpoints, saved by the real protocol on one storage or several, and disks that fail.

The driver goes through the steps as the ranks do (``llmx/checkpoint/commit.py``), one storage
after the other between two agreements. Values are a function of the step, so that a mixture of
two checkpoints shows.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmx.checkpoint import commit, pointers, selection
from llmx.checkpoint.disk import DISK, Disk
from llmx.checkpoint.fragments import FragmentIndex, check_cover, fragment_key
from llmx.checkpoint.manifest import FileEntry, Manifest, rank_file
from llmx.checkpoint.retention import plan_removals, take_inventory
from llmx.checkpoint.tensors import Fragment
from llmx.config.schema import CheckpointConfig, KeepConfig

NUM_ELEMENTS = 24
"""Of the one parameter, shared out among the storages' ranks."""
PARAMETERS = {"w": {"shape": [4, 6], "trained": True, "tied_to": None}}


class Killed(BaseException):
    """The process is gone: nothing of it runs after this."""


def values_of(step: int, state: str) -> np.ndarray:
    offset = {"master": 0.0, "exp_avg": 0.5}[state]
    return np.arange(NUM_ELEMENTS, dtype=np.float32) + 1000 * step + offset


def fragments_of(step: int, rank: int, ranks: int) -> list[Fragment]:
    first, last = NUM_ELEMENTS * rank // ranks, NUM_ELEMENTS * (rank + 1) // ranks
    return [
        Fragment(
            fragment_key(state, "w", first), "F32", last - first, values_of(step, state)[first:last]
        )
        for state in ("master", "exp_avg")
    ]


def save(
    storages: Sequence[Path],
    step: int,
    *,
    disks: Sequence[Disk] | None = None,
    keep_last: int = 1,
) -> bool:
    """One save; whether it was committed. What fails is given up, as the saver does it."""
    disks = disks or [DISK] * len(storages)
    hosts = list(zip(storages, disks, strict=True))
    manifest: Manifest | None = None
    try:
        writers = []
        for rank, (path, disk) in enumerate(hosts):
            commit.begin(path, step, disk=disk)
            specs = [each.spec for each in fragments_of(step, rank, len(hosts))]
            writers.append(commit.rank_writer(path, step, rank, specs, disk=disk))
        try:
            for writer in writers:
                writer.reserve()
            entries, owners = _write_all(hosts, step, writers)
        finally:
            for writer in writers:
                writer.close()
        manifest = Manifest(step, entries, hosts=owners, run_id="run", created=float(step))
        for path, disk in hosts:
            commit.write_manifest(path, step, manifest, disk=disk)
            commit.publish(path, step, disk=disk)
    except OSError:
        for path, disk in hosts:
            try:
                commit.abandon(path, step, published=manifest, disk=disk)
            except OSError:
                continue  # the start after the next one removes it
        return False
    for path, disk in hosts:
        try:
            pointers.set_pointer(path, pointers.LATEST, step, disk=disk)
        except OSError:
            continue
    try:
        gone, _ = plan_removals(
            [take_inventory(path, storage=n) for n, path in enumerate(storages)],
            step,
            damaged=(),
            config=CheckpointConfig(keep=KeepConfig(last=keep_last)),
        )
    except OSError:
        gone = []
    for path, disk in hosts:
        try:
            commit.prune(path, gone, disk=disk)
        except OSError:
            continue
    return True


def _write_all(
    hosts: Sequence[tuple[Path, Disk]], step: int, writers: Sequence
) -> tuple[dict[str, FileEntry], dict[str, str]]:
    entries: dict[str, FileEntry] = {}
    owners: dict[str, str] = {}
    for rank, ((path, disk), writer) in enumerate(zip(hosts, writers, strict=True)):
        by_key = {each.key: each for each in fragments_of(step, rank, len(hosts))}
        new = {rank_file(rank): writer.write(by_key[spec.key] for spec in writer.order)}
        state = json.dumps({"step": step, "parameters": PARAMETERS}).encode()
        new["state.json"] = commit.add_file(path, step, "state.json", state, disk=disk)
        name = "model/config.json"
        new[name] = commit.add_file(path, step, name, b'{"step": %d}' % step, disk=disk)
        entries |= new
        owners = {**dict.fromkeys(new, f"host-{rank}"), **owners}
    return entries, owners


def usable_steps(storages: Sequence[Path]) -> list[int]:
    """Steps that are usable over all storages, oldest first."""
    every = sorted({step for path in storages for step in selection.list_steps(path)})
    return [step for step in every if assessment(storages, step).usable]


def assessment(storages: Sequence[Path], step: int) -> selection.Assessment:
    reports = [
        selection.inspect(path, step, storage=number) for number, path in enumerate(storages)
    ]
    return selection.assess(reports)


def restart(storages: Sequence[Path]) -> int | None:
    """What a new start does: clean up, choose. The chosen step, its content checked."""
    for path in storages:
        commit.recover(path)
    usable = usable_steps(storages)
    for step in usable:
        check_content(storages, step)
    return usable[-1] if usable else None


def check_content(storages: Sequence[Path], step: int) -> None:
    """Every element of every state is that of this very step."""
    files = [path / f"step-{step:08d}" / rank_file(rank) for rank, path in enumerate(storages)]
    index = FragmentIndex(files)
    check_cover(index.cover, PARAMETERS)
    for state in ("master", "exp_avg"):
        out = np.empty(NUM_ELEMENTS, dtype=np.float32)
        index.read_range(state, "w", 0, NUM_ELEMENTS, out)
        assert np.array_equal(out, values_of(step, state)), (step, state)
    index.close()
    for path in storages:
        state = json.loads((path / f"step-{step:08d}" / "state.json").read_text())
        assert state["step"] == step


class Fault:
    """One fault at the ``at``-th call (from 0) of the disks that share it.

    ``kill`` ends the process before the call, ``kill after`` when it is done; ``ENOSPC`` and
    ``EIO`` fail it, and with ``lasting`` every later call but removals: a disk that stays full.
    """

    def __init__(self, kind: str, at: int, *, torn: bool = True, lasting: bool = False) -> None:
        self.kind, self.at, self.torn, self.lasting = kind, at, torn, lasting
        self.calls: list[str] = []
        self.hit = False
        self._dead = False

    def is_next(self) -> bool:
        return len(self.calls) == self.at and not self._dead

    def before(self, name: str) -> None:
        if self._dead:
            raise Killed
        number = len(self.calls)
        self.calls.append(name)
        due = number == self.at or (
            self.lasting and number > self.at and name.split()[0] in ("create", "reserve", "write")
        )
        if due and self.kind != "kill after":
            self.hit = True
            if self.kind == "kill":
                self._dead = True
                raise Killed
            code = getattr(errno, self.kind)
            raise OSError(code, os.strerror(code))

    def after(self) -> None:
        if self.kind == "kill after" and len(self.calls) - 1 == self.at:
            self.hit = self._dead = True
            raise Killed


class FaultyDisk(Disk):
    """Each of its writing calls is one of a fault that disks may share."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault


def _faulty(name: str) -> Callable[..., Any]:
    real = getattr(Disk, name)

    def call(disk: FaultyDisk, *words: Any) -> Any:
        if name == "write" and disk.fault.is_next() and disk.fault.torn:
            # As a full disk and a kill do it: a part is written first.
            real(disk, words[0], words[1][: len(words[1]) // 2])
        disk.fault.before(" ".join([name, *(w.name for w in words if isinstance(w, Path))]))
        result = real(disk, *words)
        disk.fault.after()
        return result

    return call


for _name in set(vars(Disk)) - {"close"}:  # the kernel closes what a killed process had open
    if not _name.startswith("_"):
        setattr(FaultyDisk, _name, _faulty(_name))


def tree(path: Path) -> list[str]:
    """Everything below ``path``, for messages."""
    return sorted(each.relative_to(path).as_posix() for each in path.rglob("*"))


def flip_bit(path: Path, position: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def names(paths: Iterable[Path]) -> list[str]:
    return sorted(path.name for path in paths)
