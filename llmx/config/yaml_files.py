"""Reads YAML that a person wrote, and reports errors with file and line."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from llmx.config.build import shown
from llmx.errors import ConfigError

_MAX_VALUES = 100_000


def read_yaml(path: Path) -> yaml.Node | None:
    """The nodes of a YAML file; ConfigError with file and line for one that cannot be read."""
    text = read_text(path)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
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
    read_yaml(path)
    return yaml.safe_load(read_text(path))


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
            _check_nodes(path, value, counter, depth + 1)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_nodes(path, item, counter, depth + 1)
    elif not node.tag.endswith(":timestamp"):  # which a config reads as text
        try:
            yaml.SafeLoader("").construct_object(node)
        except (yaml.MarkedYAMLError, ValueError):
            raise ConfigError(
                f"{path}, line {node.start_mark.line + 1}: {shown(node.value)} cannot be read as "
                f"{node.tag.rpartition(':')[2]}. Quote it, and leave out what begins with !."
            ) from None
