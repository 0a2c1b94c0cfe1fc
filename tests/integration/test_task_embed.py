"""Text embeddings from real questions and answers on two ranks at ZeRO 3: better than chance and
than before; sentence-transformers finds what the evaluation found. Resume: ``test_tasks_proof``."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from llmx.run import snapshot
from llmx.run.rundir import RunDir, read_json
from llmx.tasks import prepare, task_of, tokenizer_of
from tests.command_runs import lines, succeeds

pytestmark = [pytest.mark.deepspeed, pytest.mark.nightly]

HELD_OUT = 60


def test_questions_find_their_answers(real_data: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    shutil.copy(real_data / "bert_zh_vocab.txt", tmp_path / "tokenizer" / "vocab.txt")
    words = (
        "task=embed", "task.options.query_prompt='question: '", "model=bert_tiny",
        "model.tokenizer=tokenizer", "model.config.num_hidden_layers=2",
        "model.config.hidden_size=64", "model.config.intermediate_size=128", "data=alpaca",
        f"data.path={real_data / 'alpaca_zh_demo.json'}", f"data.eval_samples={HELD_OUT}",
        "data.seq_len=128", "data.packing=none", "data.over_long=truncate", "hardware=cpu2",
        "task.max_lost=1",
        "batch.global_batch=32", "batch.micro_batch=8", "optim.lr=0.002", "task.steps=16",
        "task.log_every_steps=1", "zero=stage3",
    )  # fmt: skip
    succeeds(tmp_path, *words, "run_dir=whole")
    whole = tmp_path / "whole"
    before, after = lines(whole, "eval")[0], lines(whole, "eval")[-1]
    assert after["weight"] == HELD_OUT
    # A guess is right once in 60; a network that was drawn finds equal characters.
    assert after["accuracy"] > max(10 / HELD_OUT, before["accuracy"] + 0.1)
    assert after["mrr"] > before["mrr"]
    succeeds(tmp_path, "eval", "whole")
    measured = read_json(whole / "eval-alpaca_zh_demo.json")["metrics"]
    for name in ("loss", "accuracy", "mrr", "recall"):
        assert measured[name] == pytest.approx(after[name], abs=1e-4)
    succeeds(tmp_path, "export", "whole")
    check_export(whole, next((whole / "export").iterdir()), accuracy=after["accuracy"])


def check_export(run: Path, exported: Path, *, accuracy: float) -> None:
    """Held-out texts as sentence-transformers embeds them."""
    library = pytest.importorskip("sentence_transformers")
    exp = snapshot.load(RunDir(run))
    tokenizer = tokenizer_of(exp)
    store = prepare(exp, tokenizer, split="eval")
    assert len(store) == HELD_OUT
    texts = [
        tokenizer.decode(tokens, skip_special_tokens=True)
        for number in range(HELD_OUT)
        for tokens, _ in store[number].sequences()
    ]
    model = library.SentenceTransformer(str(exported), device="cpu")
    assert model.prompts["query"] == "question: "
    vectors = model.encode(texts).reshape(HELD_OUT, 2, -1)
    found = (vectors[:, 0] @ vectors[:, 1].T).argmax(axis=1) == np.arange(HELD_OUT)
    # A text that was cut within a word has other tokens once it is read anew.
    assert found.mean() == pytest.approx(accuracy, abs=2.5 / HELD_OUT)
    assert task_of(exp, tokenizer).name == "embed"
