"""From a plain dict to a typed ``Experiment`` and back.

One strict reader for the composed config, a user's YAML and an old snapshot alike: an
unknown key names its nearest neighbour, a wrong type names the value and the rule, and a
size may be written ``5e8``.

``experiment_from_dict(to_dict(exp)) == exp`` for every experiment.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

from llmx.config.schema import Experiment
from llmx.errors import ConfigError, did_you_mean

T = TypeVar("T")


def experiment_from_dict(values: dict[str, Any]) -> Experiment:
    """Build the typed experiment; raises ConfigError that lists *every* problem found."""
    problems: list[str] = []
    experiment = _dataclass(Experiment, values, "", problems)
    if problems:
        raise ConfigError("\n".join(problems))
    return experiment


def to_dict(experiment: Experiment) -> dict[str, Any]:
    """The experiment as nested plain values, ready for YAML or JSON."""
    return dataclasses.asdict(experiment)


def known_keys(cls: type = Experiment, prefix: str = "") -> list[str]:
    """Every dotted key of the schema, in order (groups included)."""
    keys: list[str] = []
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        keys.append(prefix + field.name)
        if dataclasses.is_dataclass(hints[field.name]):
            keys += known_keys(hints[field.name], f"{prefix}{field.name}.")
    return keys


def _dataclass(cls: type[T], values: Any, path: str, problems: list[str]) -> T:
    if not isinstance(values, dict):
        problems.append(
            f"{path or 'the config'}: {values!r} is not a mapping; "
            f"give the keys of {cls.__name__}: {', '.join(_names(cls))}."
        )
        return cls()
    hints = typing.get_type_hints(cls)
    kwargs: dict[str, Any] = {}
    names = _names(cls)
    for key, value in values.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in names:
            problems.append(_unknown(where, str(key), names))
            continue
        kwargs[key] = _value(hints[key], value, where, problems)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in kwargs:
            _check_choice(field, kwargs[field.name], path, problems)
    return cls(**kwargs)


def _names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _unknown(where: str, key: str, names: list[str]) -> str:
    hint = did_you_mean(key, names)
    if not hint:
        # The key may be right but in the wrong group: say where it lives.
        homes = [known for known in known_keys() if known.split(".")[-1] == key]
        hint = f" It exists as {', '.join(homes)}." if homes else ""
    return f"{where}: unknown key.{hint} Known here: {', '.join(names)}."


def _check_choice(
    field: dataclasses.Field[Any], value: Any, path: str, problems: list[str]
) -> None:
    where = f"{path}.{field.name}" if path else field.name
    pairs = [(value, field.metadata.get("choices"))]
    if isinstance(value, list):
        pairs = [(item, field.metadata.get("item_choices")) for item in value]
    for item, choices in pairs:
        if choices is not None and item not in choices:
            named = [str(known) for known in choices if known is not None]
            problems.append(
                f"{where}: {item!r} is not one of {', '.join(named)}."
                f"{did_you_mean(str(item), named)}"
            )


def _value(hint: Any, value: Any, where: str, problems: list[str]) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        (inner,) = [arg for arg in args if arg is not type(None)]
        return _value(inner, value, where, problems)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return _dataclass(typing.cast(type, hint), value, where, problems)
    if origin is list:
        if not isinstance(value, list | tuple):
            problems.append(f"{where}: {value!r} is not a list; write [a, b].")
            return []
        return [_value(args[0], item, f"{where}[{i}]", problems) for i, item in enumerate(value)]
    if origin is dict:
        if not isinstance(value, dict):
            problems.append(f"{where}: {value!r} is not a mapping; write {{key: value}}.")
            return {}
        return {
            str(key): _value(args[1], item, f"{where}.{key}", problems)
            for key, item in value.items()
        }
    return _scalar(hint, value, where, problems)


def _scalar(hint: type, value: Any, where: str, problems: list[str]) -> Any:
    """Cast ``value`` to bool, int, float or str where nothing is lost by it."""
    if hint is bool:
        if isinstance(value, bool):
            return value
        problems.append(f"{where}: {value!r} is not a boolean; write true or false.")
        return False
    if hint is int:
        number = _number(value)
        if number is not None and number == int(number):
            return int(number)
        problems.append(f"{where}: {value!r} is not a whole number; write e.g. 8 or 5e8.")
        return 0
    if hint is float:
        number = _number(value)
        if number is not None:
            return float(number)
        problems.append(f"{where}: {value!r} is not a number; write e.g. 2e-5.")
        return 0.0
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        problems.append(f"{where}: {value!r} is not text; write a plain word or quote it.")
        return ""
    return str(value)


def _number(value: Any) -> float | int | None:
    """A finite number from a number or from text such as ``5e8``; None if it is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            try:
                value = float(value)
            except ValueError:
                return None
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value == value and abs(value) != float("inf"):
        return value
    return None
