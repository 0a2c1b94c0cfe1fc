"""What a pretended GPU saw: faults, waits of the host, collectives. Written line by line, so that
it is there of a rank that hangs, too."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
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


class Report:
    """Of this process, once it is a rank."""

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self.waits: Counter[str] = Counter()
        """Place -> number, of steps that are watched."""
        self.watching = False

    def open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8", buffering=1)

    def fault(self, text: str) -> RuntimeError:
        """Record one, and return what is to be raised: some code catches errors of devices."""
        self._write("fault", f"{text}, at {place()}")
        return RuntimeError(f"pretended GPU: {text}, at {place()}")

    def wait(self, kind: str) -> None:
        """The host waits for its GPU here."""
        if self.watching:
            self.waits[f"{kind} {place()}"] += 1

    def collective(self, group: str, call: str) -> None:
        """One call of this rank. Threads of one name have an order of their own."""
        thread = threading.current_thread()
        name = "main" if thread is threading.main_thread() else thread.name
        self._write("collective", [f"{group} {name}", call, place()])

    def close(self) -> None:
        self._write("waits", dict(self.waits))

    def _write(self, kind: str, value: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps([kind, value]) + "\n")


def read(path: Path) -> dict[str, list[Any]]:
    """The values of each kind, in their order."""
    values: dict[str, list[Any]] = {"fault": [], "collective": [], "waits": []}
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
