"""What every part of this benchmark is given (``Context``) and gives (``Measure``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmx.config.schema import DeviceConfig


class NotHere(Exception):
    """This machine cannot run the part; the message says what is missing."""


class PartFailed(Exception):
    """A run of this part did not end well; the message is its cause in one line."""


@dataclass(frozen=True)
class Context:
    """What every part is given."""

    root: Path
    """A directory of its own for this benchmark: runs, data, logs."""
    pretend: bool
    """Shrunken sizes: shows that a part runs, its numbers mean nothing."""
    device: DeviceConfig
    """From the catalogue of devices, or as the driver describes it."""
    device_name: str
    num_gpus: int
    known: frozenset[str] = frozenset()
    """Measures that an earlier call of this part has made, which was ended before its last."""

    @property
    def cuda(self) -> bool:
        return self.num_gpus > 0

    @property
    def compares(self) -> bool:
        """Whether a number is held against what is expected: not at shrunken sizes."""
        return self.cuda and not self.pretend

    @property
    def torch_device(self) -> str:
        return "cuda" if self.cuda else "cpu"

    def peak_tflops(self, precision: str) -> float | None:
        """Of one device, from its data sheet; None where it is not known."""
        return self.device.peak_tflops.get(precision) or None

    def at_least(self, name: str, value: float, bound: float, unit: str = "") -> Measure:
        """A measure not to be below ``bound``, where that is known (not 0) and numbers count."""
        if not bound or not self.compares:
            return Measure(name, value, unit)
        expected = Measure("", bound, unit).shown()
        return Measure(name, value, unit, expected=f"at least {expected}", ok=value >= bound)


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

    def mark(self) -> str:
        """``ok``, ``MISSED``, or nothing where nothing is expected."""
        return {True: "ok", False: "MISSED", None: ""}[self.ok]


def at_most(name: str, value: float, bound: float, unit: str = "") -> Measure:
    """A measure that must not be above ``bound``."""
    expected = Measure("", bound, unit).shown()
    return Measure(name, value, unit, expected=f"at most {expected}", ok=value <= bound)


def must(name: str, holds: bool, *, yes: str = "yes", no: str = "no") -> Measure:
    """A measure that is a fact."""
    return Measure(name, yes if holds else no, expected=yes, ok=holds)


def failed(name: str, error: Exception) -> Measure:
    """In the place of a measure whose run did not end well."""
    return Measure(name, str(error)[:160], expected="a run", ok=False)
