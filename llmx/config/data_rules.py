"""The rules of ``data`` that need no file to be read: numbers in their ranges, names that exist."""

from __future__ import annotations

from collections.abc import Iterator

from llmx.config.schema import DataConfig, Experiment
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
)
"""Our names of columns: the keys of ``data.columns``."""
MAPPED = ("prompt", "label", "history")
"""Those of a labelled row: the keys of ``data.data_map``."""


def data_problems(exp: Experiment) -> Iterator[str]:
    """One message for each rule that is broken."""
    data = exp.data
    if data.seq_len < 2:
        yield f"data.seq_len={data.seq_len}: predicting a next token needs at least 2."
    if exp.task.kind == "sft" and data.packing == "concat":
        yield "data.packing=concat would cut answers in two. SFT packs with best_fit, or none."
    if data.eval_samples < 0:
        yield f"data.eval_samples={data.eval_samples}: a number of rows is not negative."
    if data.num_workers < 0:
        yield f"data.num_workers={data.num_workers}: a number of cores; 0 takes those of the host."
    if data.share_from_mib is not None and data.share_from_mib < 0:
        yield (
            f"data.share_from_mib={data.share_from_mib}: not negative; null prepares all on every "
            "host."
        )
    limits = [("data", data.max_rows)]
    limits += [(f"data.sources[{i}]", source.max_rows) for i, source in enumerate(data.sources)]
    for where, limit in limits:
        if limit is not None and limit < 1:
            yield f"{where}.max_rows={limit}: read at least 1 row, or set it to null for all."
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
                    f"{where}.{name}: no column of any form.{did_you_mean(name, known)} It is our "
                    f"name = the one in your data; ours are {', '.join(known)}."
                )
