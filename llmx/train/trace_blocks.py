"""The events of a network of many blocks, from those of its first few. Pure.

Blocks that are built alike do alike: of a stack that is cut after a few of them (``Stack.cut``) two
in the middle are compared, event by event, and where they agree the second one is repeated until
there are as many as in the whole stack. ``memory_trace`` so traces 80 blocks in the time of 5.

Shown by ``python -m pytest tests/unit/test_plan_trace_blocks.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from llmx.plan.trace import FETCH, FETCH_BACKWARD, GRADIENT, Event

BEYOND = 4
"""Blocks that are run beside the first ones, which may differ: one whose input may still be kept
for something else, two that are compared, and the last one of the stack."""


@dataclass(frozen=True)
class Numbers:
    """The numbers of a block in a trace."""

    modules: range
    parameters: range

    def has(self, event: Event) -> bool:
        """Whether an event is of this block."""
        return event.index in (self.parameters if event.kind == GRADIENT else self.modules)


@dataclass(frozen=True)
class Run:
    """A micro step of a network whose stack is cut."""

    events: Sequence[Event]
    flops: Sequence[float]
    """Counted until each event."""
    last_peak: int
    last_flops: float


def with_all_blocks(run: Run, blocks: Sequence[Numbers], kept: int) -> Run | None:
    """The micro step with all ``blocks``, of which ``run`` has the first ``kept``; without the
    FLOPs until each event. None where the blocks that are compared do not agree.

    Numbers of modules and parameters in ``run`` are those of the whole network.
    """
    before, former, one, last = blocks[kept - 4 : kept]
    forward = [_first(run.events, FETCH, each) for each in (former, one, last)]
    backward = [_first(run.events, FETCH_BACKWARD, each) for each in (one, former, before)]
    places = [place for place in (*forward, *backward) if place is not None]
    if len(places) < 6 or places != sorted(places):
        return None
    f_former, f_one, f_last, b_one, b_former, b_before = places
    ahead, back = _Part(run, f_one, f_last), _Part(run, b_one, b_former)
    if not ahead.agrees(_Part(run, f_former, f_one), one, former):
        return None
    if not back.agrees(_Part(run, b_former, b_before), one, former):
        return None
    more = len(blocks) - kept
    modules, parameters = len(one.modules), len(one.parameters)

    def moved(events: Iterable[Event], live: int, by: int, whose: Numbers) -> Iterator[Event]:
        """With so many bytes more; and those of a block as of the one that is ``by`` later."""
        for event in events:
            step = parameters if event.kind == GRADIENT else modules
            index = event.index + (by * step if whose.has(event) else 0)
            yield Event(event.kind, index, event.peak + live, event.live + live)

    events = [*run.events[:f_last]]
    for copy in range(1, more + 1):
        events += moved(ahead.events, copy * ahead.grows, copy, one)
    grown = more * ahead.grows
    events += moved(run.events[f_last:b_one], grown, more, last)
    for copy in range(more, 0, -1):
        events += moved(back.events, grown + (more - copy) * back.grows, copy, one)
    left = grown + more * back.grows
    events += moved(run.events[b_one:], left, more, last)
    flops = run.last_flops + more * (ahead.flops + back.flops)
    return Run(events, (), run.last_peak + left, flops)


def _first(events: Sequence[Event], kind: int, block: Numbers) -> int | None:
    """Where the block itself, not a module of it, has its first event of a kind."""
    for place, event in enumerate(events):
        if event.kind == kind and event.index == block.modules[0]:
            return place
    return None


class _Part:
    """The events of a block in one direction: from its first one to that of the block after it."""

    def __init__(self, run: Run, begin: int, end: int) -> None:
        self.events = run.events[begin:end]
        self.base = run.events[begin - 1].live
        self.grows = run.events[end - 1].live - self.base
        """Bytes that stay when it is over."""
        self.flops = run.flops[end] - run.flops[begin]

    def agrees(self, other: _Part, numbers: Numbers, others: Numbers) -> bool:
        """Whether another block does the same, and both do nothing but their own."""
        return self._own(numbers) is not None and self._own(numbers) == other._own(others)

    def _own(self, numbers: Numbers) -> list[Event] | None:
        if not all(numbers.has(event) for event in self.events):
            return None
        return [
            replace(
                event,
                index=event.index
                - (numbers.parameters if event.kind == GRADIENT else numbers.modules)[0],
                peak=event.peak - self.base,
                live=event.live - self.base,
            )
            for event in self.events
        ]
