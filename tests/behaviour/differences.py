"""Compares two recordings fact by fact: exactly, and says where a difference begins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MISSING = object()


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Those of one case, in the recorded order; numbers must be equal to the last bit."""
    steps = now.get("train.step") or then.get("train.step") or []
    return [
        f"{name} differs{found}"
        for name in dict.fromkeys([*then, *now])
        if (found := _difference(name, then.get(name, MISSING), now.get(name, MISSING), steps))
    ]


def _difference(fact: str, then: Any, now: Any, steps: list[int]) -> str:
    # As they are in the file: a tuple is a list, and 1 is not 1.0.
    if _text(then) == _text(now):
        return ""
    if isinstance(then, list) and isinstance(now, list):
        pairs = list(zip(then, now, strict=False))
        sizes = [size for old, new in pairs if (size := _relative(old, new)) is not None]
        for index, (old, new) in enumerate(pairs):
            if _text(old) != _text(new):
                is_step = fact.startswith("train.") and len(steps) > index
                where = f"step {steps[index]}" if is_step else f"entry {index + 1}"
                return _words(where, old, new, max(sizes, default=None))
        return _words("its length", len(then), len(now))
    if isinstance(then, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*then, *now]):
            old, new = then.get(key, MISSING), now.get(key, MISSING)
            if _text(old) != _text(new):
                return _words(f'"{key}"', old, new)
        return _words("the order of keys", list(then), list(now))
    return _words("", then, now, _relative(then, now))


def _words(where: str, then: Any, now: Any, relative: float | None = None) -> str:
    """Where it begins, both values, and the largest relative difference, of numbers."""
    place = f" first at {where}" if where else ""
    size = "" if relative is None else f"; at most {relative:.1e} relative"
    return f"{place}: {_text(then)} recorded, {_text(now)} now{size}"


def _relative(then: Any, now: Any) -> float | None:
    if isinstance(then, int | float) and isinstance(now, int | float):
        return abs(now - then) / max(abs(then), abs(now), 1e-300)
    return None


def _text(value: Any) -> str:
    return "nothing" if value is MISSING else json.dumps(value, ensure_ascii=False)
