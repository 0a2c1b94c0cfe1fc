"""BERT from scratch on real Chinese documents, with its own WordPiece vocabulary: both ZeRO stages
learn, a resumed run has the same weights, and transformers fills in what was hidden."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.command_runs import lines, succeeds

pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(900)]

CORPUS = "CLUECorpusSmall_sampled.txt"


def test_bert_from_scratch_learns_and_resumes_bitwise(real_data: Path, tmp_path: Path) -> None:
    corpus = real_data / CORPUS
    (tmp_path / "corpus.txt").write_text(
        "".join(line for line in corpus.read_text("utf-8").splitlines(True)[:1200]), "utf-8"
    )
    data = ("data=text", "data.path=corpus.txt", "data.text_unit=line")
    succeeds(tmp_path, "tokenizer", *data, "kind=wordpiece", "vocab_size=3000", "output=tokenizer")
    words = (
        "task=mlm", "task.options.whole_words=true", "task.options.max_ngram=2",
        "model=bert_tiny", "model.tokenizer=tokenizer", "model.config.num_hidden_layers=2",
        "model.config.hidden_size=64", "model.config.intermediate_size=128", *data,
        "data.packing=best_fit", "data.seq_len=64", "data.eval_samples=32", "hardware=cpu2",
        "batch.global_batch=16", "batch.micro_batch=4", "optim.lr=0.003", "task.steps=12",
        "task.log_every_steps=1",
    )  # fmt: skip
    succeeds(tmp_path, *words, "zero=stage2", "run_dir=whole")
    succeeds(tmp_path, *words, "zero=stage2", "run_dir=halves", "task.stop_at_step=5")
    succeeds(tmp_path, "resume", "halves", "task.stop_at_step=null")
    succeeds(tmp_path, *words, "zero=stage3", "run_dir=sharded")
    runs = {name: tmp_path / name for name in ("whole", "halves", "sharded")}
    losses = {name: [line["loss"] for line in lines(run, "train")] for name, run in runs.items()}
    assert losses["halves"] == losses["whole"]
    assert losses["sharded"] == pytest.approx(losses["whole"], rel=1e-3)
    first, last = (lines(runs["whole"], "eval")[at]["loss"] for at in (0, -1))
    assert isinstance(first, float)
    assert isinstance(last, float)
    assert last < first - 0.5
    (end,) = lines(runs["whole"], "end")
    assert [line["weights_hash"] for line in lines(runs["halves"], "end")][-1] == (
        end["weights_hash"]
    )
    check_export(runs["whole"])


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
