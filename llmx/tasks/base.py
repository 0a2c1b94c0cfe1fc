"""What a task is: its samples (through ``llmx.data``) and what it measures besides the loss."""

from __future__ import annotations

from typing import Any

from llmx.config import Experiment
from llmx.data import EvalPrompt


class Task:
    """Base of the tasks; a kind is one subclass in a file of its own."""

    def __init__(self, exp: Experiment, tokenizer: Any) -> None:
        self.exp = exp
        self.tokenizer = tokenizer

    def eval_prompts(self) -> list[EvalPrompt]:
        """Prompts to complete before and after training; none by default."""
        return []

    def decode(self, tokens: list[int]) -> str:
        """The completion for a reader."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def exact_match(expected: list[str], completions: list[str]) -> float | None:
    """The part of completions whose stripped text equals the expected one; None without any."""
    if not expected:
        return None
    right = sum(a.strip() == b.strip() for a, b in zip(expected, completions, strict=True))
    return right / len(expected)
