"""What every part of this benchmark is given (``Context``) and gives (``Measure``, ``Outcome``)."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmx.config.schema import DeviceConfig
from llmx.run.metrics.lines import read_metrics


class NotHere(Exception):
    """This machine cannot run the part; the message says what is missing."""


class PartFailed(Exception):
    """A run of this part did not end well; the message is its cause in one line."""


@dataclass(frozen=True)
class Context:
    """What every part is given."""

    root: Path
    """A directory of its own for this benchmark: runs, data, logs."""
    tiny: bool
    """Shrunken sizes: shows that a part runs, its numbers mean nothing."""
    device: DeviceConfig
    """From the catalogue of devices, or as the driver describes it."""
    device_name: str
    num_gpus: int

    @property
    def cuda(self) -> bool:
        return self.num_gpus > 0

    @property
    def compares(self) -> bool:
        """Whether a number is held against what is expected: not at shrunken sizes."""
        return self.cuda and not self.tiny

    @property
    def torch_device(self) -> str:
        return "cuda" if self.cuda else "cpu"

    @property
    def world_size(self) -> int:
        """Ranks of a run: one a GPU; one on a CPU, where nothing is measured."""
        return self.num_gpus or 1

    def peak_tflops(self, precision: str) -> float | None:
        """Of one device, from its data sheet; None where it is not known."""
        return self.device.peak_tflops.get(precision) or None

    def train(self, name: str, *words: str, resume: bool = False) -> Run:
        """Run ``python -m llmx WORDS`` to its end and read what it left.

        ``resume``: go on with the run directory of that name instead. Raises PartFailed with the
        cause that the run itself recorded.
        """
        directory = self.root / "runs" / name
        if not resume:
            # A work directory that is used again: a run is never overwritten.
            shutil.rmtree(directory, ignore_errors=True)
        fixed = [] if resume else [f"run_dir={directory}", "tracking=none"]
        if not self.cuda and not resume:
            fixed += [f"hardware.slots={self.world_size}"]
        command = [sys.executable, "-m", "llmx", *(["resume", str(directory)] if resume else [])]
        command += [*fixed, *words]
        print("$", " ".join(command), flush=True)
        done = subprocess.run(
            command, cwd=self.root, stdin=subprocess.DEVNULL, check=False, stderr=subprocess.STDOUT
        )
        run = Run(directory)
        if done.returncode != 0:
            raise PartFailed(f"{name}: {run.cause() or f'exit code {done.returncode}'}")
        return run


@dataclass(frozen=True)
class Run:
    """The files of a finished run."""

    directory: Path

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl`` of one kind."""
        lines = read_metrics(self.directory / "metrics.jsonl")
        return [line for line in lines if line["kind"] == kind]

    def json(self, name: str) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((self.directory / name).read_text(encoding="utf-8"))
        return values

    def cause(self) -> str:
        """Of a run that failed, from its ``result.json``; empty without one."""
        try:
            result = self.json("result.json")
        except (OSError, ValueError):
            return ""
        return f"{result['outcome']}: {result['cause']}".splitlines()[0]

    def steady(self, key: str, *, after_step: int) -> float:
        """Median of a value over the ``train`` lines after the warm-up."""
        values = [
            line[key]
            for line in self.lines("train")
            if line["step"] > after_step and line.get(key) is not None
        ]
        if not values:
            raise PartFailed(f"no {key} was logged after step {after_step}")
        return float(statistics.median(values))

    def peak_memory_gib(self) -> float:
        """The largest that any rank reported."""
        return float(max(max(line["memory_gib"]) for line in self.lines("train")))


@dataclass(frozen=True)
class Measure:
    """One number (or word) beside what is expected."""

    name: str
    value: float | str
    unit: str = ""
    expected: str = ""
    """In words: ``at least 60 %``. Empty where there is nothing to hold it against."""
    ok: bool | None = None
    """Whether it is as expected; None where nothing is expected (or sizes are shrunken)."""

    def shown(self) -> str:
        """``788 TFLOP/s``."""
        if isinstance(self.value, str):
            return self.value
        text = f"{self.value:,.0f}" if abs(self.value) >= 100 else f"{self.value:,.3g}"
        return f"{text} {self.unit}".strip()


def at_least(name: str, value: float, bound: float, unit: str = "") -> Measure:
    """A measure that must not be below ``bound``."""
    expected = Measure("", bound, unit).shown()
    return Measure(name, value, unit, expected=f"at least {expected}", ok=value >= bound)


def at_most(name: str, value: float, bound: float, unit: str = "") -> Measure:
    """A measure that must not be above ``bound``."""
    expected = Measure("", bound, unit).shown()
    return Measure(name, value, unit, expected=f"at most {expected}", ok=value <= bound)


def must(name: str, holds: bool, *, yes: str = "yes", no: str = "no") -> Measure:
    """A measure that is a fact."""
    return Measure(name, yes if holds else no, expected=yes, ok=holds)


@dataclass
class Outcome:
    """How a part ended."""

    part: str
    title: str
    state: str
    """``done``, ``failed`` or ``not run``."""
    seconds: float = 0.0
    why: str = ""
    """Of a part that failed or was not run, in one line."""
    measures: list[Measure] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Nothing failed and nothing is below what is expected."""
        return self.state != "failed" and all(m.ok is not False for m in self.measures)
