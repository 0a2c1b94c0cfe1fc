"""Steps that are generated instead of read: prompts of the data, completions of the model.

Which prompts make up step *k* is decided as for any other task (``llmx.data.order``); what is drawn
from them is a function of (seed, step, prompt, sample) and the weights. So a resumed run draws what
the undisturbed one would have drawn, and every split over ranks trains the same examples.
Tried by ``python -m pytest -m deepspeed tests/integration/test_state_resume.py``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch

from llmx.data import collate
from llmx.data.examples import Example, Schema, checked
from llmx.data.order import rank_slice, samples_of_step
from llmx.data.store.samples import Sample, in_memory
from llmx.errors import ConfigError
from llmx.plan.types import BatchPlan
from llmx.tasks import Prompt, RolloutKey, Task
from llmx.train.batches import Layout, Step, square_tokens
from llmx.train.engine.build import Engine


def rollout_step(
    engine: Engine,
    task: Task,
    store: Any,
    step: int,
    *,
    batch: BatchPlan,
    rank: int,
    seed: int,
    layout: Layout,
    stop: int | None = None,
) -> Step:
    """The micro batches of ``rank`` at ``step``, made of what the task generates. Collective.

    All ranks generate together, for all prompts of the step, and know all examples: the weight of
    the step needs no reduction.

    Raises:
        ConfigError: what the task has made are not examples of its ``rollout_columns``.
    """
    indices = samples_of_step(
        step, global_batch=batch.global_batch, num_samples=len(store), seed=seed, stop=stop
    )
    found = [prompts_of(store[int(index)]) for index in indices]
    prompts = [prompt for sample in found for prompt in sample]
    engine.engine.eval()
    with torch.no_grad():
        made = task.rollout(engine.models, prompts, RolloutKey(seed, step))
    engine.engine.train()
    if len(made) != len(prompts):
        raise ConfigError(
            f"task={task.name}: rollout() gave {len(made)} lists of examples for {len(prompts)} "
            "prompts; it gives one list for each."
        )
    schema = Schema(task.rollout_columns)
    samples = [[_sample(one, schema, task) for one in examples] for examples in made]
    ends = np.cumsum([0, *(len(sample) for sample in found)])
    by_sample = [
        [one for examples in samples[first:last] for one in examples]
        for first, last in pairwise(ends.tolist())
    ]
    micro_batches = tuple(
        collate(
            [
                one
                for position in rank_slice(
                    np.arange(len(indices)),
                    micro_batches=batch.micro_batches,
                    accumulation=batch.accumulation,
                    rank=rank,
                    micro_step=micro_step,
                )
                for one in by_sample[int(position)]
            ],
            seq_len=layout.seq_len,
            pad_id=layout.pad_id,
            layout=layout.layout,
            pad_to=layout.pad_to,
            columns=schema.columns,
        )
        for micro_step in range(batch.accumulation)
    )
    whole = [one for sample in by_sample for one in sample]
    target_tokens = sum(int(np.count_nonzero(one.targets)) for one in whole)
    weights = {
        "tokens": float(sum(_token_weight(one) for one in whole)),
        "examples": float(len(whole)),
        "batch": 0.0,
    }
    return Step(
        step=step,
        micro_batches=micro_batches,
        weight=weights[task.normaliser],
        target_tokens=target_tokens,
        tokens=sum(len(one.tokens) for one in whole),
        square_tokens=sum(square_tokens(micro) for micro in micro_batches),
    )


def prompts_of(sample: Sample) -> list[Prompt]:
    """Each sequence of a stored sample, cut before its first target: what the model is given, and
    what the data has as the completion."""
    found = []
    for tokens, targets in sample.rows():
        first = int(np.argmax(targets)) if targets.any() else len(tokens)
        found.append(Prompt(tuple(tokens[:first].tolist()), tuple(tokens[first:].tolist())))
    return found


def _sample(example: Example, schema: Schema, task: Task) -> Sample:
    return in_memory(checked(example, schema, task=task.name), schema, task=task.name)


def _token_weight(sample: Sample) -> float:
    if sample.weights is None:
        return float(np.count_nonzero(sample.targets))
    return float(np.sum(sample.weights, dtype=np.float64))
