"""Rows in the forms of the field become conversations, or say what is wrong with them."""

from __future__ import annotations

from typing import Any

import pytest

from llmx.data.format.columns import Fields, Reading
from llmx.data.format.formats import FORMATS, detect_form, transcript
from llmx.data.format.rows import Conversation, Preference, Prompted, UnpairedPreference
from llmx.data.source.records import Document, Record, RecordError
from llmx.errors import DataError
from tests.data_rows import BOT, USER, WHERE, turn

HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}


def read(value: dict, row_type: type, form: str = "auto", *, known: Any = None, **options) -> Any:
    """The row of a record, in the format that its columns show. ``known``: the columns that may be
    left unread."""
    record, reading = Record(value, WHERE), Reading(**options)
    if form == "auto":
        form = detect_form(Fields(record, reading), takes=(row_type, Conversation))
    row, unread = FORMATS[form].read(record, reading, row_type, ignore=known)
    assert {*unread} <= {*(known or ())}
    return row


def conversation(value: dict, **options) -> Conversation | None:
    return read(value, Conversation, **options)


def turns(value: dict, **options) -> list[tuple[str, str]]:
    found = conversation(value, **options)
    assert found is not None
    return [(message.role, message.content) for message in found.messages]


QA = [("user", "q"), ("assistant", "a")]
FACTORY = [  # LLaMA-Factory's v1 rows
    turn("user", [{"type": "text", "value": "q"}], loss_weight=0.0),
    turn("assistant", [{"type": "text", "text": None, "value": "a"}], loss_weight=1.0),
]


@pytest.mark.parametrize(
    "value",
    [
        {"instruction": "q", "input": "", "output": "a"},
        {"instruction": "q", "output": "a"},
        {"prompt": "q", "response": "a"},
        {"conversations": [HUMAN, GPT]},
        {"conversations": {"from": ["human", "gpt"], "value": ["q", "a"]}},
        {"messages": [turn("user", [{"type": "text", "text": "q"}]), BOT, turn("user", "left")]},
        {"messages": FACTORY},
        {"messages": {"role": ["user", "assistant"], "content": ["q", "a"]}},
    ],
)
def test_one_question(value: dict):
    assert turns(value) == QA


@pytest.mark.parametrize(
    ("value", "reference"),
    [
        ({"prompt": "q"}, ""),
        ({"prompt": [USER]}, ""),
        ({"messages": [turn("user", "q")]}, ""),
        ({"messages": [USER, BOT, turn("user", "q2")]}, ""),
        ({"instruction": "q", "output": ""}, ""),
        ({"prompt": "q", "answer": 12}, "12"),
        ({"prompt": "q", "response": None}, ""),
        ({"prompt": "q", "completion": "a"}, "a"),
        ({"prompt": [USER], "completion": [BOT]}, "a"),
        ({"prompt": [USER], "ability": "math", "answer": "x", "solution": "y"}, "x"),
        ({"prompt": [USER], "reward_model": {"style": "rule", "ground_truth": "7"}}, "7"),
        ({"prompt": "q", "ground_truth": ["a", 2]}, '["a", 2]'),
        ({"conversations": [HUMAN, GPT]}, "a"),
    ],
)
def test_prompts_with_a_reference_or_without(value: dict, reference: str):
    last = read(value, Prompted, known=("ability", "solution")).messages[-1]
    assert (last.role, last.content) == ("assistant", reference)


def test_columns_beside_the_question_are_turns():
    value = {"instruction": "q", "input": "i", "output": "a", "history": [["q0", "a0"]]}
    before = [("system", "s"), ("user", "q0"), ("assistant", "a0"), ("user", "q\ni")]
    assert turns(value, system="s") == [*before, ("assistant", "a")]
    assert turns({**value, "system": "own"}, system="s")[0] == ("system", "own")
    columns = {"instruction": "question", "output": "answer"}
    assert turns({"question": "q", "answer": "a"}, columns=columns) == QA


def test_sharegpt_with_tools():
    value = {"conversations": [{"from": "system", "value": "S"}, HUMAN, GPT]}
    assert turns(value, system="not used") == [("system", "S"), *QA]
    for tools, read_as in (([{"name": "f"}], '[{"name": "f"}]'), ("[]", "")):
        assert conversation({**value, "tools": tools}).tools == read_as


def test_a_row_without_an_answer_is_nothing_to_learn():
    assert conversation({"instruction": "q", "output": " "}) is None
    assert conversation({"conversations": [HUMAN]}) is None


def messages(*turns: object) -> dict:
    return {"messages": list(turns)}


ANSWERED = {"prompt": "q", "response": "a"}
THOUGHT = [{"type": "reasoning", "value": "x"}]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"instruction": "q", "output": None}, 'a value of a wrong type: "output" is null, not'),
        ({"prompt": "q", "response": "a", "history": ["q"]}, "a wrong history: must be .question"),
        ({"conversations": []}, "no turns: must be a list with at least one turn"),
        ({"conversations": ["q"]}, 'a wrong turn: 1 of "conversations" is q, not an object'),
        ({"conversations": [{**GPT, "from": "humans"}]}, "an unknown role: has the role humans"),
        (messages(turn("user", 3)), "a wrong content: has the content 3"),
        (messages(BOT), "turns out of order: no user turn precedes it"),
        (messages(USER, turn("tool", "1")), "turns out of order: no call of a tool precedes"),
        (messages(USER, USER), "turns out of order: turn 2 .* role user, as the turn before it h"),
        (messages(USER, turn("system", "s")), "turns out of order: only the first turn may have"),
        (messages(USER, turn("assistant", "", tool_calls=[{}])), "wrong tool_calls: tool call"),
        (messages(turn("user", "q", tool_calls=[{}])), "wrong tool_calls: only the assistant call"),
        ({"messages": {"role": ["user"], "content": []}}, "columns of unequal length: role: 1, c"),
        (messages(USER, turn("assistant", THOUGHT)), "content that is not text: type reasoning"),
        ({**messages(USER, BOT), "tools": "[{"}, "wrong tools: tools are not JSON"),
        ({**messages(USER, BOT), "tools": '["f"]'}, "wrong tools: must be a list of objects"),
        ({"a": 1}, r"None: the columns \(a\) fit no known format"),
        ({"text": "t", **ANSWERED}, "None: the formats prompt_response and text"),
    ],
)
def test_what_is_wrong_is_said_with_the_row(value: dict, said: str):
    """``said``: the reason that is counted (one record has none), and a part of the message."""
    reason, _, message = said.partition(": ")
    with pytest.raises(DataError, match=f"rows.jsonl, line 7.*{message}") as caught:
        conversation(value)
    assert str(getattr(caught.value, "reason", None)) == reason


# Text, labels


def document(value: dict, **options) -> str:
    return read(value, Document, **options).text


def test_text_is_one_column_or_a_title_and_a_content():
    assert document({"body": "T"}, text_key="body") == "T"
    assert document({"title": "T", "content": "C"}) == "T\n\nC"
    assert document({"content": "C"}) == "C"
    columns = {"content": "body", "title": "head"}
    assert document({"head": "T", "body": "C"}, columns=columns) == "T\n\nC"
    with pytest.raises(DataError, match=r'no column "text"; the row has body'):
        read({"body": "T"}, Document, "text")
    with pytest.raises(DataError, match=r'"text" is 7, not text'):
        document({"text": 7})


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ("Before.", ["Before.\nQ", "bad"]),
        ([["q", "a"]], ["q", "a", "Q", "bad"]),
        (["q", "a"], ["q", "a", "Q", "bad"]),
        (None, ["Q", "bad"]),
        ([], ["Q", "bad"]),
    ],
)
def test_labelled_rows(context: object, expected: list[str]):
    columns = {"prompt": "prompt", "label": "label_id", "history": "context_info"}
    value = {"prompt": "Q", "label_id": 0, "context_info": context}
    named = {"columns": columns, "label_names": {"0": "bad", "1": "good"}}
    assert [content for _, content in turns(value, **named)] == expected
    assert turns(value, columns=columns)[-1] == ("assistant", "0")
    with pytest.raises(DataError, match=r"label 7 has no name; data\.label_names names 0, 1"):
        conversation({**value, "label_id": 7}, **named)
    with pytest.raises(DataError, match='"label_id" is null; a label is text'):
        conversation({**value, "label_id": None}, columns=columns)


# Preference pairs


def pair(value: dict) -> list[list[str]]:
    found = read(value, Preference)
    return [[message.content for message in one.messages] for one in (found.chosen, found.rejected)]


ASKED = "\n\nHuman: q\n\nAssistant:"
BEST, WORST = turn("assistant", "good"), turn("assistant", "bad")


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"chosen": f"{ASKED} good", "rejected": f"{ASKED} bad"},  # helpful-harmless
        {"prompt": ASKED, "chosen": "good", "rejected": "bad"},
        {"prompt": "q", "chosen": [USER, BEST], "rejected": [USER, WORST]},
        {"prompt": [USER], "chosen": [BEST], "rejected": [WORST]},
        {"conversations": [HUMAN], "chosen": BEST, "rejected": {"from": "gpt", "value": "bad"}},
        {"instruction": "q", "input": "", "chosen": "good", "rejected": "bad"},
    ],
)
def test_published_layouts_of_pairs(value: dict):
    assert pair(value) == [["q", "good"], ["q", "bad"]]


def test_turns_before_a_pair_are_read():
    row = {"prompt": "q", "chosen": "good", "rejected": "bad", "history": [["q0", "a0"]]}
    assert pair(row)[0] == ["q0", "a0", "q", "good"]
    said = "\n\nHuman: a\n\nAssistant: b\nb\n\nHuman: c\n\nHuman: d\n\nAssistant:"
    found = pair({"chosen": f"{said} good", "rejected": f"{said} bad"})
    assert found[0] == ["a", "b\nb", "c\n\nd", "good"]
    assert transcript("Humans said so.") == transcript("x\n\nHuman: y\n\nAssistant: z") == []


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"prompt": "q", "rejected": "bad"}, "no chosen answer"),
        ({"prompt": "q", "chosen": None, "rejected": "bad"}, "no chosen answer"),
        ({"prompt": "q", "chosen": "good", "rejected": ""}, "no rejected answer"),
        ({"prompt": "q", "chosen": "good", "rejected": " \n"}, "no answer"),
        ({"prompt": "q", "chosen": "same", "rejected": "same"}, "chosen is rejected"),
        (
            {"chosen": f"{ASKED} good", "rejected": f"{ASKED} b{ASKED} bad"},
            "chosen and rejected answer different things",
        ),
    ],
)
def test_rows_that_are_no_pairs(value: dict, reason: str):
    with pytest.raises(RecordError) as caught:
        read(value, Preference, "preference")
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("more", "columns", "desirable"),
    [
        ({"label": True}, {}, True),
        ({"label": "False"}, {}, False),
        ({"kto_tag": 0}, {}, False),
        ({"thumbs_up": True}, {"desirable": "thumbs_up"}, True),
        ({}, {}, r"no column says whether the answer is good .*data\.columns\.desirable"),
        ({"label": 2}, {}, r'"label" is 2, not true or false'),
        ({"label": None}, {}, r'"label" is .*, not true or false'),
    ],
)
def test_answers_with_and_without_a_verdict(more: dict, columns: dict, desirable: bool | str):
    value = {"prompt": "q", "completion": "a", **more}
    if isinstance(desirable, str):
        with pytest.raises(RecordError, match=desirable):
            read(value, UnpairedPreference, columns=columns)
        return
    found = read(value, UnpairedPreference, columns=columns)
    assert (found.desirable, found.conversation) == (desirable, conversation(value))
    assert turns(value) == QA
