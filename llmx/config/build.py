"""Reads a plain dict as a typed ``Experiment``, and writes it as one.

One strict reader for the composed config, a user's YAML and an old snapshot alike: an
unknown key names its nearest neighbour, a value of a wrong type or out of its field's range
says what it must be and what to set, and a size may be written ``5e8``.

``experiment_from_dict(to_dict(exp)) == exp`` for every experiment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

from llmx.config.fields import AUTO, Text, plain
from llmx.config.plugins import Plugins
from llmx.config.schema import SCHEMA_VERSION, Experiment
from llmx.errors import ConfigError, did_you_mean

T = TypeVar("T")

MAX_DEPTH = 20
"""Levels of mappings and lists in values of the user's own keys (``model.config``)."""


def experiment_from_dict(values: dict[str, Any]) -> Experiment:
    """Build the typed experiment; raises ConfigError that lists *every* problem found."""
    problems: list[str] = []
    experiment = _dataclass(Experiment, values, "", problems)
    if problems:
        raise ConfigError("\n".join(problems))
    return experiment


def dataclass_from(cls: type[T], values: dict[str, Any], *, path: str) -> T:
    """Any dataclass of plain fields, checked as the config is; ``path`` is what a message says
    before the key. Raises ConfigError that lists every problem found."""
    problems: list[str] = []
    instance = _dataclass(cls, values, path, problems)
    for key, hint in hints_of(typing.cast(type, cls)).items() if not problems else ():
        # Those who read the words and the files do not know these types: 007 is 7 here.
        if without_none(hint)[0] is str and type(values.get(key)) is int:
            problems.append(_wrong(f"{path}.{key}", values[key], _TEXT, {}))
    if problems:
        raise ConfigError("\n".join(problems))
    return instance


def experiment_of_snapshot(values: Any, *, source: str = "config.yaml") -> Experiment:
    """The experiment of the values of a ``config.yaml`` that llmx wrote.

    ``source`` names the file in messages. ConfigError for values of another version of the
    schema, and for what is no snapshot.
    """
    version = values.get("schema_version") if isinstance(values, dict) else None
    if isinstance(version, bool) or version != SCHEMA_VERSION:
        raise ConfigError(
            f"{source}: schema_version={shown(version)}: this llmx reads only {SCHEMA_VERSION}. "
            "Give a run directory that llmx wrote, or install the llmx that wrote it."
        )
    return experiment_from_dict(values)


def to_dict(experiment: Experiment) -> dict[str, Any]:
    """The experiment as nested plain values, ready for YAML or JSON."""
    values, cls = dataclasses.asdict(experiment), typing.cast(type, type(experiment))
    for *sections, name in _auto_keys(cls):
        part = values
        for section in sections:
            part = part[section]
        if part[name] == AUTO:
            part[name] = "auto"
    return values


@cache
def _auto_keys(cls: type) -> list[list[str]]:
    """The parts of the key of each number that takes ``auto``."""
    return [key.split(".") for key, _, field in schema_fields(cls) if "auto" in field.metadata]


def without_none(hint: Any) -> tuple[Any, bool]:
    """A type without ``| None``, and whether None was in it."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        (inner,) = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return inner, True
    return hint, False


@cache
def hints_of(cls: type) -> dict[str, Any]:
    """The types of its fields; reading them takes longer than building what they describe."""
    return typing.get_type_hints(cls)


def schema_fields(
    cls: type = Experiment, prefix: str = ""
) -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
    """Dotted key, type and field of all in the schema, in its order, a group before its fields."""
    for field in dataclasses.fields(cls):
        key, hint = prefix + field.name, hints_of(cls)[field.name]
        yield key, hint, field
        if dataclasses.is_dataclass(hint):
            yield from schema_fields(typing.cast(type, hint), f"{key}.")


@cache
def known_keys() -> list[str]:
    """Every dotted key of the schema, in order (groups included)."""
    return [key for key, _, _ in schema_fields()]


def _dataclass(cls: type[T], values: Any, path: str, problems: list[str]) -> T:
    if not isinstance(values, dict):
        problems.append(
            f"{_said(path or 'the config', values)}: must be a mapping with the keys "
            f"{', '.join(hints_of(typing.cast(type, cls)))}."
        )
        return cls()
    hints = hints_of(typing.cast(type, cls))
    kwargs: dict[str, Any] = {}
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key, value in values.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in fields:
            problems.append(_unknown(where, str(key), list(fields)))
            continue
        before = len(problems)
        kwargs[key] = _value(hints[key], value, where, fields[key].metadata, problems)
        if len(problems) == before:
            problems += _range_problems(kwargs[key], where, fields[key].metadata)
    return cls(**kwargs)


def _unknown(where: str, key: str, names: list[str]) -> str:
    where = shown(where) if len(where) < 200 and where.isprintable() else shown(where[:60])
    hint = did_you_mean(key, names) if len(key) < 100 else ""
    if not hint:
        # The key may be right but in the wrong group: say where it lives.
        homes = [dotted for dotted in known_keys() if dotted.split(".")[-1] == key]
        hint = f" It exists as {', '.join(homes)}." if homes else ""
    return f"{where}: unknown key.{hint} Known here: {', '.join(names)}."


def _range_problems(value: Any, where: str, rules: Mapping[str, Any]) -> Iterator[str]:
    """Problems of a value with its own field: closed set, range, length."""
    if value is None or ("auto" in rules and value == AUTO):
        return
    length = rules.get("length")
    if length is not None and not length.holds(len(value)):
        limit = (
            f"{length.minimum}" if length.minimum == length.maximum else f"at most {length.maximum}"
        )
        noun = "entry" if length.maximum == 1 else "entries"
        yield f"{where}: must have {limit} {noun} (it has {len(value)}).{_example(where, rules)}"
        return
    entries = [(where, value)]
    if isinstance(value, list):
        entries = [(f"{where}[{index}]", item) for index, item in enumerate(value)]
        for index, item in enumerate(value):
            if "item_choices" in rules and item in value[:index]:
                yield f"{where}: has {shown(item)} twice. Name it once."
    elif isinstance(value, dict):
        entries = [(f"{where}.{shown(key)}", item) for key, item in value.items()]
        text = rules.get("text", Text(multiline=True))
        for key in value:
            if problem := text.problem(key):
                yield f"{where}: the name {shown(key)} must {problem}."
    for place, item in entries:
        yield from _entry_problems(item, place, where, rules)


def _entry_problems(item: Any, place: str, where: str, rules: Mapping[str, Any]) -> Iterator[str]:
    allowed = rules.get("choices") or rules.get("item_choices")
    if allowed is not None and item not in allowed:
        other = rules.get("or")
        if other is not None and not other.problem(item):
            return
        options = [str(option) for option in allowed if option is not None]
        null = " or null" if None in allowed else ""
        also = "" if other is None else f", or {other.rule.removeprefix('be ')}"
        instead = other.instead.get(item) if isinstance(other, Plugins) else None
        hint = f" {instead}" if instead else did_you_mean(str(item)[:100], options)
        yield f"{_said(place, item)}: must be one of {', '.join(options)}{null}{also}.{hint}"
    elif isinstance(item, str):
        problem = rules.get("text", Text()).problem(item)
        if problem:
            yield f"{_said(place, item)}: must {problem}.{_example(where, rules)}"
    elif isinstance(item, int | float) and not isinstance(item, bool):
        limits = rules.get("range")
        if limits is not None and not limits.holds(item):
            noun = "a whole number " if isinstance(item, int) else "a number "
            or_auto = ", or auto" if "auto" in rules else ""
            yield (
                f"{_said(place, item)}: must be {noun}{limits}{or_auto}.{_example(where, rules)}"
            )


def _example(where: str, rules: Mapping[str, Any]) -> str:
    """`` Set e.g. KEY=VALUE.``, with a value that the field takes; empty where there is none."""
    example = rules.get("example")
    if example is None:
        return ""
    if isinstance(example, float | int):
        example = plain(example)
    elif isinstance(example, list):
        example = f"[{','.join(plain(element) for element in example)}]"
    if "[" in where:
        # A key inside a list is written in a YAML file; no override reaches it.
        return f" Write e.g. {where.rpartition('.')[2]}: {example}."
    setting = f"{where}={example}"
    return (
        f" Set e.g. {setting}."
        if re.fullmatch(r"[\w.=/:+-]+", setting)
        else f" Set e.g. '{setting}'."
    )


def _said(where: str, value: Any) -> str:
    return f"{where}={shown(value)}"


def shown(value: Any) -> str:
    """A value as the user wrote it, on one line, printable and short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 200:
        return f"(a whole number of about {round(value.bit_length() * 0.30103)} digits)"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, str) and value and value.isprintable() and value == value.strip():
        text = value
    elif isinstance(value, list):
        text = f"[{', '.join(map(shown, value))}]"
    else:
        text = ascii(value) if isinstance(value, str) else _repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _repr(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:
        return f"(a {type(value).__name__} with a very long number)"
    return text if text.isprintable() else ascii(value)


def _value(hint: Any, value: Any, where: str, rules: Mapping[str, Any], problems: list[str]) -> Any:
    hint, takes_none = without_none(hint)
    if takes_none:
        if value is None:
            return None
        rules = {**rules, "null": True}
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        problems += _plain_problems(value, where)
        return value
    if dataclasses.is_dataclass(hint):
        return _dataclass(typing.cast(type, hint), value, where, problems)
    if origin is list:
        if not isinstance(value, list | tuple):
            problems.append(_wrong(where, value, "a list", rules))
            return []
        inner_rules = {"example": None}
        return [
            _value(args[0], item, f"{where}[{i}]", inner_rules, problems)
            for i, item in enumerate(value)
        ]
    if origin is dict:
        if not isinstance(value, dict):
            problems.append(_wrong(where, value, "a mapping", rules))
            return {}
        problems += [problem for key in value if (problem := _key_problem(key, where))]
        return {
            str(key): _value(args[1], item, f"{where}.{shown(key)}", {}, problems)
            for key, item in value.items()
        }
    return _scalar(hint, value, where, rules, problems)


def _scalar(
    hint: type, value: Any, where: str, rules: Mapping[str, Any], problems: list[str]
) -> Any:
    """Cast ``value`` to bool, int, float or str where nothing is lost by it."""
    if hint is bool:
        if isinstance(value, bool):
            return value
        problems.append(_wrong(where, value, "true or false", rules))
        return False
    if hint in (int, float):
        if value == "auto" and "auto" in rules:
            return hint(AUTO)
        number = _number(value)
        is_auto = "auto" in rules and number == AUTO  # a number of the user's is none
        if (
            number is not None
            and not is_auto
            and (number == int(number) if hint is int else abs(number) <= 1e300)
        ):
            return hint(number)
        noun = "a whole number" if hint is int else "a number"
        problems.append(_wrong(where, value, f"{noun}{_limits(rules)}", rules))
        return hint(0)
    if isinstance(value, bool) and "flags" in rules:
        return rules["flags"][value]
    # Of a float the written text is lost: 1.10, 1e5. Of whole numbers, and of nan (an outcome), it
    # has been compared by those who read it: compose.overrides, config.yaml_files.
    is_finite = isinstance(value, float) and math.isfinite(value)
    if isinstance(value, bool) or is_finite or not isinstance(value, str | int | float):
        problems.append(_wrong(where, value, _TEXT, rules))
        return ""
    if isinstance(value, int) and value.bit_length() > 10_000:
        problems.append(_wrong(where, value, "text, or a shorter number", rules))
        return ""
    return str(value)


_TEXT = "text (in quotes where it is read as another type)"


def _limits(rules: Mapping[str, Any]) -> str:
    limits = f" {rules['range']}" if rules.get("range") else ""
    return f"{limits}, or auto" if "auto" in rules else limits


def _wrong(where: str, value: Any, rule: str, rules: Mapping[str, Any]) -> str:
    null = ", or null" if rules.get("null") else ""
    choices = rules.get("choices")
    if choices:
        rule = f"one of {', '.join(str(option) for option in choices if option is not None)}"
    return f"{_said(where, value)}: must be {rule}{null}.{_example(where, rules)}"


def _key_problem(key: Any, where: str) -> str:
    """The problem with a name in a mapping that YAML reads as no text; else empty."""
    is_text = isinstance(key, str | int) and not isinstance(key, bool)
    return "" if is_text else f"{where}: the name {shown(key)} must be text. Quote it."


def _plain_problems(value: Any, where: str, depth: int = 0) -> Iterator[str]:
    """Problems of values of the user's own keys that YAML or JSON cannot store."""
    if depth > MAX_DEPTH:
        yield f"{where}: is nested more than {MAX_DEPTH} levels deep. Nothing reads that."
    elif isinstance(value, dict):
        for key, item in value.items():
            if wrong_key := _key_problem(key, where):
                yield wrong_key
            elif problem := Text(multiline=True).problem(str(key)):
                yield f"{where}: the name {shown(key)} must {problem}."
            else:
                yield from _plain_problems(item, f"{where}.{shown(key)}", depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _plain_problems(item, f"{where}[{index}]", depth + 1)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield f"{_said(where, value)}: must be a number of at most 64 bits."
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{_said(where, value)}: must be a finite number."
    elif isinstance(value, str):
        if problem := Text(max_length=10**6, multiline=True).problem(value):
            yield f"{_said(where, value)}: must {problem}."
    elif value is not None and not isinstance(value, int | float):
        kinds = "text, a number, true, false, null, a list or a mapping"
        yield f"{_said(where, value)}: must be {kinds}."


def _number(value: Any) -> float | int | None:
    """A finite number from a number or from text such as ``5e8``; None if it is none."""
    if isinstance(value, bool):
        return None
    for kind in (int, float) if isinstance(value, str) else ():
        with contextlib.suppress(ValueError):
            value = kind(value)
            break
    is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return value if is_number else None
