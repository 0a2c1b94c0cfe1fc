"""A run directory as a run leaves it, for tests of trackers and of the report.

The files are those of ``docs/development/contracts.md``: config, plan, metrics, samples and result,
with values that a small run really had.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml

from llmx.config import Experiment, ModelConfig, TaskConfig, TrackingConfig, to_dict
from llmx.plan.types import BatchPlan, HostPlan, MemoryPlan, Plan, RankPlan
from llmx.run.metrics import Metric
from llmx.run.rundir import RunDir, write_json, write_text

RUN_ID = "20300101-120000-4f2a9c"
START_S = 1_900_000_000.0


def plan() -> Plan:
    """Two ranks on this machine, 8 samples of 128 tokens each."""
    host = HostPlan("localhost", "127.0.0.1", 22, None, None, 2, "cpu", None, True)
    memory = MemoryPlan("cpu", 0.01, 0.01, 0.02, 0.06, 0.0, 0.3, 0.0, 0.0)
    return Plan(
        hosts=(host,),
        ranks=(RankPlan(0, 0, "cpu", 8), RankPlan(1, 0, "cpu", 8)),
        accelerator="cpu",
        precision="fp32",
        precision_reason="CPU: bf16 is emulated here",
        batch=BatchPlan(32, 2, (8, 8), 128),
        transport="local",
        master_addr="127.0.0.1",
        num_parameters=1_400_000,
        peak_tflops=0.0,
        memory=(memory,),
        notes=("data.eval_samples=64 are 2 % of the rows.",),
    )


DECLARED = {"exact_match": Metric("exact match", "percent", higher_is_better=True).to_dict()}
"""``metrics`` of a ``start`` line of a task with one metric."""


def lines(steps: int = 40) -> list[dict[str, Any]]:
    """What rank 0 writes: start, evaluations, a train line every 2 steps, end."""
    records: list[dict[str, Any]] = [
        {
            "kind": "start",
            "metrics": DECLARED,
            "time": START_S,
            "total_steps": steps,
            "tokens_per_step": 4096,
            "num_parameters": 1_400_000,
            "loss_unit": "nats per target token",
            "num_samples": 900,
            "world_size": 2,
            "resumed_from": 0,
        },
        evaluation(0, 5.5, 0.0),
    ]
    records += [train_line(step) for step in range(2, steps + 1, 2)]
    records += [evaluation(steps, 0.4, 0.96875)]
    records += [{"kind": "end", "step": steps, "time": START_S + steps}]
    return records


def train_line(step: int) -> dict[str, Any]:
    """One ``train`` line."""
    return {
        "kind": "train",
        "step": step,
        "time": START_S + step,
        "samples": 32 * step,
        "tokens": 3900 * step,
        "target_tokens": 1200 * step,
        "epoch": 32 * step / 900,
        "loss": 0.3 + 5.2 * math.exp(-step / 12),
        "lr": 1e-3 * min(1.0, step / 8),
        "grad_norm": 1.5 / step,
        "loss_scale": 1.0,
        "step_time_s": 0.25,
        "tokens_per_s": 15_600.0 + step,
        "mfu": None,
        "memory_gib": [0.41, 0.43],
        "data_wait_s": 0.001,
    }


def evaluation(step: int, loss: float, match: float | None) -> dict[str, Any]:
    """One ``eval`` line."""
    return {
        "kind": "eval",
        "step": step,
        "time": START_S + step,
        "loss": loss,
        "target_tokens": 999,
        "exact_match": match,
    }


def experiment(root: Path, **tracking: Any) -> Experiment:
    """The experiment of the run in ``root``."""
    return Experiment(
        name="tiny-演示",
        run_dir=str(root),
        model=ModelConfig(name="tiny", kind="llama", config={"hidden_size": 128, "rope": None}),
        task=TaskConfig(kind="sft", steps=40, eval_generate=3),
        tracking=TrackingConfig(**tracking),
    )


def result(outcome: str = "ok", **values: Any) -> dict[str, Any]:
    """``result.json``."""
    return {
        "run_id": RUN_ID,
        "outcome": outcome,
        "cause": "",
        "fix": "",
        "failed_rank": None,
        "host": None,
        "traceback": "",
        "started": START_S,
        "ended": START_S + 60,
        "steps": 40,
        "final_loss": 0.49,
        "exact_match": 0.96875,
        "tokens_per_s": 15_622.0,
        "model": "",
        "exit_code": 0 if outcome == "ok" else 1,
        **values,
    }


def write_start(root: Path, **tracking: Any) -> RunDir:
    """The run directory as it is when the ranks start."""
    run = RunDir(root)
    config = to_dict(experiment(root, **tracking))
    write_text(run.config, yaml.safe_dump(config, allow_unicode=True, sort_keys=False))
    write_json(run.plan, plan().to_dict())
    write_json(run.ds_config, {"train_batch_size": 32, "zero_optimization": {"stage": 2}})
    provenance = {"git": {"commit": "abc123", "diff": "+x\n"}, "packages": {"torch": "2.13.0"}}
    write_json(run.provenance, provenance)
    write_json(run.identity, {"run_id": RUN_ID})
    return run


def append(run: RunDir, records: list[dict[str, Any]]) -> None:
    """Append lines to ``metrics.jsonl`` as rank 0 does, flushed a line at a time."""
    with run.metrics.open("a", encoding="utf-8") as stream:
        for record in records:
            stream.write(json.dumps(record) + "\n")
            stream.flush()
