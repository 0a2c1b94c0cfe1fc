"""Whether rewards or completions have collapsed: learning then stops, or takes a short cut.

Tried by ``python -m pytest tests/unit/test_tasks_grpo.py``.
"""

from __future__ import annotations

from collections import deque

from llmx.errors import ConfigError

STEPS = 10
"""Steps in a row; a few without a signal, or with short completions, are not a collapse."""
STOP_STEPS = 20
"""Steps in a row without a signal, after which a run ends."""
SHORT = 0.2
"""Share of the length that completions had at first."""


class CollapseWatch:
    """Says once of each kind what has collapsed. It begins anew with each attempt of a run."""

    def __init__(self, *, may_stop: bool) -> None:
        """``may_stop``: a run that learns nothing ends (``task.max_lost``)."""
        self._may_stop = may_stop
        self._silent_steps = 0
        self._first_lengths: list[float] = []
        self._last_lengths: deque[float] = deque(maxlen=STEPS)
        self._reported: set[str] = set()

    def see(self, *, no_signal: float, reward: float, tokens: float) -> list[str]:
        """Warnings after a step. Raises ConfigError where nothing is learned any more.

        Args:
            no_signal: the share of the groups whose rewards are all equal.
            reward: the mean reward.
            tokens: the mean length of the completions.
        """
        warnings = {}
        self._silent_steps = self._silent_steps + 1 if no_signal == 1 else 0
        if self._silent_steps >= STEPS:
            warnings["reward"] = (
                f"all completions of a prompt had the same reward in each of the last "
                f"{self._silent_steps} steps (mean reward now {reward:.3g}), so nothing is learned "
                "from them. Read some completions (rollouts.jsonl). Use prompts that are solved "
                "sometimes, a reward with more levels, or a larger task.options.temperature or "
                "group_size."
            )
            if self._silent_steps >= STOP_STEPS and self._may_stop:
                raise ConfigError(f"{warnings['reward']} task.max_lost=1 trains on.")
        if len(self._first_lengths) < STEPS:
            self._first_lengths.append(tokens)
        self._last_lengths.append(tokens)
        first, last = (
            sum(lengths) / len(lengths) for lengths in (self._first_lengths, self._last_lengths)
        )
        if len(self._last_lengths) == STEPS and last < SHORT * first:
            warnings["length"] = (
                f"completions averaged {last:.1f} tokens over the last {STEPS} steps, and "
                f"{first:.1f} at first. The rewards may favour short ones, whatever their content. "
                "Read some (rollouts.jsonl); lower optim.lr, or raise task.options.beta, e.g. to "
                "0.2."
            )
        new = {kind: text for kind, text in warnings.items() if kind not in self._reported}
        self._reported |= new.keys()
        return list(new.values())
