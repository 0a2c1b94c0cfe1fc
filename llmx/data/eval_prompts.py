"""Eval prompts: held-out conversations up to their last completion, and where a completion stops.

A prompt is cut from the very record that would be trained, so the model is prompted in the
evaluation exactly as in training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llmx.config import DataConfig
from llmx.data.format.rows import Conversation
from llmx.data.split import TAKEN, DatasetSplit
from llmx.data.tokenize.conversations import Renderer
from llmx.data.tokenize.truncation import shorter_prompts
from llmx.errors import ConfigError, DataError, LlmxError
from llmx.text import plural


@dataclass(frozen=True)
class EvalPrompt:
    """A held-out conversation; its last turn is the expected completion."""

    tokens: tuple[int, ...]
    """The tokens before the completion, with the generation prompt."""
    prompt: str
    """The user's last message, for a table."""
    expected: str
    """The completion as it is trained and decoded: with the empty thought that a template of
    reasoning models writes before an answer."""
    expected_tokens: int
    """The number of its tokens, with the one that ends the turn."""


def held_out_prompts(
    data: DataConfig,
    seed: int,
    tokenizer: Any,
    *,
    limit: int,
    decode: Callable[[list[int]], str],
    takes: tuple[type, ...] = TAKEN,
    turn_weights: bool = False,
    num_embeddings: int | None = None,
) -> list[EvalPrompt]:
    """The first ``limit`` conversations of the evaluation split whose prompt is shorter than
    ``seq_len``, without tokens beyond ``num_embeddings``. ``decode``: of a completion; ``takes``
    and ``turn_weights``: of the task.

    Raises ConfigError for a source of plain text, which has no prompts.
    """
    if not limit:
        return []
    source = DatasetSplit(data, seed, "eval", takes=takes, turn_weights=turn_weights)
    if source.form == "text":
        raise ConfigError(
            f"task.eval_generate={limit} needs conversations to take eval prompts "
            f"from, and {source.path} holds plain text. Set task.eval_generate=0."
        )
    renderer = Renderer(tokenizer, template=data.template)
    prompts: list[EvalPrompt] = []
    for row in source.rows():
        if not isinstance(row, Conversation):
            continue
        if row.keeps_completion and data.over_long in ("split", "truncate"):
            shortened = shorter_prompts(
                renderer, [row], limit=data.seq_len, side=data.truncate_prompt
            )
            row = shortened[0][0] if shortened is not None else row
        try:
            tokens, completion = renderer.prompt(row)
        except DataError:
            if data.on_bad_row != "skip":
                raise
            continue  # its row was left out when the samples were prepared
        if num_embeddings is not None and tokens.max(initial=0) >= num_embeddings:
            continue  # its row was refused or left out when the samples were prepared
        if len(tokens) < data.seq_len:
            expected, question = completion.tolist(), row.messages[-2].content
            prompts.append(
                EvalPrompt(tuple(tokens.tolist()), question, decode(expected), len(expected))
            )
        if len(prompts) == limit:
            break
    return prompts


def unreachable_completions(prompts: Sequence[EvalPrompt], max_new_tokens: int) -> str:
    """A warning where expected completions are longer than those that are generated; else ""."""
    lengths = [prompt.expected_tokens for prompt in prompts]
    longer = sum(length > max_new_tokens for length in lengths)
    if not longer:
        return ""
    return (
        f"WARNING: {longer} of {plural(len(lengths), 'expected completion')} have more than "
        f"{max_new_tokens} tokens, so no completion can match them exactly. Set "
        f"task.eval_max_new_tokens={max(lengths)}."
    )


def stop_token_ids(tokenizer: Any, *, template: str = "auto") -> list[int]:
    """The tokens at which a completion ends: the EOS token, and the one that closes an assistant's
    turn as the template is rendered, where that is another. Without a template, the EOS token."""
    if template != "auto" or tokenizer.chat_template:
        # A template that renders no plain chat closes no turn.
        with contextlib.suppress(LlmxError):
            return Renderer(tokenizer, template=template).stop_token_ids
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
