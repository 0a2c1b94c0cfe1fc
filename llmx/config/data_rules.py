"""The rules of ``data`` that need no file to be read: numbers in their ranges, names that exist."""

from __future__ import annotations

from collections.abc import Iterator

from llmx.config.schema import DataConfig, TaskConfig
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
LEAST_CHAT_TOKENS = 8
"""Of a question with its answer: the markers of two turns, a token in each, and the EOS token."""
MAPPED = ("prompt", "label", "history")
"""Those of a labelled row: the keys of ``data.data_map``."""


def data_problems(data: DataConfig, task: TaskConfig) -> Iterator[str]:
    """One message for each rule that is broken."""
    if task.kind == "sft" and data.packing == "concat":
        yield (
            "data.packing=concat: would cut completions at data.seq_len. For task=sft use "
            "data.packing=best_fit or none."
        )
    is_chat = task.kind == "sft" and data.form != "text" and data.loss_on != "all"
    if is_chat and data.seq_len < LEAST_CHAT_TOKENS:
        yield (
            f"data.seq_len={data.seq_len}: no question with its answer is so short; its chat "
            f"template alone takes most of {LEAST_CHAT_TOKENS} tokens. Set e.g. data.seq_len=512."
        )
    yield from _names(data)


def _names(data: DataConfig) -> Iterator[str]:
    """A name that is none of ours would be passed over in silence."""
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
