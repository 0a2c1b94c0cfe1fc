"""The peer: Hugging Face's Trainer, TRL's SFTTrainer (with peft), DPOTrainer or GRPOTrainer, with
DeepSpeed, on rows of an llmx store.

Started by ``benchmarks/throughput.py`` on every rank:

    deepspeed --num_gpus 2 benchmarks/peers/trl_trainer.py JOB.json

As their documentation shows it; the rows are tokenized already, by the same code as llmx's, so that
only training is measured. Rank 0 writes the time, the count of non-padding tokens and the loss (or
the reward) of every step to ``out`` of JOB.json.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from vowels import vowels

from llmx.data import SampleStore
from llmx.train.rollout import prompts_of


def chats(store: SampleStore) -> Dataset:
    """Ids, and the answer: its mask for TRL, labels for the Trainer."""
    rows = [store[number] for number in range(len(store))]
    return Dataset.from_list(
        [
            {
                "input_ids": row.tokens.tolist(),
                "completion_mask": row.targets.astype(int).tolist(),
                "labels": np.where(row.targets, row.tokens.astype(np.int64), -100).tolist(),
            }
            for row in rows
        ]
    )


def pairs(store: SampleStore, place: Path) -> Dataset:
    """Prompt and both answers; what follows an answer's last target is of no loss. In files of all
    ranks: the reference's log-probabilities are written beside them."""
    rows = []
    for number in range(len(store)):
        row: dict[str, list[int]] = {}
        for name, (ids, targets) in zip(
            ("chosen", "rejected"), store[number].sequences(), strict=True
        ):
            where = targets.nonzero()[0]
            first, last = int(where[0]), int(where[-1])
            assert targets[first : last + 1].all()
            row["prompt_ids"] = ids[:first].tolist()
            row[f"{name}_ids"] = ids[first : last + 1].tolist()
        rows.append(row)
    if os.environ["RANK"] == "0":
        partial = place.with_suffix(".partial")
        Dataset.from_list(rows).save_to_disk(partial)
        partial.rename(place)
    while not place.exists():
        time.sleep(0.1)
    return Dataset.load_from_disk(place)


class Pairs(DPOTrainer):
    """DPOTrainer for rows that are tokenized."""

    def _prepare_dataset(self, dataset: Dataset, *_: Any, **__: Any) -> Dataset:
        return dataset


class Prompts(GRPOTrainer):
    """GRPOTrainer for prompts that are tokenized: ``prompt`` of a row is their number."""

    store: SampleStore

    def _tokenize_prompts(self, prompts: list[str]) -> Any:
        ids = [list(prompts_of(self.store[int(number)])[0].tokens) for number in prompts]
        return ids, None, {}


def reward(completions: list[str], **_: Any) -> list[float]:
    """Rewards of the vowels in all completions, which TRL gives at once."""
    return [vowels("", completion, "") for completion in completions]


class Clock(TrainerCallback):
    """Notes (step, time, tokens of this rank) after every optimizer step."""

    def __init__(self) -> None:
        self.tokens = 0
        self.points: list[tuple[int, float, int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.points.append((state.global_step, time.time(), self.tokens))


def count(trainer: Any, clock: Clock) -> None:
    """Count the tokens that are not padding in every batch."""
    training_step = trainer.training_step

    def counted(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        mask = inputs.get("attention_mask")
        clock.tokens += int(mask.sum()) if mask is not None else inputs["input_ids"].numel()
        return training_step(model, inputs, *args, **kwargs)

    trainer.training_step = counted


def main() -> None:
    """Train for the job's steps and write what was measured."""
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    set_seed(0)
    common = {
        "output_dir": tempfile.mkdtemp(prefix="trl-"),
        "per_device_train_batch_size": job["rows_per_rank"],
        "gradient_accumulation_steps": job.get("accumulation", 1),
        "max_steps": job["steps"],
        "learning_rate": job["lr"],
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "deepspeed": job["ds_config"],
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        **job["settings"],
    }
    store = SampleStore.open(Path(job["store"]))
    tokenizer = AutoTokenizer.from_pretrained(job["tokenizer"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    clock = Clock()
    if job["kind"] == "sft":
        trainer: Any = Trainer(
            model=model,
            args=TrainingArguments(**common),
            train_dataset=chats(store).remove_columns("completion_mask"),
            # Pads to the longest row of the batch.
            data_collator=DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8),
            callbacks=[clock],
        )
    elif job["kind"] == "lora":
        from peft import LoraConfig

        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(**common, max_length=job["seq_len"], completion_only_loss=True),
            train_dataset=chats(store).remove_columns("labels"),
            processing_class=tokenizer,
            peft_config=LoraConfig(task_type="CAUSAL_LM", **job["lora"]),
            callbacks=[clock],
        )
    elif job["kind"] == "grpo":
        trainer = Prompts(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(
                **common,
                seed=job["seed"],
                num_generations=job["group_size"],
                max_completion_length=job["max_new_tokens"],
                beta=0.0,
                loss_type="dapo",
                epsilon_high=0.28,
            ),
            train_dataset=Dataset.from_list([{"prompt": str(n)} for n in range(len(store))]),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.store = store
    else:
        trainer = Pairs(
            model=model,
            args=DPOConfig(**common, max_length=job["seq_len"], beta=job["beta"]),
            train_dataset=pairs(store, Path(job["out"]).with_suffix(".rows")),
            processing_class=tokenizer,
            callbacks=[clock],
        )
    if job["kind"] != "grpo":  # its samples count
        count(trainer, clock)
    trainer.train()

    counts = torch.tensor([point[2] for point in clock.points])
    torch.distributed.all_reduce(counts)
    if torch.distributed.get_rank() == 0:
        unwrapped = trainer.accelerator.unwrap_model(trainer.model)
        trained = sum(p.numel() for p in unwrapped.parameters() if p.requires_grad)
        points = [
            {"step": step, "time": at, "tokens": int(total)}
            for (step, at, _), total in zip(clock.points, counts, strict=True)
        ]
        value = "reward" if job["kind"] == "grpo" else "loss"
        values = [entry[value] for entry in trainer.state.log_history if value in entry]
        out = {"points": points, "trained": trained, "values": values}
        Path(job["out"]).write_text(json.dumps(out))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
