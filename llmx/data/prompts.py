"""Shorter prompts for rows over ``data.seq_len`` whose answer must stay: rows with a label.

Of such a row the oldest turns go first, then the text before the label, from the side that
``data.truncate_prompt`` says. What the chat template writes stays, and the text is cut between
characters, never between the bytes of one.

Tried by ``python -m pytest tests/unit/test_data_prompts.py``.
"""

from __future__ import annotations

import unicodedata
from dataclasses import replace

from llmx.data.forms import Conversation, Message
from llmx.data.render import Renderer, TokenRow, own_backend

_JOINS = "\u200d\ufe0e\ufe0f"
"""Zero-width joiner and variation selectors: they belong to the character before them."""


class PromptCutter:
    """Cuts prompts until their rows have at most ``limit`` tokens. Threads may share it."""

    def __init__(self, renderer: Renderer, *, limit: int, side: str) -> None:
        """``side``: ``left`` cuts the beginning of the text off, ``right`` its end."""
        self._renderer = renderer
        self._limit = limit
        self._from_left = side == "left"
        self._backend = own_backend(renderer.tokenizer, plain=True)

    def shortened(self, conversation: Conversation) -> TokenRow | None:
        """The row with a prompt that fits; None where the answer alone is too long."""
        fitting = self.conversation(conversation)
        return None if fitting is None else self._row(fitting)

    def conversation(self, conversation: Conversation) -> Conversation | None:
        """The conversation as it is where it fits, else with a shorter prompt; None where the
        answer alone is too long."""
        over = self._over(conversation)
        if over <= 0:
            return conversation
        first = int(conversation.messages[0].role == "system")
        while len(messages := conversation.messages) >= first + 4:
            kept = (*messages[:first], *messages[first + 2 :])
            conversation = replace(conversation, messages=kept)
            over = self._over(conversation)
            if over <= 0:
                return conversation
        while (text := conversation.messages[-2].content) and over > 0:
            prompt = Message("user", self._cut(text, over))
            messages = (*conversation.messages[:-2], prompt, conversation.messages[-1])
            conversation = replace(conversation, messages=messages)
            over = self._over(conversation)
        return conversation if over <= 0 else None

    def _row(self, conversation: Conversation) -> TokenRow:
        (row,) = self._renderer.conversations([conversation])
        return row

    def _over(self, conversation: Conversation) -> int:
        """Tokens that the row is too long by."""
        return len(self._row(conversation).tokens) - self._limit

    def _cut(self, text: str, over: int) -> str:
        """The text without at least one character, and without about ``over`` tokens."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        offsets = encoding.offsets
        if over >= len(offsets):
            return ""
        if self._from_left:
            at = max(1, *(stop for _, stop in offsets[:over]))
            while at < len(text) and _continues(text[at]):
                at += 1
            return text[at:]
        at = min(len(text) - 1, *(start for start, _ in offsets[len(offsets) - over :]))
        while at > 0 and _continues(text[at]):
            at -= 1
        return text[:at]


def _continues(character: str) -> bool:
    """Whether a character is written together with the one before it."""
    return character in _JOINS or unicodedata.combining(character) != 0
