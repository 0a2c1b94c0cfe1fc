"""Two metrics files, value by value: identical bit for bit, or the first step that differs.

Only what is a function of the run counts (losses, gradient norms, token counts); times,
speeds and memory do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from llmx.run.metrics.declared import Metric, declared_of, measured
from llmx.run.metrics.lines import read_metrics
from llmx.run.rundir import RunDir, read_mapping
from llmx.text import plural

Line = Mapping[str, Any]

COMPARED = {
    "train": ("loss", "grad_norm", "lr", "loss_scale", "samples", "tokens", "target_tokens"),
    "eval": ("loss", "target_tokens", "weight"),
}
"""Compared values by kind of line; every metric of the task comes with them."""
EQUAL, DIFFER, UNKNOWN = "equal", "differ", "unknown"


@dataclass(frozen=True)
class Gap:
    """One value that is not the same in both runs."""

    step: int
    kind: str
    name: str
    then: float | None
    now: float | None
    absolute: float | None
    """None where one of them is no number."""
    relative: float | None
    """The difference divided by the larger of the two."""

    def shown(self, then: str, now: str) -> str:
        """Both values in words. ``then``, ``now``: what the two runs are called."""
        label = self.name if self.kind == "train" else f"{self.kind} {self.name}"
        values = f"{label} {_number(self.then)} {then}, {_number(self.now)} {now}"
        if self.absolute is None:
            return values
        return f"{values}: off by {self.absolute:.3g} ({self.relative:.3g} relative)"


@dataclass(frozen=True)
class Outcome:
    """The result of comparing two runs, as ``reproduction.json`` has it."""

    lines: int
    """Lines that both have."""
    last_step: int
    """The last step that both logged."""
    missing: list[int]
    """Steps that the first run logged and the second passed without a line."""
    first_difference: Gap | None
    largest_difference: Gap | None
    """The largest relative difference of a loss, else of any value."""
    values_that_differ: int
    weights: str
    """``equal``, ``differ`` or ``unknown``."""
    weights_at_step: int | None
    """The last step at which both runs have a hash of the weights; the first that differs."""
    lines_of_the_first_run: int
    last_step_of_the_first_run: int

    @property
    def identical(self) -> bool:
        """Everything that both recorded is the same, and there is something."""
        is_same = self.first_difference is None and not self.missing and self.weights != DIFFER
        return self.lines > 0 and is_same

    @property
    def is_proven(self) -> bool:
        """Equal down to the weights: equal losses alone do not say that the weights are."""
        return self.identical and self.weights == EQUAL

    def summary(self, then: str = "then", now: str = "now") -> str:
        """One to three sentences, with what was compared and what was not. ``then``, ``now``: what
        the two runs are called."""
        if not self.lines:
            return "nothing to compare: the two runs have no logged step in common."
        if self.is_proven:
            at = self.weights_at_step or 0
            weights = f"the hash of the weights at step {at:,}"
            text = f"bitwise identical: {self._compared()}, and {weights}."
            return text if at >= self.last_step else f"{text} Later weights were not compared."
        if self.identical:
            return (
                f"equal over the {self._compared()}. The weights were not compared: the runs have "
                "no hash of them at the same step, so this is no proof that they are equal."
            )
        parts, first, largest = [], self.first_difference, self.largest_difference
        if first is not None:
            parts.append(f"differs first at step {first.step}: {first.shown(then, now)}.")
        elif self.weights == DIFFER:
            parts.append(
                f"every logged value up to step {self.last_step} is identical, but the weights "
                f"at step {self.weights_at_step} are not."
            )
        if largest is not None and largest != first:
            values = largest.shown(then, now)
            parts.append(f"Largest difference, at step {largest.step}: {values}.")
        if self.missing:
            steps = ", ".join(map(str, self.missing[:5])) + (" ..." if self.missing[5:] else "")
            noun = "step" if len(self.missing) == 1 else "steps"
            parts.append(f"The second run logged nothing at {noun} {steps}.")
        return " ".join([*parts, f"Compared: {self._compared()}."])

    def _compared(self) -> str:
        lines = plural(self.lines, "logged line")
        if self.lines_of_the_first_run > self.lines:
            lines = f"{self.lines:,} of {plural(self.lines_of_the_first_run, 'logged line')}"
        lines += f" up to step {self.last_step:,}"
        if self.last_step_of_the_first_run > self.last_step:
            lines += f" of {self.last_step_of_the_first_run:,}"
        return lines

    def to_dict(self) -> dict[str, Any]:
        return {"identical": self.identical, "summary": self.summary(), **asdict(self)}


def compare_runs(run: RunDir, target: RunDir) -> Outcome:
    """Compare what two runs logged; works while they run, and for those that failed."""
    return compare(
        read_metrics(run.metrics),
        read_metrics(target.metrics),
        hashes_then=weight_hashes(run),
        hashes_now=weight_hashes(target),
    )


def weight_hashes(run: RunDir) -> dict[int, str]:
    """Step -> hash of the weights: of the ``end`` line, and of the checkpoints here."""
    hashes: dict[int, str] = {}
    for state in sorted(run.checkpoints.glob("step-*/state.json")):
        values = read_mapping(state)
        if values.get("weights_hash") and isinstance(values.get("step"), int):
            hashes[values["step"]] = str(values["weights_hash"])
    for line in read_metrics(run.metrics):
        if line.get("kind") == "end" and line.get("weights_hash"):
            hashes[int(line["step"])] = str(line["weights_hash"])
    return hashes


def compare(
    then: Iterable[Line],
    now: Iterable[Line],
    *,
    hashes_then: Mapping[int, str] | None = None,
    hashes_now: Mapping[int, str] | None = None,
) -> Outcome:
    """Compare two runs' lines, and their hashes of weights (step -> hash) at common steps."""
    then, now = list(then), list(now)
    declared = {**declared_of(then), **declared_of(now)}
    old, new = _by_place(then), _by_place(now)
    common = sorted(set(old) & set(new))
    gaps = [gap for place in common for gap in _gaps(place, old[place], new[place], declared)]
    reached = max((step for step, _ in new), default=0)
    # A run that was cut short logs its own last step; those lines are in one file only.
    ends = {max((step for step, _ in lines), default=0) for lines in (old, new)}
    steps_now = {step for step, kind in new if kind == "train"}
    missing = [
        step
        for step, kind in sorted(old)
        if kind == "train" and step < reached and step not in steps_now and step not in ends
    ]
    numbers = [gap for gap in gaps if gap.relative is not None]
    losses = [gap for gap in numbers if gap.name == "loss"]
    new_hashes, old_hashes = hashes_now or {}, hashes_then or {}
    shared = set(new_hashes) & set(old_hashes)
    other = {step for step in shared if new_hashes[step] != old_hashes[step]}
    return Outcome(
        lines=len(common),
        last_step=max((step for step, _ in common), default=0),
        missing=missing,
        first_difference=gaps[0] if gaps else None,
        largest_difference=max(
            losses or numbers, key=lambda gap: gap.relative or 0.0, default=None
        ),
        values_that_differ=len(gaps),
        weights=DIFFER if other else EQUAL if shared else UNKNOWN,
        weights_at_step=min(other) if other else max(shared, default=None),
        lines_of_the_first_run=len(old),
        last_step_of_the_first_run=max((step for step, _ in old), default=0),
    )


def _by_place(lines: Iterable[Line]) -> dict[tuple[int, str], Line]:
    """(step, kind) -> line; of a step that was trained again, the last. Train before eval."""
    by_place: dict[tuple[int, str], Line] = {}
    for line in lines:
        kind, step = line.get("kind"), line.get("step")
        if kind in COMPARED and isinstance(step, int):
            by_place[(step, "train" if kind == "train" else "eval")] = line
    return by_place


def _gaps(
    place: tuple[int, str], then: Line, now: Line, declared: Mapping[str, Metric]
) -> Iterator[Gap]:
    metrics = {**measured(then, declared), **measured(now, declared)}
    for name in (*COMPARED[place[1]], *metrics):
        if name in then and name in now and not _same(then[name], now[name]):
            old, new = then[name], now[name]
            absolute = relative = None
            if old is not None and new is not None:
                absolute = abs(new - old)
                relative = absolute / (max(abs(old), abs(new)) or 1.0)
            yield Gap(*place, name, old, new, absolute, relative)


def _same(then: Any, now: Any) -> bool:
    """Bit for bit: JSON's shortest form of a float is exact; 0.0 and -0.0 are not the same."""
    if isinstance(then, float) and isinstance(now, float):
        return then == now and math.copysign(1, then) == math.copysign(1, now)
    return bool(then == now)


def _number(value: float | None) -> str:
    if value is None:
        return "no number"
    return str(value) if isinstance(value, int) else f"{value:.9g}"
