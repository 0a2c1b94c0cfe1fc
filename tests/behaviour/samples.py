"""Prepared data as hashes of what is trained: token ids, their weights in the loss, sequences.

The hashes say nothing of files, indices or fingerprints, so they are the same for the same samples
in a store of another form.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from llmx.config import Experiment
from llmx.data import held_out_prompts
from llmx.data.order import samples_of_step
from llmx.plan.types import Plan
from llmx.run import snapshot
from llmx.run.rundir import RunDir, read_json
from llmx.tasks import prepare, tokenizer_of
from llmx.train.schedule import run_length
from tests.composing import composed

Sequence = tuple[Any, Any]
"""Token ids, and the weight of each as a target (0: it is not predicted)."""


def digest(sequences: Iterable[Sequence], *, digits: int = 12) -> str:
    """Hexadecimal digits for the sequences of one or more samples, in order."""
    found = hashlib.sha256()
    for tokens, weights in sequences:
        ids = np.asarray(tokens, dtype="<u4")
        found.update(len(ids).to_bytes(8, "little") + ids.tobytes())
        # A weight of a Boolean mask is 0 or 1.
        found.update(np.asarray(weights, dtype="<f4").tobytes())
    return found.hexdigest()[:digits]


def of_prepared(words: Iterable[str], directory: Path) -> dict[str, Any]:
    """Each split of the data of an experiment: counts, and a hash for each sample in order."""
    exp = composed([*words, f"data.cache_dir={directory}", "data.num_workers=1"]).experiment
    tokenizer = tokenizer_of(exp)
    return {
        f"{split}.{name}": value
        for split in (("train", "eval") if exp.data.has_eval else ("train",))
        for name, value in _of_store(prepare(exp, tokenizer, split=split)).items()
    }


def of_run(root: Path, *, batches: int = 8) -> dict[str, Any]:
    """The first global batches of a run: a hash for the samples of each step, in order; and
    the evaluation samples and prompts."""
    run = RunDir(root)
    exp, plan = snapshot.load(run), Plan.from_dict(read_json(run.plan))
    tokenizer = tokenizer_of(exp)
    store = prepare(exp, tokenizer)
    length = run_length(
        exp.task,
        num_samples=len(store),
        global_batch=plan.batch.global_batch,
        last_batch=exp.data.last_batch,
    )
    steps = [
        samples_of_step(
            step,
            global_batch=plan.batch.global_batch,
            num_samples=len(store),
            seed=exp.seed,
            stop=length.stop,
        )
        for step in range(min(batches, length.steps))
    ]
    facts: dict[str, Any] = {
        "batches": [
            digest(sequence for index in step for sequence in store[int(index)].sequences())
            for step in steps
        ],
        "batch_sizes": [len(step) for step in steps],
        "micro_batches": list(plan.batch.micro_batches),
        "accumulation": plan.batch.accumulation,
    }
    if exp.data.has_eval:
        held_out = _of_store(prepare(exp, tokenizer, split="eval"))
        facts["eval_data"] = held_out["samples"]
    if exp.task.eval_generate:
        facts["eval_prompts"] = _prompts(exp, tokenizer)
    return facts


def _of_store(store: Any) -> dict[str, Any]:
    everything = np.arange(len(store))
    return {
        "tokens": store.num_tokens(everything),
        "targets": store.num_target_tokens(everything),
        "samples": [digest(store[index].sequences(), digits=8) for index in range(len(store))],
    }


def _prompts(exp: Experiment, tokenizer: Any) -> list[str]:
    prompts = held_out_prompts(
        exp.data, exp.seed, tokenizer, limit=exp.task.eval_generate, decode=tokenizer.decode
    )
    return [digest([(each.tokens, np.zeros(len(each.tokens)))], digits=8) for each in prompts]
