"""task=classify on the real book reviews: learned, evaluated, exported; and an encoder with a part
of its data at ZeRO 3. Resume, reproduce and sweeps: ``test_tasks_proof``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from tests.command_runs import lines, llmx, succeeds

pytestmark = [pytest.mark.deepspeed, pytest.mark.nightly]


def reviews(real_data: Path, directory: Path, name: str, count: int) -> Path:
    text = (real_data / f"book_review/{name}.tsv").read_text(encoding="utf-8")
    path = directory / f"{name}.tsv"
    path.write_text("".join(text.splitlines(keepends=True)[: count + 1]), encoding="utf-8")
    return path


def test_book_reviews(real_data: Path, tmp_path: Path) -> None:
    vocabulary = tmp_path / "zh"
    vocabulary.mkdir()
    (vocabulary / "vocab.txt").write_bytes((real_data / "bert_zh_vocab.txt").read_bytes())
    train, dev = (reviews(real_data, tmp_path, *each) for each in (("train", 2000), ("dev", 200)))
    words = [
        "task=classify", "data=labelled", f"data.path={train}", f"data.eval_path={dev}",
        "data.data_map.prompt=text_a",
        "data.label_names={0: negative, 1: positive}", "data.seq_len=64", "data.packing=none",
        "task.max_lost=1",
        "hardware=cpu2", "optim.lr=0.002", "batch.global_batch=32", "batch.micro_batch=16",
        f"model.tokenizer={vocabulary}", "checkpoint.metric=eval/macro_f1",
        "model.config.hidden_size=64", "model.config.intermediate_size=128",
        "task.log_every_steps=1",
    ]  # fmt: skip
    whole = tmp_path / "whole"
    out = succeeds(tmp_path, *words, "zero=stage2", "task.steps=60", f"run_dir={whole}")
    assert "Labels: negative (" in out
    assert "try it" not in out
    before, after = lines(whole, "eval")
    assert after["accuracy"] > max(0.6, before["accuracy"])
    assert after["weight"] == 200
    table = json.loads((whole / "tables.json").read_text())["tables"][0]
    assert sum(sum(row) for row in table["values"]) == 200
    right = table["values"][0][0] + table["values"][1][1]
    assert right / 200 == after["accuracy"]
    succeeds(tmp_path, "report", str(whole))
    # The exported model says what the evaluation measured.
    model = AutoModelForSequenceClassification.from_pretrained(whole / "model").eval()
    assert model.config.id2label == {0: "negative", 1: "positive"}
    tokenizer = AutoTokenizer.from_pretrained(whole / "model")
    rows = [line.split("\t") for line in (tmp_path / "dev.tsv").read_text().splitlines()[1:]]
    good = 0
    with torch.no_grad():
        for label, text in rows:
            batch = tokenizer(text, truncation=True, max_length=64, return_tensors="pt")
            logits = model(input_ids=batch["input_ids"]).logits[0]
            good += int(logits.argmax()) == int(label)
    assert good / 200 == after["accuracy"]
    succeeds(tmp_path, "export", str(whole))
    again = AutoModelForSequenceClassification.from_pretrained(next(whole.glob("export/*")))
    for name, value in again.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    refused = llmx(tmp_path, "generate", str(whole), "x").stdout
    assert "LlamaForSequenceClassification, which generates no text" in refused


def test_an_encoder_from_scratch_at_stage_3(real_data: Path, tmp_path: Path) -> None:
    encoder = tmp_path / "bert"
    encoder.mkdir()
    (encoder / "vocab.txt").write_bytes((real_data / "bert_zh_vocab.txt").read_bytes())
    AutoConfig.for_model(
        "bert", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=64, vocab_size=21128,
    ).save_pretrained(encoder)  # fmt: skip
    run = tmp_path / "run"
    succeeds(
        tmp_path,
        "task=classify", "data=labelled", f"data.path={reviews(real_data, tmp_path, 'train', 500)}",
        "data.eval_samples=50", "data.data_map.prompt=text_a", "data.seq_len=64",
        "task.max_lost=1",
        "hardware=cpu2", "zero=stage3", "model=hf", f"model.path={encoder}", "model.init=scratch",
        "optim.lr=0.001", "batch.global_batch=8", "batch.micro_batch=4", "task.steps=10",
        "task.options.loss=focal", "task.options.balance=class_balanced", f"run_dir={run}",
    )  # fmt: skip
    assert "Rows are not packed (data.layout=auto)" in (run / "logs/rank-000.log").read_text()
    model = AutoModelForSequenceClassification.from_pretrained(run / "model")
    assert type(model).__name__ == "BertForSequenceClassification"
    assert model.config.problem_type == "single_label_classification"
    assert len(lines(run, "eval")) == 2
