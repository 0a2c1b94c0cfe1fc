"""Options of ``task=grpo`` and ``task=ppo`` alike: how completions are drawn and rewarded."""

# ruff: noqa: RUF009 - the helpers return dataclasses.field()
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmx.config.fields import (
    AUTO,
    Range,
    Text,
    items,
    model_source,
    number,
    text,
)
from llmx.tasks.rewards import BUILT_IN, reward_problems


@dataclass
class RolloutOptions:
    """The part of ``task.options`` that says how completions are drawn and rewarded."""

    environment: str | None = text(
        None,
        Text(200, pattern=r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", rule="be package.module:Class"),
        example="my_env:Calculator",
    )
    """A class of your own that answers completions, so that a sample has several turns: tools, a
    game. The sum of its rewards is the reward ``environment``, beside ``rewards``, which may be
    empty."""
    max_turns: int = number(4, minimum=1, maximum=1000)
    """Completions of a sample with an ``environment``, each of at most ``max_new_tokens``; all
    turns together are at most ``data.seq_len``."""
    rewards: list[str] = items(
        ["exact_match"],
        maximum=20,
        example="[exact_match]",
        rule=Text(
            200,
            pattern=r"(" + "|".join(BUILT_IN) + r")|[A-Za-z_][\w.]*:[A-Za-z_][\w.]*",
            rule=f"be {', '.join(BUILT_IN)}, or a function of your own, package.module:function "
            "(which may run code in a sandbox)",
        ),
    )
    """What a completion is rewarded for (with an ``environment``: the last one). A function of your
    own takes the texts of the prompt, the completion and the reference (the completion in the
    data), and returns a number."""
    reward_weights: list[float] = items(
        maximum=20, example="[1, 0.5]", values=Range(-(10**6), 10**6)
    )
    """The weight of each reward in the sum; empty: 1 each."""
    reward_timeout_s: float = number(10.0, above=0, maximum=3600)
    """A reward function that takes longer for a completion is ended, and that completion has no
    reward."""
    format: str | None = None
    """The regular expression of the reward ``format``."""
    overlong_buffer: int = number(0, minimum=0, maximum=2**24, example=64)
    """Over so many last tokens before ``max_new_tokens`` the reward ``overlong`` falls from 0 to
    -1."""
    reward_model: str = model_source()
    """A model that ``task=reward`` has trained, with the tokenizer of the run: its score is a
    reward, too."""
    reward_model_weight: float = number(1.0, minimum=-(10**6), maximum=10**6)
    """The weight of its score in the sum."""
    max_new_tokens: int = number(AUTO, auto=True, minimum=1, maximum=2**24, example=256)
    """The most tokens of a completion; fewer where ``data.seq_len`` leaves less room. ``auto`` is
    256, or half of ``data.seq_len`` where that is less."""
    temperature: float = number(1.0, minimum=0.01, maximum=100)
    """Temperature of the completions, and of the policy that is trained."""
    top_p: float = number(1.0, above=0, maximum=1)
    top_k: int = number(0, minimum=0, maximum=10**6)
    mask_truncated: bool = False
    """Completions without a stop token train nothing (their rewards count in their group)."""

    def problems(self) -> Iterator[str]:
        """Yield a message for each pair of values that do not go together."""
        yield from reward_problems(self)
        if self.temperature != 1 and (self.top_k or self.top_p < 1):
            yield (
                f"task.options.temperature={self.temperature:g} with top_k or top_p: the "
                "probability of a token under the policy is then unknown to the loss. Set "
                "task.options.temperature=1, or leave top_k and top_p out."
            )
