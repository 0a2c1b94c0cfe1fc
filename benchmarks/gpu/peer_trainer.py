"""The peer of the ``peers`` part: TRL's or Hugging Face's trainer on one GPU, at its best.

    python -m benchmarks.gpu.peer_trainer JOB.json

As their documentation advises: bf16, fused AdamW, FlashAttention 2 and Liger where they are
installed, packing (TRL) or padding-free batches. Writes tokens and seconds of every step.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    """Train for the job's steps; write what was measured."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    cuda = torch.cuda.is_available()
    flash = cuda and importlib.util.find_spec("flash_attn") is not None
    liger = cuda and importlib.util.find_spec("liger_kernel") is not None
    tokenizer = AutoTokenizer.from_pretrained(job["tokenizer"])
    config = AutoConfig.for_model("llama", **job["model"])
    model = AutoModelForCausalLM.from_config(
        config,
        # fp32 weights and autocast: llmx, too, updates an fp32 copy of the weights.
        dtype=torch.float32,
        attn_implementation="flash_attention_2" if flash else "sdpa",
    )
    arguments = {
        "output_dir": tempfile.mkdtemp(prefix="peer-"),
        "per_device_train_batch_size": job["micro_batch"],
        "max_steps": job["steps"],
        "learning_rate": 3e-4,
        "lr_scheduler_type": "constant",
        "bf16": cuda,
        "use_cpu": not cuda,
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": False,
        "use_liger_kernel": liger,
        "save_strategy": "no",
        "logging_steps": job["steps"],
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_num_workers": 0 if job["tiny"] else 2,
    }
    make = trl_trainer if job["kind"] == "trl" else hf_trainer
    trainer = make(model, tokenizer, job, arguments, flash=flash)
    clock = count_tokens(trainer)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    result = {"points": clock, "flash": flash, "liger": liger, "memory_gib": peak}
    Path(job["out"]).write_text(json.dumps(result), encoding="utf-8")


def count_tokens(trainer: Any) -> list[tuple[float, int]]:
    """(time, useful tokens so far) after every step; useful is what is no padding."""
    points: list[tuple[float, int]] = []
    training_step = trainer.training_step
    total = 0

    def counted(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal total
        mask = inputs.get("attention_mask")
        ids = inputs["input_ids"]
        # Without a mask nothing is padding: rows are packed or flattened.
        total += int(mask.sum()) if mask is not None and mask.dim() == 2 else ids.numel()
        loss = training_step(model, inputs, *args, **kwargs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        points.append((time.perf_counter(), total))
        return loss

    trainer.training_step = counted
    return points


def trl_trainer(
    model: Any, tokenizer: Any, job: dict[str, Any], arguments: dict[str, Any], *, flash: bool
) -> Any:
    """TRL's SFTTrainer with packing; isolated rows need FlashAttention (its ``bfd`` strategy)."""
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    rows = load_dataset("json", data_files=job["data"], split="train")
    rows = rows.map(
        lambda row: {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["response"]}],
        },
        remove_columns=["response"],
    )
    settings = SFTConfig(
        **arguments,
        max_length=job["seq_len"],
        packing=flash,
        completion_only_loss=True,
        dataset_num_proc=None,
    )
    return SFTTrainer(model=model, args=settings, train_dataset=rows, processing_class=tokenizer)


def hf_trainer(
    model: Any, tokenizer: Any, job: dict[str, Any], arguments: dict[str, Any], *, flash: bool
) -> Any:
    """Hugging Face's Trainer: flattened batches with FlashAttention, else padded ones."""
    from datasets import load_dataset
    from transformers import (
        DataCollatorForSeq2Seq,
        DataCollatorWithFlattening,
        Trainer,
        TrainingArguments,
    )

    def encode(row: dict[str, str]) -> dict[str, list[int]]:
        asked = [{"role": "user", "content": row["prompt"]}]
        answered = [*asked, {"role": "assistant", "content": row["response"]}]
        head = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        whole = tokenizer.apply_chat_template(answered, tokenize=False)
        ids = tokenizer(whole, add_special_tokens=False)["input_ids"][: job["seq_len"]]
        known = len(tokenizer(head, add_special_tokens=False)["input_ids"])
        return {"input_ids": ids, "labels": [-100] * min(known, len(ids)) + ids[known:]}

    rows = load_dataset("json", data_files=job["data"], split="train")
    rows = rows.map(encode, remove_columns=rows.column_names)
    collator = (
        DataCollatorWithFlattening()
        if flash
        else DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8)
    )
    return Trainer(
        model=model,
        args=TrainingArguments(**arguments),
        train_dataset=rows,
        data_collator=collator,
    )


if __name__ == "__main__":
    main()
