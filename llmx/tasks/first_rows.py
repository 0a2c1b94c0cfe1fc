"""Asks before a launch what the ranks would refuse minutes later: whether the task can be made with
its options, and whether it takes the first rows of each source.

Called where an experiment is about to run. Where code of the user's may import torch, or only the
tokenizer tells, by ``python -m llmx.tasks.first_rows CONFIG.yaml ANSWER.json``, a process of its
own.
"""

from __future__ import annotations

import contextlib
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from llmx.config import Experiment, experiment_from_dict
from llmx.config.model_rules import position_limit
from llmx.config.user_code import user_functions
from llmx.data.examples import check_task, encoded, over_long_of
from llmx.data.source.records import OnBad, RecordError, Row, refuse
from llmx.data.split import DatasetSplit, Source
from llmx.errors import ConfigError, LlmxError
from llmx.run.rundir import load_yaml, write_json
from llmx.tasks import task_class, task_of, tokenizer_of
from llmx.tolerance import too_much

FIRST = 1000
"""Rows that are read, from all sources of a split together."""
FIRST_OF_EACH = 20
"""Rows of each source that are read at least."""
TOKENIZED_BYTES = 4 << 20
"""Characters of the text of these rows that are tokenized."""


def check_first_rows(exp: Experiment, tokenizer: Any = None) -> tuple[list[str], bool]:
    """Raise the ConfigError or DataError that the ranks would raise.

    Args:
        tokenizer: without one, neither it nor the length of rows is checked.

    Returns:
        Warnings of what is lost of the rows; and whether a check with the tokenizer may say more.
    """
    task, max_lost = task_of(exp, tokenizer), exp.task.max_lost
    longest = position_limit(exp.model.network)
    warnings = list[str]()
    asks_tokenizer = task.asks_tokenizer or bool(user_functions(exp.task))
    for split in ["train", "eval"] if exp.data.has_eval else ["train"]:
        dataset_split = DatasetSplit(
            exp.data, exp.seed, split, takes=task.takes, turn_weights=task.turn_weights
        )
        if not all(map(_is_here, dataset_split.sources)):
            continue  # on other hosts, or streamed from the Hub: the ranks read it
        check_task(task, dataset_split)
        rejected: list[RecordError] = []
        skips = exp.data.on_bad_row == "skip"
        bad: OnBad = rejected.append if skips else refuse
        num_rows = max(FIRST_OF_EACH, FIRST // len(dataset_split.sources))
        sample: list[Row | None] = []
        num_read, num_lost, size, are_read = 0, 0, 0, True
        for source in dataset_split.sources:
            before = num_read
            for row in islice(source.rows(bad), num_rows):
                num_read += 1
                # No token is shorter than a byte.
                is_lost = row is None or row.num_bytes > exp.data.seq_len
                try:
                    if row is not None:
                        encoded(task, row)
                except RecordError:
                    if not skips:
                        raise
                    is_lost = True
                if size < TOKENIZED_BYTES and len(sample) != exp.data.max_rows:
                    sample.append(row)
                    num_lost += is_lost
                    size += 0 if row is None else row.num_bytes
            are_read &= num_read - before < num_rows
        if over_long_of(dataset_split, task) == "split":  # nothing is lost
            continue
        if tokenizer is not None:
            from llmx.data.store.build import fates_of
            from llmx.data.store.summary import check_lost, lost_rows

            fates = fates_of(sample, dataset_split, tokenizer, task)
            fates["rejected"].update(error.reason for error in rejected)
            fates["rows_read"] += len(rejected)
            if len(sample) == exp.data.max_rows or (are_read and size < TOKENIZED_BYTES):
                check_lost(fates, max_lost=max_lost, longest=longest)
            warnings += lost_rows(fates, longest=longest)
        num_lost += len(rejected)
        share = num_lost / max(1, len(sample) + len(rejected))
        asks_tokenizer |= too_much(share, num_lost, max_lost=max_lost)
    return warnings, asks_tokenizer


def _is_here(source: Source) -> bool:
    return not source.hub and any(Path(source.path).parent.glob(Path(source.path).name))


def main(words: list[str]) -> int:
    config, answer = words
    exp = experiment_from_dict(load_yaml(Path(config)))
    problem: LlmxError | None = None
    code_problem, tokenizer, warnings = "", None, list[str]()
    try:
        task_class(exp.task.kind)
        with contextlib.suppress(ConfigError):  # one of the Hub: the ranks may download it
            tokenizer = tokenizer_of(exp)
        if tokenizer is not None:
            warnings, _ = check_first_rows(exp, tokenizer)
            try:
                task_of(exp, tokenizer).load()
            except ConfigError as error:
                code_problem = str(error)
    except LlmxError as error:
        problem = error
    write_json(
        Path(answer),
        {
            "problem": str(problem or ""),
            "is_config": isinstance(problem, ConfigError),
            "code_problem": code_problem,
            "warnings": warnings,
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
