"""Rows in the forms of the field become conversations, or say what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmx.data.format.formats import (
    FORMATS,
    Reading,
    detect_form,
    to_document,
    to_preference,
    transcript,
    unpaired_of,
)
from llmx.data.format.rows import Conversation, Preference
from llmx.data.source.records import Record, RecordError, Where
from llmx.errors import DataError

WHERE = Where(Path("rows.json"), 3, "row")


def conversation(value: dict, *, columns: dict | None = None, system: str | None = None):
    record, reading = Record(value, WHERE), Reading(columns or {}, system=system)
    form = detect_form(record, reading)
    return FORMATS[form].readers[Conversation](record, reading)


def turns(value: dict, **options) -> list[tuple[str, str]]:
    found = conversation(value, **options)
    assert found is not None
    return [(message.role, message.content) for message in found.messages]


QA = [("user", "Q"), ("assistant", "A")]


@pytest.mark.parametrize(
    "value",
    [
        {"instruction": "Q", "input": "", "output": "A"},
        {"instruction": "Q", "output": "A"},
        {"prompt": "Q", "response": "A"},
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Q"}]},
                {"role": "assistant", "content": "A"},
                {"role": "user", "content": "an unanswered question is left out"},
            ]
        },
        {  # LLaMA-Factory's v1 rows
            "messages": [
                {"role": "user", "content": [{"type": "text", "value": "Q"}], "loss_weight": 0.0},
                {
                    "role": "assistant",
                    "content": [{"type": "text", "text": None, "value": "A"}],
                    "loss_weight": 1.0,
                },
            ]
        },
        {"messages": {"role": ["user", "assistant"], "content": ["Q", "A"]}},
    ],
)
def test_one_question(value: dict):
    assert turns(value) == QA


def test_alpaca_input_history_and_system():
    value = {"instruction": "Q", "input": "I", "output": "A", "history": [["q", "a"]]}
    before = [("user", "q"), ("assistant", "a")]
    assert turns(value) == [*before, ("user", "Q\nI"), ("assistant", "A")]
    assert turns({**value, "system": "S"}, system="other")[0] == ("system", "S")
    assert turns(value, system="S")[0] == ("system", "S")


def test_own_column_names():
    columns = {"instruction": "question", "output": "answer"}
    assert turns({"question": "Q", "answer": "A"}, columns=columns) == QA


def test_sharegpt_with_tools():
    value = {
        "conversations": [
            {"from": "system", "value": "S"},
            {"from": "human", "value": "Q"},
            {"from": "function_call", "value": '{"name": "f"}'},
            {"from": "observation", "value": "42"},
            {"from": "gpt", "value": "A"},
        ],
        "tools": [{"name": "f"}],
    }
    assert turns(value, system="not used") == [
        ("system", "S"),
        ("user", "Q"),
        ("assistant", '<tool_call>\n{"name": "f"}\n</tool_call>'),
        ("tool", "42"),
        ("assistant", "A"),
    ]
    assert conversation(value).tools == '[{"name": "f"}]'
    assert conversation({**value, "tools": "[]"}).tools == ""


def test_a_row_without_an_answer_is_nothing_to_learn():
    assert conversation({"instruction": "Q", "output": " "}) is None
    assert conversation({"conversations": [{"from": "human", "value": "Q"}]}) is None


def test_text():
    record = Record({"body": "T"}, WHERE)
    assert detect_form(record, Reading(text_key="body")) == "text"
    assert to_document(record, Reading(text_key="body")).text == "T"
    with pytest.raises(DataError, match=r'no column "text"; the row has body'):
        to_document(record, Reading())
    with pytest.raises(DataError, match=r'"text" is 7, not text'):
        to_document(Record({"text": 7}, WHERE), Reading())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": 1}, r"the columns \(a\) fit no known format"),
        ({"text": "T", "prompt": "Q", "response": "A"}, "fit the formats prompt_response and text"),
        ({"instruction": "Q", "output": None}, r'"output" is null, not text'),
        ({"instruction": "Q", "output": "A", "history": ["q"]}, r"must be \[question, answer\]"),
        ({"conversations": []}, "must be a list with at least one turn"),
        ({"conversations": ["Q"]}, r'turn 1 of "conversations" is Q, not an object'),
        ({"conversations": [{"from": "humans", "value": "Q"}]}, "has the role humans"),
        ({"messages": [{"role": "user", "content": 3}]}, "has the content 3"),
        ({"messages": [{"role": "assistant", "content": "A"}]}, "no user turn precedes it"),
        (
            {"messages": [{"role": "user", "content": c} for c in "ab"]},
            "turns 1 and 2 of .* both have the role user: b",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "Q"},
                    {"role": "system", "content": "S"},
                ]
            },
            "only the first turn may have",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "Q"},
                    {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]},
                ]
            },
            "tool call",
        ),
    ],
)
def test_what_is_wrong_is_said_with_the_row(value: dict, message: str):
    with pytest.raises(DataError, match=f"rows.json, row 3.*{message}"):
        conversation(value)


# Preference pairs

PAIR = (("Q", "good"), ("Q", "bad"))
HUMAN = "\n\nHuman: Q\n\nAssistant:"


def pair(value: dict, **options):
    record = Record(value, WHERE)
    assert detect_form(record, Reading(), takes=(Preference,)) == "preference"
    found = to_preference(record, Reading(**options))
    return tuple(
        tuple(message.content for message in one.messages) for one in (found.chosen, found.rejected)
    )


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": "Q", "chosen": "good", "rejected": "bad"},
        {"chosen": f"{HUMAN} good", "rejected": f"{HUMAN} bad"},  # helpful-harmless
        {"prompt": HUMAN, "chosen": " good".strip(), "rejected": "bad"},
        {
            "prompt": "Q",
            "chosen": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "good"}],
            "rejected": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "bad"}],
        },
        {
            "prompt": [{"role": "user", "content": "Q"}],
            "chosen": [{"role": "assistant", "content": "good"}],
            "rejected": [{"role": "assistant", "content": "bad"}],
        },
        {
            "conversations": [{"from": "human", "value": "Q"}],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        },
        {"instruction": "Q", "input": "", "output": ["good", "bad"]},
        {"prompt": "Q", "responses": ["good", "fair", "bad"]},
        {"conversations": [{"from": "human", "value": "Q"}], "answers": ["good", "bad"]},
    ],
)
def test_published_layouts_of_pairs(value: dict):
    assert pair(value) == PAIR


def test_a_transcript_of_several_turns():
    said = "\n\nHuman: a\n\nAssistant: b\nb\n\nHuman: c\n\nHuman: d\n\nAssistant:"
    found = pair({"chosen": f"{said} good", "rejected": f"{said} bad"})
    assert found[0] == ("a", "b\nb", "c\n\nd", "good")
    assert transcript("Humans said so.") == transcript("x\n\nHuman: y\n\nAssistant: z") == []


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"prompt": "Q", "rejected": "bad"}, "no chosen answer"),
        ({"prompt": "Q", "chosen": None, "rejected": "bad"}, "no chosen answer"),
        ({"prompt": "Q", "chosen": "good", "rejected": ""}, "no rejected answer"),
        ({"prompt": "Q", "chosen": "good", "rejected": " \n"}, "no answer"),
        ({"prompt": "Q", "chosen": "same", "rejected": "same"}, "chosen is rejected"),
        ({"prompt": "Q", "responses": ["only"]}, "no rejected answer"),
        (
            {"chosen": f"{HUMAN} good", "rejected": f"{HUMAN} b\n\nHuman: more\n\nAssistant: bad"},
            "chosen and rejected answer different things",
        ),
    ],
)
def test_rows_that_are_no_pairs(value: dict, reason: str):
    with pytest.raises(RecordError) as caught:
        to_preference(Record(value, WHERE), Reading())
    assert caught.value.reason == reason


def test_a_list_of_answers_is_a_preference_for_pairs_alone():
    record = Record({"instruction": "Q", "output": ["good", "bad"]}, WHERE)
    assert detect_form(record, Reading()) == "alpaca"


@pytest.mark.parametrize(
    ("more", "columns", "desirable"),
    [
        ({"label": True}, {}, True),
        ({"label": "False"}, {}, False),
        ({"kto_tag": 0}, {}, False),
        ({"thumbs_up": True}, {"desirable": "thumbs_up"}, True),
    ],
)
def test_answers_with_a_verdict(more: dict, columns: dict, desirable: bool):
    value = {"prompt": "Q", "completion": "A", **more}
    found = unpaired_of(Record(value, WHERE), conversation(value), Reading(columns))
    assert found.desirable is desirable
    assert [message.content for message in found.conversation.messages] == ["Q", "A"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, r"no column says whether the answer is good .*data\.columns\.desirable"),
        ({"label": 2}, r'"label" is 2, not true or false'),
        ({"label": None}, r'"label" is .*, not true or false'),
    ],
)
def test_answers_without_a_verdict(more: dict, message: str):
    value = {"prompt": "Q", "completion": "A", **more}
    with pytest.raises(RecordError, match=message):
        unpaired_of(Record(value, WHERE), conversation(value), Reading())
