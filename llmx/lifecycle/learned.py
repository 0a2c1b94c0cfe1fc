"""Keeps measurements of finished runs: ``learned.json`` in the cache (``$LLMX_CACHE``,
``~/.cache/llmx``).

A run that ends well leaves the TFLOP/s that its devices have reached; plans of later runs use them
instead of assumptions, and say so. The file can be deleted at any time, or edited.
``LLMX_LEARNED=off`` neither reads nor writes it. It decides the predicted time in a ``plan.json``,
what ``auto`` takes where a run is planned, and the split over unequal devices until the ranks have
measured their speeds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmx.config import Experiment
from llmx.plan.knowledge import NO_KNOWLEDGE, Knowledge
from llmx.plan.learned import Measured, Observation, observe
from llmx.plan.types import Plan
from llmx.run.rundir import RunDir, read_json, read_mapping, write_json
from llmx.run.tail import read_records

FORMAT = 1
MOST_KEPT = 500
LEAST_STEPS = 5
"""Steps of a run that teaches, after its first logged line, which is a warm-up."""


OTHERWISE = ("resumed", "rebalanced")
"""Events after which a run has other hosts, another split, or a warm-up again."""


def learned_file() -> Path:
    """The path of ``learned.json``, whether it exists or not."""
    root = Path(os.environ.get("LLMX_CACHE") or "~/.cache/llmx").expanduser()
    return root / "learned.json"


def finished_runs() -> Knowledge:
    """The measurements of finished runs, from the file as it is now."""
    path = learned_file()
    if _is_off():
        return NO_KNOWLEDGE
    return Knowledge(runs=tuple(read_observations(path)), runs_file=str(path))


def learn(run: RunDir, exp: Experiment) -> list[Observation]:
    """Add what a run that has ended well has shown; returns it. Never raises: a run is not
    to fail by it."""
    if _is_off():
        return []
    path = learned_file()
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, ArithmeticError):
        measured = measured_of(read_records(run.metrics))
        if measured is None:
            return []
        # With the split and the hosts of the last attempt, which are not always those of the first.
        plan = Plan.from_dict(read_json(run.plan))
        if plan.balance is not None and plan.balance.pending:
            return []  # the split was measured where this file is not
        if plan.drawn is not None:
            return []  # a step is mostly drawing, which is not timed apart
        observations = observe(exp, plan, measured)
        if observations:
            new = [{**row.to_dict(), "time": round(time.time())} for row in observations]
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(path.parent):
                entries = [*_stored(path), *new][-MOST_KEPT:]
                write_json(path, {"format": FORMAT, "observations": entries})
        return observations
    return []


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold a lock, where the disk has locks, so that runs that end together lose no line."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read_observations(path: Path) -> list[Observation]:
    """The observations in the file, the oldest first; unreadable ones are skipped."""
    observations = []
    for row in _stored(path):
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            observations.append(Observation.from_dict(row))
    return observations


def _stored(path: Path) -> list[Any]:
    values = read_mapping(path)
    entries = values.get("observations") if values.get("format") == FORMAT else None
    return entries if isinstance(entries, list) else []


def measured_of(records: Sequence[Mapping[str, Any]]) -> Measured | None:
    """Medians over the ``train`` lines of a run since its hosts or its split last changed, without
    the first of them; None where there are too few."""
    done, lines = 0, list[dict[str, Any]]()
    for record in records:
        if record.get("kind") == "start" or record.get("event") in OTHERWISE:
            done, lines = record.get("resumed_from") or record.get("step") or 0, []
        elif record.get("kind") == "train":
            count, done = record["step"] - done, record["step"]
            if count >= 1 and record.get("step_time_s"):  # else repeated after a restart
                lines.append({**record, "count": count})
    lines = lines[1:]
    if sum(line["count"] for line in lines) < LEAST_STEPS:
        return None
    waits = [(line.get("data_wait_s") or 0.0) / line["count"] for line in lines]
    timed = [line["forward_s"] for line in lines if line.get("forward_s")]
    is_uniform = len({len(times) for times in timed}) == 1
    return Measured(
        step_s=statistics.median(
            line["step_time_s"] - wait for line, wait in zip(lines, waits, strict=True)
        ),
        tokens=statistics.median(line["tokens_per_s"] * line["step_time_s"] for line in lines),
        forward_s=tuple(map(statistics.median, zip(*timed, strict=True))) if is_uniform else (),
        context_gib=tuple(
            map(min, zip(*(line.get("context_gib") or [] for line in lines), strict=True))
        ),
    )


def _is_off() -> bool:
    return os.environ.get("LLMX_LEARNED", "").lower() == "off"
