"""How much of a run may be lost: one rule for rows, tokens, rewards and checkpoints
(``task.max_lost``).

Tried by ``python -m pytest tests/unit/test_data_prepare.py tests/unit/test_tasks_grpo.py
tests/unit/test_train_save.py``.
"""

from __future__ import annotations

import math

AT_LEAST = 12
"""A few losses are never too many: of three rows one is a third."""


def too_much(share: float, count: int, *, max_lost: float) -> bool:
    """Whether a run with this share of something lost, in ``count`` cases, is refused."""
    return count >= AT_LEAST and share > max_lost


def rule(share: float, *, max_lost: float) -> str:
    """The end of a refusal: what is allowed, and by which value this would be."""
    allowing = math.ceil(share * 100) / 100
    return f"At most {max_lost:.0%} may be lost (task.max_lost={allowing:g} allows this much)."
