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


def of_transformers(name: str, total: int, *, lr: float = 3e-4, **values: Any) -> list[float]:
    """Rates of one of ``transformers``' schedules at each update."""
    import torch
    import transformers

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=lr)
    schedule = getattr(transformers, name)(optimizer, **values)
    return of_scheduler(optimizer, schedule, total)


def of_scheduler(optimizer: Any, schedule: Any, total: int) -> list[float]:
    found = []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("get_cosine_with_hard_restarts_schedule_with_warmup", {"num_cycles": 3},
         {"schedule": "cosine_restarts", "cycles": 3}),
        ("get_polynomial_decay_schedule_with_warmup", {"power": 2.5, "lr_end": 3e-5},
         {"schedule": "polynomial", "decay_power": 2.5, "min_lr_ratio": 0.1}),
        ("get_linear_schedule_with_warmup", {}, {"schedule": "polynomial"}),
        ("get_cosine_schedule_with_warmup", {}, {"schedule": "cosine_restarts", "cycles": 1}),
        *(
            ("get_wsd_schedule", {"num_decay_steps": 8, "decay_type": shape, "min_lr_ratio": 0.05},
             {"schedule": "wsd", "decay_shape": shape, "min_lr_ratio": 0.05, "decay_fraction": 0.2})
            for shape in ("linear", "cosine", "1-sqrt")
        ),
    ],
)  # fmt: skip
def test_values_of_transformers_from_the_end_of_the_warmup(
    name: str, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    total, warmup = 40, 5
    wanted = of_transformers(
        name, total, num_warmup_steps=warmup, num_training_steps=total, **theirs
    )
    found = rates(total, lr=3e-4, warmup_steps=warmup, **ours)
    assert found[warmup:] == pytest.approx(wanted[warmup:], rel=1e-12, abs=1e-18)
    assert found[:warmup] == pytest.approx([3e-4 * (k + 1) / warmup for k in range(warmup)])


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.3])
def test_one_cycle_is_pytorchs(fraction: float) -> None:
    import torch

    total, lr = 40, 3e-4
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, lr, total_steps=total, pct_start=fraction, cycle_momentum=False
    )
    wanted = of_scheduler(optimizer, theirs, total - 1)
    found = rates(
        total, lr=lr, warmup_steps=None, warmup_fraction=fraction, schedule="one_cycle",
        min_lr_ratio=1 / 25 / 1e4,
    )  # fmt: skip
    assert found[:-1] == pytest.approx(wanted, rel=1e-9)
    assert found[-1] == pytest.approx(lr / 25 / 1e4)


def test_every_schedule_stays_between_nothing_and_its_peak() -> None:
    for schedule in ("cosine", "linear", "wsd", "polynomial", "cosine_restarts", "one_cycle"):
        for total in (1, 2, 3, 10):
            for warmup in (0, 1, 2):
                for end in (0.0, 0.5, 1.0):
                    found = rates(
                        total, schedule=schedule, warmup_steps=warmup, decay_end_fraction=end,
                        decay_fraction=1.0, min_lr_ratio=0.25, start_lr_ratio=0.25, cycles=3,
                    )  # fmt: skip
                    assert all(0.25 <= rate <= 1.0 for rate in found), (schedule, total, warmup)
                    # Afterwards the floor stays, for a run that is made longer.
                    after = lr_at(
                        5 * total, total=total,
                        optim=OptimConfig(schedule=schedule, lr=1.0, warmup_steps=warmup,
                                          decay_end_fraction=end, min_lr_ratio=0.25),
                    )  # fmt: skip
                    assert after == pytest.approx(0.25)


def test_wsd_goes_on_at_the_stable_rate_when_a_run_is_made_longer() -> None:
    values = {"schedule": "wsd", "warmup_steps": 2}
    assert rates(20, **values)[:18] == rates(40, **values)[:18]
    assert rates(20, **values)[17:] == pytest.approx([1.0, 1.0, 0.5])
