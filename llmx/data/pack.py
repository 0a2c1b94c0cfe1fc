"""How rows become samples: pure functions of the rows' lengths.

A sample is a list of pieces ``(row, start, stop)``; all but ``concat`` take whole rows.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

Piece = tuple[int, int, int]
"""(row, start, stop): tokens [start, stop) of a row."""


def best_fit(lengths: Sequence[int], *, capacity: int) -> list[list[Piece]]:
    """Best-fit decreasing: the longest rows first, each into the fullest sample that still has
    room for it. Every length must be in [1, capacity]. O(n log capacity)."""
    samples: list[list[Piece]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # sorted; the rooms for which by_room holds a sample
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        length = lengths[row]
        at = bisect.bisect_left(rooms, length)
        if at < len(rooms):
            room = rooms[at]
            sample = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
        else:
            room, sample = capacity, len(samples)
            samples.append([])
        samples[sample].append((row, 0, length))
        left = room - length
        if left:
            if left not in by_room:
                by_room[left] = []
                bisect.insort(rooms, left)
            by_room[left].append(sample)
    return samples


def concat(lengths: Sequence[int], *, capacity: int) -> Iterator[list[Piece]]:
    """All rows one after the other, cut at ``capacity``. The last sample may be shorter; a rest
    of a single token, from which nothing can be learned, is left out."""
    sample: list[Piece] = []
    room = capacity
    for row, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(length, start + room)
            sample.append((row, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield sample
                sample, room = [], capacity
    if sum(stop - start for _, start, stop in sample) > 1:
        yield sample


def one_each(lengths: Sequence[int], *, capacity: int) -> Iterator[list[Piece]]:
    """One sample of one row."""
    return ([(row, 0, length)] for row, length in enumerate(lengths))


PACKERS = {"best_fit": best_fit, "concat": concat, "none": one_each}
