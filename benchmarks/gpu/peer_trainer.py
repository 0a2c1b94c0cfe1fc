"""The peer of the ``peers`` part: TRL's SFTTrainer on one GPU, at its best.

    python -m benchmarks.gpu.peer_trainer JOB.json

As its documentation advises: bf16, fused AdamW, and, where they are installed, Liger and packing
with FlashAttention 2 (``bfd`` isolates rows). Writes tokens and seconds of every step.
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
    from datasets import load_dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

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
    settings = SFTConfig(
        output_dir=tempfile.mkdtemp(prefix="peer-"),
        per_device_train_batch_size=job["micro_batch"],
        max_steps=job["steps"],
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        bf16=cuda,
        use_cpu=not cuda,
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        use_liger_kernel=liger,
        save_strategy="no",
        logging_steps=job["steps"],
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=2 if cuda else 0,
        max_length=job["seq_len"],
        packing=flash,
        completion_only_loss=True,
    )
    rows = load_dataset("json", data_files=job["data"], split="train")
    rows = rows.map(
        lambda row: {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["response"]}],
        },
        remove_columns=["response"],
    )
    trainer = SFTTrainer(model=model, args=settings, train_dataset=rows, processing_class=tokenizer)
    clock = count_tokens(trainer)
    trainer.train()
    result = {"points": clock, "flash": flash, "liger": liger}
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


if __name__ == "__main__":
    main()
