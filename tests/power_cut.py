"""What a disk may hold after a power cut: only what was synced is sure.

``RecordingDisk`` writes down every call. ``states_after`` replays the first so many of them on a
model of a disk: of each file, what was written after its last sync may be lost, torn or there;
of each directory, the changes after its last sync took effect up to any point, each directory
for itself. ``materialise`` puts such a state on a real disk.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmx.checkpoint.disk import Disk

Call = tuple[Any, ...]


class RecordingDisk(Disk):
    """Does everything, and writes it down: ``calls``, with a number for what is open."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.files: dict[int, int] = {}
        self.count = 0


def _recorded(name: str) -> Callable[..., Any]:
    real = getattr(Disk, name)

    def call(disk: RecordingDisk, *words: Any) -> Any:
        result = real(disk, *words)
        if name in ("create", "make_directory"):
            disk.count += 1
            words = (*words, disk.count)
            if name == "create":
                disk.files[result] = disk.count
        elif isinstance(words[0], int):
            content = (bytes(words[1][:result]),) if name == "write" else words[1:]
            words = (disk.files[words[0]], *content)
        disk.calls.append((name, *words))
        return result

    return call


for _name in set(vars(Disk)) - {"close"}:
    if not _name.startswith("_"):
        setattr(RecordingDisk, _name, _recorded(_name))


@dataclass
class _File:
    written: bytes = b""
    reserved: int = 0
    synced: bytes | None = None
    """Content at the last sync; None: never synced."""


@dataclass
class _Directory:
    names: dict[str, int] = field(default_factory=dict)
    """As programs see it: name -> number of a file or directory."""
    history: list[dict[str, int]] = field(default_factory=lambda: [{}])
    """All states since the last sync, that one first: any of them may be on the disk."""

    def change(self) -> None:
        self.history.append(dict(self.names))


class _Model:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.things: dict[int, _File | _Directory] = {0: _Directory()}

    def directory(self, path: Path) -> _Directory:
        here = self.things[0]
        for name in path.relative_to(self.root).parts:
            assert isinstance(here, _Directory)
            here = self.things[here.names[name]]
        assert isinstance(here, _Directory)
        return here

    def apply(self, call: Call) -> None:
        kind, *rest = call
        if kind in ("create", "make_directory"):
            path, number = rest
            self.things[number] = _File() if kind == "create" else _Directory()
            parent = self.directory(path.parent)
            parent.names[path.name] = number
            parent.change()
        elif kind == "rename":
            source, target = rest
            assert source.parent == target.parent, "the model has renames within a directory only"
            parent = self.directory(source.parent)
            parent.names[target.name] = parent.names.pop(source.name)
            parent.change()
        elif kind in ("remove_file", "remove_directory"):
            parent = self.directory(rest[0].parent)
            del parent.names[rest[0].name]
            parent.change()
        elif kind == "sync_directory":
            directory = self.directory(rest[0])
            directory.history = [dict(directory.names)]
        else:
            file = self.things[rest[0]]
            assert isinstance(file, _File)
            if kind == "write":
                file.written += rest[1]
            elif kind == "reserve":
                file.reserved = rest[1]
            else:
                assert kind == "sync", "a call that the model has to learn"
                file.synced = _padded(file, file.written)

    def survive(self, number: int, pick: random.Random | str) -> Any:
        """One outcome: bytes of a file, or name -> outcome of a directory."""
        thing = self.things[number]
        if isinstance(thing, _File):
            return _content(thing, pick)
        last = {"least": 0, "most": -1}.get(pick) if isinstance(pick, str) else None
        index = pick.randrange(len(thing.history)) if last is None else last  # type: ignore[union-attr]
        return {name: self.survive(child, pick) for name, child in thing.history[index].items()}


def _padded(file: _File, content: bytes) -> bytes:
    return content + bytes(max(0, file.reserved - len(content)))


def _content(file: _File, pick: random.Random | str) -> bytes:
    if file.synced == _padded(file, file.written):
        return file.synced
    nothing = file.synced or b""
    if isinstance(pick, str):
        # "most": all names are there, and no content that was not synced: the worst there is.
        return nothing
    torn = file.written[: pick.randrange(len(file.written) + 1)]
    return pick.choice([nothing, _padded(file, b""), _padded(file, torn), torn])


def states_after(
    root: Path, calls: Sequence[Call], *, random_states: int, seed: int
) -> Iterator[Any]:
    """What may be below ``root`` if the power goes after ``calls``: the extremes, and some."""
    model = _Model(root)
    for call in calls:
        model.apply(call)
    yield model.survive(0, "least")
    yield model.survive(0, "most")
    pick = random.Random(seed)
    for _ in range(random_states):
        yield model.survive(0, pick)


def materialise(state: Any, path: Path) -> None:
    """Write a state to a real disk."""
    if isinstance(state, bytes):
        path.write_bytes(state)
        return
    path.mkdir(exist_ok=True)
    for name, child in state.items():
        materialise(child, path / name)
