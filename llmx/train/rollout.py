"""Steps that are generated instead of read: prompts of the data, completions of the model.

Which prompts make up step *k* is decided as for any other task (``llmx.data.order``); what is drawn
from them is a function of (seed, step, prompt, sample) and the weights. So a resumed run draws what
the undisturbed one would have drawn, and every split over ranks trains the same examples.
Tried by ``python -m pytest -m deepspeed tests/integration/test_state_resume.py``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from llmx.collectives import all_gather
from llmx.config import Experiment
from llmx.data.examples import Column, Example, Schema
from llmx.data.order import draw_seed, samples_of_step
from llmx.data.store.samples import Sample, in_memory
from llmx.errors import ConfigError
from llmx.plan.types import BalancePlan, BatchPlan
from llmx.rollout.client import RolloutServers
from llmx.rollout.protocol import SERVERS, parse_servers
from llmx.run.rundir import RunDir
from llmx.tasks import GeneratedSample, OnlineTask, Prompt, RolloutKey, Task
from llmx.train.batches import Layout, Step, step_of
from llmx.train.engine.build import Engine

T = TypeVar("T")


def rollout_step(
    engine: Engine,
    task: OnlineTask,
    store: Any,
    step: int,
    *,
    batch: BatchPlan,
    rank: int,
    seed: int,
    layout: Layout,
    stop: int | None = None,
    balance: BalancePlan | None = None,
    servers: RolloutServers | None = None,
    ahead: Sequence[int] = (),
) -> Step:
    """The micro batches of ``rank`` at ``step``, made of what the task generates. Collective.

    All ranks generate together, for all prompts of the step, and know all examples: the weight of
    the step needs no reduction.

    Args:
        servers: what draws in place of the ranks (``rollout.hosts``).
        ahead: the next steps, of which the servers may draw samples meanwhile.

    Raises:
        ConfigError: what the task has made are not examples of its ``rollout_columns``.
    """

    indices_at = partial(
        samples_of_step,
        global_batch=batch.global_batch,
        num_samples=len(store),
        seed=seed,
        stop=stop,
    )
    indices = indices_at(step)

    def further(number: int) -> list[Prompt]:
        """Drawn with replacement, so that later steps have the prompts that they would have had."""
        places = range(number * batch.global_batch, number * batch.global_batch + len(indices))
        return _flat(_prompts(store, [draw_seed(seed, step, at) % len(store) for at in places]))

    if servers is not None:
        coming = []
        for number in ahead:
            prompts = _flat(_prompts(store, indices_at(number)))
            coming.append(([prompt.tokens for prompt in prompts], RolloutKey(seed, number).of))
        servers.at_step(step, coming)
    key = RolloutKey(seed, step, further)
    drawn = _drawn(engine, task, _prompts(store, indices), key, seq_len=layout.seq_len)
    micro_batches = []
    for keys in _shared_out(drawn, batch, rank=rank):
        samples = [drawn[place][number] for place, number in keys]
        tensors = layout.collate(samples, columns=task.rollout_columns)
        if task.draws:
            seeds = [
                draw_seed(seed, step, place) + sequence
                for place, number in keys
                for sequence in _sequence_numbers(drawn[place], number)
            ]
            tensors["draw_seeds"] = torch.tensor(seeds, dtype=torch.int64)
        micro_batches.append(tensors)
    samples = _flat(drawn)
    weights = {
        "tokens": float(sum(_token_weight(sample) for sample in samples)),
        "examples": float(len(samples)),
        "batch": 0.0,
    }
    return step_of(
        step,
        tuple(micro_batches),
        layout,
        weight=weights[task.normaliser],
        target_tokens=sum(int(np.count_nonzero(sample.targets)) for sample in samples),
        tokens=sum(len(sample.tokens) for sample in samples),
        speed=None if balance is None else balance.speeds[rank],
    )


def _flat(lists: Iterable[list[T]]) -> list[T]:
    return list(chain.from_iterable(lists))


def _prompts(store: Any, indices: Iterable[int]) -> list[list[Prompt]]:
    """The prompts of each of these samples."""
    return [prompts_of(store[int(index)], store.columns) for index in indices]


def _drawn(
    engine: Engine,
    task: OnlineTask,
    prompts_by_place: list[list[Prompt]],
    key: RolloutKey,
    *,
    seq_len: int,
) -> list[list[Sample]]:
    """What the task generates now for the prompts of each place. Collective."""
    prompts = _flat(prompts_by_place)
    engine.engine.eval()
    with torch.no_grad():
        rollouts = task.rollout(engine.models, prompts, key)
    engine.engine.train()
    if len(rollouts) != len(prompts):
        raise ConfigError(
            f"task={task.name}: rollout() gave {len(rollouts)} lists of examples for "
            f"{len(prompts)} prompts; it gives one list for each."
        )
    by_prompt = _checked(rollouts, task=task, seq_len=seq_len, vocab_size=engine.vocab_size)
    _check_alike(by_prompt, task=task)
    remaining = iter(by_prompt)
    return [_flat(islice(remaining, len(at_place))) for at_place in prompts_by_place]


def _shared_out(
    drawn: list[list[Sample]], batch: BatchPlan, *, rank: int
) -> list[list[tuple[int, int]]]:
    """(place, number at that place) of each sample of each micro batch of ``rank``.

    A micro step of the plan becomes as many micro batches on every rank: of at most the samples for
    which the plan has foreseen the memory. Similar lengths lie beside each other, as lines are
    padded to the longest of their micro batch.
    """
    ranks, shares = range(len(batch.micro_batches)), []
    for micro_step in range(len(batch.sizes_of(rank))):
        places = [
            batch.places(other, micro_step, samples=len(drawn))
            if micro_step < len(batch.sizes_of(other))
            else ()
            for other in ranks
        ]
        parts = 1
        for other, limit in zip(ranks, batch.micro_batches, strict=True):
            count = sum(len(drawn[place]) for place in places[other])
            parts = max(parts, -(-count // max(1, limit)))
        keys = sorted(
            ((place, number) for place in places[rank] for number in range(len(drawn[place]))),
            key=lambda key: len(drawn[key[0]][key[1]].tokens),
        )
        ends = [len(keys) * part // parts for part in range(parts + 1)]
        shares += [keys[start:end] for start, end in pairwise(ends)]
    return shares


def open_servers(
    exp: Experiment, engine: Engine, log: Callable[[str], None]
) -> RolloutServers | None:
    """The rollout servers that the supervisor has started for this run, from which the main model
    samples from now on; None where there are none. Collective.

    Raises:
        ConfigError: one of them does not fit.
    """
    if not (places := parse_servers(os.environ.get(SERVERS, ""))):
        return None
    servers = RolloutServers(
        engine.main,
        places,
        token=os.environ["LLMX_RUN_TOKEN"],
        config=exp.rollout,
        log=log,
        logs=RunDir(Path(exp.run_dir)).logs,
        before_gather=engine.release_gathered,
    )
    servers.connect()
    engine.main.sampler = servers.sample
    return servers


def write_rollouts(
    run_dir: RunDir, samples: Sequence[GeneratedSample], *, step: int, attempt: int
) -> None:
    """Append the samples of a step (from 1) to ``rollouts.jsonl``, one line each."""
    with run_dir.rollouts.open("a", encoding="utf-8") as stream:
        for sample in samples:
            line = {"step": step, "attempt": attempt, **asdict(sample)}
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")


def _sequence_numbers(samples: Sequence[Sample], number: int) -> range:
    """The numbers of the sequences of one of these samples, among those of all."""
    first = sum(len(sample.sequence_starts) for sample in samples[:number])
    return range(first, first + len(samples[number].sequence_starts))


def prompts_of(sample: Sample, columns: Sequence[Column] = ()) -> list[Prompt]:
    """One of each example of a stored sample: what the model is given, and what the data has as
    completions.

    Args:
        columns: those of the store.
    """
    schema, prompts = Schema(tuple(columns)), []
    rows = list(sample.sequences())
    first = 0
    for number, size in enumerate(sample.example_sizes()):
        parts = []
        for tokens, targets in rows[first : first + size]:
            at = int(np.argmax(targets)) if targets.any() else len(tokens)
            parts.append((tuple(tokens[:at].tolist()), tuple(tokens[at:].tolist())))
        by_sequence = {
            column.name: np.array(sample.columns[column.name][first : first + size])
            for column in schema.per("sequence")
        }
        of_example = {
            column.name: _plain(sample.columns[column.name][number])
            for column in schema.per("example")
        }
        completions = tuple(completion for _, completion in parts)
        prompts.append(Prompt(parts[0][0], completions, {**by_sequence, **of_example}))
        first += size
    return prompts


def _plain(value: Any) -> Any:
    """A number as Python's, an array as it is."""
    return value.item() if np.ndim(value) == 0 else np.array(value)


def _checked(
    rollouts: list[list[Example]], *, task: OnlineTask, seq_len: int, vocab_size: int
) -> list[list[Sample]]:
    """The rollouts as samples; raises ConfigError where they are no valid examples."""
    schema = Schema(task.rollout_columns, task.name, method="rollout()")
    by_prompt = []
    for examples in rollouts:
        samples = []
        for example in examples:
            sample = in_memory(schema.checked(example), schema, vocab_size=vocab_size)
            if (length := len(sample.tokens)) > seq_len:
                raise ConfigError(
                    f"task={task.name}: rollout() gave an example of {length} tokens (of all its "
                    f"sequences together), data.seq_len is {seq_len}. Cut the prompts, draw fewer "
                    f"tokens (max_new_tokens), or set data.seq_len={length}."
                )
            samples.append(sample)
        by_prompt.append(samples)
    return by_prompt


def _check_alike(by_prompt: list[list[Sample]], *, task: Task) -> None:
    """Raise ConfigError unless all ranks have made the same tokens: each trains its part of them.
    Collective."""
    digest = hashlib.blake2b(digest_size=16)
    for samples in by_prompt:
        digest.update(f"{len(samples)};".encode())
        for sample in samples:
            for values in (sample.tokens, sample.targets, sample.sequence_starts):
                digest.update(f"{len(values)},".encode() + np.ascontiguousarray(values).tobytes())
    digests = all_gather(digest.hexdigest())
    if len(set(digests)) > 1:
        other = next(rank for rank, value in enumerate(digests) if value != digests[0])
        raise ConfigError(
            f"task={task.name}: rollout() gave other examples on rank {other} than on rank 0. It "
            "must be a function of its arguments alone: draw random numbers from key.of(prompt, "
            "sample), and use no clock, no order of a set and no answer that differs by host."
        )


def _token_weight(sample: Sample) -> float:
    if sample.weights is None:
        return float(np.count_nonzero(sample.targets))
    return float(np.sum(sample.weights, dtype=np.float64))
