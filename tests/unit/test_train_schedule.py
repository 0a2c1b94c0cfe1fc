"""The learning rate is a pure function of the step, with values that can be checked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from llmx.config import OptimConfig, TaskConfig
from llmx.errors import ConfigError
from llmx.train.schedule import RunLength, lr_at, run_length, warmup_steps


def rates(total: int, **values: Any) -> list[float]:
    optim = OptimConfig(kind="adamw", **{"lr": 1.0, "warmup_steps": 0, **values})
    return [lr_at(step, optim=optim, total=total) for step in range(total)]


def test_warmup_rises_from_the_first_update() -> None:
    found = rates(8, warmup_steps=4, schedule="constant", lr=2.0)
    assert found == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.0])


def test_no_warmup_starts_at_the_full_rate() -> None:
    for schedule in ("cosine", "linear", "constant"):
        assert rates(5, schedule=schedule, lr=3e-4)[0] == 3e-4


def test_linear_values() -> None:
    assert rates(4, schedule="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_cosine_values() -> None:
    half = math.sqrt(0.5)
    wanted = [1.0, (1 + half) / 2, 0.5, (1 - half) / 2]
    assert rates(4, schedule="cosine") == pytest.approx(wanted)


def test_floor_is_reached_at_the_end_of_the_decay_and_kept() -> None:
    found = rates(10, schedule="linear", decay_end_fraction=0.5, min_lr_ratio=0.1)
    assert found == pytest.approx([1.0, 0.82, 0.64, 0.46, 0.28, 0.1, 0.1, 0.1, 0.1, 0.1])


def test_decay_begins_where_the_warmup_ends() -> None:
    found = rates(10, schedule="cosine", warmup_steps=2, decay_end_fraction=0.6, min_lr_ratio=0.2)
    assert found[:3] == pytest.approx([0.5, 1.0, 1.0])
    assert found[4] == pytest.approx(0.2 + 0.8 * 0.5)
    assert found[6:] == pytest.approx([0.2] * 4)


def test_decay_that_would_end_in_the_warmup_falls_right_after_it() -> None:
    found = rates(10, schedule="linear", warmup_steps=5, decay_end_fraction=0.3)
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0])


def test_warmup_by_fraction_rounds_up_and_steps_win() -> None:
    def steps(**values: Any) -> int:
        return warmup_steps(OptimConfig(kind="adamw", **values), total=50)

    assert steps(warmup_fraction=0.03) == 2
    assert steps() == 0
    assert steps(warmup_fraction=0.5, warmup_steps=0) == 0
    assert steps(warmup_steps=1000) == 50


def test_total_steps_from_steps_or_epochs() -> None:
    def total(num_samples: int = 10, global_batch: int = 4, **values: Any) -> int:
        task = TaskConfig(kind="sft", **values)
        return run_length(task, num_samples=num_samples, global_batch=global_batch).steps

    assert total(steps=7, epochs=100.0) == 7
    assert total(epochs=1.0) == 3
    assert total(epochs=2.0) == 5
    assert total(epochs=0.5) == 2
    assert total(epochs=0.01, global_batch=1000) == 1
    with pytest.raises(ConfigError, match="task.epochs=3"):
        total()


def length(last_batch: str, epochs: float, *, num_samples: int = 249, batch: int = 10):
    task = TaskConfig(kind="sft", epochs=epochs)
    return run_length(task, num_samples=num_samples, global_batch=batch, last_batch=last_batch)


def test_the_last_batch_wraps_is_dropped_or_is_short() -> None:
    wrap, drop, short = (length(kind, 1.0) for kind in ("wrap", "drop", "short"))
    assert (wrap.steps, wrap.samples, wrap.stop) == (25, 250, None)
    assert (drop.steps, drop.samples, drop.stop) == (24, 240, None)
    assert (short.steps, short.samples, short.stop) == (25, 249, 249)
    assert [short.samples_at(step) for step in (0, 1, 24, 25)] == [0, 10, 240, 249]
    # Only the last batch of the run: those before go on into the next epoch.
    assert (length("short", 2.0).steps, length("short", 2.0).samples) == (50, 498)
    assert (length("drop", 2.0).steps, length("drop", 2.0).samples) == (49, 490)
    for kind in ("wrap", "drop", "short"):
        assert length(kind, 1.0, num_samples=250) == RunLength(25, 250, 10)
    assert length("short", 0.1, num_samples=70).samples == 7
    assert length("short", 0.001).samples == 1
    with pytest.raises(ConfigError, match=r"last_batch=drop: 1 epoch of 9 samples do not fill"):
        length("drop", 1.0, num_samples=9)


def test_steps_that_were_asked_for_are_whole() -> None:
    task = TaskConfig(kind="sft", steps=30, epochs=1.0)
    for kind in ("wrap", "drop", "short"):
        found = run_length(task, num_samples=249, global_batch=10, last_batch=kind)
        assert found == RunLength(30, 300, 10)
