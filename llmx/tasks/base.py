"""What a task is: its samples (through ``llmx.data``) and what it measures besides the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmx.config import Experiment
from llmx.data import EvalPrompt
from llmx.metrics import Metric


class Task:
    """Base of the tasks; a kind is one subclass in a file of its own."""

    def __init__(self, exp: Experiment, tokenizer: Any) -> None:
        self.exp = exp
        self.tokenizer = tokenizer

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """Name -> what is measured besides the loss; every value that is written is declared."""
        return {}

    def eval_prompts(self) -> list[EvalPrompt]:
        """Prompts to complete before and after training; none by default."""
        return []

    def score(self, prompts: Sequence[EvalPrompt], completions: Sequence[str]) -> dict[str, float]:
        """Metrics of the ``completions`` of ``prompts``, by name."""
        return {}

    def decode(self, tokens: list[int]) -> str:
        """The completion for a reader."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def exact_match(expected: Sequence[str], completions: Sequence[str]) -> float | None:
    """The part of completions whose stripped text equals the expected one; None without any."""
    if not expected:
        return None
    right = sum(a.strip() == b.strip() for a, b in zip(expected, completions, strict=True))
    return right / len(expected)
