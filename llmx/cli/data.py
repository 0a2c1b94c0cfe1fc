"""``python -m llmx data``: prepare the data, report on its records, and show samples.

A histogram of the rows' lengths is shown of each store. With ``out=`` and its like,
``llmx.cli.data_out`` does the work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from llmx.cli import data_out
from llmx.config import Experiment
from llmx.config.model_rules import position_limit
from llmx.data import SampleStore
from llmx.data.store.summary import draw_histogram, lost_rows, print_samples, report
from llmx.errors import ConfigError
from llmx.offline import stay_offline_if_unreachable
from llmx.tasks import prepare, task_of, tokenizer_of
from llmx.text import printable


def run(exp: Experiment, own_words: Mapping[str, str]) -> int:
    """Prepare, print a table of each split and a preview; returns the exit code."""
    of_file = sorted(set(own_words) & set(data_out.WORDS))
    others = sorted(set(own_words) - set(data_out.WORDS))
    if of_file and others:
        raise ConfigError(
            f"{others[0]} shows prepared data, and {of_file[0]} prepares none. Set one of them."
        )
    splits = ["train", "eval"] if exp.data.has_eval else ["train"]
    chosen = own_words.get("split")
    if chosen == "eval" and not exp.data.has_eval:
        raise ConfigError(
            "split=eval: there is no evaluation data. Set data.eval_path, or e.g. "
            "data.eval_fraction=0.05 to hold out rows of data.path."
        )
    preview = int(own_words.get("preview", "0"))
    if offline := stay_offline_if_unreachable(exp.model, os.environ):
        print(offline, flush=True)
    if of_file:
        return data_out.run(exp, own_words)
    tokenizer = tokenizer_of(exp)
    stores = {}
    for split in [chosen] if chosen else splits:
        stores[split] = store = _prepared(exp, tokenizer, split)
        if preview and (chosen or split == "train"):
            print()
            print_samples(store, tokenizer, count=preview)
    if "train" in stores:
        for line in task_of(exp, tokenizer).see_data(stores["train"], stores.get("eval")):
            print(printable(line))
    return 0


def _prepared(exp: Experiment, tokenizer: Any, split: str) -> SampleStore:
    from rich.text import Text

    before = time.time()
    store = prepare(exp, tokenizer, split=split)
    was_cached = (store.path / "meta.json").stat().st_mtime < before
    rows = [*report(store.meta, was_prepared=was_cached), ("store", str(store.path))]
    rows.append(("lengths", draw_histogram(store.meta)))
    console = data_out.print_table(rows, title=f"{split}: {store.path.name}")
    for warning in lost_rows(store.meta, longest=position_limit(exp.model.network)):
        console.print(Text(printable(warning), style="yellow"), soft_wrap=True)
    return store
