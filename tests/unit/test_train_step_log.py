"""What a ``train`` line covers: every step since the last line, and no evaluation between them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import llmx.train.step_log as module
from llmx.config import AdapterConfig, OptimConfig
from llmx.tasks import Loss
from llmx.train.step_log import StepLog


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(torch.distributed, "all_gather", lambda out, mine: out[0].copy_(mine))
    return made


@pytest.fixture
def lines() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def log(clock: Clock, lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> StepLog:
    """Of one rank; a model of one weight."""
    flops = SimpleNamespace(of_step=lambda **_: 0.0)
    monkeypatch.setattr(module, "model_flops", lambda *_args, **_kwargs: flops)
    main = SimpleNamespace(
        module=torch.nn.Linear(1, 1),
        spec=SimpleNamespace(trained=True),
        attention=SimpleNamespace(causal=True),
        routing=SimpleNamespace(measure=lambda **_: {}),
    )
    engine = SimpleNamespace(
        device=torch.device("cpu"),
        precision="fp32",
        main=main,
        models={"policy": main},
        engine=SimpleNamespace(skipped_steps=0),
        last_norm=lambda: torch.tensor(1.0),
        grad_norm=lambda: 1.0,
        loss_scale=lambda: 1.0,
    )
    session: Any = SimpleNamespace(
        engine=engine,
        exp=SimpleNamespace(
            task=SimpleNamespace(spike_factor=None), optim=OptimConfig(), adapter=AdapterConfig()
        ),
        plan=SimpleNamespace(world_size=1, peak_tflops=0.0),
        resume_point=SimpleNamespace(tokens_seen=0, target_tokens_seen=0, losses=[]),
        length=SimpleNamespace(samples_at=lambda step: 4 * step),
        train_store=range(100),
        metrics=SimpleNamespace(write=lambda kind, **line: lines.append(line)),
        log=lambda text: None,
    )
    return StepLog(session, total=100)


def step(number: int, *, targets: int) -> Any:
    counts = {"tokens": 10, "target_tokens": targets, "square_tokens": 100, "work_fs": 7}
    return SimpleNamespace(step=number, weight=targets, **counts)


def test_a_line_covers_its_interval(log: StepLog, clock: Clock, lines: list[Any]) -> None:
    """An evaluation in the middle takes its own time away and no step."""
    for number, (targets, loss_sum) in enumerate([(10, 40.0), (30, 60.0), (10, 10.0)]):
        one = step(number, targets=targets)
        clock.now += 2.0
        log.add(one, torch.tensor(loss_sum))
        if number == 0:
            with log.paused():
                clock.now += 100.0
    log.write(one)
    line = lines[-1]
    assert line["loss"] == 1.0  # of the newest step
    assert line["loss_mean"] == pytest.approx(110 / 50)  # of the interval's target tokens
    assert line["step_time_s"] == 2.0
    assert line["tokens_per_s"] == 30 / 6
    # The next interval knows nothing of this one.
    clock.now += 1.0
    log.add(one, torch.tensor(20.0))
    log.write(one)
    assert lines[-1]["loss_mean"] == lines[-1]["loss"] == 2.0
    assert lines[-1]["step_time_s"] == 1.0


def test_metrics_of_the_loss_are_means_over_the_interval(
    log: StepLog, clock: Clock, lines: list[Any]
) -> None:
    """By the loss's own weight, or by one of their own; nothing of the interval before."""
    for number, (right, weight) in enumerate([(3.0, 4.0), (1.0, 4.0)]):
        clock.now += 1.0
        metrics = {
            "accuracy": torch.tensor(right),
            "margin": (torch.tensor(6.0), 2.0),
            "nothing": (torch.tensor(0.0), 0.0),
        }
        log.metrics.add(Loss(torch.tensor(2.0), weight, metrics))
        one = step(number, targets=4)
        log.add(one, torch.tensor(2.0))
    log.write(one)
    assert lines[0]["accuracy"] == 0.5
    assert lines[0]["margin"] == 3.0
    assert lines[0]["nothing"] is None
    clock.now += 1.0
    log.metrics.add(Loss(torch.tensor(2.0), 4.0, {"accuracy": torch.tensor(4.0)}))
    log.add(step(2, targets=4), torch.tensor(2.0))
    log.write(step(2, targets=4))
    assert lines[1]["accuracy"] == 1.0
    assert "margin" not in lines[1]
