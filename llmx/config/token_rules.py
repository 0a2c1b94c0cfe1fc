"""``model.add_tokens`` and ``model.add_special_tokens``: tokens that a tokenizer gets. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from llmx.config.build import shown
from llmx.config.schema import ModelConfig

ADD_TOKENS, ADD_SPECIAL = "model.add_tokens", "model.add_special_tokens"


def added_tokens(model: ModelConfig) -> list[str]:
    """All of them, in the order of their ids."""
    return [*model.add_tokens, *model.add_special_tokens]


def added_token_problems(model: ModelConfig) -> Iterator[str]:
    """One message for each that cannot be a token, or is there twice."""
    first: dict[str, str] = {}
    for key, tokens in ((ADD_TOKENS, model.add_tokens), (ADD_SPECIAL, model.add_special_tokens)):
        for token in tokens:
            if not token.strip():
                yield (
                    f"{key}: {shown(token)} is empty or nothing but white space, which every text "
                    "is full of. Leave it out."
                )
            elif token in first:
                yield f"{key}: {shown(token)} stands in {first[token]} already. Leave one out."
            first.setdefault(token, key)
