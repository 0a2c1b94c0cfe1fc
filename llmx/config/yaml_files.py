"""Reads YAML that a person wrote, and reports errors with file and line; writes what Hydra reads.

A text that YAML reads as a number (``007``, ``1.10``, ``1:30:00``) is refused where it would become
another text."""

from __future__ import annotations

import itertools
import re
import typing
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import yaml

from llmx.config.build import shown, without_none
from llmx.config.groups import lookup
from llmx.errors import ConfigError

_MAX_VALUES = 100_000

_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")

WHOLE = re.compile(r"0|-?[1-9][0-9]*")
"""A whole number as Python writes it: as text it is the same."""


class _Loader(yaml.SafeLoader):
    """Reads scalars as OmegaConf does, with which Hydra reads files: ``1e5`` is a number, a date is
    text."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [entry for entry in entries if not entry[0].endswith(":timestamp")]
        for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Dumper(yaml.SafeDumper):
    """Quotes what PyYAML or OmegaConf would read as no text, and Unicode's own line breaks, which
    PyYAML writes bare and reads back as spaces."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if any(mark in text for mark in "\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
for _reads_or_writes in (_Loader, _Dumper):
    _reads_or_writes.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?[0-9]+(_[0-9]+)*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )


def dump_yaml(values: Any) -> str:
    """The text of a YAML file, its keys in their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def read_yaml(path: Path) -> yaml.Node | None:
    """The nodes of a YAML file; ConfigError with file and line for one that cannot be read."""
    text = read_text(path)
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_yaml_problem(path, error, text)) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{path}, line {line}: the character #x{ord(text[error.position]):04x} is not allowed "
            "in YAML. Remove it."
        ) from error
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML. Is it nested too deeply?") from error
    if node is not None:
        _check_nodes(path, node, itertools.count())
    return node


def read_values(path: Path) -> Any:
    """The values of a YAML file; ConfigError as ``read_yaml``."""
    return values_of(read_yaml(path))


def values_of(node: yaml.Node | None) -> Any:
    """The values of nodes; None where a file has none."""
    return None if node is None else _Loader("").construct_document(node)


def check_key(path: Path, where: str, key: yaml.Node, value: yaml.Node) -> None:
    """Raise ConfigError with file and line where the dotted key ``where`` is none of the schema's,
    or its value is not of its type. ``key``, ``value``: its nodes in the file."""
    hint, problem = lookup(where)
    if problem:
        raise ConfigError(f"{path}, line {key.start_mark.line + 1}: {problem}")
    check_value(path, where, value, hint)


def check_value(path: Path, where: str, node: yaml.Node, hint: Any) -> None:
    """Raise ConfigError with file and line for a value that is no mapping or list where its type is
    one, for a number that would become another text, and for an unknown key below it."""
    hint, _ = without_none(hint)
    kind, args, is_section = typing.get_origin(hint), typing.get_args(hint), is_dataclass(hint)
    problem = ""
    if _is_open(node):
        return
    if (is_section or kind is dict) and not isinstance(node, yaml.MappingNode):
        problem = f"{where} must be a mapping: lines of name: value below it."
    elif kind is list and not isinstance(node, yaml.SequenceNode):
        problem = f"{where} must be a list: lines that begin with - below it."
    elif hint is str and node.tag.endswith((":int", ":float")) and not WHOLE.fullmatch(node.value):
        problem = f"this takes text, and YAML reads {shown(node.value)} as a number. Quote it: "
        problem += f"'{node.value}'."
    if problem:
        raise ConfigError(f"{path}, line {node.start_mark.line + 1}: {problem}")
    if isinstance(node, yaml.MappingNode):
        for key, item in node.value:
            if key.value == "<<":
                continue
            if kind is dict:
                check_value(path, where, key, str)
                check_value(path, f"{where}.{key.value}", item, args[1])
            elif is_section:
                check_key(path, f"{where}.{key.value}" if where else key.value, key, item)
    elif kind is list:
        for index, item in enumerate(node.value):
            check_value(path, f"{where}.{index}", item, args[0])


def _is_open(node: yaml.Node) -> bool:
    """Whether a value is set elsewhere: null, ``???`` or an interpolation."""
    return isinstance(node, yaml.ScalarNode) and (
        node.tag.endswith(":null") or node.value == "???" or "${" in node.value
    )


def read_text(path: Path) -> str:
    """The text of a file in UTF-8; ConfigError with file and line for another encoding."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from error
    if data.startswith(b"\xef\xbb\xbf"):
        raise ConfigError(
            f"{path}, line 1: begins with a byte order mark (BOM). Save it as UTF-8 without BOM."
        )
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ConfigError(f"{path}, line 1: is UTF-16. Save it as UTF-8.")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}, line {line}: is not UTF-8 (byte 0x{data[error.start]:02x}). Save it as UTF-8."
        ) from error


def _yaml_problem(path: Path, error: yaml.MarkedYAMLError, text: str) -> str:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    description = f"{error.context or ''} {error.problem or ''}"
    lines = text.split("\n")
    at = lines[line - 1] if line <= len(lines) else ""
    if "'\\t'" in description or at.lstrip(" ").startswith("\t"):
        return f"{path}, line {line}: a tab. YAML is indented with spaces."
    if "flow" in description and error.context_mark is not None:
        opened = error.context_mark
        sign = "[" if "sequence" in description else "{"
        return f"{path}, line {opened.line + 1}: the {sign} is not closed. Close it."
    if "quoted scalar" in description and error.context_mark is not None:
        return f"{path}, line {error.context_mark.line + 1}: the quote is not closed. Close it."
    if "mapping values" in description:
        return f"{path}, line {line}: a colon where none may be. Quote text that has ': ' in it."
    if "undefined alias" in description or "anchor" in description or "alias" in description:
        return f"{path}, line {line}: * and & have a meaning in YAML. Quote text that begins so."
    return (
        f"{path}, line {line}: is not valid YAML. Check the indentation, colons and quotes of "
        "this line and of the one before."
    )


def _check_nodes(path: Path, node: yaml.Node, counter: Iterator[int], depth: int = 0) -> None:
    """Raise ConfigError for valid YAML that no config can be: too deep, a list as a key, an unknown
    tag."""
    if depth > 100:
        raise ConfigError(f"{path}: is nested more than 100 levels deep.")
    if next(counter) >= _MAX_VALUES:  # aliases of aliases: few lines, and no end
        raise ConfigError(f"{path}: has more than {_MAX_VALUES} values. Use fewer aliases (*).")
    if isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{path}, line {line}: a key must be a word, not a list.")
            if key.value in first and key.value != "<<":
                raise ConfigError(
                    f"{path}, line {line}: {shown(key.value)} is set twice (first in line "
                    f"{first[key.value]}). Leave one."
                )
            first[key.value] = line
            if key.tag.endswith(":merge"):
                sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
                if not all(isinstance(source, yaml.MappingNode) for source in sources):
                    raise ConfigError(
                        f"{path}, line {line}: <<: takes a mapping, as *NAME of an &NAME above."
                    )
            elif key.value != "=":
                _check_nodes(path, key, counter, depth + 1)
            _check_nodes(path, value, counter, depth + 1)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_nodes(path, item, counter, depth + 1)
    try:
        if isinstance(node, yaml.ScalarNode):
            _Loader("").construct_object(node)
        elif node.tag not in _COLLECTIONS:
            raise ValueError(node.tag)
    except (yaml.MarkedYAMLError, ValueError):
        written = shown(node.value) if isinstance(node, yaml.ScalarNode) else "what follows"
        raise ConfigError(
            f"{path}, line {node.start_mark.line + 1}: {written} cannot be read as "
            f"{node.tag.rpartition(':')[2]}. Quote it, and leave out what begins with !."
        ) from None
