"""The learning rate is a pure function of the step, with values that can be checked by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import transformers

from llmx.config import OptimConfig, TaskConfig
from llmx.errors import ConfigError
from llmx.train.schedule import RunLength, lr_at, run_length, warmup_steps

HALF = math.sqrt(0.5)


def rates(total: int, **values: Any) -> list[float]:
    optim = OptimConfig(kind="adamw", **{"lr": 1.0, "warmup_steps": 0, **values})
    return [lr_at(step, optim=optim, total=total) for step in range(total)]


@pytest.mark.parametrize(
    ("schedule", "values", "wanted"),
    [
        ("constant", {"warmup_steps": 4, "lr": 2.0}, [0.5, 1.0, 1.5, *[2.0] * 5]),
        ("linear", {}, [1.0, 0.75, 0.5, 0.25]),
        ("cosine", {}, [1.0, (1 + HALF) / 2, 0.5, (1 - HALF) / 2]),
        # The floor is reached at the end of the decay, and kept.
        ("linear", {"decay_end_fraction": 0.5, "min_lr_ratio": 0.1},
         [1.0, 0.82, 0.64, 0.46, 0.28, *[0.1] * 5]),
        # The decay begins where the warmup ends, and one that would end before falls right after.
        ("cosine", {"warmup_steps": 2, "decay_end_fraction": 0.6, "min_lr_ratio": 0.2},
         [0.5, 1.0, 1.0, 0.6 + 0.4 * HALF, 0.6, 0.6 - 0.4 * HALF, *[0.2] * 4]),
        ("linear", {"warmup_steps": 5, "decay_end_fraction": 0.3},
         [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, *[0.0] * 4]),
    ],
)  # fmt: skip
def test_values_by_hand(schedule, values, wanted) -> None:
    assert rates(len(wanted), schedule=schedule, **values) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ({"warmup_fraction": 0.03}, 2),  # rounded up
        ({}, 0),
        ({"warmup_fraction": 0.5, "warmup_steps": 0}, 0),  # steps win
        ({"warmup_steps": 1000}, 50),
    ],
)
def test_the_length_of_the_warmup(values, steps) -> None:
    assert warmup_steps(OptimConfig(kind="adamw", **values), total=50) == steps


def length(last_batch: str = "wrap", num_samples: int = 249, batch: int = 10, **task: Any) -> Any:
    config = TaskConfig(kind="sft", **task)
    return run_length(config, num_samples=num_samples, global_batch=batch, last_batch=last_batch)


def test_total_steps_from_steps_or_epochs() -> None:
    for kind in ("wrap", "drop", "short"):
        assert length(kind, steps=30, epochs=1.0) == RunLength(30, 300, 10)
    for epochs, steps in ((1.0, 3), (2.0, 5), (0.5, 2)):
        assert length(num_samples=10, batch=4, epochs=epochs).steps == steps
    assert length(num_samples=10, batch=1000, epochs=0.01).steps == 1
    with pytest.raises(ConfigError, match="task.epochs=3"):
        length()


def test_the_last_batch_wraps_is_dropped_or_is_short() -> None:
    wrap, drop, short = (length(kind, epochs=1.0) for kind in ("wrap", "drop", "short"))
    assert (wrap.steps, wrap.samples, wrap.stop) == (25, 250, None)
    assert (drop.steps, drop.samples, drop.stop) == (24, 240, None)
    assert (short.steps, short.samples, short.stop) == (25, 249, 249)
    assert [short.samples_at(step) for step in (0, 1, 24, 25)] == [0, 10, 240, 249]
    # Only the last batch of the run: those before go on into the next epoch.
    assert length("short", epochs=2.0) == RunLength(50, 498, 10)
    assert length("drop", epochs=2.0) == RunLength(49, 490, 10)
    for kind in ("wrap", "drop", "short"):
        assert length(kind, epochs=1.0, num_samples=250) == RunLength(25, 250, 10)
    assert length("short", epochs=0.07, num_samples=100).samples == 7
    assert length("short", epochs=0.001).samples == 1
    with pytest.raises(ConfigError, match=r"last_batch=drop: 1 epoch of 9 samples do not fill"):
        length("drop", epochs=1.0, num_samples=9)


def of_scheduler(make: Any, total: int, *, lr: float = 3e-4) -> list[float]:
    """Rates of a scheduler that ``make`` makes for an optimizer, at each update."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    schedule, found = make(optimizer), []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


WSD = {"num_decay_steps": 8, "min_lr_ratio": 0.05}


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
            ("get_wsd_schedule", {**WSD, "decay_type": shape},
             {"schedule": "wsd", "decay_shape": shape, "min_lr_ratio": 0.05, "decay_fraction": 0.2})
            for shape in ("linear", "cosine", "1-sqrt")
        ),
    ],
)  # fmt: skip
def test_values_of_transformers_from_the_end_of_the_warmup(name, theirs, ours) -> None:
    total, warmup = 40, 5
    steps = {"num_warmup_steps": warmup, "num_training_steps": total}
    wanted = of_scheduler(lambda sgd: getattr(transformers, name)(sgd, **steps, **theirs), total)
    found = rates(total, lr=3e-4, warmup_steps=warmup, **ours)
    assert found[warmup:] == pytest.approx(wanted[warmup:], rel=1e-12, abs=1e-18)
    assert found[:warmup] == pytest.approx([3e-4 * (k + 1) / warmup for k in range(warmup)])


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.3])
def test_one_cycle_is_pytorchs(fraction: float) -> None:
    total, lr, theirs = 40, 3e-4, torch.optim.lr_scheduler.OneCycleLR
    options = {"total_steps": total, "pct_start": fraction, "cycle_momentum": False}
    wanted = of_scheduler(lambda sgd: theirs(sgd, lr, **options), total - 1)
    found = rates(
        total, lr=lr, warmup_steps=None, warmup_fraction=fraction, schedule="one_cycle",
        min_lr_ratio=1 / 25 / 1e4,
    )  # fmt: skip
    assert found[:-1] == pytest.approx(wanted, rel=1e-9)
    assert found[-1] == pytest.approx(lr / 25 / 1e4)


@pytest.mark.parametrize(
    "schedule", ["cosine", "linear", "wsd", "polynomial", "cosine_restarts", "one_cycle"]
)
def test_every_schedule_stays_between_its_floor_and_its_peak(schedule: str) -> None:
    for total, warmup, end in itertools.product((1, 2, 3, 10), (0, 1, 2), (0.0, 0.5, 1.0)):
        optim = OptimConfig(
            schedule=schedule, lr=1.0, warmup_steps=warmup, decay_end_fraction=end,
            decay_fraction=1.0, min_lr_ratio=0.25, start_lr_ratio=0.25, cycles=3,
        )  # fmt: skip
        found = [lr_at(step, optim=optim, total=total) for step in range(total)]
        assert all(0.25 <= rate <= 1.0 for rate in found), (total, warmup, end)
        # Afterwards the floor stays, for a run that is made longer.
        assert lr_at(5 * total, optim=optim, total=total) == pytest.approx(0.25)
