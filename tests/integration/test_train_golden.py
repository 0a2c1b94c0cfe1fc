"""The demo's loss curve is the recorded one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.command_runs import train
from tests.conftest import GOLDEN

pytestmark = pytest.mark.deepspeed

CURVE = GOLDEN / "train" / "loss_curve.json"

DEMO = ("task.steps=20", "task.eval_generate=0", "task.save_model=false", "data.num_workers=1")


def furthest(found: list[float], expected: list[float]) -> float:
    """The largest relative difference of two curves of one length."""
    assert len(found) == len(expected)
    return max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))


def test_the_recorded_curve(tmp_path: Path) -> None:
    plain = train(tmp_path, "plain", "experiment=demo", *DEMO)
    assert plain.exit_code == 0, plain.said
    assert plain.series("step") == list(range(1, 21))
    found = {name: plain.series(name) for name in ("loss", "lr", "grad_norm")}
    if os.environ.get("LLMX_RECORD_GOLDEN") == "1":
        CURVE.write_text(json.dumps(found, indent=1) + "\n")
    golden = json.loads(CURVE.read_text())
    # Sums in another order (stage 3, one rank) moved the losses by at most 5e-6 when this was
    # recorded; the same split again does not move them at all.
    assert furthest(found["loss"], golden["loss"]) < 1e-4, f"now {plain.losses}"
    # The schedule is arithmetic of the step alone.
    assert furthest(found["lr"], golden["lr"]) < 1e-12
    assert furthest(found["grad_norm"][:1], golden["grad_norm"][:1]) < 1e-4
