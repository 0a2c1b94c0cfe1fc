"""The peer: Hugging Face Trainer with DeepSpeed, dynamic padding, on rows of an llmx store.

Started by ``benchmarks/sft_throughput.py`` on every rank:

    deepspeed --num_gpus 2 benchmarks/peers/hf_trainer.py JOB.json

Written as the Trainer's documentation shows it; the rows are tokenized already, by the same
code as llmx's, so that only training is measured. Rank 0 writes the time and the count of
non-padding tokens after every step to ``out`` of JOB.json.
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
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from llmx.data import SampleStore

IGNORE = -100


class Rows(Dataset):
    """One row an item, as lists of ids; labels are masked outside of the assistant's turn."""

    def __init__(self, store: Path) -> None:
        self.store = SampleStore.open(store)

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        sample = self.store[index]
        ids = sample.tokens.tolist()
        labels = [
            token if target else IGNORE
            for token, target in zip(ids, sample.targets.tolist(), strict=True)
        ]
        return {"input_ids": ids, "labels": labels}


def pad_to_longest(pad_id: int, rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad to the longest row of the batch, to a multiple of 8: DataCollatorForSeq2Seq's work."""
    longest = -(-max(len(row["input_ids"]) for row in rows) // 8) * 8

    def padded(values: list[int], fill: int) -> list[int]:
        return values + [fill] * (longest - len(values))

    return {
        "input_ids": torch.tensor([padded(row["input_ids"], pad_id) for row in rows]),
        "labels": torch.tensor([padded(row["labels"], IGNORE) for row in rows]),
        "attention_mask": torch.tensor([padded([1] * len(row["input_ids"]), 0) for row in rows]),
    }


class CountingTrainer(Trainer):
    """The Trainer, counting the tokens that are not padding."""

    useful_tokens = 0

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.useful_tokens += int(inputs["attention_mask"].sum())
        return super().training_step(model, inputs, *args, **kwargs)


class Clock(TrainerCallback):
    """Notes (step, time, tokens of this rank) after every optimizer step."""

    def __init__(self) -> None:
        self.trainer: CountingTrainer | None = None
        self.points: list[tuple[int, float, int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        self.points.append((state.global_step, time.time(), self.trainer.useful_tokens))


def main() -> None:
    """Train for the job's steps and write what was measured."""
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    set_seed(0)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(prefix="hf-trainer-"),
        per_device_train_batch_size=job["rows_per_rank"],
        gradient_accumulation_steps=1,
        max_steps=job["steps"],
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        use_cpu=True,
        deepspeed=job["ds_config"],
        save_strategy="no",
        logging_steps=job["steps"],
        report_to=[],
        disable_tqdm=True,
    )
    config = AutoConfig.for_model(**job["model"])
    model = AutoModelForCausalLM.from_config(config)
    clock = Clock()
    trainer = CountingTrainer(
        model=model,
        args=arguments,
        train_dataset=Rows(Path(job["store"])),
        data_collator=lambda rows: pad_to_longest(job["pad_id"], rows),
        callbacks=[clock],
    )
    clock.trainer = trainer
    trainer.train()

    counts = torch.tensor([point[2] for point in clock.points])
    torch.distributed.all_reduce(counts)
    if torch.distributed.get_rank() == 0:
        parameters = sum(p.numel() for p in trainer.accelerator.unwrap_model(model).parameters())
        points = [
            {"step": step, "time": at, "tokens": int(total)}
            for (step, at, _), total in zip(clock.points, counts, strict=True)
        ]
        loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
        out = {"points": points, "num_parameters": parameters, "mean_loss": loss}
        Path(job["out"]).write_text(json.dumps(out))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
