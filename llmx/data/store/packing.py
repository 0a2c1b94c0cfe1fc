"""Packs examples into samples: pure functions of the examples' lengths.

A sample is made of pieces, a piece is tokens [start, stop) of an example; all but ``concat`` take
whole examples (``items`` below). Everything is arrays, so that millions of them take seconds and
little memory.
"""

from __future__ import annotations

import bisect
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Packing:
    """The pieces of all samples, one sample after the other. All arrays are integers."""

    items: np.ndarray
    """[pieces]: the example (or, with ``examples``, the sequence) that each piece is of."""
    starts: np.ndarray
    """[pieces]: its first token, counted from the start of the example."""
    stops: np.ndarray
    """[pieces]: behind its last token."""
    samples: np.ndarray
    """[samples + 1]: the first piece of each sample."""
    examples: np.ndarray | None = None
    """[examples + 1]: the first piece of each example, where an example has several sequences;
    then ``samples`` holds the first example of each sample, and ``items`` are sequences."""

    def __len__(self) -> int:
        return len(self.samples) - 1


def best_fit(lengths: np.ndarray, *, capacity: int) -> Packing:
    """Best-fit decreasing: the longest examples first, each into the fullest sample that still has
    room for it. Every length must be in [1, capacity]. O(n log capacity)."""
    lengths = np.asarray(lengths, np.int64)
    order = np.argsort(-lengths, kind="stable")
    sample_of = array("q")  # in that order
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # sorted; the rooms for which by_room holds a sample
    count = 0
    for length in lengths[order].tolist():
        at = bisect.bisect_left(rooms, length)
        if at < len(rooms):
            room = rooms[at]
            sample = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
        else:
            room, sample = capacity, count
            count += 1
        sample_of.append(sample)
        left = room - length
        if left:
            if left not in by_room:
                by_room[left] = []
                bisect.insort(rooms, left)
            by_room[left].append(sample)
    placed = np.frombuffer(sample_of, np.int64) if count else np.zeros(0, np.int64)
    items = order[np.argsort(placed, kind="stable")]
    samples = borders(np.bincount(placed, minlength=count))
    return Packing(items, np.zeros_like(items), lengths[items], samples)


def concat(lengths: np.ndarray, *, capacity: int) -> Packing:
    """All examples one after the other, cut at ``capacity``. The last sample may be shorter; a rest
    of a single token, from which nothing can be learned, is left out."""
    row_borders = borders(np.asarray(lengths, np.int64))
    total = int(row_borders[-1])
    if total % capacity == 1:
        total -= 1
    small = _smallest(max(len(lengths), int(np.max(lengths, initial=0))))
    # In place wherever it can be, and gone as soon as it can be: a corpus has millions of examples.
    cuts = np.arange(0, total, capacity, dtype=np.int64)
    begins = np.concatenate([row_borders[: np.searchsorted(row_borders, total)], cuts])
    begins.sort()
    is_first = np.ones(len(begins), np.bool_)
    np.not_equal(begins[1:], begins[:-1], out=is_first[1:])
    begins = begins[is_first]
    del is_first
    samples = np.append(np.searchsorted(begins, cuts), len(begins))
    del cuts
    items = np.searchsorted(row_borders, begins, side="right").astype(small)
    items -= 1
    sizes = np.empty(len(begins), small)
    np.subtract(begins[1:], begins[:-1], out=sizes[:-1], casting="same_kind")
    sizes[-1:] = total - begins[-1:]
    begins -= row_borders[items]
    starts = begins.astype(small)
    del begins, row_borders
    sizes += starts
    return Packing(items, starts, sizes, samples)


def one_each(lengths: np.ndarray, *, capacity: int) -> Packing:
    """One sample of one example."""
    items = np.arange(len(lengths), dtype=np.int64)
    stops = np.asarray(lengths, np.int64)
    samples = np.arange(len(items) + 1, dtype=np.int64)
    return Packing(items, np.zeros_like(items), stops, samples)


def of_sequences(packing: Packing, lengths: np.ndarray, sizes: np.ndarray) -> Packing:
    """A packing of whole examples as one of their sequences: each example has ``sizes`` of them,
    which have these ``lengths``."""
    firsts = borders(sizes)
    packed_sizes = sizes[packing.items]
    examples = borders(packed_sizes)
    items = np.repeat(firsts[packing.items] - examples[:-1], packed_sizes) + np.arange(
        int(examples[-1])
    )
    return Packing(items, np.zeros_like(items), lengths[items], packing.samples, examples)


def _smallest(largest: int) -> type[np.signedinteger[Any]]:
    """The smaller of two types that holds it: of millions of examples, half of the memory."""
    return np.int32 if largest <= np.iinfo(np.int32).max else np.int64


def borders(sizes: np.ndarray) -> np.ndarray:
    """The start of each of consecutive runs of these sizes, and the end of the last."""
    borders = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=borders[1:])
    return borders


PACKERS = {"best_fit": best_fit, "concat": concat, "none": one_each}
