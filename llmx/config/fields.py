"""Declares the values that a field of the schema takes: a closed set, a range, a length.

    slots: int = number(1, minimum=1, maximum=1024)
    betas: list[float] = numbers([0.9, 0.999], length=2, minimum=0, below=1)
    mode: str = choice("min", "max")

``llmx.config.build`` checks every value against them while the config is composed. A test
requires a range for every number and a length for every list of the schema.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llmx.config.plugins import Plugins
from llmx.text import CONTROL, SURROGATES

MAX_ITEMS = 1000
"""Entries of a list or a mapping, where the field does not say otherwise."""
MAX_PATH = 4096
"""Characters of a text, where the field does not say otherwise: Linux's longest path."""


@dataclass(frozen=True)
class Range:
    """The numbers that a field takes; ``above`` and ``below`` exclude the limit itself."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Whether ``value`` is in the range."""
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        """After "a number": ``from 1 to 65535``, ``above 0 and at most 1000``; empty: any."""
        if self.minimum is not None and self.maximum is not None:
            return f"from {plain(self.minimum)} to {plain(self.maximum)}"
        if self.minimum is not None and self.below is not None:
            return f"from {plain(self.minimum)} to below {plain(self.below)}"
        words = []
        if self.minimum is not None:
            words.append(f"of at least {plain(self.minimum)}")
        if self.above is not None:
            words.append(f"above {plain(self.above)}")
        if self.maximum is not None:
            words.append(f"{'' if words else 'of '}at most {plain(self.maximum)}")
        if self.below is not None:
            words.append(f"below {plain(self.below)}")
        return " and ".join(words)


@dataclass(frozen=True)
class Text:
    """The texts that a field takes."""

    max_length: int = MAX_PATH
    multiline: bool = False
    """Whether line breaks, tabs and other control characters may be in it."""
    pattern: str = ""
    """A regular expression that all of it matches; empty: any text."""
    rule: str = ""
    """``pattern`` in words, after "must"."""

    def problem(self, value: str) -> str:
        """What is wrong with ``value``, in words that follow "must"; empty where nothing is."""
        if len(value) > self.max_length:
            return f"have at most {self.max_length} characters (it has {len(value)})"
        if re.search(f"[{SURROGATES}]", value):
            return "be valid Unicode text (it has half of a surrogate pair)"
        control = re.search(f"[{CONTROL}]", value)
        if control and (not self.multiline or control.group() == "\x00"):
            return f"be text on one line, without control characters (it has {control.group()!r})"
        if self.pattern and not re.fullmatch(self.pattern, value):
            return self.rule
        return ""


LINE = Text()
"""The rule of a text without a rule of its own."""


def plain(number: float) -> str:
    """A number as one types it: ``64``, ``0.5``, ``1e9``, ``2e-5``."""
    if float(number).is_integer():
        text = str(int(number))
        zeros = len(text) - len(text.rstrip("0"))
        return f"{text[:-zeros]}e{zeros}" if zeros >= 6 else text
    return f"{number:g}".replace("e-0", "e-").replace("e+0", "e")


def choice(
    default: str | None,
    *options: str,
    rule: Text | Plugins | None = None,
    true: str | None = None,
    false: str | None = None,
) -> Any:
    """A string field with a closed set of values.

    ``rule``: takes other texts, too. ``true``, ``false``: the values that these say, in a field
    that was once a flag.
    """
    metadata: dict[str, Any] = {"choices": (default, *options)}
    metadata |= {} if rule is None else {"or": rule}
    metadata |= {} if true is None else {"flags": {True: true, False: false}}
    return field(default=default, metadata=metadata)


def choices(*options: str, rule: Plugins | None = None, example: str | None = None) -> Any:
    """A list of strings, each from a closed set (or one that ``rule`` takes) and there once; empty
    by default."""
    metadata: dict[str, Any] = {"item_choices": options, "length": Range(0, len(options))}
    metadata["example"] = example
    if rule is not None:
        metadata |= {"or": rule, "length": Range(0, 100)}
    return field(default_factory=list, metadata=metadata)


AUTO = -1
"""What a number that takes ``auto`` holds until it is chosen by the plan (``llmx.plan.choices``) or
by the task (``llmx.compose.task_rules``); written and read as ``auto``."""


def number(
    default: float | None,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    example: float | None = None,
    auto: bool = False,
) -> Any:
    """A number and its range; ``auto``: or ``auto``. ``example``: what a message suggests; by
    default the default."""
    limits = Range(minimum, maximum, above, below)
    assert default is None or auto or limits.holds(default), (default, limits)
    metadata = {"range": limits, "example": _first(example, default)}
    return field(default=default, metadata=metadata | ({"auto": True} if auto else {}))


def numbers(
    default: Sequence[float],
    *,
    length: int,
    minimum: float | None = None,
    below: float | None = None,
) -> Any:
    """A list of exactly ``length`` numbers, all in one range."""
    return field(
        default_factory=lambda: list(default),
        metadata={
            "range": Range(minimum, below=below),
            "length": Range(length, length),
            "example": list(default),
        },
    )


def text(
    default: str | None, rule: Text = LINE, *, example: str | None = None, path: bool = False
) -> Any:
    """A text, by default a line of at most 4096 characters."""
    metadata: dict[str, Any] = {"text": rule, "example": _first(example, default or None)}
    metadata |= {"path": True} if path else {}
    return field(default=default, metadata=metadata)


file_path = functools.partial(text, path=True)
"""A text that is, or may be, the path of a file or a directory: completion offers files."""


MODEL_SOURCE = "model_source"


def model_source() -> Any:
    """Option of a task: a directory of a model or a Hub id, empty by default. As
    ``model.path``, a relative path starts where the user stands, and is made absolute."""
    return field(default="", metadata={MODEL_SOURCE: True, "text": Text()})


def items(
    default: Sequence[str] = (),
    *,
    maximum: int = MAX_ITEMS,
    example: str | None = None,
    rule: Text = LINE,
    values: Range | None = None,
    paths: bool = False,
) -> Any:
    """A list of at most ``maximum`` entries, empty by default. ``rule``: of each text in it;
    ``values``: the range of each number in it; ``paths``: whether its texts are paths."""
    metadata: dict[str, Any] = {"length": Range(0, maximum), "example": example, "text": rule}
    metadata |= {"range": values} | ({"path": True} if paths else {})
    return field(default_factory=lambda: list(default), metadata=metadata)


def mapping(
    *,
    maximum: int = MAX_ITEMS,
    example: str | None = None,
    rule: Text | None = None,
    values: Range | None = None,
) -> Any:
    """A mapping, empty by default, of at most ``maximum`` entries. ``rule``: of each key, and of
    each value that is text; ``values``: the range of each value that is a number."""
    rule = rule or Text(multiline=True)
    metadata = {"length": Range(0, maximum), "example": example, "text": rule, "range": values}
    return field(default_factory=dict, metadata=metadata)


def _first(*candidates: Any) -> Any:
    return next((candidate for candidate in candidates if candidate is not None), None)
