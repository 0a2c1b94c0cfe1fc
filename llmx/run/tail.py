"""Reads the JSON files of a run directory: lines that others append to, and whole objects.

A file may be damaged, or be somebody else's. ``SHAPES`` says how llmx writes each; what differs is
left out, and named. Standard library only.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

Record = dict[str, Any]


class LineTail:
    """Whole lines appended since the last call; an unfinished one stays for the next.

    A file that was replaced (as a resume does with ``metrics.jsonl``) or is shorter than it was
    is read anew from its first line, and ``began_anew`` is true until the next call.
    """

    def __init__(self, path: Path, *, from_end: bool = False, max_bytes: int | None = None) -> None:
        """``from_end``: without the lines that are there already. ``max_bytes``: of more than that
        at once, the end; and a longer line is split, since a program may write without ends."""
        self.path, self._max_bytes = path, max_bytes
        self.began_anew = False
        self._offset = 0
        self._partial = b""
        self._file: tuple[int, int] | None = None
        if from_end and path.exists():
            status = path.stat()
            self._offset, self._file = status.st_size, (status.st_dev, status.st_ino)

    def read(self, *, final: bool = False) -> list[bytes]:
        """The new lines, in order, without their ends; none where there is no file. ``final``: an
        unfinished one, too."""
        self.began_anew = False
        try:
            with self.path.open("rb") as stream:
                status = os.fstat(stream.fileno())
                file = (status.st_dev, status.st_ino)
                is_known = self._file is not None
                if is_known and (file != self._file or status.st_size < self._offset):
                    self._offset, self._partial, self.began_anew = 0, b"", True
                self._file = file
                longest = status.st_size if self._max_bytes is None else self._max_bytes
                if status.st_size - self._offset > longest:
                    self._offset, self._partial = status.st_size - longest, b""
                stream.seek(self._offset)
                data = stream.read()
        except OSError:
            return []
        self._offset += len(data)
        lines = (self._partial + data).split(b"\n")
        self._partial = lines.pop()
        is_long = self._max_bytes is not None and len(self._partial) > self._max_bytes
        if self._partial and (final or is_long):
            lines.append(self._partial)
            self._partial = b""
        return lines


SHAPES: Record = {
    "metrics.jsonl": {
        # Names that no metric of a task can have (``metrics.declared.RESERVED``).
        "kind": "", "step": 0, "time": 0, "loss": 0, "loss_mean": 0, "lr": 0, "grad_norm": 0,
        "step_time_s": 0, "tokens_per_s": 0, "mfu": 0, "data_wait_s": 0, "tokens": 0, "epoch": 0,
        "total_steps": 0, "num_parameters": 0, "num_trained": 0, "loss_unit": "", "memory_gib": [0],
    },
    "attempts.jsonl": {
        "started": 0, "ended": 0, "outcome": "", "cause": "", "rank": 0, "host": "",
        "first_step": 0, "last_step": 0, "saved_step": 0, "decision": "", "wait_s": 0,
    },
    "config.yaml": {"name": "", "model": {}, "task": {}},
    "overrides.yaml": [""],
    "result.json": {
        "outcome": "", "cause": "", "fix": "", "other_fix": "", "failure": "", "failed_rank": 0,
        "host": "", "traceback": "", "started": 0, "ended": 0, "restarts": 0,
    },
    "plan.json": {
        "warnings": [""], "hosts": [{"name": "", "slots": 0}], "accelerator": "",
        "ranks": [{"rank": 0, "host": 0, "device": "", "micro_batch": 0}], "num_parameters": 0,
        "batch": {"global_batch": 0, "accumulation": 0, "micro_batches": [0], "seq_len": 0},
        "memory": [{"device": ""}],
        "time": {"step_s": 0, "rollout": {"training_idle": 0, "drawing_idle": [None]}},
    },
    "samples.json": {
        "rows": [{"prompt": "", "expected": "", "before": "", "after": ""}],
    },
    "rollouts.jsonl": {
        "step": 0, "attempt": 0, "prompt": "", "completion": "", "rewards": {"*": 0},
        "advantage": 0,
    },
    "tables.json": {
        "step": 0, "tables": [{"title": "", "rows": [""], "columns": [""], "values": [[0]]}],
    },
    "data.json": {"*": [["", ""]]},
    "tracking.json": {"*": {"*": ""}},
    "changes.json": {"step": 0, "changes": {"*": [None, None]}},
    "sweep.json": {
        "words": [""], "cwd": "", "config_dir": "", "objective": "", "started": 0, "pid": 0,
        "host": "", "trials": [
            {"index": 0, "overrides": [""], "outcome": "", "cause": "", "fix": "", "run_dir": "",
             "same_as": 0, "started": 0, "ended": 0},
        ],
    },
    "run.json": {"run_id": "", "created": 0},
    "supervisor.json": {"state": "", "pid": 0, "host": "", "time": 0, "until": 0, "why": ""},
    "supervisor.lock": {"pid": 0, "host": "", "time": 0},
    "rank.json": {"rank": 0, "state": "", "step": 0, "time": 0, "error": {"type": ""}},
    "config.json": {"architectures": [""]},
    "manifest.json": {"files": {"*": {"bytes": 0}}, "created": 0},
    "provenance.json": {
        "git": {"commit": "", "diff": "", "untracked": {"*": ""}}, "packages": {"*": ""},
        "code": {"*": ""}, "task_code": {"*": ""}, "environment": {"*": ""}, "gpus": [""],
        "nccl": {"*": ""}, "python": {"version": ""}, "fingerprints": {
            "frozen": {"*": {"path": "", "digest": ""}}, "*": {"path": "", "digest": ""},
        },
    },
}  # fmt: skip
"""Shape by name of a file: a value of the kind of each value that is read; ``*`` is any key, None
any value."""


NUMBERS = {int: (int, float, bool)}


def misfit(value: Any, shape: Any, place: str = "") -> str:
    """Find a part of ``value`` that is of another kind than ``shape``; empty without one.

    A value may be null, and a key may be missing, but not in an object of a list.
    """
    if value is None or shape is None:
        return ""
    if isinstance(shape, dict) and isinstance(value, dict):
        of_other_keys = shape.get("*")
        for key, inner in value.items():
            expected = shape.get(key, of_other_keys)
            # Most values are numbers that may be any, or are: no call for each of them.
            if inner is None or expected is None or type(inner) in NUMBERS.get(type(expected), ()):
                continue
            fault = misfit(inner, expected, f"{place}.{key}")
            if fault:
                return fault
        return ""
    if isinstance(shape, list) and isinstance(value, list):
        if len(shape) > 1 and len(value) != len(shape):
            return f"{place[1:]} has {len(value)} values"
        for at, inner in enumerate(value):
            spot = f"{place}.{at}"
            fault = misfit(inner, shape[0], spot)
            if isinstance(shape[0], dict):
                missing = [key for key in shape[0] if key not in (inner or {})]
                fault = fault or (f"{spot[1:]} has no {missing[0]}" if missing else "")
            if fault:
                return fault
        return ""
    kind = (int, float) if isinstance(shape, int) else type(shape)
    return "" if isinstance(value, kind) else f"{place[1:] or 'it'} is {str(value)[:40]!r}"


LEFT_OUT = "It is left out."
"""Added to the damage of a file by those who show the others."""


def read_checked(path: Path, parse: Callable[[IO[bytes]], Any] = json.load) -> tuple[Any, str]:
    """Read a file of a run directory: its content, and a sentence on its damage.

    The content is empty where the file is missing or damaged; of a missing file nothing is wrong.
    ``parse``: reads an open file; ValueError where it cannot.
    """
    name = path.name
    shape = SHAPES.get(re.sub(r"^rank-\d+", "rank", name), {})
    empty = type(shape)()
    try:
        with path.open("rb") as stream:
            content = parse(stream)
    except FileNotFoundError:
        return empty, ""
    except (OSError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())  # YAML's are of several lines
        return empty, f"{name} cannot be read: {why.rstrip('.')}."
    if not isinstance(content, type(shape)):
        kind = "a list" if isinstance(shape, list) else "a JSON object or a YAML mapping"
        return empty, f"{name} is not {kind}."
    fault = misfit(content, shape)
    if fault:
        return empty, f"{name} has a value that llmx does not write: {fault}."
    return content, ""


def record_of(line: bytes, shape: Record = SHAPES["metrics.jsonl"]) -> Record | None:
    """The object of a line; None for anything else, such as a line that a crash cut off."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and not misfit(record, shape) else None


def records_of(lines: Iterable[bytes], shape: Record = SHAPES["metrics.jsonl"]) -> list[Record]:
    """The objects of ``lines``; what is none is left out."""
    lines = list(lines)
    try:
        # All at once: half the time of a call for each.
        values = json.loads((b"[" + b",".join(lines) + b"]").decode("utf-8"))
    except (ValueError, RecursionError):
        values = []
    if len(values) == len(lines):
        return [v for v in values if isinstance(v, dict) and not misfit(v, shape)]
    records = (record_of(line, shape) for line in lines)
    return [record for record in records if record is not None]


def read_records(
    path: Path,
    damage: list[str] | None = None,
    *,
    last_bytes: int | None = None,
) -> list[Record]:
    """The objects of the lines of a file; none where there is no file. A last line that has
    no end yet counts where it is a whole object.

    ``damage``: a line is added to it where lines cannot be read. ``last_bytes``: only the lines in
    so many bytes at its end are read.
    """
    name = path.name
    try:
        with path.open("rb") as stream:
            if last_bytes is not None and os.fstat(stream.fileno()).st_size > last_bytes:
                stream.seek(-last_bytes, os.SEEK_END)
                stream.readline()  # the rest of a line
            *lines, last = stream.read().split(b"\n")
    except OSError as error:
        if damage is not None and not isinstance(error, FileNotFoundError):
            damage.append(f"{name} cannot be read: {error}. {LEFT_OUT}")
        return []
    shape = SHAPES.get(name, {})
    records = records_of(lines, shape)
    unreadable = sum(bool(line.strip()) for line in lines) - len(records)
    if damage is not None and unreadable:
        damage.append(f"{name}: unreadable lines are left out ({unreadable}).")
    return records + records_of([last], shape)


LAST_BYTES = 1 << 20
"""Bytes of the end of ``rollouts.jsonl`` that are read; it may be large."""
SHOWN_SAMPLES = 16
"""Samples of a step, at most."""


def newest_samples(path: Path, damage: list[str] | None = None) -> list[Record]:
    """Some samples of the newest step in ``rollouts.jsonl``, for a reader."""
    samples = [
        record
        for record in read_records(path, damage, last_bytes=LAST_BYTES)
        if None not in map(record.get, SHAPES["rollouts.jsonl"])
    ]
    return [sample for sample in samples if sample["step"] == samples[-1]["step"]][:SHOWN_SAMPLES]
