"""What a task is: its samples (through ``llmx.data``) and what it measures besides the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmx.config import Experiment


@dataclass(frozen=True)
class Question:
    """A held-out prompt and the answer it should get."""

    tokens: tuple[int, ...]
    """What the model is given, up to and with the cue to answer."""
    prompt: str
    """The same for a reader."""
    expected: str


class Task:
    """Base of the tasks; a kind is one subclass in a file of its own."""

    def __init__(self, exp: Experiment, tokenizer: Any) -> None:
        self.exp = exp
        self.tokenizer = tokenizer

    def questions(self) -> list[Question]:
        """Held-out questions to answer before and after training; none by default."""
        return []

    def decode(self, tokens: list[int]) -> str:
        """The answer for a reader."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def exact_match(expected: list[str], answers: list[str]) -> float | None:
    """The part of answers whose stripped text equals the expected one; None without any."""
    if not expected:
        return None
    right = sum(a.strip() == b.strip() for a, b in zip(expected, answers, strict=True))
    return right / len(expected)
