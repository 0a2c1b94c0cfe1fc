"""Real rows of real data sets, in a real 50k vocabulary. Needs LLMX_REAL_DATA."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from llmx.config import Experiment
from llmx.data import SampleStore
from llmx.tasks import prepare, tokenizer_of
from tests.realdata import real_tokenizer_dir


@pytest.fixture(scope="module")
def directory(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return real_tokenizer_dir(real_data, tmp_path_factory.mktemp("tokenizer"))


def experiment(path: Path, directory: Path, cache: Path, kind: str = "sft", **data) -> Experiment:
    exp = Experiment()
    exp.data.path, exp.data.cache_dir = str(path), str(cache)
    exp.model.tokenizer, exp.task.kind = str(directory), kind
    for name, value in data.items():
        setattr(exp.data, name, value)
    return exp


def rows(store: SampleStore) -> list[tuple[np.ndarray, np.ndarray]]:
    return [row for i in range(len(store)) for row in store[i].sequences()]


def test_the_tokenizer_has_the_real_ids(directory: Path):
    tokenizer = tokenizer_of(experiment(directory, directory, directory, "pretrain"))
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert len(tokenizer) == 50265
    assert tokenizer("the the").input_ids[1] == 5  # "Ġthe" in vocab.json
    assert tokenizer.decode(tokenizer("Ünï 春").input_ids) == "Ünï 春"


def test_alpaca_zh(real_data: Path, directory: Path, tmp_path: Path):
    path = real_data / "alpaca_zh_demo.json"
    exp = experiment(path, directory, tmp_path, seq_len=1024, over_long="drop", eval_samples=50)
    tokenizer = tokenizer_of(exp)
    train, held_out = (prepare(exp, tokenizer, split=split) for split in ("train", "eval"))
    lost = sum(sum(store.meta["dropped"].values()) for store in (train, held_out))
    assert train.num_sequences + held_out.num_sequences + lost == 1000
    assert train.meta["form"] == "alpaca"
    assert train.meta["rows_read"] == 950
    assert train.meta["num_tokens"] > 0.9 * 1024 * len(train)

    source = json.loads(path.read_text(encoding="utf-8"))
    answers = {row["output"] for row in source}
    for tokens, targets in rows(held_out):
        learned = tokenizer.decode(tokens[targets])
        assert learned.endswith("</s>")
        assert learned.removesuffix("</s>") in answers
        text = tokenizer.decode(tokens)
        assert text.startswith("<|im_start|>user\n")
        assert text.endswith(f"</s>\n<|im_start|>assistant\n{learned}")


def test_sharegpt_tool_calls(real_data: Path, directory: Path, tmp_path: Path):
    path = real_data / "sharegpt_toolcall_zh_demo.json"
    exp = experiment(path, directory, tmp_path, seq_len=4096)
    tokenizer = tokenizer_of(exp)
    store = prepare(exp, tokenizer)
    assert (store.meta["form"], store.num_sequences) == ("sharegpt", 300)
    source = json.loads(path.read_text(encoding="utf-8"))
    turns = [turn for row in source for turn in row["conversations"]]
    learned_turns = sum(turn["from"] in ("gpt", "function_call") for turn in turns)
    whole = [row for row in rows(store) if len(row[0]) < 4096]
    starts = sum(int(np.sum(targets[1:] & ~targets[:-1])) for _, targets in whole)
    # Turns after the last answer, and those of the few rows that were cut, are not there.
    assert len(whole) == 300 - store.meta["truncated"]
    assert learned_turns - 20 < starts <= learned_turns
    calls = sum(tokenizer.decode(t[m]).count("<tool_call>") for t, m in whole)
    assert calls == sum(turn["from"] == "function_call" for turn in turns)


def test_pairs(real_data: Path, directory: Path, tmp_path: Path):
    path = tmp_path / "excerpt.json"
    source = json.loads((real_data / "dpo_en_demo.json").read_text(encoding="utf-8"))[:50]
    path.write_text(json.dumps(source), encoding="utf-8")
    exp = experiment(path, directory, tmp_path, "dpo", seq_len=4096, packing="none")
    tokenizer = tokenizer_of(exp)
    store = prepare(exp, tokenizer)
    assert store.meta["rows_read"] == 50
    learned = {tokenizer.decode(t[m]).removesuffix("</s>") for t, m in rows(store)}
    assert learned == {row[side]["value"] for row in source for side in ("chosen", "rejected")}


def test_tinyshakespeare_comes_back_byte_for_byte(real_data: Path, directory: Path, tmp_path: Path):
    path = real_data / "tinyshakespeare.txt"
    exp = experiment(path, directory, tmp_path, "pretrain", seq_len=512, packing="concat")
    tokenizer = tokenizer_of(exp)
    store = prepare(exp, tokenizer)
    tokens = np.concatenate([store[i].tokens for i in range(len(store))])
    assert tokenizer.decode(tokens[:-1]) == path.read_text(encoding="utf-8")
    assert int(tokens[-1]) == tokenizer.eos_token_id
    whole = tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False).input_ids
    assert tokens[:-1].tolist() == whole


@pytest.mark.parametrize(
    ("name", "text_key", "documents"),
    [("c4_demo.jsonl", "text", 300), ("book_review/dev.tsv", "text_a", 8000)],
)
def test_documents(
    real_data: Path, directory: Path, tmp_path: Path, name: str, text_key: str, documents: int
):
    values = {"seq_len": 1024, "packing": "concat", "text_key": text_key, "form": "text"}
    exp = experiment(real_data / name, directory, tmp_path, "pretrain", **values)
    tokenizer = tokenizer_of(exp)
    store = prepare(exp, tokenizer)
    assert store.meta["rows_read"] == documents
    ends = sum(int(np.sum(store[i].tokens == tokenizer.eos_token_id)) for i in range(len(store)))
    assert ends == documents
