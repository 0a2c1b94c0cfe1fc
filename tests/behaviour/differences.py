"""Compares two recordings fact by fact: exactly, and says where a difference begins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Difference:
    """A fact of a case that is not what was recorded."""

    fact: str
    where: str
    """The first step or sample, or the key; empty for a single value."""
    then: str
    now: str
    relative: float | None = None
    """The largest relative difference, of numbers."""

    def __str__(self) -> str:
        place = f" first at {self.where}" if self.where else ""
        size = "" if self.relative is None else f"; at most {self.relative:.1e} relative"
        return f"{self.fact} differs{place}: {self.then} recorded, {self.now} now{size}"


MISSING = object()


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Those of one case, in the recorded order; numbers must be equal to the last bit."""
    names = [*then, *(name for name in now if name not in then)]
    steps = now.get("train.step") or then.get("train.step") or []
    return [
        found
        for name in names
        if (found := _difference(name, then.get(name, MISSING), now.get(name, MISSING), steps))
    ]


def _difference(fact: str, then: Any, now: Any, steps: list[int]) -> Difference | None:
    # As they are in the file: a tuple is a list, and 1 is not 1.0.
    if _text(then) == _text(now):
        return None
    if isinstance(then, list) and isinstance(now, list):
        return _of_lists(fact, then, now, steps)
    if isinstance(then, dict) and isinstance(now, dict):
        for key in [*then, *(key for key in now if key not in then)]:
            old, new = then.get(key, MISSING), now.get(key, MISSING)
            if _text(old) != _text(new):
                return Difference(fact, f'"{key}"', _text(old), _text(new))
        return Difference(fact, "the order of keys", _text(list(then)), _text(list(now)))
    return Difference(fact, "", _text(then), _text(now), _relative(then, now))


def _of_lists(fact: str, then: list[Any], now: list[Any], steps: list[int]) -> Difference:
    pairs = list(zip(then, now, strict=False))
    sizes = [size for old, new in pairs if (size := _relative(old, new)) is not None]
    for index, (old, new) in enumerate(pairs):
        if _text(old) != _text(new):
            is_step = fact.startswith("train.") and len(steps) > index
            where = f"step {steps[index]}" if is_step else f"entry {index + 1}"
            return Difference(fact, where, _text(old), _text(new), max(sizes, default=None))
    return Difference(fact, "its length", str(len(then)), str(len(now)))


def _relative(then: Any, now: Any) -> float | None:
    if isinstance(then, int | float) and isinstance(now, int | float):
        return abs(now - then) / max(abs(then), abs(now), 1e-300)
    return None


def _text(value: Any) -> str:
    return "nothing" if value is MISSING else json.dumps(value, ensure_ascii=False)
