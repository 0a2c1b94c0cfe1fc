"""Held-out questions for generation: prompt, expected answer and where to stop.

A prompt is cut from the very row that would be trained, so a model is asked exactly as it
was taught.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmx.config import Experiment
from llmx.data.forms import Conversation
from llmx.data.prompts import PromptCutter
from llmx.data.render import Renderer
from llmx.data.source import Source
from llmx.errors import ConfigError, LlmxError


@dataclass(frozen=True)
class Question:
    """One held-out question: the last turn of a conversation is its expected answer."""

    text: str
    """The user's last words, for a table."""
    prompt: np.ndarray
    """uint32 [n]: the whole conversation up to the answer, template included."""
    expected: str


def held_out_questions(exp: Experiment, tokenizer: Any, *, limit: int) -> list[Question]:
    """The first ``limit`` conversations of the evaluation split whose prompt is shorter than
    ``seq_len``. Raises ConfigError for a source of plain text, in which nothing is asked."""
    source = Source.of(exp, "eval")
    if source.form == "text":
        raise ConfigError(
            f"task.eval_generate asks questions, {source.path} holds plain text. Set it to 0."
        )
    renderer = Renderer(tokenizer, template=exp.data.template)
    cutter = PromptCutter(renderer, limit=exp.data.seq_len, side=exp.data.truncate_prompt)
    questions: list[Question] = []
    rows = source.rows()
    while len(questions) < limit:
        row = next(rows, False)
        if row is False:
            break
        if not isinstance(row, Conversation):
            continue
        if row.keeps_answer and exp.data.over_long == "truncate":
            row = cutter.conversation(row) or row
        prompt, expected = renderer.prompt(row)
        if len(prompt) < exp.data.seq_len:
            questions.append(Question(row.messages[-2].content, prompt, expected.strip()))
    return questions


def stop_token_ids(tokenizer: Any, *, template: str = "auto") -> list[int]:
    """The tokens at which an answer ends: the EOS token, and the one that closes an assistant's
    turn as the template is rendered, where that is another. Without a template, the EOS token."""
    if template != "auto" or tokenizer.chat_template:
        # A template that renders no plain chat closes no turn.
        with contextlib.suppress(LlmxError):
            return Renderer(tokenizer, template=template).stop_token_ids
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
