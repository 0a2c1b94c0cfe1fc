"""``task=sft``: answers to instructions. Reports the loss, and exact match on held-out questions.

A question is a held-out conversation up to its last answer, rendered as it is trained.
"""

from __future__ import annotations

from typing import Any

from llmx.config import Experiment
from llmx.data import held_out_questions
from llmx.tasks.base import Question, Task


class Sft(Task):
    """Targets are the assistant's turns (``data.loss_on``), marked by ``llmx.data``."""

    def __init__(self, exp: Experiment, tokenizer: Any) -> None:
        super().__init__(exp, tokenizer)
        self._questions: list[Question] | None = None

    def questions(self) -> list[Question]:
        """The first ``task.eval_generate`` held-out conversations; read once, then kept."""
        limit = self.exp.task.eval_generate
        if self._questions is None:
            found = held_out_questions(self.exp, self.tokenizer, limit=limit) if limit else []
            self._questions = [
                Question(tuple(question.prompt.tolist()), question.text, question.expected)
                for question in found
            ]
        return self._questions
