"""``tests/programs/ranks.py``, whose ranks have pretended GPUs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cuda"
os.environ.pop("CUDA_VISIBLE_DEVICES", None)

# Before there is a GPU: they import what only torch for CUDA has.
import transformers.models.bert.modeling_bert
import transformers.models.llama.modeling_llama  # noqa: F401
import yaml

from tests.pretend_gpu import collectives, cuda, fetches, kernels
from tests.pretend_gpu.devices import Devices

DEVICES = Devices()


def be_rank(run_dir: Path) -> None:
    """Take the GPU that the plan has for this rank. Of several hosts, this one is each in turn."""
    from llmx.plan.types import Plan
    from llmx.run.rundir import RunDir, read_json

    run = RunDir(run_dir)
    plan = Plan.from_dict(read_json(run.plan))
    rank = int(os.environ["RANK"])
    host = plan.ranks[rank].host
    peers = [other.rank for other in plan.ranks if other.host == host]
    values = yaml.safe_load(run.config.read_text())
    hardware = values["hardware"]
    device = hardware["devices"][hardware["hosts"][host]["device"]]
    DEVICES.local_rank, DEVICES.count = peers.index(rank), len(peers)
    major, minor = str(float(device["compute_capability"])).split(".")
    DEVICES.capability = int(major), int(minor)
    os.environ.update(LOCAL_RANK=str(DEVICES.local_rank), LOCAL_SIZE=str(DEVICES.count))
    DEVICES.report.open(run.ranks / f"pretended-{rank:03d}.jsonl")
    watch_steps(values["task"])


def watch_steps(task: dict[str, Any]) -> None:
    """Let the report watch from after step 2 to before the last step, where no line is logged."""
    from llmx.train.status import RankStatus

    last, at_step = task["stop_at_step"] or task["steps"], RankStatus.at_step

    def watched(status: RankStatus, step: int) -> None:
        DEVICES.report.watching = status.state == "training" and 2 <= step < last - 1
        at_step(status, step)

    RankStatus.at_step = watched  # type: ignore[method-assign]


def tell_phases() -> None:
    """Let the report know which part of a step a rank is in."""
    from llmx.models.decode import Decoding
    from llmx.rollout.client import RolloutServers
    from llmx.train import loop

    parts: list[tuple[str, Any, str]] = [
        ("prefill", Decoding, "_prefill"),
        ("token", Decoding, "_decode"),
        ("rollout", loop, "rollout_step"),
        ("push", RolloutServers, "_send_weights"),
    ]
    for phase, owner, name in parts:
        setattr(owner, name, DEVICES.report.phase(phase)(getattr(owner, name)))


def main() -> None:
    # Before DeepSpeed is imported, which keeps some of what is replaced.
    cuda.install(DEVICES)
    collectives.install(DEVICES)
    DEVICES.install()
    from llmx import worker
    from tests.programs import ranks

    kernels.install(DEVICES)
    tell_phases()
    fetches.install(DEVICES.report)
    run_worker = worker.main

    def run_pretended(argv: list[str]) -> int:
        be_rank(Path(argv[0]))
        try:
            return run_worker(argv)
        finally:
            DEVICES.report.close()

    worker.main = run_pretended
    ranks.main()


if __name__ == "__main__":
    main()
