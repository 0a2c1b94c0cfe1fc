"""Run directories of ranks with pretended GPUs, and of the same run on CPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmx.run.rundir import RunDir
from tests.pretend_gpu.report import read
from tests.rundirs import experiment, write_run

DEVICES = {
    "a100": {"compute_capability": 8.0, "memory_gib": 40, "precisions": ["fp32", "fp16", "bf16"]},
    "v100": {"compute_capability": 7.0, "memory_gib": 32, "precisions": ["fp32", "fp16"]},
}


def gpus(*hosts: tuple[str, int]) -> dict[str, Any]:
    """The group ``hardware`` of hosts with so many GPUs of a type."""
    return {
        "name": "pretended",
        "hosts": [
            {"name": f"node-{number}", "address": "127.0.0.1", "slots": slots, "device": device}
            for number, (device, slots) in enumerate(hosts)
        ],
        "devices": {device: {"accelerator": "cuda", **DEVICES[device]} for device in dict(hosts)},
    }


def run_of(directory: Path, hardware: dict[str, Any] | None, **groups: Any) -> RunDir:
    """A small run; ``hardware=None``: on two CPU ranks."""
    defaults: dict[str, Any] = {
        "data": {"seq_len": 64, "max_rows": 200, "eval_samples": 8},
        "task": {"steps": 8, "log_every_steps": 8, "save_model": False},
        "batch": {"micro_batch": 2, "accumulation": 2},
        "checkpoint": {"every_steps": 100},
        "launch": {"comm_timeout_s": 120},
    }
    for group, values in groups.items():
        known = defaults.get(group)
        merged = isinstance(known, dict) and isinstance(values, dict)
        defaults[group] = {**known, **values} if merged else values
    if hardware is not None:
        defaults["hardware"] = hardware
        if len(hardware["hosts"]) > 1:
            defaults["launch"] = {**defaults["launch"], "transport": "ssh"}
    return write_run(experiment(directory, **defaults))


def reports(run: RunDir) -> list[dict[str, list[Any]]]:
    """What each rank saw."""
    return [read(path) for path in sorted(run.ranks.glob("pretended-*.jsonl"))]
