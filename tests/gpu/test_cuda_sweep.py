"""A sweep in which CUDA runs out of memory. Skipped, saying so, without a GPU.

``python -m pytest -m gpu tests/gpu/test_cuda_sweep.py``
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmx.hardware.detect import detect_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not detect_gpus(), reason="no CUDA device on this machine"),
]


def test_a_trial_out_of_memory_spares_the_larger_one(tmp_path: Path) -> None:
    """Each token takes about 1 MiB in each layer: 512 rows of 40 tokens need some 300 GiB."""
    words = [
        "model.config.hidden_size=64", "model.config.intermediate_size=131072",
        "model.config.num_hidden_layers=16", "data.packing=none", "data.eval_samples=0",
        "batch.global_batch=null", "batch.accumulation=1", "batch.micro_batch=2,512,1024",
        "sweep.trial_steps=3", "hardware.slots=1", "tracking=none",
        f"hydra.sweep.dir={tmp_path}/sweep",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "llmx", "-m", "experiment=demo", *words],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0, "a trial has failed"
    trials = json.loads((tmp_path / "sweep/sweep.json").read_text())["trials"]
    assert [trial["outcome"] for trial in trials] == ["ok", "oom", "pruned"], done.stdout
    assert "out of memory" in trials[1]["cause"]
    assert trials[2]["cause"].startswith("trial 1 ran out of memory and needs no more")
    best = (tmp_path / "sweep/best.yaml").read_text()
    assert "- batch.micro_batch=2\n" in best
