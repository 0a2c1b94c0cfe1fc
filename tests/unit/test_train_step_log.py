"""What a ``train`` line covers: every step since the last line, and no evaluation between them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import llmx.train.step_log as module
from llmx.config import OptimConfig
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
    engine = SimpleNamespace(
        device=torch.device("cpu"),
        precision="fp32",
        module=torch.nn.Linear(1, 1),
        config=None,
        engine=SimpleNamespace(skipped_steps=0),
        routing=SimpleNamespace(measure=lambda **_: {}),
        last_norm=lambda: torch.tensor(1.0),
        grad_norm=lambda: 1.0,
        loss_scale=lambda: 1.0,
    )
    session: Any = SimpleNamespace(
        engine=engine,
        exp=SimpleNamespace(task=SimpleNamespace(spike_factor=None), optim=OptimConfig()),
        plan=SimpleNamespace(world_size=1, peak_tflops=0.0),
        start=SimpleNamespace(tokens_seen=0, target_tokens_seen=0, losses=[]),
        length=SimpleNamespace(samples_at=lambda step: 4 * step),
        train_store=range(100),
        metrics=SimpleNamespace(write=lambda kind, **line: lines.append(line)),
        say=lambda text: None,
    )
    return StepLog(session, total=100)


def step(number: int, *, targets: int) -> Any:
    return SimpleNamespace(step=number, tokens=10, target_tokens=targets, square_tokens=100)


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
