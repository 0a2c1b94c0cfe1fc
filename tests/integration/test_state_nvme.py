"""Optimizer states on a disk (ZeRO-Infinity): saved from their files, restored into new ones.

``python -m pytest -m deepspeed tests/integration/test_state_nvme.py``, where ``libaio-dev`` is
installed and ``python -c 'from deepspeed.ops.op_builder import AsyncIOBuilder as B; B().load()'``
has built DeepSpeed's extension (minutes).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.forked_ranks import launch


def extension() -> Path:
    """Where torch puts it."""
    directory = os.environ.get("TORCH_EXTENSIONS_DIR")
    if directory:
        return Path(directory) / "async_io" / "async_io.so"
    return next(Path("~/.cache/torch_extensions").expanduser().glob("*/async_io/*.so"), Path("-"))


pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(not extension().is_file(), reason="DeepSpeed's async_io is not built"),
]


def test_states_on_a_disk_go_on_bit_for_bit_and_elsewhere(tmp_path: Path) -> None:
    nvme = {"offload_optimizer": "nvme", "nvme_path": str(tmp_path / "disk")}
    common = {
        "world": 2,
        "save_at": 4,
        "micro_batches": [2, 2],
        "accumulation": 1,
        "precision": "bf16",
        # Sub-groups of over 1 MiB are swapped, smaller ones stay in memory: both are here.
        "config": {"hidden_size": 192, "intermediate_size": 1024},
    }
    jobs = [
        {
            "name": "disk",
            "stage": 3,
            "zero": {**nvme, "offload_param": "nvme", "sub_group_size": 300_000},
            **common,
        },
        {"name": "memory", "load": "disk", "until": 7, "stage": 2, **common},
        {"name": "disk-again", "load": "memory", "until": 7, "stage": 3, "zero": nvme, **common},
    ]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    done = launch(
        "tests.programs.state", str(tmp_path / "jobs.json"), str(tmp_path), ranks=2, timeout_s=500
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    found = {
        (job["name"], rank): json.loads((tmp_path / f"{job['name']}.{rank}.json").read_text())
        for job in jobs
        for rank in (0, 1)
    }
    assert {key: result["wrong"] for key, result in found.items()} == {key: {} for key in found}
    assert len(found["disk", 0]["losses"]) == 7
    losses = {name: [loss for loss, _ in found[name, 0]["losses"]] for name in ("disk", "memory")}
    assert losses["memory"] == pytest.approx(losses["disk"][4:], rel=5e-3)
    assert list((tmp_path / "disk").rglob("exp_avg*.swp")), "nothing was swapped"
