"""What a pretended GPU saw: faults, waits of the host, collectives, fetches. Written line by line,
so that it is there of a rank that hangs, too."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

PACKAGES = {
    str(Path(str(spec.origin)).parent) + os.sep: name
    for name in ("llmx", "deepspeed", "transformers", "peft")
    if (spec := find_spec(name)) is not None
}
"""Directory of each package, wherever it is installed, to its name: a clone may be called ``llmx``,
too. Found without an import, since torch is to be replaced before they see it."""


STEP = "step"


class Report:
    """Of this process, once it is a rank."""

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self.waits: Counter[tuple[str, str]] = Counter()
        """(Phase, place) -> number, of steps that are watched."""
        self.begun: Counter[str] = Counter()
        """How often each phase was entered in these steps."""
        self.fetches: Counter[str] = Counter()
        """Parameters that ZeRO-3 gathers in passes of ``training`` and ``other`` ones, ``ahead`` of
        their module or ``late``; of the same steps."""
        self.watching = False
        self._here = threading.local()

    def open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8", buffering=1)

    def fault(self, text: str) -> RuntimeError:
        """Record one, and return what is to be raised: some code catches errors of devices."""
        self._write("fault", f"{text}, at {place()}")
        return RuntimeError(f"pretended GPU: {text}, at {place()}")

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Inside, this thread's waits are those of a phase; outside of all, of the step."""
        outer = getattr(self._here, "phase", STEP)
        self.begun[name] += self.watching
        self._here.phase = name
        try:
            yield
        finally:
            self._here.phase = outer

    def wait(self, kind: str) -> None:
        """The host waits for its GPU here."""
        if self.watching:
            self.waits[getattr(self._here, "phase", STEP), f"{kind} {place()}"] += 1

    def fetch(self, *, training: bool, ahead: bool) -> None:
        """ZeRO-3 gathers a parameter."""
        if self.watching:
            kind = "training" if training else "other"
            self.fetches[f"{kind} {'ahead' if ahead else 'late'}"] += 1

    def collective(self, group: str, call: str) -> None:
        """One call of this rank. Threads of one name have an order of their own."""
        thread = threading.current_thread()
        name = "main" if thread is threading.main_thread() else thread.name
        self._write("collective", [f"{group} {name}", call, place()])

    def close(self) -> None:
        for (phase, where), count in self.waits.items():
            self._write("wait", [phase, where, count])
        self._write("begun", self.begun)
        self._write("fetches", dict(self.fetches))

    def _write(self, kind: str, value: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps([kind, value]) + "\n")


def read(path: Path) -> dict[str, list[Any]]:
    """The values of each kind, in their order."""
    kinds = ("fault", "collective", "wait", "begun", "fetches")
    values: dict[str, list[Any]] = {kind: [] for kind in kinds}
    for line in path.read_text(encoding="utf-8").splitlines():
        kind, value = json.loads(line)
        values[kind].append(value)
    return values


def place() -> str:
    """``llmx/train/step.py:train_step``: the innermost function of llmx, DeepSpeed, transformers or
    peft on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        for directory, package in PACKAGES.items():
            inside = path.removeprefix(directory)
            if inside != path and not inside.startswith("accelerator/"):
                return f"{package}/{inside}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"
