"""A row of the catalogue of failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum


class Weight(IntEnum):
    """How much the words of a row say about the cause; the smallest wins."""

    CAUSE = 0
    SYMPTOM = 1
    """Has many causes: shown only where no cause was found."""
    SIGNAL = 2
    """A launcher's word of how a process ended."""
    CONSEQUENCE = 3
    """Usually follows from another rank's death; never the first thing to look at."""
    END = 4
    """What a watchdog or a launcher did to the processes after all of the above."""


@dataclass(frozen=True)
class Row:
    """How a known failure is recognised, and what to say of it."""

    name: str
    """Also the anchor on the page of all failures."""
    outcome: str
    """The class of the failure: an outcome of a run (``result.json``)."""
    pattern: str
    """``{group}`` in the cause and the fix is filled from the group of that name."""
    messages: tuple[str, ...]
    """Messages as they are printed, with which the tests try the row and readers search it."""
    cause: str
    fix: str
    llmx: str = ""
    """What to set in llmx; a run shows it instead of ``fix``."""
    weight: Weight = Weight.CAUSE
    symptom: str = ""
    """A pattern that decides as well, where ``context`` is anywhere in the log, also in a warning
    or in a frame of a traceback."""
    context: str = ""
    when: Callable[[str], bool] | None = None
    """A condition on the numbers in the text of the error."""
