"""The trial before a launch: ``python -m llmx.tasks.trial CONFIG.yaml RESULT.json cpu|cuda``.

Can rows be packed for the networks that the task needs, and can they be trained at all?
``llmx.lifecycle.packing`` starts it, in a process of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from llmx.config import Experiment, experiment_from_dict
from llmx.models.trial import try_model
from llmx.run.rundir import load_yaml, write_json
from llmx.tasks import task_class


def heads_of(exp: Experiment) -> list[str]:
    """What the networks of the task end in. The task is made without a tokenizer: one whose
    ``models`` needs it, or the data, raises, and is not tried before the launch."""
    specs = task_class(exp.task.kind)(exp, None).models()
    return sorted({spec.head for spec in specs.values()})


def try_task(exp: Experiment, *, accelerator: str) -> dict[str, Any]:
    """``try_model`` of all its networks: the first that cannot be packed, or trained, decides."""
    found = [
        try_model(exp.model, exp.data, accelerator=accelerator, head=head) for head in heads_of(exp)
    ]
    worst = min(found, key=lambda one: (not one["problem"], not one["unknown"], one["packs"]))
    return {**worst, "dense": any(one["dense"] for one in found)}


def main(words: list[str]) -> int:
    config, result, accelerator = words
    values = load_yaml(Path(config))
    write_json(Path(result), try_task(experiment_from_dict(values), accelerator=accelerator))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
