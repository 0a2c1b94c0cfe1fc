"""Prompts as tokens, as training lays them out: turns of a chat template, or plain text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmx.cli.target import Target
from llmx.data.format.formats import Conversation, Message
from llmx.data.source.files import Where
from llmx.data.tokenize.conversations import Renderer
from llmx.errors import ConfigError

_HERE = Where(Path("prompt"), 1, "line")


class PromptLayout:
    """How prompts of one model are laid out."""

    def __init__(self, tokenizer: Any, *, template: str | None, system: str | None) -> None:
        """``template``: a name of ``data.template``; None for plain text. ``system``: of prompts
        that have no system message of their own."""
        self.template = template
        self.system = system
        self._tokenizer = tokenizer
        self._renderer = None if template is None else Renderer(tokenizer, template=template)

    @property
    def plain(self) -> bool:
        """Whether text is continued, without turns."""
        return self._renderer is None

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that close an answer in this template."""
        return frozenset(self._renderer.stop_token_ids if self._renderer else ())

    def text(self, prompt: str) -> list[int]:
        """The tokens of one prompt: a user's turn, or the text itself."""
        if self.plain:
            return list(self._tokenizer(prompt)["input_ids"])
        return self.turns([Message("user", prompt)])

    def turns(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation up to the answer that is to come."""
        if self._renderer is None:
            raise ConfigError(
                "messages need a chat template, and this model is given plain text. Give prompts "
                "as text."
            )
        turns = tuple(messages)
        if self.system and turns[0].role != "system":
            turns = (Message("system", self.system), *turns)
        conversation = Conversation((*turns, Message("assistant", ".")), _HERE)
        tokens, _ = self._renderer.prompt(conversation)
        return [int(token) for token in tokens]


def layout_of(target: Target, tokenizer: Any, *, plain: bool = False) -> PromptLayout:
    """As the run laid its own out; of a model, by the chat template of its tokenizer, and as plain
    text where that has none."""
    exp = target.exp
    if exp is not None:
        plain = plain or not learns_chats(exp.task.kind)
        return PromptLayout(
            tokenizer, template=None if plain else exp.data.template, system=exp.data.system
        )
    plain = plain or not has_template(tokenizer)
    return PromptLayout(tokenizer, template=None if plain else "auto", system=None)


def learns_chats(kind: str) -> bool:
    """Whether the task of a run learns conversations, and its prompts are questions."""
    from llmx.tasks import task_class

    try:
        return task_class(kind).learns_chats()
    except ConfigError:  # a task of the user's own whose code is not here
        return True


def has_template(tokenizer: Any) -> bool:
    """Whether the tokenizer says how a chat is written."""
    return bool(getattr(tokenizer, "chat_template", None))
