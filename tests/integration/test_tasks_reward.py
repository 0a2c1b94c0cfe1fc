"""task=reward on real pairs at ZeRO 3: what is exported scores as the evaluation did.

Resume, reproduce and sweeps: ``test_tasks_proof``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from llmx.run import snapshot
from llmx.run.rundir import RunDir
from llmx.tasks import prepare, tokenizer_of
from tests.command_runs import lines, succeeds
from tests.realdata import real_tokenizer_dir

pytestmark = [pytest.mark.deepspeed, pytest.mark.nightly]


def test_preference_pairs(real_data: Path, tmp_path: Path) -> None:
    tokenizer = real_tokenizer_dir(real_data, tmp_path / "bpe")
    words = [
        "task=reward", "data=file", f"data.path={real_data / 'dpo_en_demo.json'}",
        "data.max_rows=120", "data.eval_samples=20", "data.seq_len=512", "data.over_long=truncate",
        "task.max_lost=1",
        f"data.cache_dir={tmp_path / 'cache'}", f"model.tokenizer={tokenizer}", "hardware=cpu2",
        "zero=stage3", "model.config.hidden_size=64", "model.config.intermediate_size=128",
        "optim.lr=0.002", "batch.global_batch=8", "batch.micro_batch=2", "task.steps=6",
        "task.log_every_steps=1", "checkpoint.metric=eval/accuracy",
    ]  # fmt: skip
    whole = tmp_path / "whole"
    succeeds(tmp_path, *words, f"run_dir={whole}")
    assert lines(whole, "train")[0]["loss"] == pytest.approx(0.693, abs=0.2)
    # The exported model scores the held-out conversations as the evaluation did.
    exp = snapshot.load(RunDir(whole))
    store = prepare(exp, tokenizer_of(exp), split="eval")
    model = AutoModelForSequenceClassification.from_pretrained(whole / "model").eval()
    assert model.config.num_labels == 1
    scores = []
    with torch.no_grad():
        for number in range(len(store)):
            for tokens, _ in store[number].sequences():
                ids = torch.from_numpy(tokens.astype(np.int64))[None]
                scores.append(float(model(input_ids=ids).logits))
    pairs = np.array(scores).reshape(-1, 2)
    after = lines(whole, "eval")[-1]
    assert after["weight"] == len(pairs)
    assert after["score_chosen"] == pytest.approx(pairs[:, 0].mean(), abs=1e-4)
    assert after["score_rejected"] == pytest.approx(pairs[:, 1].mean(), abs=1e-4)
    assert after["accuracy"] == pytest.approx((pairs[:, 0] > pairs[:, 1]).mean())
    assert AutoTokenizer.from_pretrained(whole / "model").chat_template
