"""Completions of the eval prompts before and after training: ``samples.json``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmx.data import EvalPrompt
from llmx.models.generation_config import stop_ids
from llmx.rundir import RunDir, read_json, write_json
from llmx.tasks import exact_match
from llmx.train.generate import generate
from llmx.train.session import Session


def complete_eval_prompts(session: Session, *, when: str) -> float | None:
    """Exact match of the greedy completions; None for a task without eval prompts. Collective.

    Args:
        when: ``before`` or ``after`` training: the column of ``samples.json`` that rank 0 writes.
    """
    prompts = session.task.eval_prompts()
    if not prompts:
        return None
    completions = [
        session.task.decode(tokens)
        for tokens in generate(
            session.engine,
            [prompt.tokens for prompt in prompts],
            max_new_tokens=session.exp.task.eval_max_new_tokens,
            stop_ids=frozenset(stop_ids(session.engine.module, session.tokenizer)),
        )
    ]
    matched = exact_match([prompt.expected for prompt in prompts], completions)
    if session.rank == 0:
        write_samples(session.run_dir, prompts, completions, matched, when=when)
    return matched


def write_samples(
    run_dir: RunDir,
    prompts: Sequence[EvalPrompt],
    completions: list[str],
    matched: float | None,
    *,
    when: str,
) -> None:
    """Rewrite ``samples.json`` with the completions ``before`` or ``after`` training."""
    old: dict[str, Any] = {"rows": []}
    if when == "after" and run_dir.samples.is_file():
        old = read_json(run_dir.samples)
    # The prompts are the same in the same order; another file is not of this run.
    known = [row["before"] for row in old["rows"]]
    before = known if len(known) == len(prompts) else [None] * len(prompts)
    rows = [
        {
            "prompt": prompt.prompt,
            "expected": prompt.expected,
            "before": completion if when == "before" else earlier,
            "after": completion if when == "after" else None,
        }
        for prompt, completion, earlier in zip(prompts, completions, before, strict=True)
    ]
    write_json(
        run_dir.samples,
        {
            "rows": rows,
            "exact_match_before": matched if when == "before" else old.get("exact_match_before"),
            "exact_match_after": matched if when == "after" else None,
        },
    )
