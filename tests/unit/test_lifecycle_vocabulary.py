"""A model from scratch is as large as its tokenizer's vocabulary makes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmx.lifecycle.preflight import tokenizer_rows, with_true_vocabulary
from tests.composing import composed


def tokenizer(directory: Path, vocabulary: object, *, added: tuple[int, ...] = ()) -> Path:
    directory.mkdir()
    values = {"model": {"vocab": vocabulary}, "added_tokens": [{"id": each} for each in added]}
    (directory / "tokenizer.json").write_text(json.dumps(values))
    return directory


def test_the_rows_of_a_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from llmx.lifecycle.preflight import DEMO

    assert tokenizer_rows("demo") == len(AutoTokenizer.from_pretrained(DEMO))
    ids = {f"t{number}": number for number in range(500)}
    bpe = str(tokenizer(tmp_path / "bpe", ids, added=(500, 777)))
    assert (tokenizer_rows(bpe), tokenizer_rows(bpe, with_added=False)) == (778, 500)
    both = str(tokenizer(tmp_path / "both", ids, added=(0, 499)))  # also in the vocabulary
    assert (tokenizer_rows(both), tokenizer_rows(both, with_added=False)) == (500, 499)
    unigram = [[f"t{number}", -1.0] for number in range(300)]
    assert tokenizer_rows(str(tokenizer(tmp_path / "unigram", unigram))) == 300
    assert tokenizer_rows("owner/name") is None
    (tmp_path / "bpe" / "tokenizer.json").write_text("not json")
    assert tokenizer_rows(str(tmp_path / "bpe")) is None


@pytest.mark.parametrize("rows", [500, 8000])
def test_its_checkpoints_are_planned_so(tmp_path: Path, rows: int) -> None:
    there = tokenizer(tmp_path / "mine", {f"t{number}": number for number in range(rows)})
    done = composed(["experiment=demo", f"model.tokenizer={there}"])
    before = done.plan.storage
    assert before is not None
    assert before.certain < 1
    found = with_true_vocabulary(done.plan, done.experiment).storage
    assert found is not None
    assert found.certain == 1
    width, padded = done.experiment.model.config["hidden_size"], -(-rows // 64) * 64
    tables = 1 if done.experiment.model.config.get("tie_word_embeddings") else 2
    more = 12 * tables * width * (padded - 1024)
    assert (found.checkpoint_bytes or 0) - (before.checkpoint_bytes or 0) == more


def test_a_pretrained_model_keeps_its_own() -> None:
    done = composed(["model=llama3_8b", "hardware=a100x8"])
    assert with_true_vocabulary(done.plan, done.experiment) is done.plan
