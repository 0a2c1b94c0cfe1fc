"""The peer: TRL's GRPOTrainer with DeepSpeed, on the prompts of an llmx store.

Started by ``benchmarks/grpo_throughput.py`` on every rank:

    deepspeed --num_gpus 2 benchmarks/peers/trl_grpo.py JOB.json

As TRL's documentation shows it; the prompts are tokenized already, by the same code as llmx's. Rank
0 writes the time, reward, and completion length of every step to ``out`` of JOB.json.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from vowels import vowels

from llmx.data import SampleStore
from llmx.train.rollout import prompts_of


class Prompts(GRPOTrainer):
    """GRPOTrainer for prompts that are tokenized: ``prompt`` of a row is their number."""

    store: SampleStore

    def _tokenize_prompts(self, prompts: list[str]) -> Any:
        ids = [list(prompts_of(self.store[int(number)])[0].tokens) for number in prompts]
        return ids, None, {}


class Clock(TrainerCallback):
    """Notes (step, time) after every optimizer step."""

    def __init__(self) -> None:
        self.points: list[dict[str, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.points.append({"step": state.global_step, "time": time.time()})


def reward(completions: list[str], **_: Any) -> list[float]:
    """TRL gives all completions at once."""
    return [vowels("", completion, "") for completion in completions]


def main() -> None:
    """Train for the job's steps and write what was measured."""
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    store = SampleStore.open(Path(job["store"]))
    clock = Clock()
    trainer = Prompts(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(prefix="trl-"),
            seed=job["seed"],
            per_device_train_batch_size=job["micro_batch"],
            gradient_accumulation_steps=job["accumulation"],
            num_generations=job["group_size"],
            max_completion_length=job["max_new_tokens"],
            max_steps=job["steps"],
            learning_rate=job["lr"],
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            beta=0.0,
            loss_type="dapo",
            epsilon_high=0.28,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            deepspeed=job["ds_config"],
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": str(n)} for n in range(len(store))]),
        processing_class=AutoTokenizer.from_pretrained(job["tokenizer"]),
        callbacks=[clock],
    )
    trainer.store = store
    trainer.train()
    if torch.distributed.get_rank() == 0:
        lines = [line for line in trainer.state.log_history if "reward" in line]
        for point, line in zip(clock.points, lines, strict=True):
            point |= {"reward": line["reward"], "tokens": line["completions/mean_length"]}
        Path(job["out"]).write_text(json.dumps(clock.points))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
