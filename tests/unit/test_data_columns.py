"""Columns that change what a row means are never ignored; the others are named."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from llmx.config import DataConfig, SourceConfig
from llmx.config.validate import COLUMNS, data_problems
from llmx.data.format.formats import FORMATS
from llmx.data.source.records import RecordError, refuse
from llmx.data.split import Source
from llmx.data.store.summary import print_samples, report, summary
from llmx.errors import DataError
from llmx.tasks import prepare
from tests.data_rows import BOT, CHATML, USER, of_rows, turn, write_rows
from tests.small_tokenizers import byte_tokenizer

ASKED: dict[str, Any] = {"prompt": "q", "response": "a"}
TASK: dict[str, Any] = {"instruction": "q", "output": "a"}
CHAT: dict[str, Any] = {"messages": [USER, BOT]}
PAIR: dict[str, Any] = {"prompt": "q", "chosen": "a", "rejected": "b"}
DOCUMENT: dict[str, Any] = {"text": "t"}
KTO = "task=dpo task.options.loss=kto data.columns.desirable"
IMAGE = [{"type": "image_url", "image_url": "x", "text": "t"}]


def part(directory: Path, rows: Iterable[Any], name: str = "rows.jsonl", **options: Any) -> Source:
    path = str(write_rows(directory / name, rows))
    return Source.of(DataConfig(**options), SourceConfig(path=path), split="train")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        # TRL's KTO rows
        ({"prompt": "q", "completion": "a", "label": False}, '"label" is false: the answer'),
        ({**TASK, "accepted": "no"}, "marked as a bad one"),
        ({**ASKED, "is_correct": False}, f"{KTO}=is_correct .*data\\.on_bad_row=skip"),
        ({**ASKED, "label": 0}, r"marked as a bad one.*data\.form=labelled data\.data_map\.label="),
        ({**ASKED, "label": 3}, r"labels the row.*data\.form=labelled data\.data_map\.label=label"),
        ({**CHAT, "desirable": "maybe"}, '"desirable" is maybe: it labels the row'),
        ({**ASKED, "chosen": "b"}, r"data\.form=preference data\.columns\.chosen=chosen"),
        ({**CHAT, "chosen_response": "b"}, r"data\.columns\.chosen=chosen_response"),
        ({**DOCUMENT, "audio": "a.wav"}, "only text is trained"),
        ({**CHAT, "images": ["a.png"]}, '"images" is .*only text is trained'),
        ({**ASKED, "prompt": "<image>what?", "img_path": "a.png"}, "only text is trained"),
        ({**CHAT, "weight": 0.5}, "weights or masks the loss"),
        ({**PAIR, "sample_weight": 2}, "weights or masks the loss"),
        ({**ASKED, "score": 0.2}, r"Filter the rows by it.*data\.ignore_columns=\[score\]"),
        ({**ASKED, "rejected_response": "b"}, r"data\.columns\.rejected=rejected_response"),
        ({**TASK, "context": "c"}, r"data\.columns\.input=context"),  # Dolly
        ({**ASKED, "input": "c"}, r"data\.columns\.input=input"),
        ({**ASKED, "system_prompt": "s"}, r"data\.columns\.system=system_prompt"),  # OpenOrca
        ({**CHAT, "functions": [{"name": "f"}]}, r"data\.columns\.tools=functions"),
        ({**CHAT, "history": [["q", "a"]]}, "the earlier turns"),
        ({**PAIR, "input": 0}, '"input" is 0, not text'),
        ({"messages": [turn("system", "s"), USER, BOT], "system": "t"}, "two different system mes"),
        # OpenAI's weight of a turn, ms-swift's loss
        ({"messages": [USER, {**BOT, "weight": 0}]}, 'turn 2 of "messages": "weight" is 0'),
        ({"messages": [USER, {**BOT, "function_calls": "f()"}]}, 'Rename it to "tool_calls"'),
        ({"messages": [{**USER, "images": ["a"]}, BOT]}, "only text is trained"),
        ({"messages": json.dumps([USER, {**BOT, "weight": 0}])}, 'turn 2 of "messages"'),
        ({**PAIR, "rejected": {**turn("assistant", "b"), "images": ["a"]}}, "only text is trained"),
        ({"messages": [turn("user", IMAGE), BOT]}, "a part of the type image_url"),
    ],
)
def test_a_column_that_changes_what_a_row_means(tmp_path: Path, row: dict, message: str):
    rows = part(tmp_path, [row]).rows(refuse)
    with pytest.raises(RecordError, match=rf"rows\.jsonl, line 1: .*{message}") as caught:
        list(rows)
    # A bad answer is never offered as a good one.
    assert "marked as a bad" not in str(caught.value) or "ignore_columns" not in str(caught.value)


WEIGHTED = [{**USER, "weight": 0}, {**BOT, "weight": 1, "loss": True, "note": "x"}]


@pytest.mark.parametrize(
    ("row", "ignored"),
    [
        ({"prompt": "q", "completion": "a", "label": True}, ["label"]),
        ({**TASK, "desirable": 1, "correct": "A"}, ["correct", "desirable"]),
        ({**ASKED, "chosen": True}, ["chosen"]),
        ({**CHAT, "tools": "null "}, []),
        ({**CHAT, "images": [], "videos": None, "audio": ""}, []),
        ({**CHAT, "weight": 1.0, "id": 7, "source": "s"}, ["id", "source", "weight"]),
        ({**CHAT, "prompt": "q", "prompt_id": "x"}, ["prompt", "prompt_id"]),  # UltraChat
        ({**PAIR, "score_chosen": 1, "score_rejected": 0}, ["score_chosen", "score_rejected"]),
        ({**DOCUMENT, "score": 4.2, "label": 1, "url": "u"}, ["label", "score", "url"]),
        ({**DOCUMENT, "title": "beside a text", "content": "c"}, ["content", "title"]),
        ({"messages": WEIGHTED}, ["messages.loss", "messages.note", "messages.weight"]),
        ({**PAIR, "conversations": [USER], "input": "beside a chat"}, ["input", "prompt"]),
    ],
)
def test_columns_that_do_not_are_named(tmp_path: Path, row: dict, ignored: list[str]):
    source = part(tmp_path, [row])
    assert len(list(source.rows(refuse))) == 1
    assert sorted(source.ignored) == ignored


def test_a_column_may_be_ignored_on_purpose(tmp_path: Path):
    rows = [{**ASKED, "score": 0.2}, {**ASKED, "label": 3}]
    source = part(tmp_path, rows, ignore_columns=["score", "label"])
    assert len(list(source.rows(refuse))) == 2
    assert source.ignored == {"score", "label"}
    turns = {"messages": [USER, {**BOT, "weight": 0}]}
    assert list(part(tmp_path, [turns], ignore_columns=["weight"]).rows(refuse))


def test_what_was_rejected_and_ignored_is_in_the_summary(tmp_path: Path):
    tokenizer = byte_tokenizer(*CHATML)
    rows = [{**ASKED, "label": good, "id": 1} for good in (True, False, False)]
    rows.append({**ASKED, "images": ["a.png"], "id": 4})
    store = prepare(of_rows(tmp_path, rows, on_bad_row="skip"), tokenizer)
    assert store.num_sequences == 1
    counts = {"an answer that is marked as bad": 2, "images, audio or video": 1}
    assert store.meta["rejected"] == counts
    text = summary(store)
    assert "an answer that is marked as bad (2), images, audio or video (1)" in text
    assert "; ignored columns: id, label; " in text
    with pytest.raises(DataError, match=r"rejected: an answer that is marked as bad \(2\)"):
        prepare(of_rows(tmp_path, rows[1:3], on_bad_row="skip"), tokenizer)
    many = {**ASKED, **{f"c{i:02}": 1 for i in range(30)}}
    store = prepare(of_rows(tmp_path, [many]), tokenizer)
    assert "c10, c11 and 18 more; " in summary(store)


def test_turns_after_the_last_answer_are_counted(tmp_path: Path):
    rows = [
        {"messages": [USER, BOT, USER]},
        CHAT,
        {"messages": [USER, BOT, turn("tool", "4"), USER]},
        {"messages": [USER]},  # without an answer: the whole row is left out, and counted so
    ]
    store = prepare(of_rows(tmp_path, rows), byte_tokenizer(*CHATML))
    assert store.meta["unanswered_turns"] == 3
    assert store.meta["dropped"] == {"without an answer": 1}
    assert "; left-out turns: 3 turns after the last answer of a row; " in summary(store)
    store = prepare(of_rows(tmp_path, [CHAT]), byte_tokenizer(*CHATML))
    assert "left-out turns" not in dict(report(store.meta, was_prepared=False))


def test_a_bad_first_row_does_not_refuse_a_file(tmp_path: Path):
    """Where bad rows are skipped, most rows tell the form."""
    rows = [{"unknown": 1}, {"text": "t"}, *[ASKED] * 5]
    source = part(tmp_path, rows, on_bad_row="skip")
    assert source.form == "prompt_response"
    rejected: list[RecordError] = []
    assert len(list(source.rows(rejected.append))) == 5
    assert [error.where.number for error in rejected] == [1, 2]
    for some, how in ((rows, "fail"), (rows[:1] * 3, "skip")):
        with pytest.raises(DataError, match=r"line 1: the columns \(unknown\) fit no known format"):
            _ = part(tmp_path, some, on_bad_row=how).form


# The keys that map columns


def test_a_key_that_maps_no_column_is_said():
    (problem,) = data_problems(DataConfig(sources=[SourceConfig("a", columns={"b": "c"})]))
    assert problem.startswith("data.sources[0].columns.b: no such column.")


def test_every_key_of_a_form_can_be_mapped(tmp_path: Path):
    assert {key for one in FORMATS.values() for key in one.keys} <= set(COLUMNS)
    (row,) = part(tmp_path, [{"body": "words"}], columns={"text": "body"}).rows(refuse)
    assert row.text == "words"


# Terminals


def test_neither_the_summary_nor_an_error_steers_a_terminal(tmp_path: Path):
    """What is said of rows is tried by test_data_fuzz."""
    row = {**ASKED, "\x1b]0;title\x07\x1b[2J\u202e": "unused"}
    text = summary(prepare(of_rows(tmp_path, [row]), byte_tokenizer(*CHATML)))
    assert r"ignored columns: \x1b]0;title\x07\x1b[2J\u202e" in text
    with pytest.raises(DataError) as caught:
        _ = part(tmp_path, [[1]], "a\x1b[2Jb.jsonl").form
    assert "\x1b" not in str(caught.value)


def test_no_preview_steers_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tokenizer, answer = byte_tokenizer(*CHATML), "\x1b[2J\x1b]0;title\x07a\rb\u202ec\nd"
    store = prepare(of_rows(tmp_path, [{"prompt": "q", "response": answer}]), tokenizer)
    print_samples(store, tokenizer, count=1)
    shown = capsys.readouterr().out
    assert not set(shown) & set("\x1b\x07\r\u202e")
    assert r"\x1b" in shown
    assert r"\u202e" in shown
