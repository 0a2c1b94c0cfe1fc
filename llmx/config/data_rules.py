"""The rules of ``data`` that need no file to be read."""

from __future__ import annotations

from collections.abc import Iterator

from llmx.config.schema import DataConfig
from llmx.errors import did_you_mean

COLUMNS = (
    "text",
    "title",
    "content",
    "instruction",
    "input",
    "output",
    "history",
    "system",
    "tools",
    "conversations",
    "messages",
    "prompt",
    "response",
    "label",
    "chosen",
    "rejected",
    "margin",
    "responses",
    "answers",
    "desirable",
)
"""Our names of columns: the keys of ``data.columns``."""
MAPPED = ("prompt", "label", "history")
"""Those of a labelled row: the keys of ``data.data_map``."""


def data_problems(data: DataConfig) -> Iterator[str]:
    """One message for each name of a column that is none of ours, and for each second way to say
    which rows are evaluated: both would be passed over in silence."""
    ways = {key: getattr(data, key) for key in ("eval_path", "eval_fraction", "eval_samples")}
    if len(given := [f"data.{key}={value}" for key, value in ways.items() if value]) > 1:
        yield f"{' and '.join(given)}: each says which rows are evaluated. Keep one of them."
    groups = [("data.columns", data.columns, COLUMNS), ("data.data_map", data.data_map, MAPPED)]
    groups += [
        (f"data.sources[{i}].columns", source.columns, COLUMNS)
        for i, source in enumerate(data.sources)
    ]
    for where, mapping, known in groups:
        for name in mapping:
            if name not in known:
                yield (
                    f"{where}.{name}: no such column.{did_you_mean(name, known)} The keys are "
                    f"{', '.join(known)}; the values are the names in your data."
                )
