"""Many splits of one global batch in one launch: losses and the first gradient of each.

``deepspeed --num_gpus 2 --module --no_local_rank tests.programs.parity JOBS.json OUT``

Every job is ``{"name", "stage", "micro_batches", "accumulation", "layout", "kind"}``, and
``"stop"`` where the last step has fewer samples than the others (``data.last_batch=short``). Rank 0
writes ``OUT/<name>.pt`` with the losses, the reported norms and the gradient of step 0.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from llmx.plan import ds_config, make_plan
from llmx.train.batches import Layout, make_step
from llmx.train.engine.build import build_engine
from llmx.train.engine.process_group import join_process_group
from llmx.train.schedule import lr_at
from llmx.train.step import train_step
from tests.programs.leaving import run_and_leave
from tests.reference import (
    GLOBAL_BATCH,
    NEXT_TOKEN,
    SEQ_LEN,
    STEPS,
    synthetic_store,
    whole_weights,
    word_tokenizer,
)
from tests.rundirs import parity_experiment, with_batch


def run_job(job: dict[str, Any], *, out: Path, store: Any, tokenizer: Any) -> None:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    exp = parity_experiment(
        out, ranks=world, stage=job["stage"], kind=job["kind"], layout=job["layout"]
    )
    plan = with_batch(make_plan(exp), tuple(job["micro_batches"]), job["accumulation"])
    assert plan.batch.global_batch == GLOBAL_BATCH
    engine = build_engine(
        exp, plan, ds_config(exp.model, exp.zero, exp.optim, plan), tokenizer=tokenizer
    )
    layout = Layout(seq_len=SEQ_LEN, pad_id=0, layout=job["layout"])
    losses, norms = [], []
    start = whole_weights(engine.module)
    gradient: dict[str, torch.Tensor] = {}
    for number in range(STEPS):
        step = make_step(
            store,
            number,
            batch=plan.batch,
            rank=rank,
            seed=exp.seed,
            layout=layout,
            stop=job.get("stop"),
        )
        lr = lr_at(number, optim=exp.optim, total=STEPS)
        engine.set_lr(lr)
        loss = train_step(engine, step, NEXT_TOKEN, world=world).double()
        torch.distributed.all_reduce(loss)
        measured = engine.main.routing.measure(tokens=step.tokens)
        auxiliary = engine.main.routing.coefficient * measured.get("aux_loss", 0.0)
        losses.append(float(loss) / step.target_tokens + auxiliary)
        norms.append(engine.grad_norm())
        if number == 0:
            # SGD without momentum: what a weight lost is the rate times its gradient.
            after = whole_weights(engine.module)
            gradient = {name: (start[name] - after[name]) / lr for name in start}
    if rank == 0:
        result = {"losses": losses, "norms": norms, "gradient": gradient}
        torch.save(result, out / f"{job['name']}.pt")
    engine.engine.destroy()


def main() -> None:
    jobs, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    world = len(jobs[0]["micro_batches"])
    join_process_group(make_plan(parity_experiment(out, ranks=world)))
    store, tokenizer = synthetic_store(out / "store"), word_tokenizer()
    for job in jobs:
        began = time.perf_counter()
        run_job(job, out=out, store=store, tokenizer=tokenizer)
        print(f"{job} {time.perf_counter() - began:.2f} s", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run_and_leave(main)
