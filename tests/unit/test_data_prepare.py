"""Preparing: nothing lost or duplicated, found again when unchanged, never mistaken."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from collections import Counter
from datetime import date as Date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmx.config import DataConfig, Experiment, SourceConfig
from llmx.config.validate import data_problems
from llmx.data import held_out_prompts
from llmx.data.format import rendering
from llmx.data.store import writer
from llmx.data.store.packing import Packing, best_fit, concat
from llmx.data.store.spec import cache_directory, dataset_spec
from llmx.data.store.summary import check_lost, lost_rows, report, summary
from llmx.data.tokenize import encoder as blocks
from llmx.errors import ConfigError, DataError
from llmx.tasks import prepare, task_of
from tests import forks
from tests.data_rows import (
    chat_row,
    learned,
    of_rows,
    of_text,
    row_tokenizer,
    sequences,
    texts,
    turn,
    write_rows,
)

TOKENIZER = row_tokenizer()


def of_pairs(directory: Path, pairs: list[tuple[str, str]], **data: Any) -> Experiment:
    """SFT on questions and answers."""
    rows = [{"prompt": question, "response": answer} for question, answer in pairs]
    return of_rows(directory, rows, **{"seq_len": 32, **data})


def store_path(exp: Experiment, tokenizer: Any = TOKENIZER) -> Path:
    return dataset_spec(exp.data, exp.seed, tokenizer, task_of(exp, tokenizer), "train").path


def numbered(count: int) -> list[tuple[str, str]]:
    return [(f"q{i}" + "x" * (i % 7), f"a{i}") for i in range(count)]


def as_text(pairs: list[tuple[str, str]]) -> Counter[str]:
    return Counter(f"Q{question}<|end|>A{answer}<|end|>" for question, answer in pairs)


def lengths_of(store) -> list[int]:
    return [len(store[i].tokens) for i in range(len(store))]


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_every_row_is_in_the_store_once(tmp_path: Path, packing: str):
    rows = numbered(1100)  # more than two batches of the tokenizer
    store = prepare(of_pairs(tmp_path, rows, packing=packing), TOKENIZER)
    assert Counter(texts(store, TOKENIZER)) == as_text(rows)
    assert store.num_sequences == 1100
    assert (len(store) == 1100) == (packing == "none")
    answers = Counter(span for row in sequences(store) for span in learned(TOKENIZER, row))
    assert answers == Counter(f"{answer}<|end|>" for _, answer in rows)
    assert max(lengths_of(store)) <= 32
    assert store.meta["dropped"] == {}
    store.verify()


def test_documents_are_isolated(tmp_path: Path):
    store = prepare(of_text(tmp_path, [{"text": "ab" * n} for n in (3, 20, 1)]), TOKENIZER)
    assert [store[i].sequence_starts.tolist() for i in range(len(store))] == [[0, 7], [0, 16]]
    pieces = ["ababab</s>", "ab" * 12 + "a", "b" + "ab" * 7 + "</s>", "ab</s>"]
    assert texts(store, TOKENIZER) == pieces
    # Of each all is learned but its first token.
    assert [store.num_target_tokens(i) for i in range(len(store))] == [30, 17]


def test_found_again_only_when_nothing_that_matters_changed(tmp_path: Path):
    exp = of_pairs(tmp_path, numbered(20))
    first = prepare(exp, TOKENIZER)
    stamp = (first.path / "meta.json").stat().st_mtime_ns
    exp.data.num_workers, exp.batch.micro_batch, exp.seed = 7, 3, 5
    again = prepare(exp, TOKENIZER)
    assert again.path == first.path == store_path(exp)
    assert (again.path / "meta.json").stat().st_mtime_ns == stamp
    (tmp_path / "moved").mkdir()
    exp.data.path = moved = shutil.copy(exp.data.path, tmp_path / "moved")
    elsewhere = prepare(exp, TOKENIZER)
    assert (elsewhere.path, elsewhere.meta["sources"]) == (first.path, [str(moved)])

    fingerprints = {first.fingerprint}
    changes = {"seq_len": 48, "packing": "none", "over_long": "drop", "loss_on": "last"}
    changes |= {"template": "human_assistant", "system": "Be.", "max_rows": 5, "eval_samples": 4}
    for name, value in changes.items():
        changed = of_pairs(tmp_path, numbered(20), **{name: value})
        fingerprints.add(prepare(changed, TOKENIZER).fingerprint)
    fingerprints.add(prepare(exp, row_tokenizer("<|more|>")).fingerprint)
    fingerprints.add(prepare(of_pairs(tmp_path, numbered(21)), TOKENIZER).fingerprint)
    assert len(fingerprints) == len(changes) + 3


def test_a_template_that_writes_the_day(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(rendering, "_days", [])
    jinja = TOKENIZER.chat_template
    dated = row_tokenizer()
    dated.chat_template = "{{ strftime_now('%d %b %Y') }}" + jinja
    exp = of_pairs(tmp_path, [("q", "a")])
    paths = set()
    for day in (Date(2026, 1, 2), Date(2026, 1, 3)):
        rendering.write_day(day)
        store = prepare(exp, dated)
        paths |= {store.path, store_path(exp)}
        assert texts(store, dated) == [f"{day:%d %b %Y}Qq<|end|>Aa<|end|>"]
        assert store.meta["identity"]["date"] == str(day)
    assert len(paths) == 3  # one for both days of the template without a date


def test_the_summary_says_what_is_not_as_in_the_row(tmp_path: Path):
    call = {"function": {"name": "f", "arguments": {}}}
    rows = [
        {"messages": [turn("user", "Q"), turn("assistant", "", tool_calls=[call])]},
        {"messages": json.dumps([turn("user", "Q"), turn("assistant", "A")])},
    ]
    write_rows(tmp_path / "snap" / "train.jsonl", rows)
    write_rows(tmp_path / "snap" / "test.jsonl", rows)
    exp = of_rows(tmp_path, [], path=str(tmp_path / "snap"), packing="none")
    store = prepare(exp, TOKENIZER)
    assert len(store) == 2
    text = summary(store)
    assert "rows with tools as JSON text, for the chat template has no form for calls: 1" in text
    assert "files of other splits, which were not read: test.jsonl" in text
    exp.data.eval_path = exp.data.path
    eval_spec = dataset_spec(exp.data, 0, TOKENIZER, task_of(exp, TOKENIZER), "eval")
    assert [file.name for file in eval_spec.split.files] == ["test.jsonl"]


def test_a_store_of_other_options_is_never_used(tmp_path: Path):
    place = prepare(of_pairs(tmp_path, numbered(20)), TOKENIZER).path
    for changes, other, difference in (
        ({"seq_len": 48}, TOKENIZER, r"seq_len 32 there, 48 wanted\."),
        ({"template": "human_assistant"}, TOKENIZER, r"template \{% .* there, \{% .* wanted\."),
        ({}, row_tokenizer("<|more|>"), r"tokenizer \w{64} there, \w{64} wanted\."),
    ):
        changed = of_pairs(tmp_path, numbered(20), **changes)
        place = place.rename(store_path(changed, other))
        with pytest.raises(DataError, match=f"prepared differently: {difference}"):
            prepare(changed, other)


def _prepare_until_killed(exp: Experiment) -> None:
    """Dies without a word when it writes the third batch."""
    blocks.BATCH_ROWS = 10
    append, written = writer.Writer.append, []

    def append_or_die(self, examples):
        if len(written) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        written.append(examples)
        return append(self, examples)

    writer.Writer.append = append_or_die
    prepare(exp, row_tokenizer())


def test_a_killed_preparation_starts_again(tmp_path: Path):
    rows = [chat_row(i) for i in range(95)]
    exp = of_rows(tmp_path, rows, on_bad_row="skip", form="prompt_response", seq_len=32)
    process = forks.process(_prepare_until_killed, exp)
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert not store_path(exp).exists()
    store = prepare(exp, TOKENIZER)
    store.verify()
    left = {child.suffix for child in store.path.parent.iterdir() if child != store.path}
    assert left == {".lock", ".jsonl"}
    assert store.meta["rejected"] == {"a missing column": 4, "the template refuses it": 8}
    assert store.meta["dropped"] == {"without an answer": 6}
    assert Path(store.meta["rejected_file"]).read_bytes().count(b"\n") == 12


def test_text_and_chats_in_one_pretraining(tmp_path: Path):
    exp = of_text(tmp_path, "A text.\nIts end.\n", packing="none")
    rows = of_pairs(tmp_path, [("q", "a"), ("r", "b")]).data.path
    exp.data.sources = [SourceConfig(exp.data.path), SourceConfig(rows)]
    store = prepare(exp, TOKENIZER)
    chats = ["Qq<|end|>Aa<|end|>", "Qr<|end|>Ab<|end|>"]
    assert texts(store, TOKENIZER) == ["A text.\nIts end.\n</s>", *chats]
    assert all(store[i].targets[1:].all() for i in range(len(store)))
    assert (store.meta["form"], store.meta["template"]) == ("text+prompt_response", "own")
    # Nothing is asked in a text, so it cannot be learned as an answer.
    exp.task.kind = "sft"
    with pytest.raises(ConfigError, match=r"corpus\.txt contains text beside conv.*pretrain"):
        prepare(exp, TOKENIZER)


# Evaluation


def parts_of(exp: Experiment) -> list[list[str]]:
    return [texts(prepare(exp, TOKENIZER, split=name), TOKENIZER) for name in ("train", "eval")]


def test_held_out_rows_are_a_number_or_a_fraction(tmp_path: Path):
    rows = numbered(50)
    train, held_out = parts_of(of_pairs(tmp_path, rows, eval_fraction=0.1))
    assert (len(train), len(held_out)) == (45, 5)
    assert Counter(train + held_out) == as_text(rows)
    exp = of_pairs(tmp_path, rows, eval_samples=5)
    assert parts_of(exp) == [train, held_out]
    exp.seed = 1
    assert set(parts_of(exp)[1]) != set(held_out)
    assert len(parts_of(of_pairs(tmp_path, rows, eval_fraction=0.001))[1]) == 1
    for too_many in ({"eval_samples": 50}, {"eval_fraction": 0.999}):
        ((key, value),) = too_many.items()
        with pytest.raises(ConfigError, match=rf"{key}={value} of 50 rows"):
            prepare(of_pairs(tmp_path, rows, **too_many), TOKENIZER)
    for more in ({"eval_path": "dev.jsonl"}, {"eval_samples": 5}):
        problem = next(iter(data_problems(DataConfig(eval_fraction=0.1, **more))))
        assert "data.eval_fraction=0.1" in problem
        assert "Keep one of them." in problem


def test_a_source_for_evaluation(tmp_path: Path):
    exp = of_pairs(tmp_path, numbered(9))
    assert not exp.data.has_eval
    with pytest.raises(ConfigError, match="no evaluation data"):
        prepare(exp, TOKENIZER, split="eval")
    row = {"prompt": "Q?", "response": " A. "}
    exp.data.eval_path = str(write_rows(tmp_path / "eval.jsonl", [row]))
    assert exp.data.has_eval
    train, held_out = parts_of(exp)
    assert (len(train), held_out) == (9, ["QQ?<|end|>A A. <|end|>"])
    # One that the template refuses is skipped.
    exp.data.on_bad_row = "skip"
    write_rows(tmp_path / "eval.jsonl", [{"prompt": "no", "response": "A"}, row])
    (prompt,) = held_out_prompts(exp.data, exp.seed, TOKENIZER, limit=5, decode=TOKENIZER.decode)
    assert (prompt.prompt, prompt.expected) == ("Q?", " A. <|end|>")
    assert TOKENIZER.decode(prompt.tokens) == "QQ?<|end|>A"


# What is too long

LONG = [("q", "a"), ("q" * 40, "lost"), ("q", "a" * 60)]


def test_too_long_rows_are_counted(tmp_path: Path):
    store = prepare(of_pairs(tmp_path, LONG), TOKENIZER)
    assert (store.meta["truncated"], store.meta["truncated_tokens"]) == (1, 33)
    said = "1 row to 32 tokens; 33 tokens (46.5% of all) cut off"
    assert dict(report(store.meta, was_prepared=False))["truncated"] == said
    reason = "without an answer in the first seq_len tokens"
    assert store.meta["dropped"] == {reason: 1}
    assert texts(store, TOKENIZER)[0] == "Qq<|end|>A" + "a" * 28
    assert f"{reason} (1); truncated: 1 row to 32" in summary(store)

    dropped = prepare(of_pairs(tmp_path, LONG, over_long="drop"), TOKENIZER)
    assert (dropped.num_sequences, dropped.meta["dropped"]) == (1, {"too long": 2})
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: 48 tokens, data\.seq_len is 32"):
        prepare(of_pairs(tmp_path, LONG, over_long="error"), TOKENIZER)
    with pytest.raises(DataError, match="no row is left .* left out: too long .2."):
        prepare(of_pairs(tmp_path, LONG[1:], over_long="drop"), TOKENIZER)


def test_long_documents_are_split_by_default(tmp_path: Path):
    text = "".join(f"line {i}\n" for i in range(60))
    exp = of_text(tmp_path, text)
    for exp.data.packing in ("concat", "none"):
        store = prepare(exp, TOKENIZER)
        assert "".join(texts(store, TOKENIZER)) == text + "</s>"
        lengths = lengths_of(store)
        assert set(lengths[:-1]) == {32}
    meta = store.meta
    assert (meta["rows_read"], meta["truncated"], meta["dropped"]) == (1, 0, {})
    assert meta["split_sequences"] == len(lengths) - 1
    assert f"1 read; cut into {len(lengths)} pieces" in summary(store)
    assert lost_rows(meta) == []
    # No part of one token, from which nothing is learned.
    exp.data.seq_len = len(text)
    assert [prepare(exp, TOKENIZER).num_target_tokens(i) for i in range(2)] == [len(text) - 2, 1]

    exp.data.seq_len, exp.data.over_long = 32, "truncate"
    cut = prepare(exp, TOKENIZER)
    assert (len(cut), cut.meta["truncated"]) == (1, 1)
    warning = "WARNING: train data: 1 of 1 row (100.0%) exceed data.seq_len=32: 1 truncated ("
    assert lost_rows(cut.meta)[0].startswith(warning)


def test_more_than_two_percent_lost_is_a_warning(tmp_path: Path):
    rows = [("q", "a" * 20)] * 180 + [("q", "a" * 150)] * 15 + [("q", "a" * 300)] * 5
    exp = of_pairs(tmp_path, rows)
    (warning,) = lost_rows(prepare(exp, TOKENIZER).meta)
    assert "20 of 200 rows (10.0%) exceed data.seq_len=32: 20 truncated (" in warning
    assert "data.seq_len=288 keeps 95 %, data.seq_len=352 keeps 99 % of the rows" in warning
    for seq_len, lost in ((288, 0.05), (352, 0.01)):
        exp.data.seq_len = seq_len
        meta = prepare(exp, TOKENIZER).meta
        assert meta["truncated"] <= 200 * lost
        assert meta["truncated_tokens"] <= meta["num_tokens"] * lost
    exp = of_pairs(tmp_path, [("q", "a")] * 95 + [("q", " ")] * 5)
    assert lost_rows(prepare(exp, TOKENIZER).meta) == [
        "WARNING: train data: 5 of 100 rows (5.0%) are not used: without an answer (5)."
    ]
    exp = of_pairs(tmp_path, [("q", "a")] * 5, deduplicate=True)
    assert lost_rows(prepare(exp, TOKENIZER).meta) == []  # as asked for
    exp = of_pairs(tmp_path, [("q", "a" * 20), *[("q" * 300, "a")] * 20])
    meta = prepare(exp, TOKENIZER).meta
    with pytest.raises(DataError, match=r"20 of 21 rows .*\n.*20% may .*max_lost=0\.96 allows"):
        check_lost(meta, max_lost=0.2)
    check_lost(meta, max_lost=0.96)
    # Advice is given once, and is nothing that the model does not take.
    assert lost_rows(meta)[0].endswith("data.seq_len=352 keeps 99 % of the rows and tokens.")
    (warning,) = lost_rows(meta, longest=128)
    assert warning.endswith("). The model takes at most 128 tokens: shorten the longer rows first.")
    few = of_pairs(tmp_path, [("q", "a" * 20)] * 2 + [("q" * 300, "a")] * 4)
    check_lost(prepare(few, TOKENIZER).meta, max_lost=0.2)


@pytest.mark.parametrize("kind", ["sft", "pretrain", "dpo"])
def test_the_rows_read_are_all_rows_whatever_the_task(tmp_path: Path, kind: str):
    good = {"prompt": "q", "chosen": "a", "rejected": "b"}
    rows = [good, {**good, "prompt": 1}, good, {**good, "chosen": ""}, {**good, "x": "y"}]
    if kind == "pretrain":
        rows = [{"text": text} for text in ("t", 1, "u", " ", "v")]
    exp = of_rows(tmp_path, rows, on_bad_row="skip", packing="none")
    exp.task.kind = kind
    meta = prepare(exp, TOKENIZER).meta
    assert meta["rows_read"] == 5
    assert sum(meta["dropped"].values()) + sum(meta["rejected"].values()) == 2
    assert (meta["dropped"] == {"empty": 1}) == (kind == "pretrain")


def test_task_and_form_must_go_together(tmp_path: Path):
    exp = of_text(tmp_path, "some text", packing="best_fit")
    exp.task.kind = "sft"
    with pytest.raises(ConfigError, match="task=sft needs questions and answers"):
        prepare(exp, TOKENIZER)
    with pytest.raises(DataError, match=r"corpus\.txt, line 1: a text file has no columns"):
        prepare(of_text(tmp_path, "some text", form="alpaca"), TOKENIZER)
    # Pretraining on conversations learns all of them.
    exp = of_pairs(tmp_path, [("q", "a")])
    exp.task.kind = "pretrain"
    store = prepare(exp, TOKENIZER)
    assert store.num_target_tokens(0) == len(store[0].tokens) - 1


def _prepare_in_child(exp: Experiment, start, results) -> None:
    tokenizer = row_tokenizer()
    start.wait()
    store = prepare(exp, tokenizer)
    results.put((store.fingerprint, (store.path / "meta.json").stat().st_ino))


def test_processes_that_prepare_at_once_share_one_store(tmp_path: Path):
    exp = of_pairs(tmp_path, numbered(300))
    start, results = forks.context.Event(), forks.context.Queue()
    children = [forks.process(_prepare_in_child, exp, start, results) for _ in range(3)]
    for child in children:
        child.start()
    start.set()
    found = {results.get(timeout=120) for _ in children}
    for child in children:
        child.join(60)
    assert len(found) == 1
    assert len([path for path in (tmp_path / "cache" / "data").iterdir() if path.is_dir()]) == 1


def test_cache_directory(tmp_path: Path, monkeypatch):
    data = DataConfig()
    monkeypatch.delenv("LLMX_CACHE", raising=False)
    assert cache_directory(data) == Path.home() / ".cache" / "llmx"
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path))
    assert cache_directory(data) == tmp_path
    data.cache_dir = "/elsewhere"
    assert cache_directory(data) == Path("/elsewhere")


def pieces(packing: Packing) -> list[list[tuple[int, int, int]]]:
    """(row, start, stop) of every piece of every sample."""
    columns = (packing.items.tolist(), packing.starts.tolist(), packing.stops.tolist())
    every = list(zip(*columns, strict=True))
    return [every[a:b] for a, b in itertools.pairwise(packing.samples.tolist())]


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 40))
def test_best_fit_places_every_row_once_and_fits(lengths: list[int], capacity: int):
    samples = pieces(best_fit(lengths, capacity=capacity))
    whole = [(row, 0, length) for row, length in enumerate(lengths)]
    assert sorted(itertools.chain(*samples)) == whole
    sums = sorted(sum(stop for _, _, stop in sample) for sample in samples)
    assert not sums or sums[-1] <= capacity
    # No two samples could have been one.
    assert len(sums) < 2 or sums[0] + sums[1] > capacity


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(2, 16))
def test_concat_loses_at_most_one_token(lengths: list[int], capacity: int):
    samples = pieces(concat(lengths, capacity=capacity))
    sizes = [sum(stop - start for _, start, stop in sample) for sample in samples]
    assert all(size == capacity for size in sizes[:-1])
    assert sum(lengths) - sum(sizes) == (1 if sum(lengths) % capacity == 1 else 0)
    flat = [(row, i) for sample in samples for row, a, b in sample for i in range(a, b)]
    every = [(row, i) for row, length in enumerate(lengths) for i in range(length)]
    assert flat == every[: len(flat)]
