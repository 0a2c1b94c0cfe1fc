"""BERT from scratch on real Chinese documents, with its own WordPiece vocabulary: it learns, and
transformers fills in what was hidden. Stages, resume and reproduce: ``test_tasks_proof``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.command_runs import lines, succeeds

pytestmark = [pytest.mark.deepspeed, pytest.mark.nightly]

CORPUS = "CLUECorpusSmall_sampled.txt"


def test_bert_from_scratch_learns(real_data: Path, tmp_path: Path) -> None:
    corpus = real_data / CORPUS
    (tmp_path / "corpus.txt").write_text(
        "".join(line for line in corpus.read_text("utf-8").splitlines(True)[:1200]), "utf-8"
    )
    data = ("data=text", "data.path=corpus.txt", "data.text_unit=line")
    succeeds(
        tmp_path,
        "tokenizer",
        *data,
        "tokenizer.kind=wordpiece",
        "tokenizer.vocab_size=3000",
        "tokenizer.output=tokenizer",
    )
    words = (
        "task=mlm", "task.options.whole_words=true",
        "model=bert_tiny", "model.tokenizer=tokenizer", "model.config.num_hidden_layers=2",
        "model.config.hidden_size=64", "model.config.intermediate_size=128", *data,
        "data.packing=best_fit", "data.seq_len=64", "data.eval_samples=32", "hardware=cpu2",
        "batch.global_batch=16", "batch.micro_batch=4", "optim.lr=0.003", "task.steps=12",
        "task.log_every_steps=1",
    )  # fmt: skip
    succeeds(tmp_path, *words, "zero=stage2", "run_dir=run")
    run = tmp_path / "run"
    first, last = (lines(run, "eval")[at]["loss"] for at in (0, -1))
    assert isinstance(first, float)
    assert isinstance(last, float)
    assert last < first - 0.5
    check_export(run)


def check_export(run: Path) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    model = AutoModelForMaskedLM.from_pretrained(run / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    config = json.loads((run / "model" / "config.json").read_text("utf-8"))
    assert config["architectures"] == ["BertForMaskedLM"]
    assert config["vocab_size"] == len(tokenizer) == model.get_input_embeddings().weight.shape[0]
    found = tokenizer(f"中国{tokenizer.mask_token}民", return_tensors="pt")
    with torch.no_grad():
        logits = model(**found).logits
    assert logits.shape[-1] == len(tokenizer)
    assert torch.isfinite(logits).all()
