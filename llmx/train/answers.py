"""Answers to held-out questions before and after training: ``samples.json``."""

from __future__ import annotations

from typing import Any

from llmx.rundir import RunDir, read_json, write_json
from llmx.tasks import exact_match
from llmx.train.generate import generate
from llmx.train.generation_config import stop_ids
from llmx.train.session import Session


def answer_questions(session: Session, *, when: str) -> float | None:
    """Exact match of greedy answers; rank 0 keeps them in ``samples.json``. Collective."""
    questions = session.task.questions()
    if not questions:
        return None
    answers = [
        session.task.decode(tokens)
        for tokens in generate(
            session.engine,
            [question.tokens for question in questions],
            max_new_tokens=session.exp.task.eval_max_new_tokens,
            stop_ids=frozenset(stop_ids(session.engine.module, session.tokenizer)),
        )
    ]
    matched = exact_match([question.expected for question in questions], answers)
    if session.rank == 0:
        write_samples(session.run_dir, questions, answers, matched, when=when)
    return matched


def write_samples(
    run_dir: RunDir, questions: list[Any], answers: list[str], matched: float | None, *, when: str
) -> None:
    """Rewrite ``samples.json`` with the answers ``before`` or ``after`` training."""
    old: dict[str, Any] = {"rows": []}
    if when == "after" and run_dir.samples.is_file():
        old = read_json(run_dir.samples)
    # The questions are the same in the same order; another file is not of this run.
    known = [row["before"] for row in old["rows"]]
    before = known if len(known) == len(questions) else [None] * len(questions)
    rows = [
        {
            "prompt": question.prompt,
            "expected": question.expected,
            "before": answer if when == "before" else earlier,
            "after": answer if when == "after" else None,
        }
        for question, answer, earlier in zip(questions, answers, before, strict=True)
    ]
    write_json(
        run_dir.samples,
        {
            "rows": rows,
            "exact_match_before": matched if when == "before" else old.get("exact_match_before"),
            "exact_match_after": matched if when == "after" else None,
        },
    )
