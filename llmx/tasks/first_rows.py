"""Asks before a launch what the ranks would refuse minutes later: whether the task can be made with
its options, and whether it takes the first rows of each source.

Called where an experiment is about to run; of a task of the user's own, which may import torch, by
``python -m llmx.tasks.first_rows CONFIG.yaml ANSWER.json``, a process of its own.
"""

from __future__ import annotations

import contextlib
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from llmx.config import Experiment, experiment_from_dict
from llmx.data.examples import check_task, encoded
from llmx.data.source.records import OnBad, RecordError, refuse
from llmx.data.split import DatasetSplit, Source, has_eval
from llmx.errors import ConfigError, LlmxError
from llmx.run.rundir import load_yaml, write_json
from llmx.tasks import task_class, task_of, tokenizer_of

FIRST = 1000
"""Rows that are read, from all sources of a split together."""
FIRST_OF_EACH = 20
"""Rows of each source that are read at least."""


def check_first_rows(exp: Experiment, tokenizer: Any = None) -> None:
    """Raise the ConfigError or DataError that the ranks would raise. ``tokenizer``: tasks of llmx
    need none for it."""
    task = task_of(exp, tokenizer)
    for split in ["train", "eval"] if has_eval(exp.data) else ["train"]:
        dataset_split = DatasetSplit.of(
            exp.data, exp.seed, split, takes=task.takes, turn_weights=task.turn_weights
        )
        if not all(map(_is_here, dataset_split.sources)):
            continue  # on other hosts, or streamed from the Hub: the ranks read it
        check_task(task, dataset_split)
        rejected: list[RecordError] = []
        bad: OnBad = rejected.append if exp.data.on_bad_row == "skip" else refuse
        num_rows = max(FIRST_OF_EACH, FIRST // len(dataset_split.sources))
        for source in dataset_split.sources:
            for row in islice(source.rows(bad), num_rows):
                if row is not None:
                    encoded(task, row)


def _is_here(source: Source) -> bool:
    return not source.hub and any(Path(source.path).parent.glob(Path(source.path).name))


def main(words: list[str]) -> int:
    config, answer = words
    exp = experiment_from_dict(load_yaml(Path(config)))
    problem: LlmxError | None = None
    tokenizer = None
    try:
        task_class(exp.task.kind)
        with contextlib.suppress(ConfigError):  # one of the Hub: the ranks may download it
            tokenizer = tokenizer_of(exp)
        if tokenizer is not None:
            check_first_rows(exp, tokenizer)
    except LlmxError as error:
        problem = error
    write_json(
        Path(answer),
        {"problem": str(problem or ""), "is_config": isinstance(problem, ConfigError)},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
