"""Completions of the eval prompts before and after training: ``samples.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmx.data import EvalPrompt
from llmx.models.generate import generate
from llmx.models.generation_config import stop_ids
from llmx.models.sampling import Sampling
from llmx.run.rundir import RunDir, read_json, write_json
from llmx.train.session import Session


def complete_eval_prompts(session: Session, *, when: str) -> dict[str, float]:
    """The task's metrics of greedy completions; none for a task without eval prompts. Collective.

    Args:
        when: ``before`` or ``after`` training: the column of ``samples.json`` that rank 0 writes.
    """
    prompts = session.task.eval_prompts()
    if not prompts:
        return {}
    greedy = Sampling(
        max_new_tokens=session.exp.task.eval_max_new_tokens,
        stop_ids=frozenset(stop_ids(session.engine.main.module, session.tokenizer)),
    )
    found = generate(session.engine.main, [prompt.tokens for prompt in prompts], greedy)
    completions = [session.task.decode(list(one.text_tokens)) for one in found]
    scores = session.task.score(prompts, completions)
    if session.rank == 0:
        write_samples(session.run_dir, prompts, completions, scores, when=when)
    return scores


def write_samples(
    run_dir: RunDir,
    prompts: Sequence[EvalPrompt],
    completions: list[str],
    scores: Mapping[str, float],
    *,
    when: str,
) -> None:
    """Rewrite ``samples.json`` with the completions ``before`` or ``after`` training, and
    with the metrics of both (``NAME_before``, ``NAME_after``)."""
    old: dict[str, Any] = {"rows": []}
    if when == "after" and run_dir.samples.is_file():
        old = read_json(run_dir.samples)
    # The prompts are the same in the same order; another file is not of this run.
    known = [row["before"] for row in old["rows"]]
    earlier_ones = known if len(known) == len(prompts) else [None] * len(prompts)
    rows = [
        {
            "prompt": prompt.prompt,
            "expected": prompt.expected,
            "before": completion if when == "before" else earlier,
            "after": completion if when == "after" else None,
        }
        for prompt, completion, earlier in zip(prompts, completions, earlier_ones, strict=True)
    ]
    values: dict[str, Any] = {"rows": rows}
    for name, value in scores.items():
        before, after = f"{name}_before", f"{name}_after"
        values[before] = value if when == "before" else old.get(before)
        values[after] = value if when == "after" else None
    write_json(run_dir.samples, values)
