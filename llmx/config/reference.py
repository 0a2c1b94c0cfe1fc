"""Every key of the schema with its type, range, default, meaning and an example, as data.

Read from the schema itself: the dataclasses, the metadata beside the fields, and the texts under
them, which ``ast`` finds in the source. ``python -m llmx help``, its page of all keys and shell
completion are made from it, so none of them can fall behind.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import typing
from collections.abc import Iterator
from typing import Any

from llmx.config import schema
from llmx.config.build import hints_of, schema_fields, without_none
from llmx.config.fields import AUTO, plain

NAME = "NAME"
"""Stands for a key of the user's choice: ``hardware.devices.NAME.memory_gib``."""

_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "anything"}


@dataclasses.dataclass(frozen=True)
class Key:
    """One key that a user can set."""

    name: str
    """Dotted name as it is typed: ``optim.lr``, ``hardware.hosts[].slots``."""
    type: str
    """Type in words: ``whole number``, ``list of text``, ``true or false``."""
    default: Any
    choices: tuple[str, ...]
    """The closed set of its values, without null; empty where any is taken."""
    limits: str
    """Its range or length in words: ``from 1 to 65535``; empty where there is none."""
    nullable: bool
    doc: str
    """What it means, one paragraph; names in it stand between backquotes."""
    example: str
    """A value as it is typed behind ``=``."""
    is_path: bool
    """Whether its value is, or may be, a file or a directory."""
    takes_auto: bool = False
    """A number that the plan chooses with ``auto``."""

    @property
    def group(self) -> str:
        """``optim`` of ``optim.lr``; empty for a key at the top."""
        return self.name.split(".", 1)[0] if "." in self.name else ""

    @property
    def values(self) -> tuple[str, ...]:
        """All of its values, where there are few: choices, true and false, null."""
        values = self.choices or (("true", "false") if self.type == "true or false" else ())
        return (*values, "null") if self.nullable and values else values

    @property
    def is_list_item(self) -> bool:
        """Whether the key lies in a list or under a name of the user's: set in YAML, mostly."""
        return "[]" in self.name or f".{NAME}." in self.name

    def takes(self) -> str:
        """Type and range in words: ``number, above 0 and at most 1000, or null``."""
        if self.choices:
            prefix = "list of " if self.type.startswith("list") else ""
            words = f"{prefix}{', '.join(self.choices)}"
            if self.limits and not prefix:
                words += f", or {self.limits.removeprefix('be ')}"
        else:
            words = ", ".join(part for part in (self.type, self.limits) if part)
            words += ", or auto" if self.takes_auto else ""
        return f"{words}, or null" if self.nullable else words


@functools.cache
def keys() -> tuple[Key, ...]:
    """Every key, in the order of the schema, also those inside lists and mappings."""
    return tuple(_keys(schema.Experiment, ""))


@functools.cache
def sections() -> dict[str, str]:
    """Dotted name of each group of keys -> what it is: ``optim``, ``checkpoint.keep``, ..."""
    texts = {}
    for name, hint, _ in schema_fields():
        types = (hint, *typing.get_args(hint))
        if section := next(filter(dataclasses.is_dataclass, types), None):
            texts[name] = _one_paragraph(inspect.getdoc(section) or "")
    return texts


def typed(value: Any) -> str:
    """A default as one would type it: ``null``, ``true``, ``5e8``, ``[a, b]``, ``''``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return plain(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(typed(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {typed(item)}" for key, item in value.items()) + "}"
    return str(value) or "''"


def _keys(cls: type, prefix: str) -> Iterator[Key]:
    hints, docs = hints_of(cls), _docs()[cls.__name__]
    for field in dataclasses.fields(cls):
        name, (hint, nullable) = prefix + field.name, without_none(hints[field.name])
        if dataclasses.is_dataclass(hint):
            yield from _keys(typing.cast(type, hint), f"{name}.")
            continue
        if field.name == "schema_version":
            continue
        yield _key(name, hint, nullable, field, docs.get(field.name, ""))
        inner = typing.get_args(hint)[-1] if typing.get_args(hint) else None
        if dataclasses.is_dataclass(inner):
            inside = "[]" if typing.get_origin(hint) is list else f".{NAME}"
            yield from _keys(typing.cast(type, inner), f"{name}{inside}.")


def _key(name: str, hint: Any, nullable: bool, field: dataclasses.Field[Any], doc: str) -> Key:
    meta = field.metadata
    choices = meta.get("choices") or meta.get("item_choices") or ()
    key = Key(
        name=name,
        type="path" if "path" in meta and hint is str else _words(hint),
        default=_default(field),
        choices=tuple(str(value) for value in choices if value is not None),
        limits=meta["or"].rule if "or" in meta else _limits(hint, meta),
        nullable=nullable,
        doc=doc,
        example="",
        is_path="path" in meta,
        takes_auto="auto" in meta,
    )
    return dataclasses.replace(key, example=_example(key, meta.get("example")))


def _example(key: Key, from_field: Any) -> str:
    """The example beside the field; without one a value that is not the default."""
    candidates = [value for value in key.values if value not in (typed(key.default), "null")]
    if from_field is None and candidates:
        return f"[{candidates[0]}]" if key.type.startswith("list") else candidates[0]
    return from_field if isinstance(from_field, str) else typed(from_field)


def _limits(hint: Any, meta: typing.Mapping[str, Any]) -> str:
    parts = [str(meta["range"])] if meta.get("range") is not None else []
    length = meta.get("length")
    if length is not None and not meta.get("item_choices"):
        minimum, maximum = (int(value or 0) for value in (length.minimum, length.maximum))
        inside = f"each {parts.pop()}" if parts and parts[0] else ""
        if minimum == maximum:
            parts.append(f"exactly {maximum} entries")
        elif maximum:
            parts.append(f"at most {typed(maximum)} entries")
        if inside:
            parts.append(inside)
    rule = getattr(meta.get("text"), "rule", "")
    if rule and hint is str:
        parts.append(f"must {rule}")
    return ", ".join(part for part in parts if part)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    if "auto" in field.metadata and field.default == AUTO:
        return "auto"
    return None if field.default is dataclasses.MISSING else field.default


def _words(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        inner = args[0]
        return "list" if dataclasses.is_dataclass(inner) else f"list of {_plural(_words(inner))}"
    if origin is dict:
        inner = args[1]
        any_value = inner is Any or dataclasses.is_dataclass(inner)
        return "mapping" if any_value else f"mapping to {_plural(_words(inner))}"
    return _WORDS[hint]


def _plural(words: str) -> str:
    return {"text": "texts", "number": "numbers", "whole number": "whole numbers"}[words]


@functools.cache
def _docs() -> dict[str, dict[str, str]]:
    """Class -> field -> the text under it."""
    docs: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        texts = docs.setdefault(node.name, {})
        for above, below in zip(node.body, node.body[1:], strict=False):
            if isinstance(above, ast.AnnAssign) and isinstance(below, ast.Expr):
                value = getattr(below.value, "value", None)
                if isinstance(above.target, ast.Name) and isinstance(value, str):
                    texts[above.target.id] = _one_paragraph(value)
    return docs


def _one_paragraph(text: str) -> str:
    """On one line, with Markdown's backquotes instead of those of reStructuredText."""
    return " ".join(text.replace("``", "`").split())
