"""What DeepSpeed computes, by stage and precision, held against what it should.

``python -m pytest -m deepspeed tests/integration/test_train_engines.py``
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rundirs import rank_environment

pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(600)]

STAGES = ["0", "1", "2", "3"]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every check of ``tests.programs.engines``, answered by two ranks."""
    out = tmp_path_factory.mktemp("engines")
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.engines", str(out)],
        env=rank_environment(),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return out


def answers(out: Path, name: str) -> list[Any]:
    return [json.loads((out / f"{name}.{rank}.json").read_text())["answer"] for rank in range(2)]


@pytest.mark.parametrize("stage", STAGES)
def test_a_growing_loss_scale_changes_no_update(out: Path, stage: str) -> None:
    """DeepSpeed alone halves the update at which the scale doubles."""
    for found in answers(out, "growing_loss_scale"):
        one = found[stage]
        assert one["scales"] == [256.0, 1024.0]
        assert one["apart"] < 1e-5  # half an update is 7e-4
        still, growing = one["numbers"]
        for expected, got in zip(still, growing, strict=True):
            assert got == pytest.approx(expected, rel=1e-5)
