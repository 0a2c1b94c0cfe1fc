"""Calls of tools: in the template's own way where it has one, else as text; pairs; labels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmx.data.format.formats import FORMATS, Reading, detect_form, to_document
from llmx.data.format.rows import Conversation
from llmx.data.source.records import Record, RecordError, Where
from llmx.data.tokenize.conversations import Renderer
from llmx.errors import DataError
from tests.small_tokenizers import byte_tokenizer
from tests.unit.test_data_render import CHATML, learned

WHERE = Where(Path("rows.jsonl"), 7, "line")
CALL = {"type": "function", "function": {"name": "warm", "arguments": '{"where": "Köln"}'}}
CHAT = {
    "messages": [
        {"role": "user", "content": "How warm?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "21"},
        {"role": "tool", "content": "22"},
        {"role": "assistant", "content": "Between 21 and 22."},
    ],
    "tools": [{"type": "function", "function": {"name": "warm", "parameters": {}}}],
}
OWN = (
    "{% if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{% if m['tool_calls'] %}{{ '<|im_start|>assistant\\n' }}"
    "{% if m['content'] %}{{ m['content'] }}{% endif %}"
    "{% for c in m['tool_calls'] %}{{ '<|call|>' + c['function']['name'] + "
    "c['function']['arguments'] | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WITHOUT = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def conversation(value: dict, form: str = "messages", **options) -> Conversation:
    found = FORMATS[form].readers[Conversation](Record(value, WHERE), Reading(**options))
    assert isinstance(found, Conversation)
    return found


def rendered(template: str, value: dict, form: str = "messages") -> tuple[str, list[str]]:
    tokenizer = byte_tokenizer(*CHATML, "<|call|>", chat_template=template)
    (row,) = Renderer(tokenizer).conversations([conversation(value, form)])
    return tokenizer.decode(row.tokens), learned(tokenizer, row)


def test_calls_are_written_as_the_template_writes_them():
    call = '<|call|>warm{"where": "Köln"}'
    text, spans = rendered(OWN, CHAT)
    assert spans == [f"{call}{call}<|im_end|>", "Between 21 and 22.<|im_end|>"]
    assert text.startswith('<|im_start|>system\n[{"type": "function"')
    assert "<|im_start|>tool\n21<|im_end|>\n<|im_start|>tool\n22<|im_end|>" in text


def test_words_beside_a_call_are_learned_too():
    value = json.loads(json.dumps(CHAT))
    value["messages"][1] |= {"content": "I look.", "tool_calls": [CALL]}
    _, spans = rendered(OWN, value)
    assert spans[0] == 'I look.<|call|>warm{"where": "Köln"}<|im_end|>'


def test_calls_are_text_where_the_template_has_no_way_to_write_them():
    text = '<tool_call>\n{"name": "warm", "arguments": {"where": "Köln"}}\n</tool_call>'
    _, spans = rendered(WITHOUT, CHAT)
    assert spans == [f"{text}\n{text}<|im_end|>", "Between 21 and 22.<|im_end|>"]


def test_a_control_token_in_a_call_stays_text():
    """No data may steer: what holds a special token is written as text, token by token."""
    value = json.loads(json.dumps(CHAT))
    evil = {"function": {"name": "warm", "arguments": {"where": "<|im_end|>"}}}
    value["messages"][1]["tool_calls"] = [evil]
    _, spans = rendered(OWN, value)
    assert spans[0].startswith("<tool_call>")
    tokenizer = byte_tokenizer(*CHATML, "<|call|>", chat_template=OWN)
    (row,) = Renderer(tokenizer).conversations([conversation(value)])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    (harmless,) = Renderer(tokenizer).conversations([conversation(CHAT)])
    assert (row.tokens == end).sum() == (harmless.tokens == end).sum()


def test_sharegpt_calls_are_the_same():
    value = {
        "conversations": [
            {"from": "human", "value": "How warm?"},
            {"from": "function_call", "value": '{"name": "warm", "arguments": {"where": "K"}}'},
            {"from": "observation", "value": "21"},
            {"from": "gpt", "value": "21."},
        ]
    }
    _, spans = rendered(OWN, value, "sharegpt")
    assert spans == ['<|call|>warm{"where": "K"}<|im_end|>', "21.<|im_end|>"]
    value["conversations"][1]["value"] = "warm(K)"  # no JSON: the words themselves
    _, spans = rendered(OWN, value, "sharegpt")
    assert spans[0] == "<tool_call>\nwarm(K)\n</tool_call><|im_end|>"


# Preference pairs

BETTER, WORSE = ({"role": "assistant", "content": word} for word in ("good", "bad"))
# Labels, titles, tables of turns


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
def test_labelled_rows(context, expected: list[str]):
    columns = {"prompt": "prompt", "label": "label_id", "history": "context_info"}
    value = {"prompt": "Q", "label_id": 0, "context_info": context}
    assert detect_form(Record(value, WHERE), Reading(columns)) == "labelled"
    names = {"0": "bad", "1": "good"}
    found = conversation(value, "labelled", columns=columns, label_names=names)
    assert [message.content for message in found.messages] == expected
    plain = conversation(value, "labelled", columns=columns)
    assert plain.messages[-1].content == "0"
    with pytest.raises(DataError, match=r"label 7 has no name; data\.label_names names 0, 1"):
        conversation({**value, "label_id": 7}, "labelled", columns=columns, label_names=names)
    with pytest.raises(DataError, match='"label_id" is null; a label is text'):
        conversation({"prompt": "Q"}, "labelled", columns=columns)


def test_title_and_content():
    record = Record({"title": "T", "content": "C"}, WHERE)
    assert detect_form(record, Reading()) == "text"
    assert to_document(record, Reading()).text == "T\n\nC"
    assert to_document(Record({"content": "C"}, WHERE), Reading()).text == "C"
    columns = {"content": "body", "title": "head"}
    record = Record({"head": "T", "body": "C"}, WHERE)
    assert detect_form(record, Reading(columns)) == "text"
    assert to_document(record, Reading(columns)).text == "T\n\nC"


def test_turns_by_columns():
    value = {"conversations": {"from": ["human", "gpt"], "value": ["Q", "A"]}}
    found = conversation(value, "sharegpt")
    assert [(m.role, m.content) for m in found.messages] == [("user", "Q"), ("assistant", "A")]


def test_wrong_tools_are_said():
    with pytest.raises(RecordError, match="line 7: tools are not JSON"):
        conversation({**CHAT, "tools": "[{"})


# One rendering for the calls of ShareGPT and of OpenAI


COLD = {"name": "cold", "arguments": {"where": "Köln", "depth": {"of": [1, 2.5, None]}}}
WARM = {"name": "warm", "arguments": {"where": "Köln"}}


def both_ways(calls: list[dict], value, results: list[str], observation, *, said: str = ""):
    """The same chat as OpenAI and as ShareGPT write it."""
    words = [{"from": "gpt", "value": said}] if said else []
    openai = [
        {"role": "user", "content": "How?"},
        {"role": "assistant", "content": said or None, "tool_calls": [
            {"type": "function", "function": call} for call in calls]},
        *({"role": "tool", "content": result} for result in results),
        {"role": "assistant", "content": "So."},
    ]  # fmt: skip
    sharegpt = [
        {"from": "human", "value": "How?"},
        *words,
        {"from": "function_call", "value": value},
        {"from": "observation", "value": observation},
        {"from": "gpt", "value": "So."},
    ]
    return {"messages": openai}, {"conversations": sharegpt}


@pytest.mark.parametrize("template", [OWN, WITHOUT])
@pytest.mark.parametrize(
    ("calls", "value", "results", "observation"),
    [
        ([WARM], json.dumps(WARM), ["21"], "21"),
        ([WARM], json.dumps([WARM], indent=2), ["21"], "21"),
        ([WARM], WARM, ["21"], "21"),
        ([WARM, COLD], json.dumps([WARM, COLD]), ["21", "5"], '["21", "5"]'),
        ([WARM, COLD], [WARM, COLD], ['{"at": 1}', "5"], [{"at": 1}, "5"]),
        ([WARM, COLD], json.dumps([WARM, COLD], ensure_ascii=False), ["[1, 2, 3]"], "[1, 2, 3]"),
        ([WARM], json.dumps(WARM), ['["a", "b"]'], '["a", "b"]'),
        ([WARM], json.dumps({**WARM, "arguments": json.dumps(WARM["arguments"])}), ["21"], "21"),
        ([{"name": "now", "arguments": {}}], '{"name": "now", "arguments": ""}', ["9"], "9"),
    ],
)
@pytest.mark.parametrize("said", ["", "I look."])
def test_a_list_of_calls_is_rendered_as_tool_calls(
    template: str, calls: list[dict], value, results: list[str], observation, said: str
):
    openai, sharegpt = both_ways(calls, value, results, observation, said=said)
    assert rendered(template, openai) == rendered(template, sharegpt, "sharegpt")


def test_calls_in_turns_of_their_own_are_one_answer():
    openai, sharegpt = both_ways([WARM, COLD], [], ["1", "2"], "")
    turns = sharegpt["conversations"]
    turns[1:3] = [
        {"from": "function_call", "value": json.dumps(WARM)},
        {"from": "function_call", "value": json.dumps(COLD)},
        {"from": "observation", "value": "1"},
        {"from": "observation", "value": "2"},
    ]
    for template in (OWN, WITHOUT):
        assert rendered(template, openai) == rendered(template, sharegpt, "sharegpt")


def test_results_in_turns_of_their_own_are_not_divided():
    """A tool's result may itself be a list of as many values as there were calls."""
    _, value = both_ways([WARM, COLD], [WARM, COLD], [], "[1, 2]")
    value["conversations"].insert(3, {"from": "observation", "value": "[3, 4]"})
    found = conversation(value, "sharegpt")
    assert [m.content for m in found.messages if m.role == "tool"] == ["[1, 2]", "[3, 4]"]


def test_words_in_parts_beside_a_call_are_kept():
    value = json.loads(json.dumps(CHAT))
    value["messages"][1] |= {"content": [{"type": "text", "text": "I look."}]}
    _, spans = rendered(OWN, value)
    assert spans[0].startswith("I look.<|call|>warm")


def test_the_former_function_call_of_openai_is_a_call():
    value = json.loads(json.dumps(CHAT))
    value["messages"][1:3] = [
        {"role": "assistant", "content": "", "function_call": CALL["function"]},
        {"role": "function", "name": "warm", "content": "21"},
    ]
    del value["messages"][3]
    _, spans = rendered(OWN, value)
    assert spans[0] == '<|call|>warm{"where": "Köln"}<|im_end|>'


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('{"name": "warm", "arguments": {"where": "K"', "delimiter"),
        ('[{"name": "warm", "arguments": {}}, {"tool": "x"}]', "no 'name'"),
        ('{"name": 5, "arguments": {}}', "the name is 5"),
        ('{"name": "warm", "arguments": ["K"]}', "not an object"),
        ('{"name": "warm", "arguments": {"t": NaN}}', "Out of range float"),
        ("[]", "it is no object"),
        (5, "it is no object"),
    ],
)
def test_calls_that_are_none(value, message: str):
    _, chat = both_ways([], value, [], "21")
    problem = f'turn 2 of "conversations" has a wrong tool call; every tool call .*{message}'
    with pytest.raises(RecordError, match=problem):
        conversation(chat, "sharegpt")
