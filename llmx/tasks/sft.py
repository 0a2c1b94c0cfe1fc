"""``task=sft``: answers to instructions. Reports the loss, and exact match on held-out questions.

A question is a held-out row up to the last answer; the answer is what was to be learned there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from llmx.tasks.base import Question, Task


class Sft(Task):
    """Targets are the assistant's turns (``data.loss_on``), marked by ``llmx.data``."""

    def questions(self, store: Any) -> list[Question]:
        """The first ``task.eval_generate`` rows of ``store`` that end in an answer."""
        found: list[Question] = []
        for index in range(len(store)):
            sample = store[index]
            ends = [*sample.row_starts[1:].tolist(), len(sample.tokens)]
            for start, end in zip(sample.row_starts.tolist(), ends, strict=True):
                if len(found) >= self.exp.task.eval_generate:
                    return found
                question = self._question(sample.tokens[start:end], sample.targets[start:end])
                if question is not None:
                    found.append(question)
        return found

    def _question(self, tokens: np.ndarray, targets: np.ndarray) -> Question | None:
        span = last_span(targets)
        if span is None or span[0] == 0:
            return None
        start, end = span
        prompt = tokens[:start].tolist()
        return Question(
            tokens=tuple(prompt),
            prompt=self.decode(prompt),
            expected=self.decode(tokens[start:end].tolist()),
        )

    def stop_ids(self) -> frozenset[int]:
        """Every special token ends an answer: none may stand inside one."""
        return super().stop_ids() | frozenset(self.tokenizer.all_special_ids)


def last_span(targets: np.ndarray) -> tuple[int, int] | None:
    """[start, end) of the last run of True; None if there is none."""
    places = np.flatnonzero(targets)
    if places.size == 0:
        return None
    gaps = np.flatnonzero(np.diff(places) > 1)
    start = places[gaps[-1] + 1] if gaps.size else places[0]
    return int(start), int(places[-1]) + 1
