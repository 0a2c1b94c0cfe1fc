"""Columns that change what a row means are never ignored; the others are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmx.config import DataConfig, Experiment, SourceConfig
from llmx.data.source.records import RecordError, refuse
from llmx.data.split import Source
from llmx.data.store.summary import print_samples, report, summary
from llmx.errors import DataError
from llmx.tasks import prepare
from tests.small_tokenizers import byte_tokenizer
from tests.unit.test_data_render import CHATML

ASKED: dict[str, Any] = {"prompt": "q", "response": "a"}
TASK: dict[str, Any] = {"instruction": "q", "output": "a"}
USER, BOT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CHAT: dict[str, Any] = {"messages": [USER, BOT]}
PAIR: dict[str, Any] = {"prompt": "q", "chosen": "a", "rejected": "b"}
DOCUMENT: dict[str, Any] = {"text": "t"}


def part(tmp_path: Path, rows: list[dict], **options) -> Source:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return Source.of(DataConfig(**options), SourceConfig(path=str(path)), split="train")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        # TRL's KTO rows
        ({"prompt": "q", "completion": "a", "label": False}, '"label" is false: the answer'),
        ({**ASKED, "kto_tag": False}, "marked as a bad one"),
        ({**TASK, "accepted": "no"}, "marked as a bad one"),
        ({**TASK, "desirable": 1}, None),
        ({**ASKED, "label": 0}, r"data\.form=labelled data\.data_map\.label=label"),
        ({**CHAT, "images": ["a.png"]}, '"images" is .*only text is trained'),
        ({**DOCUMENT, "audio": "a.wav"}, "only text is trained"),
        ({**ASKED, "prompt": "<image>what?", "img_path": "a.png"}, "placeholder"),
        ({**CHAT, "weight": 0.5}, "weights or masks the loss"),
        ({**PAIR, "sample_weight": 2}, "weights or masks the loss"),
        ({**ASKED, "score": 0.2}, r"how good the answer is.*data\.ignore_columns=\[score\]"),
        ({**TASK, "rejected": "b"}, "data.form=preference"),
        ({**ASKED, "chosen": False}, "preference pair"),
        ({**TASK, "context": "c"}, r"data\.columns\.input=context"),  # Dolly
        ({**ASKED, "input": "c"}, r"data\.columns\.input=input"),
        ({**ASKED, "system_prompt": "s"}, r"data\.columns\.system=system_prompt"),  # OpenOrca
        ({**CHAT, "functions": [{"name": "f"}]}, r"data\.columns\.tools=functions"),
        ({**CHAT, "history": [["q", "a"]]}, "earlier turns"),
        ({**ASKED, "system": 3}, '"system" is 3, not text'),
        ({**PAIR, "input": 0}, '"input" is 0, not text'),
        ({"messages": [{"role": "system", "content": "s"}, USER, BOT], "system": "other"},
         "two different system messages"),
        ({**CHAT, "tools": "null "}, None),
        ({**CHAT, "tools": '["f"]'}, "tools must be a list of objects"),
        # OpenAI's weight of a turn, ms-swift's loss
        ({"messages": [USER, {**BOT, "weight": 0}]}, 'turn 2 of "messages": "weight" is 0'),
        ({"messages": [USER, {**BOT, "reasoning_content": "so"}]}, "reasoning before the answer"),
        ({"messages": [{**USER, "images": ["a"]}, BOT]}, "only text is trained"),
        ({**PAIR, "rejected": {**BOT, "images": ["a"]}}, "only text is trained"),
        ({"messages": [{**USER, "content": [{"type": "image_url", "image_url": "x", "text": "t"}]},
                       BOT]}, "a part of the type image_url"),
        ({"messages": [{**USER, "tool_calls": [{"name": "f", "arguments": {}}]}, BOT]},
         "only the assistant calls tools"),
    ],
)  # fmt: skip
def test_a_column_that_changes_what_a_row_means(tmp_path: Path, row: dict, message: str | None):
    source = part(tmp_path, [row])
    if message is None:
        assert len(list(source.rows(refuse))) == 1
        return
    with pytest.raises(RecordError, match=rf"rows\.jsonl, line 1: .*{message}"):
        list(source.rows(refuse))


@pytest.mark.parametrize(
    ("row", "ignored"),
    [
        ({"prompt": "q", "completion": "a", "label": True}, ["label"]),
        ({**CHAT, "images": [], "videos": None, "audio": ""}, []),
        ({**CHAT, "weight": 1.0, "id": 7, "source": "s"}, ["id", "source", "weight"]),
        ({**CHAT, "prompt": "q", "prompt_id": "x"}, ["prompt", "prompt_id"]),  # UltraChat
        ({**PAIR, "score_chosen": 1, "score_rejected": 0}, ["score_chosen", "score_rejected"]),
        ({**DOCUMENT, "score": 4.2, "label": 1, "url": "u"}, ["label", "score", "url"]),
        ({**DOCUMENT, "title": "beside a text", "content": "c"}, ["content", "title"]),
        (
            {"messages": [{**USER, "weight": 0}, {**BOT, "weight": 1, "loss": True, "note": "x"}]},
            ["messages.loss", "messages.note", "messages.weight"],
        ),
        ({**PAIR, "conversations": [USER], "input": "beside a chat"}, ["input", "prompt"]),
        ({"prompt": [USER], "completion": [BOT]}, []),
    ],
)
def test_columns_that_do_not_are_named(tmp_path: Path, row: dict, ignored: list[str]):
    source = part(tmp_path, [row])
    assert len(list(source.rows(refuse))) == 1
    assert sorted(source.ignored) == ignored


def test_a_bad_answer_is_never_offered_as_a_good_one(tmp_path: Path):
    good = {**ASKED, "label": True}
    for column in ("label", "is_correct"):
        with pytest.raises(RecordError) as caught:
            list(part(tmp_path, [good, {**ASKED, column: False}]).rows(refuse))
        message = str(caught.value)
        assert f"task=dpo task.options.loss=kto data.columns.desirable={column}" in message
        assert "data.on_bad_row=skip" in message
        assert "ignore_columns" not in message


def test_a_column_may_be_ignored_on_purpose(tmp_path: Path):
    rows = [{**ASKED, "score": 0.2}, {"prompt": "q", "response": "a", "label": 3}]
    source = part(tmp_path, rows, ignore_columns=["score", "label"])
    assert len(list(source.rows(refuse))) == 2
    assert source.ignored == {"score", "label"}
    turns = {"messages": [USER, {**BOT, "weight": 0}]}
    assert list(part(tmp_path, [turns], ignore_columns=["weight"]).rows(refuse))


def test_a_history_before_a_pair_is_read(tmp_path: Path):
    (chosen,) = part(tmp_path, [{**PAIR, "history": [["q0", "a0"]]}]).rows(refuse)
    contents = [message.content for message in chosen.messages]
    assert contents == ["q0", "a0", "q", "a"]


def experiment(tmp_path: Path, rows: list[dict], **data) -> Experiment:
    exp = Experiment()
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    exp.data.path, exp.data.cache_dir = str(path), str(tmp_path / "cache")
    exp.data.seq_len = 64
    for key, value in data.items():
        setattr(exp.data, key, value)
    return exp


def test_what_was_rejected_and_ignored_is_in_the_summary(tmp_path: Path):
    tokenizer = byte_tokenizer(*CHATML)
    rows = [
        {"prompt": "q", "completion": "good", "label": True, "id": 1},
        {"prompt": "q", "completion": "bad", "label": False, "id": 2},
        {"prompt": "q", "completion": "bad", "label": False, "id": 3},
        {"prompt": "q", "completion": "a", "images": ["a.png"], "id": 4},
    ]
    store = prepare(experiment(tmp_path, rows, on_bad_row="skip"), tokenizer)
    assert store.num_sequences == 1
    assert store.meta["rejected"] == {
        "an answer that is marked as bad": 2,
        "images, audio or video": 1,
    }
    text = summary(store)
    assert "an answer that is marked as bad (2), images, audio or video (1)" in text
    assert text.endswith("; ignored columns: id, label.")
    assert dict(report(store.meta, was_prepared=False))["ignored columns"] == "id, label"
    with pytest.raises(DataError, match=r"line 2: .label. is false.*data\.on_bad_row=skip"):
        prepare(experiment(tmp_path, rows), tokenizer)
    with pytest.raises(DataError, match=r"rejected: an answer that is marked as bad \(2\)"):
        prepare(experiment(tmp_path, rows[1:3], on_bad_row="skip"), tokenizer)


def test_turns_after_the_last_answer_are_counted(tmp_path: Path):
    rows = [
        {"messages": [USER, BOT, USER]},
        {"messages": [USER, BOT]},
        {"messages": [USER, BOT, {"role": "tool", "content": "4"}, USER]},
        {"messages": [USER]},  # without an answer: the whole row is left out, and counted so
    ]
    store = prepare(experiment(tmp_path, rows), byte_tokenizer(*CHATML))
    assert store.meta["unanswered_turns"] == 3
    assert store.meta["dropped"] == {"without an answer": 1}
    assert summary(store).endswith("; 3 turns after the last answer of a row left out.")
    lines = dict(report(store.meta, was_prepared=False))
    assert lines["left-out turns"] == "3 turns after the last answer of a row"
    store = prepare(experiment(tmp_path, rows[1:2]), byte_tokenizer(*CHATML))
    assert "after the last answer" not in summary(store)
    assert "left-out turns" not in dict(report(store.meta, was_prepared=False))


def test_many_columns_are_named_up_to_a_limit(tmp_path: Path):
    row = {**ASKED, **{f"c{i:02}": 1 for i in range(30)}}
    store = prepare(experiment(tmp_path, [row]), byte_tokenizer(*CHATML))
    assert summary(store).endswith("c10, c11 and 18 more.")


# Forms are told by most rows where bad ones are skipped


def test_a_bad_first_row_does_not_refuse_a_file(tmp_path: Path):
    rows = [{"unknown": 1}, {"text": "t"}, *[ASKED] * 5]
    source = part(tmp_path, rows, on_bad_row="skip")
    assert source.form == "prompt_response"
    rejected: list[RecordError] = []
    assert len(list(source.rows(rejected.append))) == 5
    assert [error.where.number for error in rejected] == [1, 2]
    with pytest.raises(DataError, match=r"line 1: the columns \(unknown\) fit no known format"):
        _ = part(tmp_path, rows).form
    with pytest.raises(DataError, match=r"line 1: the columns \(unknown\) fit no known format"):
        _ = part(tmp_path, rows[:1] * 3, on_bad_row="skip").form


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"prompt": "q", ]', r"no row of it can be used; 1 row rejected .*column 18: not JSON"),
        (b'[{"prompt": "q" "response": "a"}]', "not JSON .Expecting ',' delimiter"),
        (b'["a", "b"]', "2 rows rejected .* row 1: a is not an object"),
        (b"[]", "there is no row in it"),
    ],
)
def test_a_broken_array_says_why(tmp_path: Path, content: bytes, message: str):
    exp = experiment(tmp_path, [], on_bad_row="skip")
    exp.data.path = str(tmp_path / "rows.json")
    Path(exp.data.path).write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare(exp, byte_tokenizer(*CHATML))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_key_that_is_there_twice_is_no_guess(tmp_path: Path, name: str):
    twice = '{"prompt": "q", "response": "a", "response": "b"}'
    nested = '{"prompt": "q", "response": "a", "meta": {"x": 1, "x": 2}}'
    rows = [json.dumps(ASKED), twice, nested, json.dumps(ASKED)]
    text = f"[{', '.join(rows)}]" if name == "rows.json" else "\n".join(rows)
    (tmp_path / name).write_text(text)
    source = Source.of(DataConfig(), SourceConfig(path=str(tmp_path / name)), split="train")
    rejected: list[RecordError] = []
    assert len(list(source.rows(rejected.append))) == 2
    assert [error.where.number for error in rejected] == [2, 3]
    assert 'the key "response" is there twice' in str(rejected[0])


def test_two_columns_of_one_name_are_refused(tmp_path: Path):
    (tmp_path / "rows.tsv").write_text("prompt\tresponse\tresponse\nq\ta\tb\n")
    source = Source.of(DataConfig(), SourceConfig(path=str(tmp_path / "rows.tsv")), split="train")
    with pytest.raises(DataError, match='line 1: the header names the column "response" twice'):
        list(source.rows(refuse))


# Terminals


def test_no_message_steers_a_terminal(tmp_path: Path):
    escape = "\x1b]0;title\x07\x1b[2J\u202e"
    rows = [
        {f"{escape}column": "x"},
        {"prompt": escape, "response": 3},
        {"messages": [{"role": escape, "content": "x"}]},
        {"messages": [USER, USER, {"role": "assistant", "content": escape}]},
        {**ASKED, "label": escape},
        {**ASKED, "tools": escape},
        {**ASKED, f"{escape}": "unused"},
    ]
    for row in rows:
        try:
            source = part(tmp_path, [row])
            list(source.rows(refuse))
            text = summary(prepare(experiment(tmp_path, [row]), byte_tokenizer(*CHATML)))
        except DataError as error:
            text = str(error)
        assert not any(letter in text for letter in escape if not letter.isprintable()), text
    path = tmp_path / "a\x1b[2Jb.jsonl"
    path.write_text("[1]\n")
    with pytest.raises(DataError) as caught:
        _ = Source.of(DataConfig(), SourceConfig(path=str(path)), split="train").form
    assert "\x1b" not in str(caught.value)


def test_no_preview_steers_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tokenizer = byte_tokenizer(*CHATML)
    answer = "\x1b[2J\x1b]0;title\x07a\rb\u202ec\nd"
    store = prepare(experiment(tmp_path, [{"prompt": "q", "response": answer}]), tokenizer)
    print_samples(store, tokenizer, count=1)
    shown = capsys.readouterr().out
    assert not set(shown) & set("\x1b\x07\r\u202e")
    assert r"\x1b" in shown
    assert r"\u202e" in shown
