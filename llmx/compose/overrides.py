"""Checks the overrides of a command line word by word before Hydra composes them.

Each word is read by Hydra's own parser; what it, or the composing, would refuse is said here in
one line: the word, the rule and the fix. Used by a run, a sweep, ``resume`` and ``reproduce``.
"""

from __future__ import annotations

import itertools
import math
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from llmx.compose.user_files import check_no_file, check_user_files
from llmx.config.build import hints_of, without_none
from llmx.config.groups import (
    ALIASES,
    GROUPS,
    OPTIONAL_GROUPS,
    find_option,
    hydra_problem,
    key_problem,
    lookup,
    no_such_option,
    options,
    shown,
)
from llmx.config.yaml_files import WHOLE
from llmx.errors import ConfigError, did_you_mean

STAGES = ("0", "1", "2", "3")
"""``zero=3`` is ``zero=stage3``."""

_ALIAS = re.compile(r"^(?P<sign>\+\+|\+|~)?(?P<name>[A-Za-z_]+)(?P<value>[=.@].*)?$")

SET = "++"
"""Before a key: it is set, whether anything reads it or not. The words of a saved config begin so,
since nobody has typed them."""
MAX_WORD = 65536
"""Characters of one override: reading takes some 20 microseconds for each."""
MAX_JOBS = 10_000
"""Jobs of one sweep."""

_MIXTURE = (
    "Mix data sets with data.sources: 'data.sources=[{path: a.jsonl}, {path: b.jsonl, weight: 2}]'."
)
_NESTED = ("hardware/devices",)
"""Groups inside a group."""


def resolve_alias(override: str) -> str:
    """Rewrite a word as Hydra reads it: ``zero_stage=stage3`` or ``zero=3`` -> ``zero=stage3``,
    ``data.path=数据.jsonl`` -> ``data.path='数据.jsonl'``, ``model.revision=1.10`` ->
    ``model.revision='1.10'``; anything else is unchanged.

    Hydra's grammar takes letters beyond ASCII, and ``~`` at the beginning, only in quotes, and what
    looks like a number it takes for one. Where there are quotes or brackets, the user has said what
    belongs together.
    """
    key, equal, value = override.partition("=")
    if equal and not any(mark in value for mark in "'\"[]{}()\\"):
        parts = [
            f"'{part}'" if part.startswith("~") or not part.isascii() else part
            for part in value.split(",")
        ]
        if any(map(_is_rewritten, parts)) and lookup(key.lstrip("+"))[0] is str:
            parts = [f"'{part.strip()}'" if _is_rewritten(part) else part for part in parts]
        override = f"{key}={','.join(parts)}"
    match = _ALIAS.match(override)
    if match is None:
        return override
    name, value = ALIASES.get(match["name"], match["name"]), match["value"] or ""
    if name == "zero" and value.startswith("="):
        stages = [f"stage{word}" if word in STAGES else word for word in value[1:].split(",")]
        value = f"={','.join(stages)}"
    return f"{match['sign'] or ''}{name}{value}"


def _is_rewritten(word: str) -> bool:
    """Whether a word is a number that Hydra hands over in another form: ``1.10``, ``1_000``."""
    try:
        float(word)
    except ValueError:
        return False
    return not WHOLE.fullmatch(word.strip())


def check_overrides(
    words: Sequence[str],
    *,
    multirun: bool = False,
    config_dirs: Sequence[str] = (),
    commands: Sequence[str] = (),
) -> list[str]:
    """The words as Hydra takes them; ConfigError for the first that cannot be read, or with all
    that Hydra would refuse.

    ``commands``: the meanings that a word without ``=`` may have.
    """
    parsed = [(word, _parsed(word, commands)) for word in map(resolve_alias, words)]
    directories = [Path(directory).expanduser().absolute() for directory in config_dirs]
    accepted: dict[tuple[str, str], tuple[str, Any]] = {}
    choices: list[tuple[str, Any]] = []
    problems: list[str] = []
    for word, override in parsed:
        key = override.key_or_group
        if not key.startswith("hydra") and not word.startswith(SET):
            word = word.lstrip("+")  # nothing can be added that is not there
        try:
            chosen = _check(word, override, multirun=multirun, directories=directories)
        except ConfigError as error:
            problems.append(str(error))
            continue
        if chosen == [None]:
            continue
        choices += [(key, name) for name in chosen]
        # Of a key that is given twice the last counts, as in Hydra; here also of a group.
        place = (key, "-" if override.is_delete() else "")
        accepted.pop(place, None)
        accepted[place] = (word, override)
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    if directories:
        check_user_files([(group, shown(name)) for group, name in choices], directories)
    if multirun:
        _check_sweep([override for _, override in accepted.values()])
    return [word for word, _ in accepted.values()]


def fixed_keys(words: Sequence[str]) -> list[str]:
    """The keys and groups of the words that have one value in all trials of a sweep."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_overrides(list(words))
    return [override.key_or_group for override in parsed if not override.is_sweep_override()]


def _parsed(word: str, commands: Sequence[str]) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, equal, value = word.partition("=")
    try:
        word.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{shown(word)}: is not valid UTF-8 text. Type it again.") from error
    if len(word) > MAX_WORD:
        raise ConfigError(
            f"{shown(key)}: the value has {len(value)} characters, at most {MAX_WORD} are read. "
            "Put it into a YAML file: --config-dir DIR."
        )
    if equal and not key.strip("+~ "):
        raise ConfigError(
            f"{shown(word)}: has no key before the =. Write group=option or key=value."
        )
    if not equal and not word.startswith("~"):
        raise ConfigError(f"{shown(word)}: is not key=value.{_meant(word, commands)}")
    try:
        override = OverridesParser.create().parse_override(word)
        # A number of more than 4300 digits fails only when its value is asked for.
        if not override.is_sweep_override():
            override.value()
    except (HydraException, ValueError, RecursionError, AttributeError) as error:
        raise ConfigError(f"{shown(word)}: cannot be read. {_unreadable(word)}") from error
    return override


def _meant(word: str, commands: Sequence[str]) -> str:
    if word in commands:
        return f" A command comes first: python -m llmx {word} ..."
    if word and not key_problem(word):
        return f" Write {word}=VALUE, without spaces."
    hint = did_you_mean(word, [*commands, *GROUPS]) if len(word) < 100 else ""
    return hint or " Write group=option or key=value."


def _unreadable(word: str) -> str:
    """The most likely mistake in a word that Hydra's grammar does not take."""
    key, _, value = word.partition("=")
    if not re.fullmatch(r"(\+\+|\+|~)?[A-Za-z_][\w./@:-]*", key):
        dotted = re.sub(r"\[(\d+)\]", r".\1", key)
        if dotted != key and re.fullmatch(r"[A-Za-z_][\w.]*", dotted):
            return f"An entry of a list has its number behind a dot: {shown(dotted)}={shown(value)}"
        return f"{shown(key)} is not a key: letters, digits, _ and dots, as in optim.lr=1e-4."
    quotes = [mark for mark in "'\"" if len(re.findall(rf"(?<!\\){mark}", value)) % 2]
    if quotes:
        return f"A quote ({quotes[0]}) is not closed."
    for opening, closing in ("[]", "{}", "()"):
        if value.count(opening) != value.count(closing):
            unmatched = opening if value.count(opening) > value.count(closing) else closing
            other = closing if unmatched == opening else opening
            return f"A {unmatched} has no {other}; text with brackets is quoted: '{key}=\"...\"'."
    if re.search(r"\d{4000}", value):
        return "A number has more than 4000 digits."
    if value.endswith("\r"):
        return "It ends with a carriage return, as lines of Windows do: tr -d '\\r' < FILE."
    if "#" in value and not re.search(r"[\[{]", value):
        return f"A # is quoted: '{key}=\"{shown(value)}\"'."
    if re.search(r"""[{,]\s*["'][^"']*["']\s*:""", value):
        return f"The keys of a mapping have no quotes: '{key}={{a: \"text\"}}'."
    if not value.isascii():
        quoted = re.sub(r"""[^\s,:'"\[\]{}()]*[^\x00-\x7f][^\s,:'"\[\]{}()]*""", r'"\g<0>"', value)
        return f"Letters beyond ASCII inside brackets are quoted: '{shown(f'{key}={quoted}')}'."
    if value.strip().endswith(","):
        return "Nothing follows the comma at its end; leave it out."
    return (
        "A value with commas, colons, brackets or = is quoted: "
        f"'{key if len(key) < 60 else 'key'}=\"a, b\"'."
    )


def _check(word: str, override: Any, *, multirun: bool, directories: Sequence[Path]) -> list[Any]:
    """Options chosen by a word that is a group's; ``[None]`` for a group that is left out.
    ConfigError for what cannot be composed."""
    key = override.key_or_group
    if override.is_sweep_override() and not multirun:
        written = f" A list is written '{key}=[a,b]', text with a comma '{key}=\"a, b\"'."
        if key == "tracking":
            written = f" Several trackers of one run: 'tracking.kinds=[{word.partition('=')[2]}]'."
        raise ConfigError(
            f"{shown(word)}: several values are for a sweep: add -m."
            f"{written if key == 'tracking' or key not in GROUPS else ''}"
        )
    if override.package is not None:
        raise ConfigError(f"{shown(word)}: @ is not supported here. Write {shown(key)}=...")
    if key.startswith("hydra"):
        _check_hydra(word, override)
        return []
    if key in GROUPS or key in _NESTED:
        return _check_group(word, override, directories)
    if "/" in key or any((directory / key).is_dir() for directory in directories):
        if not options(key, directories):
            groups = [*GROUPS, *_NESTED]
            raise ConfigError(
                f"{shown(key)}: no such group.{did_you_mean(key[:100], groups)} Groups: "
                f"{', '.join(groups)}; your own: --config-dir DIR."
            )
        return _check_group(word, override, directories)
    hint, problem = lookup(key)
    if problem:
        raise ConfigError(problem)
    if key == "data.path" and isinstance(override.value(), list):
        raise ConfigError(f"{shown(word)}: takes one path. {_MIXTURE}")
    _check_numbers(word, override, hint)
    return []


def _check_numbers(word: str, override: Any, hint: Any) -> None:
    """ConfigError for a number inside brackets, in the place of a text, that would not be the text
    that was typed. Of those outside ``resolve_alias`` makes text."""
    if override.is_sweep_override() or override.is_delete():
        values = _sweep_values(override) if override.is_choice_sweep() else []
        hint = list[hint]
    else:
        values = override.value()
    numbers = list(_numbers(values, hint))
    typed = re.findall(r"[^\s,:\[\]{}()]+", word.partition("=")[2])
    for number, is_text in numbers:
        if is_text and typed.count(number) < [text for text, _ in numbers].count(number):
            raise ConfigError(
                f"{shown(word)}: takes text, and a number in it would become {number}. Quote "
                "the number as it is to be."
            )


def _numbers(value: Any, hint: Any) -> Iterator[tuple[str, bool]]:
    """Every number of a value, as Python writes it, and whether its place is that of a text."""
    hint, _ = without_none(hint)
    kind, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(value, dict):
        types = hints_of(typing.cast(type, hint)) if is_dataclass(hint) else {}
        for key, item in value.items():
            yield from _numbers(key, str if kind is dict else Any)
            yield from _numbers(item, args[1] if kind is dict else types.get(key, Any))
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item, args[0] if kind is list else Any)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield str(value), hint is str


def _check_group(word: str, override: Any, directories: Sequence[Path]) -> list[Any]:
    group = override.key_or_group
    if override.is_delete():
        if group in OPTIONAL_GROUPS:
            return [None]
        if override.value() in (None, ""):
            return []
        raise ConfigError(f"{shown(word)}: write ~{group} to leave the group out.")
    values = [override.value()]
    if override.is_sweep_override():
        values = [getattr(value, "text", value) for value in _sweep_values(override)]  # of quotes
    for value in values:
        if value is None and group in OPTIONAL_GROUPS:
            if len(values) > 1:
                raise ConfigError(
                    f"{shown(word)}: null is no option of a sweep. Sweep over the keys of the "
                    "experiment, or over experiments."
                )
            return [None]
        if isinstance(value, list | dict):
            if group == "data":
                raise ConfigError(f"{shown(word)}: data takes one option. {_MIXTURE}")
            names = sorted(options(group, directories))
            raise ConfigError(
                f"{shown(word)}: {group} takes one option: {group}={names[0]}. Options of "
                f"{group}: {', '.join(names)}."
            )
        name = value if isinstance(value, str) else shown(value)
        if find_option(group, name, directories) is None:
            if group == "experiment":
                check_no_file(name)
            raise ConfigError(no_such_option(group, name, directories))
    return values


def _check_hydra(word: str, override: Any) -> None:
    key = override.key_or_group
    if problem := hydra_problem(key):
        raise ConfigError(f"{shown(word)}: {problem}")
    if "/" in key and not isinstance(override.value(), str):
        raise ConfigError(f"{shown(word)}: {key} takes the name of an option.")
    if override.is_sweep_override():
        raise ConfigError(f"{shown(word)}: a sweep varies keys of the config, none of hydra's.")


def _sweep_values(override: Any) -> list[Any]:
    from hydra.core.override_parser.types import ValueType

    if override.value_type is ValueType.RANGE_SWEEP:
        sweep = override.value()
        start, stop, step = map(float, (sweep.start or 0, sweep.stop, sweep.step))
        count = (stop - start) / step if step else math.inf
        if not 0 < count <= MAX_JOBS:
            raise ConfigError(
                f"{shown(override.input_line or '')}: range(start, stop, step) must give 1 to "
                f"{MAX_JOBS} values."
            )
    if override.value_type is ValueType.INTERVAL_SWEEP:
        raise ConfigError(
            f"{shown(override.input_line or '')}: interval() is for sweepers that search. Write "
            "the values: a,b,c, or range(start, stop, step)."
        )
    if override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        return []
    try:
        return list(itertools.islice(override.sweep_iterator(), MAX_JOBS + 1))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{shown(override.input_line or '')}: cannot be read. Write the values: a,b,c."
        ) from error


def _check_sweep(overrides: Sequence[Any]) -> None:
    jobs = 1
    searches = any(
        o.key_or_group == "hydra/sweeper" and o.value() not in ("grid", "basic") for o in overrides
    )
    for override in overrides:
        if override.is_sweep_override() and not searches:
            jobs *= max(1, len(_sweep_values(override)))
        elif override.key_or_group == "run_dir":
            raise ConfigError(
                f"{shown(override.input_line or 'run_dir')}: every job of a sweep has its own "
                "run directory. Set hydra.sweep.dir=DIR for all of them."
            )
    if jobs > MAX_JOBS:
        axes = ", ".join(o.key_or_group for o in overrides if o.is_sweep_override())
        raise ConfigError(
            f"{axes}: the sweep has {jobs} jobs; at most {MAX_JOBS} are run. Vary fewer values."
        )


def quoted(value: object) -> str:
    """A value of YAML as Hydra's grammar has it, which takes no quotes around the names of a
    mapping."""
    if isinstance(value, dict):
        names = [re.sub(r"[\\()\[\]{}:=, \t]", r"\\\g<0>", str(name)) for name in value]
        items = zip(names, map(quoted, value.values()), strict=True)
        return "{" + ", ".join(f"{name}: {item}" for name, item in items) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(quoted, value)) + "]"
    if value is None:
        return "null"
    if isinstance(value, bool | int | float):
        return str(value).lower()
    text = re.sub(r"(\\*)('|\Z)", lambda mark: mark[1] * 2 + ("\\'" if mark[2] else ""), str(value))
    return f"'{text}'"
