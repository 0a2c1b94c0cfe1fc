"""Models built, trained for two steps and exported, many in one launch; digests and files out.

``deepspeed --num_gpus 2 --module --no_local_rank tests.programs.models JOBS.json OUT``

A job is ``{"name", "kind", "stage", "precision", "config"}`` and optionally ``"path"`` (weights
to load) and ``"trained": false``. Rank 0 writes ``OUT/<name>.json`` with the digest of the first
weights and the dtypes of the buffers, and of a model that was trained ``OUT/<name>.pt`` with the
weights in the end and ``OUT/<name>`` with the export.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from llmx.checkpoint.export.model import export_model
from llmx.config import Experiment
from llmx.models.factory import true_vocab
from llmx.plan import ds_config, make_plan
from llmx.plan.types import Plan
from llmx.train.batches import Layout, make_step
from llmx.train.engine.build import Engine, build_engine
from llmx.train.engine.process_group import join_process_group
from llmx.train.step import train_step
from tests.programs.leaving import run_and_leave
from tests.reference import NEXT_TOKEN, SEQ_LEN, synthetic_store, whole_weights, word_tokenizer
from tests.rundirs import parity_experiment, with_batch

SHARD_BYTES = 20_000
"""Small enough that every export has several files."""


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Of names and values, bit for bit."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].detach().float().numpy().tobytes())
    return found.hexdigest()


def run_job(job: dict[str, Any], *, out: Path, store: Any, tokenizer: Any) -> None:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    exp = parity_experiment(out, ranks=world, stage=job["stage"], kind=job["kind"])
    exp.precision = job["precision"]
    exp.model.config = {**exp.model.config, **job.get("config", {})}
    if "path" in job:
        exp.model.init, exp.model.path = "pretrained", job["path"]
        exp.model.config = {}
    plan = with_batch(make_plan(exp), (2,) * world, 1)
    engine = build_engine(
        exp, plan, ds_config(exp.model, exp.zero, exp.optim, plan), tokenizer=tokenizer
    )
    report = {
        "digest": digest(whole_weights(engine.module)),
        "buffers": {name: str(b.dtype) for name, b in engine.module.named_buffers()},
    }
    if rank == 0:
        (out / f"{job['name']}.json").write_text(json.dumps(report))
    if job.get("trained", True):
        train_and_export(engine, exp, plan, job["name"], out=out, store=store, tokenizer=tokenizer)
    engine.engine.destroy()


def train_and_export(
    engine: Engine, exp: Experiment, plan: Plan, name: str, *, out: Path, store: Any, tokenizer: Any
) -> None:
    """Two steps."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    layout = Layout(seq_len=SEQ_LEN, pad_id=0, layout="packed")
    engine.set_lr(0.1)
    for number in range(2):
        step = make_step(store, number, batch=plan.batch, rank=rank, seed=exp.seed, layout=layout)
        train_step(engine, step, NEXT_TOKEN, world=world)
    final = whole_weights(engine.module)
    export_model(
        engine.module,
        engine.config,
        tokenizer=tokenizer,
        vocab_size=true_vocab(tokenizer),
        directory=out / name,
        dtype=engine.dtype,
        shard_bytes=SHARD_BYTES,
    )
    if rank == 0:
        torch.save(final, out / f"{name}.pt")


def main() -> None:
    jobs, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    plan = make_plan(parity_experiment(out))
    join_process_group(plan)
    store, tokenizer = synthetic_store(out / "store"), word_tokenizer()
    for job in jobs:
        run_job(job, out=out, store=store, tokenizer=tokenizer)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run_and_leave(main)
