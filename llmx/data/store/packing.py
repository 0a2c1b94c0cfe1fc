"""Packs examples into samples: pure functions of the examples' lengths.

A sample is made of pieces, a piece is tokens [start, stop) of an example; all but ``concat`` take
whole examples (``items`` below). Everything is arrays, so that millions of them take seconds and
little memory.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Packing:
    """The pieces of all samples, one sample after the other. All arrays are integers."""

    items: np.ndarray
    """[pieces]: the example that each piece is of."""
    starts: np.ndarray
    """[pieces]: its first token, counted from the start of the example."""
    stops: np.ndarray
    """[pieces]: behind its last token."""
    samples: np.ndarray
    """[samples + 1]: the first piece of each sample."""

    @classmethod
    def whole(cls, items: np.ndarray, lengths: np.ndarray, samples: np.ndarray) -> Packing:
        """Examples as they are: ``items`` in this order."""
        return cls(items, np.zeros_like(items), lengths[items], samples)


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
    return Packing.whole(items, lengths, borders(np.bincount(placed, minlength=count)))


def concat(lengths: np.ndarray, *, capacity: int) -> Packing:
    """All examples one after the other, cut at ``capacity``. The last sample may be shorter; a rest
    of a single token, from which nothing can be learned, is left out."""
    edges = borders(np.asarray(lengths, np.int64))
    total = int(edges[-1])
    if total % capacity == 1:
        total -= 1
    cuts = np.arange(0, total, capacity, dtype=np.int64)
    begins = np.sort(np.concatenate([edges[edges < total], cuts]), kind="stable")
    begins = begins[np.diff(begins, prepend=-1) > 0]
    items = np.searchsorted(edges, begins, side="right") - 1
    starts = begins - edges[items]
    samples = np.append(np.searchsorted(begins, cuts), len(begins))
    return Packing(items, starts, starts + np.diff(begins, append=total), samples)


def one_each(lengths: np.ndarray, *, capacity: int) -> Packing:
    """One sample of one example."""
    numbers = np.arange(len(lengths) + 1, dtype=np.int64)
    return Packing.whole(numbers[:-1], np.asarray(lengths, np.int64), numbers)


def of_sequences(examples: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sequences of ``examples``, in this order, and the first of each of them (and the end of
    the last), where every example has ``sizes`` of them."""
    counts = sizes[examples]
    firsts = borders(counts)
    shift = np.repeat(borders(sizes)[examples] - firsts[:-1], counts)
    return shift + np.arange(len(shift)), firsts


def borders(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """The start of each of consecutive runs of these sizes, and the end of the last."""
    borders = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=borders[1:])
    return borders


PACKERS = {"best_fit": best_fit, "concat": concat, "none": one_each}
