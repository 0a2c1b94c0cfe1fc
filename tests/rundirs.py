"""Run directories for tests of the rank's side: config, plan and DeepSpeed's JSON, written as
``llmx.run.snapshot`` writes them; and starting the ranks with the real ``deepspeed``."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from llmx.config import Experiment, experiment_from_dict, to_dict
from llmx.plan import ds_config, make_plan
from llmx.plan.types import BatchPlan, Plan
from llmx.run.rundir import RunDir, write_json, write_text

TINY_LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def experiment(run_dir: Path, *, ranks: int = 2, **groups: Any) -> Experiment:
    """A small CPU experiment on the bundled data; ``groups`` override key by key."""
    values: dict[str, Any] = {
        "name": "test",
        "run_dir": str(run_dir),
        "precision": "fp32",
        "model": {
            "name": "tiny",
            "kind": "llama",
            "init": "scratch",
            "tokenizer": "demo",
            "config": dict(TINY_LLAMA),
        },
        "data": {
            "path": "demo",
            "seq_len": 128,
            "max_rows": 400,
            "eval_samples": 0,
            "cache_dir": str(run_dir.parent / "cache"),
        },
        "task": {"kind": "sft", "steps": 6, "log_every_steps": 1},
        "zero": {"stage": 2},
        "hardware": {
            "name": "cpu",
            "hosts": [{"name": "localhost", "slots": ranks, "device": "cpu"}],
            "devices": {"cpu": {"accelerator": "cpu", "precisions": ["fp32", "bf16", "fp16"]}},
        },
        "optim": {"kind": "adamw", "lr": 1e-3, "warmup_steps": 2},
        "batch": {"micro_batch": 4, "accumulation": 1},
        "launch": {"transport": "local"},
    }
    for group, override in groups.items():
        if isinstance(override, dict):
            values[group] = {**values.get(group, {}), **override}
        else:
            values[group] = override
    return experiment_from_dict(values)


def write_run(exp: Experiment, *, plan: Plan | None = None) -> RunDir:
    """The files that the ranks read."""
    run_dir = RunDir(Path(exp.run_dir))
    plan = plan or make_plan(exp)
    write_text(run_dir.config, yaml.safe_dump(to_dict(exp), sort_keys=False))
    write_json(run_dir.plan, plan.to_dict())
    write_json(run_dir.ds_config, ds_config(exp.model, exp.zero, exp.optim, plan))
    return run_dir


def with_batch(plan: Plan, micro_batches: tuple[int, ...], accumulation: int) -> Plan:
    """The same plan with this split, equal or not."""
    batch = BatchPlan(
        sum(micro_batches) * accumulation, accumulation, micro_batches, plan.batch.seq_len
    )
    ranks = tuple(
        replace(rank, micro_batch=micro)
        for rank, micro in zip(plan.ranks, micro_batches, strict=True)
    )
    return replace(plan, batch=batch, ranks=ranks)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def rank_environment(**more: str) -> dict[str, str]:
    """What a rank gets: no GPU, one thread, nothing of this test run's own."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "SLURM_"))
    }
    return {
        **kept,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **more,
    }


def launch(
    target: str, *arguments: str, ranks: int, timeout_s: float = 900.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Start ``ranks`` processes of a module (or of a script, by its path) with ``deepspeed``.

    ``tests.forked_ranks.launch`` does so at a tenth of the cost.
    """
    program = str(Path(sys.executable).with_name("deepspeed"))
    return launched(program, target, *arguments, ranks=ranks, timeout_s=timeout_s, **environment)


def launched(
    program: str,
    target: str,
    *arguments: str,
    ranks: int,
    timeout_s: float,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """``launch`` by this ``deepspeed``, or what stands in for it."""
    command = [
        program,
        f"--num_gpus={ranks}",
        f"--master_port={free_port()}",
        "--no_local_rank",
        *([] if target.endswith(".py") else ["--module"]),
        target,
        *arguments,
    ]
    return subprocess.run(
        command,
        env=rank_environment(LOCAL_SIZE=str(ranks), **environment),
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def logs(run_dir: RunDir) -> str:
    """All ranks' logs, for the message of a failed assertion."""
    return "\n".join(
        f"== {path.name}\n{path.read_text()[-4000:]}" for path in sorted(run_dir.logs.glob("*"))
    )


PARITY_MODELS: dict[str, dict[str, Any]] = {
    "llama": {**TINY_LLAMA, "hidden_size": 32, "intermediate_size": 48},
    "qwen3": {**TINY_LLAMA, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8},
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "opt": {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
}
"""A small network of each supported architecture, without dropout."""

EXPERT_MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {
        **TINY_LLAMA,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_local_experts": 4,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
    },
}
"""Mixtures of experts, with an auxiliary loss that is felt."""


def parity_experiment(
    run_dir: Path,
    *,
    ranks: int = 1,
    stage: int = 0,
    kind: str = "llama",
    layout: str = "packed",
    attention: str = "auto",
) -> Experiment:
    """Plain SGD on a model of 32 dimensions: gradients can be read off the weights."""
    exp = experiment(
        run_dir,
        ranks=ranks,
        seed=3,
        model={
            "name": kind,
            "kind": kind if kind in PARITY_MODELS else "hf",
            **({} if kind in PARITY_MODELS else {"path": str(run_dir)}),
            "init": "scratch",
            "tokenizer": "demo",
            "config": {**PARITY_MODELS, **EXPERT_MODELS}[kind],
            "attention": attention,
        },
        data={"seq_len": 48, "layout": layout},
        zero={"stage": stage},
        batch={"micro_batch": 1},
        optim={"kind": "sgd", "lr": 0.5, "clip_norm": 0.0, "warmup_steps": 1},
    )
    exp.model.kind = kind  # that of a config.json, without writing one
    return exp
