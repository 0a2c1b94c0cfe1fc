"""Preparing: nothing lost or duplicated, found again when unchanged, never mistaken."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmx.config import DataConfig, Experiment, SourceConfig
from llmx.config.validate import data_problems
from llmx.data import has_eval, held_out_prompts
from llmx.data.source import files as digests
from llmx.data.store import staging
from llmx.data.store.packing import Packing, best_fit, concat
from llmx.data.store.samples import sha256_of_file
from llmx.data.store.spec import cache_directory, dataset_spec
from llmx.data.store.summary import lost_rows, report, summary
from llmx.data.tokenize import encoder as blocks
from llmx.errors import ConfigError, DataError
from llmx.tasks import prepare, task_of, tokenizer_of
from tests import forks
from tests.small_tokenizers import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ ('Q' if m['role'] == 'user' else 'A') + m['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'A' }}{% endif %}"
)


@pytest.fixture
def tokenizer():
    return byte_tokenizer("<|end|>", chat_template=TEMPLATE)


def experiment(tmp_path: Path, rows: list[tuple[str, str]] | str, **data) -> Experiment:
    """An SFT experiment on (question, answer) rows, or pretraining on a text."""
    exp = Experiment()
    if isinstance(rows, str):
        exp.task.kind, exp.data.packing = "pretrain", "concat"
        path = tmp_path / "corpus.txt"
        path.write_text(rows, encoding="utf-8")
    else:
        path = tmp_path / "rows.jsonl"
        lines = [json.dumps({"prompt": q, "response": a}) + "\n" for q, a in rows]
        path.write_text("".join(lines), encoding="utf-8")
    exp.data.path, exp.data.cache_dir = str(path), str(tmp_path / "cache")
    exp.data.seq_len = 32
    for name, value in data.items():
        setattr(exp.data, name, value)
    return exp


def store_path(exp: Experiment, tokenizer) -> Path:
    return dataset_spec(exp.data, exp.seed, tokenizer, task_of(exp, tokenizer), "train").path


def numbered(count: int) -> list[tuple[str, str]]:
    return [(f"q{i}" + "x" * (i % 7), f"a{i}") for i in range(count)]


def texts(store, tokenizer) -> list[str]:
    """Every row of a store as text, in the order of the store."""
    return [
        tokenizer.decode(tokens) for i in range(len(store)) for tokens, _ in store[i].sequences()
    ]


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_every_row_is_in_the_store_once(tmp_path: Path, tokenizer, packing: str):
    rows = numbered(1100)  # more than two batches of the tokenizer
    store = prepare(experiment(tmp_path, rows, packing=packing), tokenizer)
    wanted = Counter(f"Q{q}<|end|>A{a}<|end|>" for q, a in rows)
    assert Counter(texts(store, tokenizer)) == wanted
    assert store.num_sequences == 1100
    assert (len(store) == 1100) == (packing == "none")
    learned = [
        tokenizer.decode(tokens[targets])
        for i in range(len(store))
        for tokens, targets in store[i].sequences()
    ]
    assert Counter(learned) == Counter(f"{a}<|end|>" for _, a in rows)
    assert max(len(store[i].tokens) for i in range(len(store))) <= 32
    assert store.meta["dropped"] == {}
    store.verify()


def test_pretraining_text_is_all_there_and_cut_at_seq_len(tmp_path: Path, tokenizer):
    text = "".join(f"line {i} ü\n" for i in range(200))
    store = prepare(experiment(tmp_path, text), tokenizer)
    lengths = [len(store[i].tokens) for i in range(len(store))]
    assert set(lengths[:-1]) == {32}
    tokens = np.concatenate([store[i].tokens for i in range(len(store))])
    assert tokenizer.decode(tokens) == text + "</s>"
    # One document: every sample is one row, of which all is learned but its first token.
    assert [store.num_target_tokens(i) for i in range(len(store))] == [n - 1 for n in lengths]
    assert store.num_sequences == len(store)


def test_documents_are_isolated(tmp_path: Path, tokenizer):
    exp = experiment(tmp_path, "")
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": "ab" * n}) + "\n" for n in (3, 20, 1)))
    exp.data.path = str(path)
    store = prepare(exp, tokenizer)
    assert [store[i].sequence_starts.tolist() for i in range(len(store))] == [[0, 7], [0, 16]]
    assert texts(store, tokenizer) == [
        "ababab</s>",
        "ab" * 12 + "a",
        "b" + "ab" * 7 + "</s>",
        "ab</s>",
    ]


def test_found_again_only_when_nothing_that_matters_changed(tmp_path: Path, tokenizer):
    exp = experiment(tmp_path, numbered(20))
    first = prepare(exp, tokenizer)
    stamp = (first.path / "meta.json").stat().st_mtime_ns
    exp.data.num_workers, exp.batch.micro_batch, exp.seed = 7, 3, 5
    again = prepare(exp, tokenizer)
    assert again.path == first.path == store_path(exp, tokenizer)
    assert (again.path / "meta.json").stat().st_mtime_ns == stamp

    fingerprints = {first.fingerprint}
    changes = {
        "seq_len": 48,
        "packing": "none",
        "over_long": "drop",
        "template": "human_assistant",
        "system": "Be.",
        "loss_on": "last",
        "max_rows": 5,
        "eval_samples": 4,
    }
    for name, value in changes.items():
        before = getattr(exp.data, name)
        setattr(exp.data, name, value)
        fingerprints.add(prepare(exp, tokenizer).fingerprint)
        setattr(exp.data, name, before)
    other = byte_tokenizer("<|end|>", "<|more|>", chat_template=TEMPLATE)
    fingerprints.add(prepare(exp, other).fingerprint)
    with Path(exp.data.path).open("a") as stream:
        stream.write('{"prompt": "new", "response": "row"}\n')
    fingerprints.add(prepare(exp, tokenizer).fingerprint)
    assert len(fingerprints) == len(changes) + 3


def test_a_store_of_other_options_is_never_used(tmp_path: Path, tokenizer):
    exp = experiment(tmp_path, numbered(20))
    place = prepare(exp, tokenizer).path
    others = [
        ({"seq_len": 48}, tokenizer, r"seq_len 32 there, 48 wanted\."),
        ({"template": "human_assistant"}, tokenizer, r"template \{% .* there, \{% .* wanted\."),
        (
            {},
            byte_tokenizer("<|end|>", "<|more|>", chat_template=TEMPLATE),
            r"tokenizer \w{64} there, \w{64} wanted\.",
        ),
    ]
    for changes, other, difference in others:
        changed = experiment(tmp_path, numbered(20), **changes)
        place = place.rename(store_path(changed, other))
        with pytest.raises(DataError, match=f"prepared differently: {difference}"):
            prepare(changed, other)


def test_digests_are_remembered_until_the_file_changes(tmp_path: Path, monkeypatch):
    file, cache = tmp_path / "big.txt", tmp_path / "cache"
    file.write_bytes(b"a" * digests.WORTH_BYTES)
    first = digests.digest_of(file, cache=cache)
    assert first == sha256_of_file(file)
    with monkeypatch.context() as context:
        context.setattr(digests, "sha256_of_file", None)  # it is not called
        assert digests.digest_of(file, cache=cache) == first
    (note,) = (cache / "digests").iterdir()
    note.write_text("{")
    assert digests.digest_of(file, cache=cache) == first
    with file.open("ab") as stream:
        stream.write(b"b")
    assert digests.digest_of(file, cache=cache) == sha256_of_file(file) != first
    small = tmp_path / "small.txt"
    small.write_text("a")
    assert digests.digest_of(small, cache=tmp_path / "big.txt") == sha256_of_file(small)
    assert digests.digest_of(file, cache=tmp_path / "big.txt") == sha256_of_file(file)


def _prepare_until_killed(exp: Experiment, rows: int) -> None:
    """Dies without a word when so many rows were tokenized."""
    blocks.BATCH_ROWS, staging.JOURNAL_BYTES = 10, 1
    record = staging.Staging.record

    def record_and_die(self, state):
        record(self, state)
        if state["counts"]["rows"] >= rows:
            # Written, and not noted: what a kill leaves.
            for stream in self._streams.values():
                stream.write(b"half")
                stream.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    staging.Staging.record = record_and_die
    prepare(exp, byte_tokenizer("<|end|>", chat_template=REFUSING))


REFUSING = (
    "{% if 'no' in messages[0]['content'] %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
)


def chat_row(i: int) -> dict[str, str]:
    """Some have no answer, some have another key, some are refused by the template."""
    answer = "" if i % 17 == 3 else f"a{i}"
    question = f"no {i}" if i % 11 == 5 else f"q{i}" * (i % 9 + 1)
    return {"prompt": question, "answer" if i % 23 == 7 else "response": answer}


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_a_killed_preparation_goes_on(tmp_path: Path, packing: str):
    tokenizer = byte_tokenizer("<|end|>", chat_template=REFUSING)
    exp = experiment(tmp_path, "", packing=packing)
    chats = packing == "best_fit"
    if chats:
        exp.task.kind, exp.data.on_bad_row, exp.data.form = "sft", "skip", "prompt_response"
    path = tmp_path / "rows.jsonl"
    rows = [chat_row(i) if chats else {"text": f"text {i}" * (i % 9 + 1)} for i in range(95)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    exp.data.path = str(path)
    exp.data.cache_dir = str(tmp_path / "whole")
    whole = prepare(exp, tokenizer)
    exp.data.cache_dir = str(tmp_path / "killed")
    for rows in (20, 60):
        process = forks.process(_prepare_until_killed, exp, rows)
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
        assert not store_path(exp, tokenizer).exists()
    store = prepare(exp, tokenizer)
    assert store.meta["resumed_at_row"] == 60
    assert store.meta["sha256"] == whole.meta["sha256"]
    same = ("rows_read", "truncated", "dropped", "rejected", "fingerprint")
    assert [store.meta[key] for key in same] == [whole.meta[key] for key in same]
    store.verify()
    left = {child.suffix for child in store.path.parent.iterdir() if child != store.path}
    if chats:
        assert store.meta["rejected"] == {"a missing column": 4, "the template refuses it": 8}
        assert store.meta["dropped"] == {"without an answer": 6}
        files = [Path(one.meta["rejected_file"]).read_bytes() for one in (store, whole)]
        assert files[0] == files[1]
        assert files[0].count(b"\n") == 12
    assert left == {".lock", ".jsonl"} if chats else {".lock"}


def test_text_and_chats_in_one_pretraining(tmp_path: Path, tokenizer):
    exp = experiment(tmp_path, "A text.\nIts end.\n", packing="none")
    rows = experiment(tmp_path, [("q", "a"), ("r", "b")]).data.path
    exp.data.sources = [
        SourceConfig(exp.data.path),
        SourceConfig(rows, weight=2),
        SourceConfig(rows, max_rows=1),
    ]
    store = prepare(exp, tokenizer)
    chats = ["Qq<|end|>Aa<|end|>", "Qr<|end|>Ab<|end|>"]
    assert texts(store, tokenizer) == ["A text.\nIts end.\n</s>", *chats, *chats, chats[0]]
    assert all(store[i].targets[1:].all() for i in range(len(store)))
    assert (store.meta["form"], store.meta["template"]) == ("text+prompt_response", "own")
    # Nothing is asked in a text, so it cannot be learned as an answer.
    exp.task.kind = "sft"
    with pytest.raises(
        ConfigError, match=r"corpus\.txt contains text beside conversations.*pretrain"
    ):
        prepare(exp, tokenizer)


def test_held_out_rows(tmp_path: Path, tokenizer):
    rows = numbered(50)
    exp = experiment(tmp_path, rows, eval_samples=8)
    train, held_out = (
        texts(prepare(exp, tokenizer, split=s), tokenizer) for s in ("train", "eval")
    )
    assert len(held_out) == 8
    assert Counter(train + held_out) == Counter(f"Q{q}<|end|>A{a}<|end|>" for q, a in rows)
    exp.seed = 1
    assert set(texts(prepare(exp, tokenizer, split="eval"), tokenizer)) != set(held_out)
    exp.data.eval_samples = 50
    with pytest.raises(ConfigError, match="eval_samples=50 of 50 rows"):
        prepare(exp, tokenizer)


def test_a_fraction_of_the_rows_is_held_out(tmp_path: Path, tokenizer):
    exp = experiment(tmp_path, numbered(50), eval_fraction=0.1)
    train, held_out = (
        texts(prepare(exp, tokenizer, split=s), tokenizer) for s in ("train", "eval")
    )
    assert (len(train), len(held_out)) == (45, 5)
    assert not set(train) & set(held_out)
    as_samples = experiment(tmp_path, numbered(50), eval_samples=5)
    assert texts(prepare(as_samples, tokenizer, split="eval"), tokenizer) == held_out
    exp.data.eval_fraction = 0.001
    assert len(texts(prepare(exp, tokenizer, split="eval"), tokenizer)) == 1
    exp.data.eval_fraction = 0.999
    with pytest.raises(ConfigError, match=r"eval_fraction=0\.999 of 50 rows"):
        prepare(exp, tokenizer)


def test_only_one_key_says_what_is_evaluated():
    for more in ({"eval_path": "dev.jsonl"}, {"eval_samples": 5}):
        problems = list(data_problems(DataConfig(eval_fraction=0.1, **more)))
        assert problems
        assert "data.eval_fraction=0.1" in problems[0]
        assert "Keep one of them." in problems[0]
    assert not list(data_problems(DataConfig(eval_fraction=0.1)))


def test_a_source_for_evaluation(tmp_path: Path, tokenizer):
    exp = experiment(tmp_path, numbered(9))
    assert not has_eval(exp.data)
    with pytest.raises(ConfigError, match="no evaluation data"):
        prepare(exp, tokenizer, split="eval")
    other = tmp_path / "eval.jsonl"
    other.write_text('{"prompt": "Q?", "response": " A. "}\n')
    exp.data.eval_path = str(other)
    assert has_eval(exp.data)
    assert texts(prepare(exp, tokenizer, split="eval"), tokenizer) == ["QQ?<|end|>A A. <|end|>"]
    assert prepare(exp, tokenizer).num_sequences == 9
    (prompt,) = held_out_prompts(exp.data, exp.seed, tokenizer, limit=5, decode=tokenizer.decode)
    assert (prompt.prompt, prompt.expected) == ("Q?", " A. <|end|>")
    assert tokenizer.decode(prompt.tokens) == "QQ?<|end|>A"


LONG = [("q", "a"), ("q" * 40, "lost"), ("q", "a" * 60)]


def test_too_long_rows_are_counted(tmp_path: Path, tokenizer):
    store = prepare(experiment(tmp_path, LONG), tokenizer)
    assert (store.meta["truncated"], store.meta["truncated_tokens"]) == (1, 33)
    assert dict(report(store.meta, was_prepared=False))["truncated"] == (
        "1 row to 32 tokens; 33 tokens (46.5% of all) cut off"
    )
    assert store.meta["dropped"] == {"without an answer in the first seq_len tokens": 1}
    assert texts(store, tokenizer)[0] == "Qq<|end|>A" + "a" * 28
    assert "without an answer in the first seq_len tokens (1); 1 row truncated to 32" in summary(
        store
    )

    dropped = prepare(experiment(tmp_path, LONG, over_long="drop"), tokenizer)
    assert (dropped.num_sequences, dropped.meta["dropped"]) == (1, {"too long": 2})
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: 48 tokens, data\.seq_len is 32"):
        prepare(experiment(tmp_path, LONG, over_long="error"), tokenizer)


def test_long_documents_are_split_by_default(tmp_path: Path, tokenizer):
    text = "".join(f"line {i}\n" for i in range(60))
    exp = experiment(tmp_path, text, packing="none")
    store = prepare(exp, tokenizer)
    assert "".join(texts(store, tokenizer)) == text + "</s>"
    lengths = [len(store[i].tokens) for i in range(len(store))]
    assert set(lengths[:-1]) == {32}
    meta = store.meta
    assert (meta["rows_read"], meta["truncated"], meta["dropped"]) == (1, 0, {})
    assert meta["split_sequences"] == len(lengths) - 1
    assert f"1 row, cut into {len(lengths)} pieces" in summary(store)
    assert lost_rows(meta) == []
    # No part of one token, from which nothing is learned.
    exp.data.seq_len = len(text)
    assert [prepare(exp, tokenizer).num_target_tokens(i) for i in range(2)] == [len(text) - 2, 1]

    exp.data.seq_len, exp.data.over_long = 32, "truncate"
    cut = prepare(exp, tokenizer)
    assert (len(cut), cut.meta["truncated"]) == (1, 1)
    assert lost_rows(cut.meta)[0].startswith(
        "WARNING: train data: 1 of 1 row (100.0%) exceed data.seq_len=32: 1 truncated ("
    )


def test_more_than_two_percent_lost_is_a_warning(tmp_path: Path, tokenizer):
    rows = [("q", "a" * 20)] * 180 + [("q", "a" * 150)] * 15 + [("q", "a" * 300)] * 5
    exp = experiment(tmp_path, rows)
    (warning,) = lost_rows(prepare(exp, tokenizer).meta)
    assert "20 of 200 rows (10.0%) exceed data.seq_len=32: 20 truncated (" in warning
    assert "data.seq_len=288 keeps 95 %, data.seq_len=352 keeps 99 % of the rows" in warning
    for seq_len, lost in ((288, 0.05), (352, 0.01)):
        exp.data.seq_len = seq_len
        meta = prepare(exp, tokenizer).meta
        assert meta["truncated"] <= 200 * lost
        assert meta["truncated_tokens"] <= meta["num_tokens"] * lost
    exp = experiment(tmp_path, [("q", "a")] * 95 + [("q", " ")] * 5)
    assert lost_rows(prepare(exp, tokenizer).meta) == [
        "WARNING: train data: 5 of 100 rows (5.0%) are not used: without an answer (5)."
    ]
    exp = experiment(tmp_path, [("q", "a")] * 5, deduplicate=True)
    assert lost_rows(prepare(exp, tokenizer).meta) == []  # as asked for


@pytest.mark.parametrize("kind", ["sft", "pretrain", "dpo"])
def test_the_rows_read_are_all_rows_whatever_the_task(tmp_path: Path, tokenizer, kind: str):
    good = {"prompt": "q", "chosen": "a", "rejected": "b"}
    rows = [good, {**good, "prompt": 1}, good, {**good, "chosen": ""}, {**good, "x": "y"}]
    if kind == "pretrain":
        rows = [{"text": "t"}, {"text": 1}, {"text": "u"}, {"text": " "}, {"text": "v"}]
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    exp = experiment(tmp_path, [], path=str(path), on_bad_row="skip", packing="none")
    exp.task.kind = kind
    meta = prepare(exp, tokenizer).meta
    assert meta["rows_read"] == 5
    assert sum(meta["dropped"].values()) + sum(meta["rejected"].values()) == 2


def test_nothing_left_is_an_error_and_leaves_nothing(tmp_path: Path, tokenizer):
    with pytest.raises(DataError, match="no row is left .* left out: too long .2."):
        prepare(experiment(tmp_path, LONG[1:], over_long="drop"), tokenizer)
    with pytest.raises(DataError, match="no row in it"):
        prepare(experiment(tmp_path, []), tokenizer)
    assert [path.suffix for path in (tmp_path / "cache" / "data").iterdir()] == [".lock"]


def test_task_and_form_must_go_together(tmp_path: Path, tokenizer):
    exp = experiment(tmp_path, "some text")
    exp.task.kind, exp.data.packing = "sft", "best_fit"
    with pytest.raises(ConfigError, match="task=sft needs questions and answers"):
        prepare(exp, tokenizer)
    with pytest.raises(ConfigError, match=r"data\.packing=concat: would cut"):
        prepare(experiment(tmp_path, numbered(3), packing="concat"), tokenizer)
    exp = experiment(tmp_path, "some text", form="alpaca")
    with pytest.raises(DataError, match=r"corpus\.txt, line 1: a text file has no columns"):
        prepare(exp, tokenizer)
    # Pretraining on conversations learns all of them.
    exp = experiment(tmp_path, [("q", "a")])
    exp.task.kind = "pretrain"
    store = prepare(exp, tokenizer)
    assert store.num_target_tokens(0) == len(store[0].tokens) - 1


def _prepare_in_child(exp: Experiment, start, results) -> None:
    tokenizer = byte_tokenizer("<|end|>", chat_template=TEMPLATE)
    start.wait()
    store = prepare(exp, tokenizer)
    results.put((store.fingerprint, (store.path / "meta.json").stat().st_ino))


def test_processes_that_prepare_at_once_share_one_store(tmp_path: Path):
    exp = experiment(tmp_path, numbered(300))
    start, results = forks.context.Event(), forks.context.Queue()
    children = [forks.process(_prepare_in_child, exp, start, results) for _ in range(3)]
    for child in children:
        child.start()
    start.set()
    found = {results.get(timeout=120) for _ in children}
    for child in children:
        child.join(60)
    assert len(found) == 1
    stores = [path for path in (tmp_path / "cache" / "data").iterdir() if path.is_dir()]
    assert len(stores) == 1


def test_cache_directory(tmp_path: Path, monkeypatch):
    exp = Experiment()
    monkeypatch.delenv("LLMX_CACHE", raising=False)
    assert cache_directory(exp.data) == Path.home() / ".cache" / "llmx"
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path))
    assert cache_directory(exp.data) == tmp_path
    exp.data.cache_dir = "/elsewhere"
    assert cache_directory(exp.data) == Path("/elsewhere")


def pieces(packing: Packing) -> list[list[tuple[int, int, int]]]:
    """(row, start, stop) of every piece of every sample."""
    every = list(
        zip(*(a.tolist() for a in (packing.items, packing.starts, packing.stops)), strict=True)
    )
    return [every[a:b] for a, b in itertools.pairwise(packing.samples.tolist())]


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 40))
def test_best_fit_places_every_row_once_and_fits(lengths: list[int], capacity: int):
    samples = pieces(best_fit(lengths, capacity=capacity))
    assert sorted(piece for sample in samples for piece in sample) == [
        (row, 0, length) for row, length in enumerate(lengths)
    ]
    sums = sorted(sum(stop for _, _, stop in sample) for sample in samples)
    assert not sums or sums[-1] <= capacity
    # No two samples could have been one.
    assert len(sums) < 2 or sums[0] + sums[1] > capacity


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=20), st.integers(2, 16))
def test_concat_loses_at_most_one_token(lengths: list[int], capacity: int):
    samples = pieces(concat(lengths, capacity=capacity))
    sizes = [sum(stop - start for _, start, stop in sample) for sample in samples]
    assert all(size == capacity for size in sizes[:-1])
    assert sum(lengths) - sum(sizes) == (1 if sum(lengths) % capacity == 1 else 0)
    flat = [(row, i) for sample in samples for row, a, b in sample for i in range(a, b)]
    every = [(row, i) for row, length in enumerate(lengths) for i in range(length)]
    assert flat == every[: len(flat)]


def test_tokenizer_that_cannot_be_loaded(monkeypatch):
    exp = Experiment()
    with pytest.raises(ConfigError, match=r"Neither model\.tokenizer nor model\.path"):
        tokenizer_of(exp)
    exp.model.tokenizer = "/nowhere/model"
    with pytest.raises(ConfigError, match="no such directory"):
        tokenizer_of(exp)
    # As HF_HUB_OFFLINE=1 sets it, when the client is imported.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    exp.model.tokenizer = "nobody/no-such-model"
    with pytest.raises(ConfigError, match=r"'nobody/no-such-model' cannot be loaded.*hf download"):
        tokenizer_of(exp)
