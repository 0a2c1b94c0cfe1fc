"""The peer of ``benchmarks/sweep.py``: a training script as DeepSpeed's tutorials write it.

    deepspeed --num_gpus 2 benchmarks/peers/bare_deepspeed.py --job JOB.json \
        --deepspeed_config DS.json

A network of transformers, ``deepspeed.initialize``, packed samples that lie ready in a file; every
rank takes its own. Rank 0 writes what was measured to ``out`` of JOB.json. Nothing of llmx.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import deepspeed
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM


def main() -> None:
    """Train for the job's steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    parser.add_argument("--local_rank", type=int, default=0)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    job = json.loads(Path(args.job).read_text())
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    deepspeed.init_distributed()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**job["model"]), attn_implementation=job["attention"]
    )
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    tokens = torch.from_numpy(np.load(job["tokens"])).long()
    labels = torch.from_numpy(np.load(job["labels"])).long()
    micro, accumulation = (
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
    )
    points, place = [], rank * micro
    for _ in range(job["steps"]):
        for _ in range(accumulation):
            rows = torch.arange(place, place + micro) % len(tokens)
            place += world * micro
            loss = engine(input_ids=tokens[rows], labels=labels[rows], use_cache=False).loss
            engine.backward(loss)
            engine.step()
        points.append(time.time())
    if rank == 0:
        per_step = world * micro * accumulation * tokens.shape[1]
        steady = (len(points) - 1) * per_step / (points[-1] - points[0]) if job["steps"] > 1 else 0
        out = {
            "tokens_per_s": steady,
            "train_s": points[-1] - points[0],
            "loss": float(loss.detach()),
            "num_parameters": sum(p.numel() for p in model.parameters()),
        }
        Path(job["out"]).write_text(json.dumps(out))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
