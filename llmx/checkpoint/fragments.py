"""Fragments: which elements of which parameter's state are in which file.

A checkpoint is a set of ranges over named, flattened parameters. It knows nothing of ranks, so
any number of them reads from it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmx.checkpoint.manifest import CheckpointError
from llmx.checkpoint.tensors import ITEM_BYTES, TensorFile, TensorSpec, as_bytes

MASTER, FROZEN, BUFFER = "master", "frozen", "buffer"


def fragment_key(state: str, name: str, start: int) -> str:
    """The key of a fragment in a file, as ``master|model.embed_tokens.weight|4096``."""
    if "|" in state:
        raise ValueError(f"the name of a state has no |: {state!r}")
    return f"{state}|{name}|{start}"


def parse_key(key: str) -> tuple[str, str, int]:
    """State, parameter, first element. CheckpointError for what is no fragment's key."""
    state, _, name_and_start = key.partition("|")
    name, _, start = name_and_start.rpartition("|")
    if not (state and name and start.isascii() and start.isdigit()):
        raise CheckpointError(f"{key!r} is no fragment's key (state|parameter|start)")
    return state, name, int(start)


@dataclass(frozen=True)
class Range:
    """Elements ``[start, stop)`` of one state of one parameter, and where they are."""

    start: int
    stop: int
    dtype: str
    file: str
    """Name of the file, as messages show it."""
    key: str


Cover = dict[tuple[str, str], list[Range]]
"""(state, parameter) -> its ranges, sorted."""


def cover_of(files: Mapping[str, Iterable[TensorSpec]]) -> Cover:
    """The ranges of all fragments. ``files``: name -> what it holds (or will hold)."""
    cover: Cover = {}
    for file, specs in files.items():
        for spec in specs:
            state, name, start = parse_key(spec.key)
            if spec.num_elements == 0:
                continue
            stop = start + spec.num_elements
            elements = Range(start, stop, spec.dtype, file, spec.key)
            cover.setdefault((state, name), []).append(elements)
    for ranges in cover.values():
        ranges.sort(key=lambda r: (r.start, r.stop))
    return cover


def check_cover(
    cover: Cover,
    parameters: Mapping[str, Mapping[str, Any]],
    buffers: Mapping[str, Mapping[str, Any]] | None = None,
    states: Mapping[str, Mapping[str, Sequence[int]]] | None = None,
) -> None:
    """Raise CheckpointError unless every element of every state is there exactly once.

    Every trained parameter must be whole in ``master`` and in each of the optimizer's states
    that are there, every other one in ``frozen``, every buffer in ``buffer``; nothing else may
    be there. A tied weight lies under the name it is tied to.

    Args:
        parameters: ``state.json``'s table: name -> ``shape``, ``trained``, ``tied_to``.
        buffers: name -> ``shape``.
        states: ``state.json``'s, where parameters have different states or ones of another shape:
            parameter -> state -> shape.
    """
    optimizer = {state for state, _ in cover} - {MASTER, FROZEN, BUFFER}
    shapes: dict[tuple[str, str], Sequence[int]] = {}
    for name, entry in parameters.items():
        if entry.get("tied_to"):
            continue
        if entry["trained"] and states is not None:
            shapes[MASTER, name] = entry["shape"]
            shapes.update({(state, name): shape for state, shape in states[name].items()})
            continue
        for state in (MASTER, *sorted(optimizer)) if entry["trained"] else (FROZEN,):
            shapes[state, name] = entry["shape"]
    for name, entry in (buffers or {}).items():
        shapes[BUFFER, name] = entry["shape"]
    for (state, name), ranges in cover.items():
        if (state, name) not in shapes:
            raise CheckpointError(
                f"{ranges[0].file} holds {ranges[0].key}, but the model has no such "
                f"{'buffer' if state == BUFFER else 'parameter'} with that state."
            )
    for (state, name), shape in shapes.items():
        problem = uncovered(cover.get((state, name), []), shape)
        # A buffer may well be empty; a parameter of no elements was saved from one shard alone.
        if problem is None and state != BUFFER and math.prod(shape) == 0:
            problem = f"is empty (shape {list(shape)})"
        if problem:
            raise CheckpointError(f"{state} of {name} {problem}. The checkpoint is incomplete.")


def uncovered(ranges: Sequence[Range], shape: Sequence[int]) -> str | None:
    """The problem of sorted ranges that should cover ``shape`` once; None where they do."""
    total, reached = math.prod(shape), 0
    for piece in ranges:
        if piece.start > reached:
            return f"lacks elements {reached} to {piece.start} of {total}"
        if piece.start < reached:
            end = min(reached, piece.stop)
            return f"has elements {piece.start} to {end} twice (again in {piece.file})"
        if piece.dtype != ranges[0].dtype:
            return f"is {ranges[0].dtype} in {ranges[0].file} and {piece.dtype} in {piece.file}"
        reached = piece.stop
    if reached < total:
        return f"lacks elements {reached} to {total} of {total}"
    if reached > total:
        return f"has {reached} elements, and the shape {list(shape)} has {total}"
    return None


class FragmentIndex:
    """All fragments of some files, read range by range as if each state were one array."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = {str(path): TensorFile(Path(path)) for path in files}
        self.cover = cover_of({path: file.specs for path, file in self._files.items()})

    def states(self) -> set[str]:
        """``master``, ``exp_avg``, ... : those that are there."""
        return {state for state, _ in self.cover}

    def dtype(self, state: str, name: str) -> str:
        """safetensors' name of the dtype that the values are stored in."""
        return self._ranges(state, name)[0].dtype

    def read_range(self, state: str, name: str, start: int, stop: int, out: Any) -> None:
        """Elements ``[start, stop)`` of the flattened parameter into ``out``.

        Args:
            out: a writable C-contiguous buffer of exactly that many elements of ``dtype``.

        Raises:
            CheckpointError: some of them are in none of the files.
        """
        ranges = self._ranges(state, name)
        width = ITEM_BYTES[ranges[0].dtype]
        view = as_bytes(out)
        if len(view) != (stop - start) * width:
            raise ValueError(
                f"{state} of {name}: elements {start} to {stop} of {ranges[0].dtype} do not fit "
                f"{len(view)} bytes"
            )
        at = start
        for piece in ranges[max(0, bisect_right(ranges, start, key=lambda r: r.start) - 1) :]:
            if at >= stop or not piece.start <= at < piece.stop:
                break
            end = min(stop, piece.stop)
            self._files[piece.file].read_into(
                piece.key,
                at - piece.start,
                end - piece.start,
                view[(at - start) * width : (end - start) * width],
            )
            at = end
        if at < stop:
            raise CheckpointError(
                f"{state} of {name}: element {at} is in none of {len(self._files)} files."
            )

    def _ranges(self, state: str, name: str) -> list[Range]:
        try:
            return self.cover[state, name]
        except KeyError:
            raise CheckpointError(f"the checkpoint holds no {state} of {name}") from None

    def close(self) -> None:
        for file in self._files.values():
            file.close()
