"""What a part of the benchmark gives: measures with what is expected of them. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


class NotHere(Exception):
    """This machine cannot run the part; the message says what is missing."""


@dataclass(frozen=True)
class Measure:
    """One number (or word) beside what is expected."""

    name: str
    value: float | str
    unit: str = ""
    expected: str = ""
    """In words: ``at least 60 %``. Empty where there is nothing to hold it against."""
    ok: bool | None = None
    """Whether it is as expected; None where nothing is expected (or sizes are shrunken)."""

    def shown(self) -> str:
        """``788 TFLOP/s``."""
        if isinstance(self.value, str):
            return self.value
        text = f"{self.value:,.0f}" if abs(self.value) >= 100 else f"{self.value:,.3g}"
        return f"{text} {self.unit}".strip()


def at_least(name: str, value: float, bound: float, unit: str = "") -> Measure:
    """A measure that must not be below ``bound``."""
    expected = Measure("", bound, unit).shown()
    return Measure(name, value, unit, expected=f"at least {expected}", ok=value >= bound)


def at_most(name: str, value: float, bound: float, unit: str = "") -> Measure:
    """A measure that must not be above ``bound``."""
    expected = Measure("", bound, unit).shown()
    return Measure(name, value, unit, expected=f"at most {expected}", ok=value <= bound)


def must(name: str, holds: bool, *, yes: str = "yes", no: str = "no") -> Measure:
    """A measure that is a fact."""
    return Measure(name, yes if holds else no, expected=yes, ok=holds)


@dataclass
class Outcome:
    """How a part ended."""

    part: str
    title: str
    state: str
    """``done``, ``failed`` or ``not run``."""
    seconds: float = 0.0
    why: str = ""
    """Of a part that failed or was not run, in one line."""
    measures: list[Measure] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Nothing failed and nothing is below what is expected."""
        return self.state != "failed" and all(m.ok is not False for m in self.measures)

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON."""
        return dataclasses.asdict(self)


def markdown(outcomes: list[Outcome], *, machine: list[str]) -> list[str]:
    """The whole table as Markdown, a section a part."""
    lines = [*machine, ""]
    for outcome in outcomes:
        lines += [f"## {outcome.title} (`{outcome.part}`)", ""]
        if outcome.state != "done":
            lines += [f"{outcome.state}: {outcome.why}", ""]
        if outcome.measures:
            lines += ["| what | measured | expected | |", "|---|---|---|---|"]
            lines += [
                f"| {m.name} | {m.shown()} | {m.expected} | {mark(m)} |" for m in outcome.measures
            ]
            lines.append("")
    return lines


def mark(measure: Measure) -> str:
    """``ok``, ``MISSED``, or nothing where nothing is expected."""
    return {True: "ok", False: "MISSED", None: ""}[measure.ok]
