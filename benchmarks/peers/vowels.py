"""A reward that a model learns in a few steps, for llmx and for TRL."""

from __future__ import annotations


def vowels(prompt: str, completion: str, reference: str) -> float:
    """The share of vowels among the characters of a completion."""
    return sum(completion.count(letter) for letter in "aeiou") / max(1, len(completion))
