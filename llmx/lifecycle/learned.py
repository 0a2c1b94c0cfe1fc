"""What finished runs teach: ``learned.json`` in the cache (``$LLMX_CACHE``, ``~/.cache/llmx``).

A run that ends well leaves the TFLOP/s that its devices have reached, and the speed of its
collectives where it can be told; plans of later runs use them instead of assumptions, and say so.
The file can be deleted at any time, or edited. ``LLMX_LEARNED=off`` neither reads nor writes it.
Nothing that a run computes depends on it: only the predicted time in its ``plan.json``.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmx.compose.complete import Composed
from llmx.config import Experiment
from llmx.plan.learned import Measured, Observation, known_of, observe, with_sizes
from llmx.plan.step_time import with_time
from llmx.plan.types import Plan
from llmx.run.rundir import RunDir, read_mapping, write_json
from llmx.run.tail import read_records

FORMAT = 1
MOST_KEPT = 500
LEAST_STEPS = 5
"""Steps of a run that teaches, after its first logged line, which is a warm-up."""


def learned_file() -> Path:
    """Where it is, whether it exists or not."""
    root = Path(os.environ.get("LLMX_CACHE") or "~/.cache/llmx").expanduser()
    return root / "learned.json"


def with_learned_time(composed: Composed) -> Composed:
    """With the time that finished runs let expect in its plan, where there are any."""
    if _is_off():
        return composed
    path = learned_file()
    exp, plan = composed.experiment, composed.plan
    known = known_of(read_observations(path), exp, plan, path=str(path))
    if not known.tflops:
        return composed
    taught = with_time(plan, exp, known=known)
    # Of a model whose size only a trace knows, the time stays that by the trace.
    return replace(composed, plan=taught) if taught.time and taught.time.step_s else composed


def learn(run: RunDir, exp: Experiment, plan: Plan) -> list[Observation]:
    """Add what a run that has ended well has shown; returns it. Never raises: a run is not
    to fail by it."""
    if _is_off():
        return []
    path = learned_file()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, ArithmeticError):
        measured = measured_of(read_records(run.metrics))
        if measured is None:
            return []
        sizes = read_mapping(run.balance).get("sizes")
        used = with_sizes(plan, sizes) if plan.balance is not None and sizes else plan
        found = observe(exp, used, measured)
        if found:
            kept = _stored(path)
            new = [{**one.to_dict(), "time": round(time.time())} for one in found]
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = [*kept, *new][-MOST_KEPT:]
            write_json(path, {"format": FORMAT, "observations": kept})
        return found
    return []


def read_observations(path: Path) -> list[Observation]:
    """Of the file, the oldest first; without those that cannot be read."""
    found = []
    for each in _stored(path):
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            found.append(Observation.from_dict({k: v for k, v in each.items() if k != "time"}))
    return found


def _stored(path: Path) -> list[Any]:
    values = read_mapping(path)
    kept = values.get("observations") if values.get("format") == FORMAT else None
    return kept if isinstance(kept, list) else []


def measured_of(records: Sequence[Mapping[str, Any]]) -> Measured | None:
    """Medians over the ``train`` lines of a run; None where there are too few."""
    lines = [record for record in records if record.get("kind") == "train"]
    counts, steps, tokens, forward, before = [], [], [], [], 0
    for line in lines:
        count, before = line["step"] - before, line["step"]
        if count < 1 or not line.get("step_time_s"):
            continue  # repeated after a restart
        counts.append(count)
        steps.append(line["step_time_s"] - (line.get("data_wait_s") or 0.0) / count)
        tokens.append(line["tokens_per_s"] * line["step_time_s"])
        forward.append(line.get("forward_s") or [])
    if sum(counts[1:]) < LEAST_STEPS:
        return None
    timed = [each for each in forward[1:] if each]
    same = len({len(each) for each in timed}) == 1
    return Measured(
        step_s=statistics.median(steps[1:]),
        tokens=statistics.median(tokens[1:]),
        forward_s=tuple(statistics.median(rank) for rank in zip(*timed, strict=True))
        if same
        else (),
    )


def _is_off() -> bool:
    return os.environ.get("LLMX_LEARNED", "").lower() == "off"
