"""The allocations of one micro step, traced on fake tensors, as plain values. Pure.

A trace is made once (``llmx.train.memory_trace``, in a process of its own) for a network, a micro
batch and a setting of activation checkpointing. It says nothing of ZeRO: ``llmx.plan.step_memory``
applies DeepSpeed's rules to it for any stage, number of ranks and bucket size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from llmx.config.schema import Experiment
from llmx.plan.by_device import CHECKPOINTING, checkpointing_on
from llmx.plan.network import Network
from llmx.plan.types import Plan

FETCH, RELEASE, FETCH_BACKWARD, RELEASE_BACKWARD, GRADIENT = range(5)
"""Kinds of events: a module begins and ends its forward pass, and its backward pass; the gradient
of a parameter is there."""


@dataclass(frozen=True)
class TracedParameter:
    """A parameter of the traced network."""

    numel: int
    trained: bool
    group: int = 0
    """The group of the optimizer that it is in."""
    matrix: bool = False
    """One that Muon updates."""


@dataclass(frozen=True)
class Event:
    """Something that ZeRO acts on, and the bytes of activations and temporaries around it."""

    kind: int
    index: int
    """The index of the module, or of the parameter (``GRADIENT``)."""
    peak: int
    """The most bytes since the event before."""
    live: int
    """Bytes that are left after it. A gradient that is there is not counted from its event on."""


@dataclass(frozen=True)
class StepTrace:
    """A traced micro step: one forward and one backward pass."""

    parameters: tuple[TracedParameter, ...]
    """The parameters in the order of the network, tied ones once."""
    modules: tuple[tuple[int, ...], ...]
    """The parameters that stage 3 gathers for each module: those that it has itself; of a block
    with experts all."""
    events: tuple[Event, ...]
    last_peak: int = 0
    """The most bytes after the last event."""
    buffers: int = 0
    """Bytes of the network's buffers."""
    networks: Mapping[str, Network] = field(default_factory=dict)
    """The networks of the task by name, also those that compute stored columns before training."""
    reach: str = ""
    """What an adapter reaches of the weights, where it leaves the experts out."""
    __hash__ = object.__hash__
    """By identity, for caches: a trace is long."""

    @property
    def num_trained(self) -> int:
        return sum(p.numel for p in self.parameters if p.trained)

    @property
    def peak(self) -> int:
        """Bytes of activations and temporaries, alone."""
        return max([self.last_peak, *(event.peak for event in self.events)])

    def at(self, other: StepTrace, part: float) -> StepTrace | None:
        """The trace between this one (0) and that of another micro batch (1), or beyond: bytes are
        linear in the micro batch. None where the two are not of the same steps."""
        if [(event.kind, event.index) for event in self.events] != [
            (event.kind, event.index) for event in other.events
        ]:
            return None

        def mixed(here: float, there: float) -> int:
            return max(0, round(here + part * (there - here)))

        return replace(
            self,
            events=tuple(
                Event(a.kind, a.index, mixed(a.peak, b.peak), mixed(a.live, b.live))
                for a, b in zip(self.events, other.events, strict=True)
            ),
            last_peak=mixed(self.last_peak, other.last_peak),
        )

    def to_dict(self) -> dict[str, Any]:
        """The trace as plain values, in short lists."""
        return {
            "parameters": [
                [p.numel, int(p.trained), p.group, int(p.matrix)] for p in self.parameters
            ],
            "modules": [list(indices) for indices in self.modules],
            "events": [[event.kind, event.index, event.peak, event.live] for event in self.events],
            "last_peak": self.last_peak,
            "buffers": self.buffers,
            "networks": {name: asdict(network) for name, network in self.networks.items()},
            "reach": self.reach,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> StepTrace:
        """The inverse of ``to_dict``."""
        return cls(
            tuple(TracedParameter(n, bool(t), g, bool(m)) for n, t, g, m in values["parameters"]),
            tuple(tuple(indices) for indices in values["modules"]),
            tuple(Event(*event) for event in values["events"]),
            values["last_peak"],
            values["buffers"],
            {name: Network(**network) for name, network in values["networks"].items()},
            values["reach"],
        )


@dataclass(frozen=True)
class TraceKey:
    """The facts that a trace depends on, beside the network."""

    attention: str
    checkpointing: str
    micro_batch: int


@dataclass(frozen=True)
class Traces:
    """The traces of one network and task."""

    found: Mapping[TraceKey, StepTrace]
    problem: str = ""
    """Why there are none."""
    networks: Mapping[str, Network] = field(default_factory=dict)
    """The networks of the task by name."""
    _between: dict[TraceKey, StepTrace | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def from_dict(cls, answers: Mapping[str, Any]) -> Traces:
        """The traces in the ``traces.json`` of a run; none where another llmx wrote it."""
        try:
            traces = {
                TraceKey(**answer["key"]): StepTrace.from_dict(answer["trace"])
                for answer in answers.values()
            }
        except (LookupError, TypeError, ValueError):
            traces = {}
        return cls.of(traces)

    @classmethod
    def of(cls, found: Mapping[TraceKey, StepTrace], problem: str = "") -> Traces:
        """These traces, with the networks that all of them have."""
        return cls(found, problem, next((trace.networks for trace in found.values()), {}))

    def get(self, attention: str, checkpointing: str, micro_batch: int) -> StepTrace | None:
        """The trace of this micro batch, or between those of two others: bytes are linear in it."""
        key = TraceKey(attention, checkpointing, micro_batch)
        if key in self.found:
            return self.found[key]
        if key not in self._between:
            self._between[key] = self._mixed(attention, checkpointing, micro_batch)
        return self._between[key]

    def _mixed(self, attention: str, checkpointing: str, micro_batch: int) -> StepTrace | None:
        sizes = sorted(
            key.micro_batch
            for key in self.found
            if (key.attention, key.checkpointing) == (attention, checkpointing)
        )
        if len(sizes) < 2:
            return None
        low, high = sizes[0], sizes[-1]
        first, last = (self.found[TraceKey(attention, checkpointing, size)] for size in (low, high))
        return first.at(last, (micro_batch - low) / (high - low))


NO_TRACES = Traces({})


def wanted_traces(exp: Experiment, plan: Plan, *, alternatives: bool) -> list[TraceKey]:
    """The traces that a plan needs, two sizes where ranks take as much as fits; ``alternatives``:
    also for what it might be instead."""
    attentions = dict.fromkeys(dict(plan.attention).values())
    used = dict.fromkeys((kind, checkpointing_on(exp, name)) for name, kind in plan.attention)
    sizes = sorted({rank.micro_batch for rank in plan.ranks})
    if plan.balance is not None:  # ranks may take less, or as much as is allowed
        sizes = sorted({*sizes, 1, exp.batch.micro_batch})
    keys = [TraceKey(kind, setting, size) for kind, setting in used for size in sizes]
    if alternatives:
        two_sizes = {1, max([2, *sizes])}
        keys += [
            TraceKey(kind, setting, size)
            for kind in attentions
            for setting in CHECKPOINTING
            for size in two_sizes
        ]
    return list(dict.fromkeys(keys))
