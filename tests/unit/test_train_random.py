"""Random numbers of a step: a function of (seed, step, rank), cheap to set.

``python -m pytest tests/unit/test_train_random.py``
"""

from __future__ import annotations

import torch

from llmx.train.step import seed_step, step_seed


def draw() -> list[float]:
    return torch.nn.functional.dropout(torch.ones(64), 0.5).tolist()


def test_a_step_draws_the_same_whatever_came_before() -> None:
    seed_step(1, 7, 0)
    first = draw()
    torch.manual_seed(5)
    draw()
    seed_step(1, 7, 0)
    assert draw() == first


def test_seeds_steps_and_ranks_are_all_different() -> None:
    seeds = {step_seed(s, k, r) for s in range(4) for k in range(40) for r in range(40)}
    assert len(seeds) == 4 * 40 * 40
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_a_seed_is_the_same_in_every_process_and_version() -> None:
    # A constant: a checkpoint of an older llmx goes on with the same random numbers.
    assert step_seed(0, 0, 0) == 4842970191371296480
    assert step_seed(3, 120, 7) == 7287527681292060888
