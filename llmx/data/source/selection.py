"""Which rows are taken and which are held out: functions of the seed and a row's number alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

import numpy as np

from llmx.data.source.survey import Survey


def weight_draws(seed: int, number: int, weight: float) -> Callable[[int], bool] | None:
    """Whether a row of source ``number`` is in a copy of which only the part ``weight`` is
    taken; None where all of it is."""
    if weight >= 1:
        return None
    generator = np.random.Generator(np.random.Philox(key=_key("weight", seed, number)))
    drawn: list[float] = []

    def chosen(index: int) -> bool:
        while index >= len(drawn):
            drawn.extend(generator.random(4096).tolist())
        return drawn[index] < weight

    return chosen


def held_out(survey: Survey, wanted: int, *, seed: int) -> set[int]:
    """The rows of the evaluation: those with the smallest of one random draw a row, so that
    they are a function of (seed, number of rows) alone. A repeated row is never one."""
    draws = np.random.Philox(key=_key("held out", seed)).random_raw(survey.num_rows)
    order = np.argsort(draws, kind="stable")
    if survey.repeated is not None:
        order = order[~survey.repeated[order]]
    return set(order[:wanted].tolist())


def _key(*parts: object) -> np.ndarray:
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()[:16]
    return np.frombuffer(digest, np.uint64)
