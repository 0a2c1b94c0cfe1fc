"""Rewards of generated completions: the built-in ones, functions of the user's own, a time limit.

A reward is a function of the texts of a prompt, a completion and a reference (the completion that
the data has), and returns a number:

    def correct(prompt, completion, reference):
        return float(completion.split()[-1] == reference)

One that returns None has no say about this completion: the sum is that of the other rewards. What
a function raises, or returns in place of a number, costs the one completion; the run only where too
many fail (``task.max_lost``).
Tried by ``python -m pytest tests/unit/test_tasks_rewards.py``.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import math
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from llmx.config.build import shown
from llmx.errors import ConfigError
from llmx.run.metrics.completions import exact_match, failure, load_function

if TYPE_CHECKING:
    from llmx.tasks.rollout_options import RolloutOptions

MATH = "math_verify"
REWARD_MODEL = "reward_model"
"""The name of the score of a trained reward model."""
ENVIRONMENT = "environment"
"""The name of the sum of the rewards that an environment gives."""
BUILT_IN = ("exact_match", "format", "length", "overlong", MATH)

OPTION_OF = {
    "format": (
        "format",
        "a regular expression that the whole completion must match, e.g. "
        "task.options.format='<think>.*</think>.*'",
    ),
    "overlong": (
        "overlong_buffer",
        "the number of last tokens over which the penalty grows, e.g. "
        "task.options.overlong_buffer=64",
    ),
}
"""The option that a reward needs, and what it says."""

NO_VALUE = "it returned None, and no other reward has a value for this completion."

T = TypeVar("T")


@dataclass(frozen=True)
class Scored:
    """The arguments of a reward function."""

    prompt: str
    completion: str
    reference: str
    num_tokens: int
    """Tokens of the completion."""


Reward = Callable[[Scored], Any]


@dataclass(frozen=True)
class Outcome:
    """The value of one reward function for one completion."""

    value: float | None
    """None where the function failed, or has none for such a completion."""
    problem: str = ""
    """Description of the failure; empty without one."""


def short_names(names: Sequence[str]) -> list[str]:
    """The names of the rewards' metrics: a user's function is called as it is in its module."""
    return [re.split("[:.]", name)[-1] for name in names]


def reward_problems(options: RolloutOptions) -> Iterator[str]:
    """Yield a message for rewards that cannot be used together, or not on this machine, and for
    one whose option is missing, or an option without its reward."""
    names, weights = options.rewards, options.reward_weights
    key = f"task.options.rewards={shown(list(names))}"
    if not names and not options.reward_model and not options.environment:
        yield (
            "task.options.rewards is empty, and there is no task.options.reward_model. Set e.g. "
            "task.options.rewards=[exact_match]."
        )
    by_name = Counter([*short_names(names), ENVIRONMENT, REWARD_MODEL])
    twice = [name for name, count in by_name.items() if count > 1]
    if twice:
        yield f"{key}: two are called {twice[0]}. Leave one out, or give it another name."
    if weights and len(weights) != len(names):
        yield (
            f"task.options.reward_weights={shown(list(weights))}: has {len(weights)} values for "
            f"{len(names)} rewards. Give one weight for each of task.options.rewards."
        )
    if MATH in names and importlib.util.find_spec(MATH) is None:
        yield f"{key}: the package math-verify is not installed. Run: pip install math-verify"
    if options.environment and "overlong" in names:
        yield (
            "task.options.rewards has overlong, which judges the length of one completion, and "
            "task.options.environment makes several. Remove one of them."
        )
    try:
        re.compile(options.format or "")
    except re.error as error:
        yield f"task.options.format={options.format}: is not a regular expression: {error}."
    for name, (option, meaning) in OPTION_OF.items():
        value = getattr(options, option)
        if name in names and not value:
            yield (
                f"task.options.rewards has {name}, and task.options.{option} is "
                f"{'0' if value == 0 else 'not set'}. Set it to {meaning}."
            )
        elif value and name not in names:
            yield (
                f"task.options.{option}={value} has no effect without the reward {name}. Add "
                f"{name} to task.options.rewards, or remove the option."
            )


def reward_functions(options: RolloutOptions) -> dict[str, Reward]:
    """The functions by the name of their metric.

    Raises:
        ConfigError: a function of the user's own cannot be imported.
    """

    def overlong(scored: Scored) -> float:  # DAPO, Yu et al. 2025, eq. 13
        excess = scored.num_tokens - (options.max_new_tokens - options.overlong_buffer)
        return -min(1.0, max(0, excess) / options.overlong_buffer)

    built_in: dict[str, Reward] = {
        "exact_match": lambda scored: exact_match(scored.completion, scored.reference),
        "format": lambda scored: float(
            re.fullmatch(options.format or "", scored.completion, re.DOTALL) is not None
        ),
        "length": lambda scored: scored.num_tokens / options.max_new_tokens,
        "overlong": overlong,
        MATH: _math_verify,
    }
    functions = [built_in[name] if name in built_in else _of_user(name) for name in options.rewards]
    return dict(zip(short_names(options.rewards), functions, strict=True))


def _of_user(path: str) -> Reward:
    function = load_function(path, BUILT_IN)
    signature = None
    with suppress(ValueError, TypeError):  # of some built-in functions it is not known
        signature = inspect.signature(function)
    try:
        if signature is not None:
            signature.bind("prompt", "completion", "reference")
    except TypeError as error:
        raise ConfigError(
            f"task.options.rewards: {path}{signature} is called with (prompt, completion, "
            f"reference): {error}. Define it with these three parameters."
        ) from error
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"task.options.rewards: {path} is async. Define it with def: it returns a number."
        )
    return lambda scored: function(scored.prompt, scored.completion, scored.reference)


def _math_verify(scored: Scored) -> float:
    """1 where the completion's last answer is mathematically equal to the reference."""
    package: Any = importlib.import_module(MATH)
    # Its own time limits would take the signal that ours uses. It warns of their absence each time.
    for name in ("parser", "grader"):
        logging.getLogger(f"{MATH}.{name}").setLevel(logging.ERROR)
    reference = package.parse(scored.reference, parsing_timeout=None)
    if not reference:
        raise ValueError(f"math-verify finds no answer in the reference {scored.reference!r}")
    answer = package.parse(scored.completion, parsing_timeout=None)
    return float(package.verify(reference, answer, timeout_seconds=None))


class RewardTimeout(BaseException):
    """Not an ``Exception``, so that a function which catches these does not go on."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise RewardTimeout inside after so many seconds, also in a regular expression or a sleep."""

    def expire(*_: Any) -> None:
        raise RewardTimeout

    before = signal.signal(signal.SIGALRM, expire)
    # Repeated: code that swallows the first one gets another.
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(function: Callable[[], T], *, limit_s: float) -> tuple[T | None, str]:
    """The value of a function of the user's; or None, and its failure."""
    try:
        with time_limit(limit_s):
            return function(), ""
    except RewardTimeout:
        return None, f"it took more than {limit_s:g} s (task.options.reward_timeout_s)."
    except (Exception, SystemExit) as error:
        return None, f"it raised {failure(error)}"


def outcome(reward: Reward, scored: Scored, *, limit_s: float) -> Outcome:
    """The value of a reward function, or why there is none."""
    value: Any
    value, problem = attempt(lambda: reward(scored), limit_s=limit_s)
    if problem or value is None:
        return Outcome(None, problem)
    is_number = hasattr(value, "__float__")  # of NumPy or PyTorch, too
    if not is_number or not math.isfinite(float(value)):
        return Outcome(None, f"it returned {value!r:.80}, which is not a finite number.")
    return Outcome(float(value))


def all_outcomes(
    rewards: Mapping[str, Reward],
    rows: Sequence[Scored],
    *,
    limit_s: float,
    may_abstain: bool = False,
) -> list[list[Outcome]]:
    """The outcome of each reward for each row. The ranks share the rows and get all outcomes, so
    that a clock or a random number in a function does not divide them. Collective.

    ``may_abstain``: all of them may return None for a row; else it is a failure.
    """
    from llmx.collectives import shared

    def of_row(row: Scored) -> list[Outcome]:
        outcomes = [outcome(reward, row, limit_s=limit_s) for reward in rewards.values()]
        are_none = not may_abstain and outcomes == [Outcome(None)] * len(outcomes)
        return [Outcome(None, NO_VALUE)] * len(outcomes) if are_none else outcomes

    return shared(rows, of_row)
