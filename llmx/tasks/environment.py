"""Environments: completions of several turns, in which the model calls tools or plays a game.

    class Calculator:                     # task.options.environment=my_env:Calculator
        def reset(self, prompt, reference):
            self.reference = reference

        def step(self, completion):
            calls = tool_calls(completion)
            if not calls:                 # the answer
                return Turn(reward=float(completion == self.reference), done=True)
            return Turn([{"role": "tool", "content": str(sum(calls[0]["arguments"]["add"]))}])

Each sample has an instance of its own. What ``step`` returns is rendered by the chat template and
appended to the tokens that the model has drawn, which stay as they were drawn. Tried by
``python -m pytest tests/unit/test_tasks_environment.py``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llmx.data.format.rows import Conversation, Message
from llmx.data.source.records import Where
from llmx.data.tokenize.conversations import Renderer
from llmx.errors import ConfigError, LlmxError
from llmx.run.metrics.completions import load_function
from llmx.tasks.rewards import attempt

ROLES = ("tool", "user")
"""Roles that the messages of an environment may have."""


@dataclass(frozen=True)
class Turn:
    """The answer of an environment to a completion."""

    messages: Sequence[Mapping[str, str]] = ()
    """Messages that the model sees next: ``{"role": "tool", "content": "4"}``, or of a ``user``."""
    reward: float = 0.0
    """The reward of a sample is the sum over its turns."""
    done: bool = False
    """Whether the sample ends here; its messages are then not needed."""


class Environment(Protocol):
    """An instance serves one sample; it is made without arguments."""

    def reset(self, prompt: str, reference: str, /) -> Any:
        """Before the first turn, with the texts of the prompt and of the completion in the data.
        Returns None."""

    def step(self, completion: str, /) -> Turn:
        """After each completion of the model."""


_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def tool_calls(completion: str) -> list[dict[str, Any]]:
    """The calls of a completion in the form of Qwen and Hermes, ``<tool_call>{"name": ...,
    "arguments": {...}}</tool_call>``. One that is no JSON of this form is left out."""
    calls = []
    for text in _CALL.findall(completion):
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(call, dict) and isinstance(call.get("arguments"), dict) and "name" in call:
            calls.append(call)
    return calls


@dataclass(frozen=True)
class Answer:
    """A checked ``Turn``."""

    tokens: tuple[int, ...] = ()
    """Appended before the next completion; empty at the end of the sample."""
    reward: float = 0.0
    problem: str = ""
    """Reason why the environment gave no turn; the sample then has no reward."""


class Observations:
    """The tokens that a chat template writes between two completions."""

    def __init__(self, tokenizer: Any, *, template: str) -> None:
        self._renderer = Renderer(tokenizer, template=template)

    def check(self) -> None:
        """Raise ConfigError for a template that writes turns in another way when others follow."""
        for role in ROLES:
            messages = [Message(role, "a")]
            try:
                short, long = (self.tokens(messages, num_turns=number) for number in (1, 2))
            except LlmxError as error:
                raise ConfigError(f"task.options.environment: {error}") from error
            if short != long:
                raise ConfigError(
                    f"task.options.environment: the chat template ({self._renderer.template_name}) "
                    f"writes messages of the role {role} differently after other turns, so the "
                    "tokens that continue a completion cannot be told. Set data.template=chatml."
                )

    def tokens(self, messages: Sequence[Message], *, num_turns: int = 1) -> tuple[int, ...]:
        """Tokens from the end of an assistant's turn to the cue for the next one. ``num_turns``:
        of the user and the assistant before the messages."""
        before = [Message("user", "q"), Message("assistant", "a")] * num_turns
        turns = (*before, *messages, Message("assistant", "b"))
        where = Where(Path("environment"), 1, "turn")
        (sequence,) = self._renderer.conversations([Conversation(turns, where)])
        # The targets are the completions, each with the token that ends it.
        edges = np.flatnonzero(np.diff(np.concatenate([[0], sequence.targets, [0]])))
        starts, ends = edges[::2].tolist(), edges[1::2].tolist()
        if len(starts) != num_turns + 1 or int(sequence.tokens[ends[-2] - 1]) not in self._stops:
            raise ConfigError(
                f"the chat template ({self._renderer.template_name}) does not end an assistant's "
                "turn with a token of its own. Set data.template=chatml."
            )
        return tuple(sequence.tokens[ends[-2] : starts[-1]].tolist())

    @cached_property
    def _stops(self) -> frozenset[int]:
        return frozenset(self._renderer.stop_token_ids)


class Episodes:
    """The environments of the samples of a rollout. Each lives on one rank, and all ranks get what
    it answers."""

    def __init__(
        self,
        make: Callable[[], Environment],
        texts: Sequence[tuple[str, str]],
        observations: Observations,
        *,
        limit_s: float,
    ) -> None:
        """``texts``: (prompt, reference) of each sample. ``limit_s``: of each call."""
        from llmx.collectives import world

        self._world, self._rank = world()
        self._make = make
        self._texts = texts
        self._observations = observations
        self._limit_s = limit_s
        self._environments: dict[int, Environment] = {}

    def step(self, completions: Mapping[int, str]) -> dict[int, Answer]:
        """The answers to the completions of samples, by number. Collective."""
        from llmx.collectives import all_gather

        here = {
            number: self._answer(number, text)
            for number, text in completions.items()
            if number % self._world == self._rank
        }
        parts = all_gather(here) if self._world > 1 else [here]
        return {number: answer for part in parts for number, answer in part.items()}

    def _answer(self, number: int, completion: str) -> Answer:
        def step() -> Answer:
            if number not in self._environments:
                environment = self._make()
                returned = environment.reset(*self._texts[number])
                if returned is not None:
                    raise TypeError(
                        f"reset() returned {returned!r:.80}, not None. What the model sees first "
                        "is the prompt in the data"
                    )
                self._environments[number] = environment
            return self._checked(self._environments[number].step(completion))

        answer, problem = attempt(step, limit_s=self._limit_s)
        return Answer(problem=problem) if answer is None else answer

    def _checked(self, turn: Turn) -> Answer:
        """Raise TypeError or ValueError for what is no turn."""
        if not isinstance(turn, Turn):
            raise TypeError(f"step() returned {turn!r:.80}, not a Turn")
        if not (hasattr(turn.reward, "__float__") and math.isfinite(float(turn.reward))):
            raise ValueError(f"the reward {turn.reward!r:.80} is not a finite number")
        if turn.done:
            return Answer(reward=float(turn.reward))
        messages = [_message(message) for message in turn.messages]
        if not messages:
            raise ValueError("step() returned no messages, and the sample is not done")
        return Answer(self._observations.tokens(messages), float(turn.reward))


def _message(message: Any) -> Message:
    role = message.get("role") if isinstance(message, Mapping) else None
    content = message.get("content") if isinstance(message, Mapping) else None
    if role not in ROLES or not isinstance(content, str):
        raise ValueError(
            f'the message {message!r:.80} is not {{"role": "tool" or "user", "content": TEXT}}'
        )
    return Message(role, content)


def load_environment(path: str) -> Callable[[], Environment]:
    """The class that ``package.module:Class`` names. Raises ConfigError."""
    make = load_function(path, ())
    missing = [name for name in ("reset", "step") if not callable(getattr(make, name, None))]
    if missing:
        raise ConfigError(
            f"task.options.environment={path}: has no method {' and '.join(missing)} "
            "(docs/tasks.md has an example)."
        )
    return make
