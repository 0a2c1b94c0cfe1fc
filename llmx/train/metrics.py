"""``metrics.jsonl``: the truth about a run, one JSON object a line, written by rank 0.

The lines are described in ``llmx.run.metrics``. Shown by ``tail -f RUN_DIR/metrics.jsonl``.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llmx.checkpoint.disk import DISK
from llmx.run.metrics.declared import is_number
from llmx.run.metrics.lines import read_metrics
from llmx.run.rundir import write_text

GIB = 2**30


class MetricsWriter:
    """Appends lines, each flushed at once, from any thread. On other ranks it writes nothing."""

    def __init__(self, path: Path, *, enabled: bool) -> None:
        self._stream = path.open("a", encoding="utf-8") if enabled else None
        self._directory = path.parent
        self._lock = threading.Lock()
        self._latest: dict[str, float] = {}
        self.evaluations: list[dict[str, Any]] = []
        """All ``eval`` lines of the run, oldest first. On rank 0 only."""

    def remember(self, lines: Iterable[dict[str, Any]]) -> None:
        """Take in what an earlier attempt measured, for ``latest``."""
        for line in lines:
            if line["kind"] == "eval":
                self.evaluations.append(line)
            if line["kind"] in ("train", "eval"):
                values = {f"{line['kind']}/{key}": value for key, value in line.items()}
                self._latest.update(
                    {key: float(value) for key, value in values.items() if is_number(value)}
                )

    def latest(self, name: str) -> dict[str, Any] | None:
        """The newest value of ``eval/loss``, ``train/loss``, ... as a checkpoint records it."""
        value = self._latest.get(name)
        return None if value is None else {"name": name, "value": value}

    def write(self, kind: str, **values: Any) -> None:
        """Write one line. A number that is not finite becomes null, with ``"nonfinite": true``."""
        if self._stream is None:
            return
        line: dict[str, Any] = {"kind": kind, "time": time.time(), **values}
        for key, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                line[key] = None
                line["nonfinite"] = True
        self.remember([line])
        with self._lock:
            self._stream.write(json.dumps(line, allow_nan=False) + "\n")
            self._stream.flush()

    def event(self, event: str, *, step: int, **values: Any) -> None:
        """Write a line about something that happened, beside the measurements."""
        self.write("event", event=event, step=step, **values)

    def sync(self) -> None:
        """Sync the lines to the disk, so that they survive a power cut."""
        if self._stream is not None:
            os.fsync(self._stream.fileno())
            # Its name, too: a resumed run has replaced the file (``truncate_metrics``).
            DISK.sync_directory(self._directory)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


def lines_until(lines: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """The lines of a run that resumes from ``step``: none of a later step, no end (``end``,
    ``early_stopped``), and no line that was only written because the run stopped there (``extra``).
    """
    return [
        line
        for line in lines
        if line["kind"] != "end"
        and line.get("event") != "early_stopped"
        and line.get("step", 0) <= step
        and not line.get("extra", False)
    ]


def truncate_metrics(path: Path, step: int) -> list[dict[str, Any]]:
    """Replace a metrics file by its lines up to ``step``; returns them. Atomic; untouched where
    nothing is to go."""
    lines = read_metrics(path)
    remaining = lines_until(lines, step)
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in remaining)
    if path.is_file() and path.read_bytes() != text.encode():
        write_text(path, text)
    return remaining


def context_gib() -> float:
    """Memory of the device outside PyTorch's allocator, GiB: the CUDA context, NCCL's buffers, and
    whatever other processes have there; 0 without CUDA."""
    import torch

    if not torch.cuda.is_initialized():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return max(0, total - free - torch.cuda.memory_reserved()) / GIB


def memory_gib(device_type: str) -> float:
    """Peak memory of this process, GiB: of the device under CUDA, resident RAM on CPU."""
    if device_type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / GIB
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
