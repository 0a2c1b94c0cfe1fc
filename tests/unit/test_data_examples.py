"""Examples of several sequences with columns: never separated, cut together, found again."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from llmx import data
from llmx.config import DataConfig, Experiment, SourceConfig
from llmx.data import (
    Column,
    Conversation,
    Document,
    Example,
    Preference,
    Record,
    Rejected,
    SampleStore,
    Tokens,
    collate,
    held_out_prompts,
)
from llmx.data.examples import TokenSequence
from llmx.data.split import DatasetSplit
from llmx.data.store import build
from llmx.data.store.build import fates_of
from llmx.data.store.summary import print_samples, report, summary
from llmx.data.tokenize import encoder as blocks
from llmx.data.tokenize.conversations import Renderer
from llmx.data.tokenize.truncation import Fates, Truncation, shorter_prompts
from llmx.errors import ConfigError, DataError
from llmx.tasks import Task, prepare
from tests.data_rows import CHATML, chat, learned, of_rows, row_tokenizer, sequences, write_rows
from tests.small_tokenizers import byte_tokenizer
from tests.unit.test_data_tools import WITHOUT

TOKENIZER = row_tokenizer()
CHATTY = byte_tokenizer(*CHATML, chat_template=WITHOUT)
RENDERER = Renderer(CHATTY)


class Pairs(Task):
    """Pairs with what can be beside them: a weight by token, a vector by sequence, a label."""

    name = "pairs"
    takes: ClassVar[tuple[type, ...]] = (Preference,)
    columns: ClassVar[tuple[Column, ...]] = (
        Column("weight", per="token"),
        Column("old_logp", per="token"),
        Column("score", per="sequence", shape=(2,)),
        Column("label", per="example", dtype="int64"),
    )

    def encode(self, row: Preference) -> Example | None:
        number = row.where.number
        if number % 13 == 4:
            return None
        if number % 17 == 5:
            raise Rejected("an unlucky number")
        if number % 3:
            sequences = (row.chosen, row.rejected)
        else:  # tokens of its own, with weights
            ids = list(range(number % 20 + 2))
            weight = [0, *(0.5 * i for i in ids[1:])]
            ready = Tokens(ids, weight=weight, columns={"old_logp": [-float(i) for i in ids]})
            sequences = (row.chosen, ready, row.rejected)
        score = [(number, place) for place in range(len(sequences))]
        return Example.of(*sequences, score=score, label=-number)


def pair_row(i: int) -> dict[str, str]:
    """Some cannot be read, some are refused by the template, some that are all text are too long:
    beside tokens, a prompt is not cut."""
    prompt = f"no {i}" if i % 11 == 6 else f"q{i}" + "x" * (i % 29 if i % 3 else i % 5)
    return {"prompt": prompt, "chosen": f"good {i}" + "!" * (i % 7), "rejected": f"bad {i}"}


def experiment(directory: Path, rows: Iterable[dict[str, Any]], **data: Any) -> Experiment:
    return of_rows(directory, rows, **{"seq_len": 96, "on_bad_row": "skip", **data})


def prepared(exp: Experiment, task: type[Task] = Pairs) -> SampleStore:
    return data.prepare(exp.data, exp.seed, TOKENIZER, task(exp, TOKENIZER))


def of_pairs(directory: Path, numbers: Iterable[int], **options: Any) -> SampleStore:
    return prepared(experiment(directory, map(pair_row, numbers), **options))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> SampleStore:
    return of_pairs(tmp_path_factory.mktemp("pairs"), range(1, 120))


def examples_of(store: SampleStore) -> dict[int, list[tuple[Any, ...]]]:
    """Every example by its number: (tokens, weights, old_logp, score) of each sequence."""
    found = {}
    for sample in (store[index] for index in range(len(store))):
        by_token = (sample.tokens, sample.weights, sample.columns["old_logp"])
        sequences = [
            (*(values[start:stop].tolist() for values in by_token), score.tolist())
            for (start, stop), score in zip(sample.bounds(), sample.columns["score"], strict=True)
        ]
        ends = np.cumsum(sample.example_sizes())
        assert ends[-1] == len(sequences)
        for label, start, end in zip(sample.columns["label"], [0, *ends], ends, strict=False):
            found[-int(label)] = sequences[start:end]
    return found


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_pairs_with_columns(tmp_path: Path, packing: str):
    count = 700  # more than a batch
    store = of_pairs(tmp_path, range(1, count), packing=packing)
    store.verify()
    found, fates = examples_of(store), Counter()
    for number in range(1, count):
        row, example = pair_row(number), found.pop(number, None)
        if number % 13 == 4:
            fates["left out by the task"] += 1
        elif number % 17 == 5:
            fates["an unlucky number"] += 1
        elif "no" in row["prompt"]:
            fates["the template refuses it"] += 1
        else:
            assert example is not None, number
            check_pair(number, row, example)
            continue
        assert example is None
    assert not found
    assert store.meta["dropped"] == {"left out by the task": fates.pop("left out by the task")}
    assert store.meta["rejected"] == dict(fates)
    assert store.meta["num_examples"] == store.num_examples(np.arange(len(store)))
    assert max(len(store[i].tokens) for i in range(len(store))) <= 96
    assert (len(store) == store.meta["num_examples"]) == (packing == "none")


def check_pair(number: int, row: dict[str, str], example: list[tuple[Any, ...]]) -> None:
    assert [score for *_, score in example] == [[number, place] for place in range(len(example))]
    assert len(example) == (2 if number % 3 else 3)
    prompts = set()
    for (tokens, weights, old_logp, _), side in ((example[0], "chosen"), (example[-1], "rejected")):
        prompt, _, answer = TOKENIZER.decode(tokens).partition("<|end|>A")
        assert answer == f"{row[side]}<|end|>"  # completions are never cut
        assert ("Q" + row["prompt"]).endswith(prompt[1:])
        prompts.add(prompt)
        assert sum(weights) == len(answer) - len("<|end|>") + 1
        assert set(old_logp) == {0.0}
    assert len(prompts) == 1
    for ids, weights, old_logp, _ in example[1:-1]:
        assert old_logp == [-float(i) for i in ids]
        # The first is nothing to predict, whatever its weight.
        assert weights == [0.0, *(0.5 * i for i in ids[1:])]


def test_the_index_knows_without_reading(pairs: SampleStore):
    store, chosen = pairs, np.array([3, 0, 3])
    samples = [store[i] for i in chosen]
    assert store.num_tokens(chosen) == sum(len(sample.tokens) for sample in samples)
    assert store.num_examples(chosen) == sum(len(sample.columns["label"]) for sample in samples)
    assert store.num_target_tokens(chosen) == sum(int(s.targets.sum()) for s in samples)
    assert store.weight_of(chosen) == sum(s.weights.astype(np.float64).sum() for s in samples)
    assert store.weight_of(2) == float(store[2].weights.astype(np.float64).sum())
    assert SampleStore.open(store.path).columns == Pairs.columns


def by_sequence(batch: dict[str, torch.Tensor], values: torch.Tensor) -> list[float]:
    """As the docstring of ``collate`` says it."""
    sums = torch.zeros(len(batch["example_ids"]) + 1, dtype=torch.float64)
    sums.index_add_(0, batch["sequence_ids"].flatten(), values.double().flatten())
    return sums[1:].tolist()


def test_collated_packed_and_padded(pairs: SampleStore):
    samples = [pairs[i] for i in (5, 1, 0)]
    batches = [
        collate(samples, seq_len=96, pad_id=0, layout=layout, columns=pairs.columns)
        for layout in ("packed", "padded")
    ]
    plain = collate(samples, seq_len=96, pad_id=0, layout="packed")
    assert all(torch.equal(values, batches[0][name]) for name, values in plain.items())
    sums = []
    for batch in batches:
        weights = batch["weights"]
        assert weights.dtype == torch.float32
        assert ((weights != 0) == (batch["labels"] != data.IGNORE)).all()
        assert ((batch["sequence_ids"] > 0) == (batch["segment_ids"] > 0)).all()
        assert weights.double().sum() == pairs.weight_of(np.array([5, 1, 0]))
        sums.append([by_sequence(batch, weights), by_sequence(batch, batch["old_logp"])])
        sizes = torch.bincount(batch["example_ids"]).tolist()
        assert sizes == [size for sample in samples for size in sample.example_sizes()]
        assert batch["label"].tolist() == [x for s in samples for x in s.columns["label"].tolist()]
        assert batch["score"].shape == (len(batch["example_ids"]), 2)
        # Of an example, the first number is the same for all sequences.
        of_example = -batch["label"][batch["example_ids"]]
        assert torch.equal(batch["score"][:, 0], of_example.float())
    assert sums[0] == sums[1]
    assert batches[1]["input_ids"].shape[0] == len(batches[1]["example_ids"])


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_rank_without_samples_has_no_examples(layout: str):
    batch = collate([], seq_len=96, pad_id=3, layout=layout, columns=Pairs.columns)
    shapes = {name: tuple(values.shape) for name, values in batch.items()}
    assert shapes["weights"] == shapes["old_logp"] == shapes["sequence_ids"] == (1, 8)
    assert (shapes["example_ids"], shapes["label"], shapes["score"]) == ((0,), (0,), (0, 2))
    assert int(batch["sequence_ids"].max()) == int(batch["segment_ids"].max()) == 0
    assert batch["input_ids"].tolist() == [[3] * 8]
    assert (batch["labels"] == data.IGNORE).all()


# Truncation


def cut(*sequences: Tokens, by: Any = "auto", limit: int = 10, **options: Any) -> Any:
    """(the tokens of each sequence that are left, or None, what was counted)."""
    config = DataConfig(seq_len=limit, packing="best_fit", **options)
    fates, place = Fates(), Column("place", per="token")
    whole = [
        TokenSequence(ids := np.array(one.ids), np.array(one.weight) > 0, {place: ids})
        for one in sequences
    ]
    truncation = Truncation(config, RENDERER, splits=False)
    left = truncation.fitted(Example(tuple(sequences), cut=by), whole, fates)
    assert fates.overflow.total() == (sum(len(one.tokens) for one in whole) > limit)
    if not left:
        return None, fates.dropped
    (parts,) = left
    assert all(part.columns[place].tolist() == part.tokens.tolist() for part in parts)
    return [part.tokens.tolist() for part in parts], [fates.truncated, fates.truncated_tokens]


def answer(prompt: int, completion: int, first: int = 0) -> Tokens:
    """Tokens 0, 1, ... of which the last ``completion`` are targets; 0 begins every text."""
    ids = [0, *range(first + 1, first + prompt + completion)]
    return Tokens(ids, weight=[0] * prompt + [1] * completion)


def test_which_end_may_go_is_said_by_the_task_and_what_fits_is_left_alone():
    one = answer(4, 8)
    assert cut(one, limit=10) == ([list(range(10))], [1, 2])
    assert cut(one, by="start", limit=10)[0] == [list(range(2, 12))]
    assert cut(one, limit=12) == ([one.ids], [0, 0])
    # Only conversations have a prompt that may go.
    for row, by in ((one, "none"), (one, "prompt"), (answer(6, 1), "auto")):
        sequences = (row, row) if by == "auto" else (row,)
        dropped = (None, {"longer than seq_len, and not to be cut": 1})
        assert cut(*sequences, by=by, limit=10) == dropped
    # The longest loses first; one that is not to be cut stays whole.
    assert [len(x) for x in cut(answer(1, 9), answer(1, 3), by="end", limit=10)[0]] == [6, 4]
    mixed = cut(answer(1, 9), answer(1, 3), by=("none", "end"), limit=12)[0]
    assert [len(x) for x in mixed] == [10, 2]
    three = (answer(1, 9), answer(1, 9), answer(1, 3))
    ends = ([[7, 8, 9], [7, 8, 9], [1, 2, 3]], [1, 15])
    assert cut(*three, by="start", limit=10) == ends
    assert cut(*three, by="end", limit=2)[0] is None, "a token of each stays"
    assert cut(one, limit=10, over_long="drop") == (None, {"too long": 1})
    with pytest.raises(DataError, match=r"14 tokens in 2 sequences, data\.seq_len is 10"):
        cut(answer(1, 9), answer(1, 3), limit=10, over_long="error")


# Prompts that are cut as text: the label is whole

TEXT = "这本书 😀e\u0301 👩\u200d🚀 very 好看。" * 6


def shortened(row: Conversation, limit: int, side: str = "left") -> Any:
    return shorter_prompts(RENDERER, [row], limit=limit, side=side)


labelled = functools.partial(chat, keeps_completion=True)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_prompt_is_cut_between_characters(side: str):
    for limit in range(40, 200, 7):
        ((found,), _) = shortened(labelled(TEXT, "好评"), limit, side)
        prompt, answer = found.messages
        assert answer.content == "好评"
        # Neither half an accent nor half of a joined emoji begins it, or is left behind.
        if side == "left":
            assert TEXT.endswith(prompt.content)
            begins = prompt.content
        else:
            assert TEXT.startswith(prompt.content)
            begins = TEXT[len(prompt.content) :]
        assert begins[:1] not in ("\u0301", "\u200d")
        (row,) = RENDERER.conversations([found])
        assert limit - 12 < len(row.tokens) <= limit, "no more is cut than there must be"
        assert learned(CHATTY, row) == ["好评<|im_end|>"]
    assert shortened(labelled("q", "label " * 10), 30, side) is None


def test_the_oldest_turns_go_first():
    row = labelled("old " * 5, "answer", "new " * 5, "answer", "question", "bad", system="S")
    ((found,), (short,)) = shortened(row, 90)
    assert [m.content for m in found.messages] == ["S", "new " * 5, "answer", "question", "bad"]
    assert len(short.tokens) <= 90
    same = labelled("a", "b", "a", "b", "a", "b")
    assert shortened(same, 400)[0] == [same]
    size = len(RENDERER.conversations([same])[0].tokens)
    ((fitting,), _) = shortened(same, size - 1)
    assert [m.content for m in fitting.messages] == ["a", "b", "a", "b"]


def labelled_rows(directory: Path, rows: list[tuple[str, str]], **data: object) -> Experiment:
    content = "label\ttext_a\n" + "".join(f"{label}\t{text}\n" for label, text in rows)
    data_map = {"prompt": "text_a", "label": "label"}
    return of_rows(directory, content, "rows.tsv", data_map=data_map, **data)


def test_no_label_is_lost(tmp_path: Path):
    rows = [("good", "short"), ("bad", "长" * 100), ("x" * 100, "label too long")]
    store = prepare(labelled_rows(tmp_path, rows), CHATTY)
    found = [learned(CHATTY, row) for row in sequences(store)]
    assert sorted(found) == [["bad<|im_end|>"], ["good<|im_end|>"]]
    assert store.meta["dropped"] == {"answer longer than seq_len": 1}
    assert store.meta["truncated"] == 1
    assert store.meta["truncated_tokens"] > 200
    left_out = "left out: answer longer than seq_len (1); truncated: 1 row to 64 tokens"
    assert left_out in summary(store)
    dropped = prepare(labelled_rows(tmp_path, rows, over_long="drop"), CHATTY)
    assert dropped.num_sequences == 1


def test_an_eval_prompt_is_cut_as_it_is_trained(tmp_path: Path):
    exp = labelled_rows(tmp_path, [("good", "short"), ("bad", "x" * 200)])
    exp.data.eval_path = exp.data.path
    prompts = held_out_prompts(exp.data, exp.seed, CHATTY, limit=9, decode=CHATTY.decode)
    assert [prompt.expected for prompt in prompts] == ["good<|im_end|>", "bad<|im_end|>"]
    rows = [row.tokens.tolist() for row in sequences(prepare(exp, CHATTY))]
    assert max(rows, key=len)[: len(prompts[1].tokens)] == list(prompts[1].tokens)


# What a task may be, and what it is told


ONE = Tokens([1])


class Raw(Task):
    """Records as they are."""

    name = "raw"
    takes: ClassVar[tuple[type, ...]] = (Record,)

    def encode(self, row: Record) -> Example | None:
        return Example.of(Tokens(row.value["ids"]))


def test_records_of_no_known_format(tmp_path: Path):
    rows = [{"ids": list(range(i + 1))} for i in range(9)]
    store = prepared(experiment(tmp_path, rows, packing="none"), Raw)
    assert [store[i].tokens.tolist() for i in range(9)] == [row["ids"] for row in rows]
    # Every token is a target but the first.
    assert store.num_target_tokens(np.arange(9)) == sum(range(9))
    at = r"for .*rows\.jsonl, line 1: KeyError: 'ids' \(.*_examples\.py, line \d+\)\."
    with pytest.raises(ConfigError, match=rf"task=raw: encode\(\) failed {at} Correct the task"):
        prepared(experiment(tmp_path, [{"id": 1}]), Raw)
    # For sft this is nothing.
    with pytest.raises(DataError, match="fit no known format"):
        prepare(experiment(tmp_path, rows), TOKENIZER)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ([1, 2], "encode() gave list; it gives an Example or None."),
        (Example.of(), "an Example without a sequence"),
        (Example.of("text"), "is a Conversation, a Document or Tokens, not str."),
        (Example.of(ONE, cut="middle", label=1), "cut='middle': one of auto, end, start"),
        (Example.of(ONE, cut=("end", "end"), label=1), "or one for each sequence."),
        (Example.of(ONE), "the columns none, and the task declares label by"),
        (Example.of(ONE, label=1, lable=2), "the columns label, lable, and the task"),
        (Example.of(ONE, label="good"), "the column label (by example, int64) got "),
        (Example.of(ONE, label=0.5), "int64 does not hold every value"),
        (Example.of(Tokens([]), label=1), "Tokens are at least one id"),
        (Example.of(Tokens([10**6]), label=1), "from 0 to 257 (the last of the vocabulary)"),
        (Example.of(Tokens([1, 2], weight=[1]), label=1), "have together the shape (1,), not (2,)"),
        (Example.of(Tokens([1], columns={"x": [1]}), label=1), "Tokens have the columns x"),
    ],
)
def test_what_a_task_gives_is_checked(tmp_path: Path, example: Any, message: str):
    class Wrong(Raw):
        name = "labels"
        columns: ClassVar[tuple[Column, ...]] = (Column("label", per="example", dtype="int64"),)

        def encode(self, row: Record) -> Example | None:
            return example

    exp = experiment(tmp_path, [{"a": 1}])
    task = Wrong(exp, TOKENIZER)
    split = DatasetSplit(exp.data, exp.seed, "train", takes=task.takes)
    with pytest.raises(ConfigError, match=f"task=labels: .*{re.escape(message)}"):
        fates_of([*split.rows()], split, TOKENIZER, task)
    with pytest.raises(ConfigError, match=f"task=labels: .*{re.escape(message)}"):
        prepared(exp, Wrong)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"name": "labels", "per": "example"}, "The column 'labels' of a task: a name is"),
        ({"name": "a b", "per": "example"}, "a name is a Python identifier"),
        ({"name": "a", "per": "row"}, "per='row' is not in"),
        ({"name": "a", "per": "token", "dtype": "object"}, "is not a numeric type"),
        ({"name": "weight", "per": "example"}, "The column weight is that of the targets"),
    ],
)
def test_columns_that_are_none(column: dict[str, str], message: str):
    with pytest.raises(ConfigError, match=message):
        Column(**column)


class Plain(Pairs):
    columns: ClassVar[tuple[Column, ...]] = ()

    def encode(self, row: Preference) -> Example | None:
        return Example.of(row.chosen, row.rejected)


def test_what_does_not_go_together_is_said(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"task=pairs takes preference pairs; .*prompt_response"):
        prepared(experiment(tmp_path, [{"prompt": "q", "response": "a"}]))
    concat = experiment(tmp_path, [pair_row(1)], packing="concat")
    with pytest.raises(ConfigError, match=r"concat cuts examples .*task=pairs stores score, label"):
        prepared(concat)
    with pytest.raises(ConfigError, match=r"several sequences that belong together \(here 2\)"):
        prepared(concat, Plain)
    with pytest.raises(DataError, match=r"rows\.jsonl, line 5: an unlucky number"):
        of_pairs(tmp_path, range(1, 6), on_bad_row="fail")


class Others(Pairs):
    def encoding_identity(self) -> dict[str, Any]:
        return {**super().encoding_identity(), "options": {"beta": 2}}


def test_other_tasks_and_options_are_other_stores(tmp_path: Path):
    exp = experiment(tmp_path, map(pair_row, range(1, 30)))
    # sft learns the chosen answers of pairs.
    stores = [prepared(exp), prepared(exp, Others), prepare(exp, TOKENIZER)]
    forms = ["preference", "preference", "preference (the chosen answers)"]
    assert [store.meta["form"] for store in stores] == forms
    exp.data.truncate_prompt = "right"
    stores.append(prepared(exp))
    assert len({store.path for store in stores}) == 4


def test_the_summary_and_the_preview_count_examples(tmp_path: Path, capsys):
    store = of_pairs(tmp_path, (1, 2, 3), packing="none")
    lines = dict(report(store.meta, was_prepared=True))
    assert lines["rows"] == "3 read, 3 (of 7 sequences) in samples"
    columns = "weight by token, old_logp by token, score by sequence, label by example"
    assert lines["columns"] == columns
    print_samples(store, TOKENIZER, count=3)
    said = capsys.readouterr().out
    assert re.search(r"sample 1: \d+ tokens, \d+ target tokens, 1 example of 2 sequences\n", said)
    assert "── example 1, sequence 2 of 3, 5 tokens, weight 5 ──" in said
    assert "score by sequence: [[2.0, 0.0], [2.0, 1.0]]\nlabel by example: [-2]" in said


class Anything(Task):
    """Texts and chats, each as it is."""

    name = "anything"
    takes: ClassVar[tuple[type, ...]] = (Document, Conversation)

    def encode(self, row: Document | Conversation) -> Example:
        return Example.of(row)


def test_a_long_document_beside_a_chat_is_split(tmp_path: Path) -> None:
    rows = {"text": [{"text": "x" * 150}], "chat": [{"prompt": "q", "response": "y"}]}
    sources = [
        SourceConfig(path=str(write_rows(tmp_path / f"{name}.jsonl", of_source)))
        for name, of_source in rows.items()
    ]
    exp = experiment(tmp_path, [], path="", form="auto", sources=sources)
    exp.task.kind, exp.data.seq_len, exp.data.packing = "pretrain", 64, "best_fit"
    meta = prepare(exp, TOKENIZER).meta
    assert (meta["split_sequences"], meta["truncated"]) == (2, 0)


@pytest.mark.parametrize("is_large", [False, True])
def test_a_fast_encoder_is_proven_on_the_first_texts_and_the_first_chats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    monkeypatch.setattr(build, "FAST_FROM_BYTES", 1 if is_large else 1 << 30)
    proven: list[str] = []
    for encoder, seen in (
        (blocks.TextEncoder, lambda self, texts: proven.append(texts[0][:1])),
        (blocks.ConversationEncoder, lambda self, chats: proven.append(str(len(chats)))),
    ):
        monkeypatch.setattr(encoder, "choose", seen)
    both = {"texts": [{"text": "x" * 100}] * 30}
    both["chats"] = [{"prompt": f"q{number}", "response": "y" * 90} for number in range(90)]
    sources = [
        SourceConfig(path=str(write_rows(tmp_path / f"{name}.jsonl", rows)))
        for name, rows in both.items()
    ]
    prepared(experiment(tmp_path, [], path="", form="auto", sources=sources), Anything)
    assert sorted(proven) == (["90", "x"] if is_large else [])
