"""Applies the table of another tool's keys: settings of ours, and a row of the report for each key.

A converter gets the value and all values of the source. It returns settings, or the reason for
which the key has no effect; what cannot be is ``Refused``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmx.config.foreign import Tool
from llmx.errors import LlmxError, did_you_mean

Settings = dict[str, Any]
"""Dotted key of ours -> value."""
MAPPED, NO_EFFECT, REFUSED, UNKNOWN = "mapped", "no effect", "refused", "unknown"
LEFT_OUT = "left out by --without"
OFF: tuple[Any, ...] = (None, False, 0, "", [], {}, "none", "no", "None", "false")
"""Values that ask for nothing: a key that is refused may have them."""


class Refused(Exception):
    """Reason and fix, for a value that cannot be imported."""


class Source(dict[str, Any]):
    """The values of a source by key, with the defaults of its tool."""

    def __init__(
        self, tool: Tool, given: Mapping[str, Any], *, answered: Sequence[str] = ()
    ) -> None:
        """``answered``: keys of ours that the user sets in any case."""
        self.given = {name: value for name, value in given.items() if value is not None}
        super().__init__({**tool.defaults, **self.given})
        self.tool, self.names, self.answered = tool, tuple(given), answered


def first_record(path: str) -> dict[str, Any] | None:
    """The first record of data on this machine; None of data that is not here."""
    from llmx.data.source.files import read_file, source_files
    from llmx.data.source.records import Record

    if not Path(path).exists():
        return None
    try:
        record = next(iter(read_file(source_files(path)[0])), None)
    except (LlmxError, IndexError):
        return None
    return record.value if isinstance(record, Record) else {"text": ""}


Converter = Callable[[Any, Source], Settings | str]


@dataclass(frozen=True)
class Row:
    """What became of one key."""

    key: str
    value: Any
    kind: str
    ours: str
    """Keys of ours with their values, or the key that it would be."""
    remark: str = ""
    is_default: bool = False
    """Nobody has set it: a default of the tool."""
    settings: Mapping[str, Any] = field(default_factory=dict)


def choice(ours: str, values: Mapping[Any, Any], otherwise: str = "") -> Converter:
    """The converter of a closed set. ``values``: theirs -> ours, settings, or None for what a run
    does anyway; ``otherwise``: what is said of another value."""

    def converted(value: Any, source: Source) -> Settings | str:
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        if not isinstance(value, list | dict) and value in values:
            setting = values[value]
            if setting is None:
                return "as here"
            return setting if isinstance(setting, dict) else {ours: setting}
        if value in OFF:
            return "off"
        choices = ", ".join(str(name) for name in values)
        raise Refused(otherwise or f"must be one of {choices}. Leave it out.")

    return converted


def part_of(name: str) -> Converter:
    """The converter of a key that is read with another one."""
    return lambda value, source: f"part of {name}"


def convert(
    source: Source, converters: Mapping[str, Converter], *, prefix: str = ""
) -> tuple[Settings, list[Row]]:
    """Settings and report of a source. ``prefix``: before the keys in the report."""
    settings, rows = Settings(), []
    for name in dict.fromkeys([*source.names, *source.tool.defaults]):
        is_default = name not in source.given
        if is_default and name not in source.tool.defaults:
            rows.append(Row(prefix + name, None, NO_EFFECT, "", "not set"))
            continue
        row = _converted(name, source[name], source, converters)
        if row.kind == REFUSED and row.ours in source.answered:
            row = replace(row, kind=NO_EFFECT, remark="set on the command line")
        if is_default and row.kind == NO_EFFECT and name not in source.names:
            continue
        settings |= row.settings
        rows.append(replace(row, key=prefix + name, is_default=is_default))
    return settings, rows


def _converted(name: str, value: Any, source: Source, converters: Mapping[str, Converter]) -> Row:
    tool = source.tool
    ours = _entry(tool.mapped, name)
    row = Row(name, value, NO_EFFECT, ours or "")
    if (reason := _entry(tool.no_effect, name)) is not None:
        return replace(row, remark=reason)
    if (reason := _entry(tool.refused, name)) is not None:
        is_off = value in OFF
        kind, remark = (NO_EFFECT, "off") if is_off else (REFUSED, f"{reason}.")
        return replace(row, kind=kind, remark=remark)
    if ours is None:
        names = [n for table in (tool.mapped, tool.no_effect, tool.refused)
                 for names in table.values() for n in names.split()]  # fmt: skip
        near = did_you_mean(name[:100], names).strip()
        return replace(row, kind=UNKNOWN, remark=near or f"not known of {tool.title}.")
    try:
        result = converters[name](value, source) if name in converters else {ours: value}
    except Refused as refused:
        return replace(row, kind=REFUSED, remark=str(refused))
    if isinstance(result, str):
        return replace(row, remark=result)
    return mapped_row(row, result, remark=tool.remarks.get(name, ""))


def mapped_row(row: Row, settings: Settings, *, remark: str = "") -> Row:
    """The row with what its key became."""
    text = ", ".join(f"{key}={shown_value(item)}" for key, item in settings.items())
    return replace(row, kind=MAPPED, ours=text, remark=remark, settings=settings)


def _entry(table: Mapping[str, str], name: str) -> str | None:
    """The entry that lists a name."""
    return next((entry for entry, names in table.items() if name in names.split()), None)


def shown_value(value: Any) -> str:
    """A value in one short word for a table."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def as_number(value: Any) -> Any:
    """``1e-4`` is text for YAML, and a number for those who write it; ``007`` is none."""
    digits = r"(0|[1-9]\d*)"
    if isinstance(value, str) and re.fullmatch(
        rf"[+-]?({digits}(\.\d*)?|\.\d+)([eE][+-]?\d+)?", value
    ):
        return int(value) if re.fullmatch(rf"[+-]?{digits}", value) else float(value)
    if isinstance(value, list):
        return [as_number(item) for item in value]
    if isinstance(value, dict):
        return {key: as_number(item) for key, item in value.items()}
    return value


def form(name: str, columns: Mapping[str, str]) -> dict[str, Any]:
    """``form`` and ``columns`` of a source; ``columns``: our name -> theirs."""
    renamed = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    return {"form": name} | ({"columns": renamed} if renamed else {})


def words_of(value: Any) -> list[str]:
    """The parts of a list, or of text with commas."""
    parts = value.split(",") if isinstance(value, str) else value or []
    return [str(part).strip() for part in parts if str(part).strip()]
