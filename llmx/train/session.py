"""What one rank works with: data, engine, task, and where it writes.

Made once at the start by ``open_session``; the loop only reads it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from llmx.config import Experiment
from llmx.plan.types import Plan
from llmx.rundir import RunDir
from llmx.tasks import KINDS, Task
from llmx.train.batches import Layout
from llmx.train.engine import Engine, build_engine
from llmx.train.metrics import MetricsWriter
from llmx.train.status import RankStatus


@dataclass
class Session:
    """What one rank works with."""

    exp: Experiment
    plan: Plan
    run_dir: RunDir
    engine: Engine
    task: Task
    tokenizer: Any
    train_store: Any
    eval_store: Any | None
    layout: Layout
    metrics: MetricsWriter
    status: RankStatus

    @property
    def rank(self) -> int:
        return torch.distributed.get_rank()

    def say(self, text: str) -> None:
        """One line of rank 0's log."""
        if self.rank == 0:
            print(text, flush=True)


def open_session(
    exp: Experiment, plan: Plan, ds_config: dict[str, Any], run_dir: RunDir, status: RankStatus
) -> Session:
    """Data, then the engine. Collective."""
    from llmx.data import load_tokenizer

    status.enter("loading")
    tokenizer = load_tokenizer(exp)
    train_store, eval_store = open_stores(exp, tokenizer)
    engine = build_engine(exp, plan, ds_config, tokenizer=tokenizer)
    return Session(
        exp=exp,
        plan=plan,
        run_dir=run_dir,
        engine=engine,
        task=KINDS[exp.task.kind](exp, tokenizer),
        tokenizer=tokenizer,
        train_store=train_store,
        eval_store=eval_store,
        layout=Layout(seq_len=exp.data.seq_len, pad_id=pad_id(tokenizer), layout=exp.data.layout),
        metrics=MetricsWriter(run_dir.metrics, enabled=torch.distributed.get_rank() == 0),
        status=status,
    )


def open_stores(exp: Experiment, tokenizer: Any) -> tuple[Any, Any | None]:
    """Training and held-out samples. One rank of each host prepares, then all open. Collective."""
    from llmx.data import has_eval
    from llmx.data import prepare as prepare_data

    wanted = ["train"]
    if has_eval(exp):
        wanted.append("eval")
    if os.environ["LOCAL_RANK"] == "0":
        for split in wanted:
            prepare_data(exp, tokenizer, split=split)
    torch.distributed.barrier()
    stores = [prepare_data(exp, tokenizer, split=split) for split in wanted]
    return stores[0], stores[1] if len(stores) > 1 else None


def pad_id(tokenizer: Any) -> int:
    """Any token does for padding, since padding is known by its position; 0 without one."""
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0)
