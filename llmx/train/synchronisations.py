"""Counts where training waits for the GPU, by line of code, for ``benchmarks/gpu``.

``LLMX_WATCH_SYNCHRONISATIONS=3`` (in ``launch.env``) counts from after step 3 to before the last
step, where no line is logged, and writes ``RUN_DIR/ranks/synchronisations-NNN.json``: place ->
count. It slows the steps it watches.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

import torch

VARIABLE = "LLMX_WATCH_SYNCHRONISATIONS"


class SynchronisationWatch:
    """Counts what torch's debug mode of synchronisations warns of; does nothing unasked."""

    def __init__(self, path: Path, *, last_step: int) -> None:
        first_step = os.environ.get(VARIABLE, "")
        self._begin = (
            int(first_step) if first_step.isdigit() and torch.cuda.is_available() else None
        )
        self._end = last_step - 1
        self._path = path
        self._counts: Counter[str] = Counter()
        self._shown: Any = None
        """``warnings.showwarning`` as it was, while this counts."""

    def after_step(self, step: int) -> None:
        """Begin or end counting, where it is time."""
        if self._begin is None:
            return
        if self._shown is None and self._begin <= step < self._end:  # later after a resume
            warnings.simplefilter("always")
            self._shown, warnings.showwarning = warnings.showwarning, self._count
            torch.cuda.set_sync_debug_mode("warn")
        elif self._shown is not None and step == self._end:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning, self._shown = self._shown, None
            self._path.write_text(json.dumps(self._counts), encoding="utf-8")

    def _count(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if "synchroniz" in str(message):
            short = "/".join(Path(filename).parts[-3:])
            self._counts[f"{short}:{lineno}"] += 1
