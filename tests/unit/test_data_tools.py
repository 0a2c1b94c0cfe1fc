"""Calls of tools: in the template's own way where it has one, else as text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset

from llmx.config import DataConfig, SourceConfig
from llmx.data.format.columns import Reading
from llmx.data.format.formats import FORMATS
from llmx.data.format.rendering import CALLS_AS_TEXT
from llmx.data.format.rows import Conversation
from llmx.data.source.records import Record, RecordError, refuse
from llmx.data.split import Source
from llmx.data.tokenize.conversations import Renderer
from tests.data_rows import CHATML, WHERE, learned, turn
from tests.small_tokenizers import byte_tokenizer

CALL = {"type": "function", "function": {"name": "warm", "arguments": '{"where": "Köln"}'}}
CHAT = {
    "messages": [
        turn("user", "How warm?"),
        turn("assistant", None, tool_calls=[CALL, CALL]),
        turn("tool", "21"),
        turn("tool", "22"),
        turn("assistant", "Between 21 and 22."),
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
WARM = {"name": "warm", "arguments": {"where": "Köln"}}
COLD = {"name": "cold", "arguments": {"where": "Köln", "depth": {"of": [1, 2.5, None]}}}
AS_OWN = '<|call|>warm{"where": "Köln"}'
AS_TEXT = '<tool_call>\n{"name": "warm", "arguments": {"where": "Köln"}}\n</tool_call>'


def conversation(value: dict) -> Conversation:
    form = "messages" if "messages" in value else "sharegpt"
    found = FORMATS[form].read(Record(value, WHERE), Reading(), Conversation)[0]
    assert isinstance(found, Conversation)
    return found


def rendered(template: str, value: dict) -> tuple[str, list[str]]:
    """(the row as text, what is learned of it)"""
    tokenizer = byte_tokenizer(*CHATML, "<|call|>", chat_template=template)
    (row,) = Renderer(tokenizer).conversations([conversation(value)])
    assert (CALLS_AS_TEXT in row.notes) == (template == WITHOUT)
    return tokenizer.decode(row.tokens), learned(tokenizer, row)


def test_calls_are_written_as_the_template_writes_them():
    text, spans = rendered(OWN, CHAT)
    assert spans == [f"{AS_OWN}{AS_OWN}<|im_end|>", "Between 21 and 22.<|im_end|>"]
    assert text.startswith('<|im_start|>system\n[{"type": "function"')
    assert "<|im_start|>tool\n21<|im_end|>\n<|im_start|>tool\n22<|im_end|>" in text
    # As text, where it has no way to.
    _, spans = rendered(WITHOUT, CHAT)
    assert spans == [f"{AS_TEXT}\n{AS_TEXT}<|im_end|>", "Between 21 and 22.<|im_end|>"]


def called(*turns: dict) -> dict:
    """The chat with other turns in the place of the calls and their results."""
    first, *_, last = CHAT["messages"]
    return {**CHAT, "messages": [first, *turns, last]}


def test_words_beside_a_call_are_learned_too():
    for words in ("I look.", [{"type": "text", "text": "I look."}]):
        calling = turn("assistant", words, tool_calls=[CALL])
        _, spans = rendered(OWN, called(calling, turn("tool", "21")))
        assert spans[0] == f"I look.{AS_OWN}<|im_end|>"
    former = turn("assistant", "", function_call=CALL["function"])  # as OpenAI had it
    _, spans = rendered(OWN, called(former, turn("function", "21", name="warm")))
    assert spans[0] == f"{AS_OWN}<|im_end|>"


def test_results_belong_to_the_call_with_their_id():
    """Some templates write the name of the call beside its result."""
    template = OWN.replace("m['role'] + '\\n'", "m['role'] + (m['name'] or '') + '\\n'")
    calls = [{"id": name, "function": {"name": name, "arguments": {}}} for name in ("in", "out")]
    results = [turn("tool", "5", tool_call_id="out"), turn("tool", "21", tool_call_id="in")]
    text, _ = rendered(template, called(turn("assistant", None, tool_calls=calls), *results))
    assert "<|im_start|>toolout\n5<|im_end|>\n<|im_start|>toolin\n21<|im_end|>" in text
    text, _ = rendered(template, CHAT)
    assert text.count("<|im_start|>toolwarm\n") == 2


def test_a_last_call_has_the_thought_that_its_template_drops():
    template = OWN.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] }}")
    thinking = turn("assistant", "<think>T</think>I look.", tool_calls=[CALL])
    _, spans = rendered(template, {"messages": [CHAT["messages"][0], thinking]})
    assert spans == [f"<think>T</think>I look.{AS_OWN}<|im_end|>"]


def test_what_a_template_writes_after_a_call_is_learned_without_an_end_token():
    template = OWN.replace("endfor %}{{ '<|im_end|>", "endfor %}{{ ';")
    template = template.replace("<|im_end|>", "").replace("<|im_start|>", "# ")
    _, spans = rendered(template, CHAT)
    assert spans == [f"{AS_OWN}{AS_OWN};", "Between 21 and 22.", "</s>"]
    _, spans = rendered(template, {"messages": CHAT["messages"][:2]})
    assert spans == [f"{AS_OWN}{AS_OWN};", "</s>"]


def test_columns_of_arrow_bring_no_nulls(tmp_path: Path):
    """Arrow gives each call the arguments of all, and each schema the properties of all."""
    rows = [of_openai([call], ["21"]) for call in (WARM, {"name": "cold", "arguments": {"at": 1}})]
    parameters = [{"city": {"type": "string"}}, {"at": {"type": "number", "enum": [1, 2]}}]
    for row, properties in zip(rows, parameters, strict=True):
        row["tools"] = [{"function": {"name": "x", "parameters": {"properties": properties}}}]
    tokenizer = byte_tokenizer(*CHATML, "<|call|>", chat_template=OWN)
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    expected = [rendered(OWN, row)[0] for row in rows]
    for path in ("rows.parquet", "saved"):
        source = Source.of(DataConfig(), SourceConfig(f"{tmp_path}/{path}"), split="train")
        sequences = Renderer(tokenizer).conversations([*source.rows(refuse)])  # type: ignore[list-item]
        assert [tokenizer.decode(sequence.tokens) for sequence in sequences] == expected


# One rendering for the calls of ShareGPT and of OpenAI


def of_sharegpt(value, *observations) -> dict:
    calls = [{"from": "function_call", "value": call} for call in value]
    results = [{"from": "observation", "value": one} for one in observations]
    first, last = {"from": "human", "value": "How?"}, {"from": "gpt", "value": "So."}
    return {"conversations": [first, *calls, *results, last]}


def of_openai(calls: list[dict], results: list[str]) -> dict:
    functions = [{"type": "function", "function": call} for call in calls]
    turns = [turn("assistant", None, tool_calls=functions)]
    turns += [turn("tool", result) for result in results]
    return {"messages": [turn("user", "How?"), *turns, turn("assistant", "So.")]}


@pytest.mark.parametrize(
    ("calls", "value", "results"),
    [
        ([WARM], [json.dumps([WARM], indent=2)], ["21"]),
        ([WARM], [WARM], ["21"]),
        ([WARM, COLD], [json.dumps([WARM, COLD])], ["21", "5"]),
        ([WARM, COLD], [[WARM, COLD]], ["[1, 2]"]),
        ([WARM], [json.dumps({**WARM, "arguments": '{"where": "Köln"}'})], ['["a", "b"]']),
        ([{"name": "now", "arguments": {}}], ['{"name": "now", "arguments": ""}'], ["9"]),
    ],
)
def test_calls_of_sharegpt_are_rendered_as_tool_calls(calls: list, value: list, results: list):
    openai, sharegpt = of_openai(calls, results), of_sharegpt(value, *results)
    for template in (OWN, WITHOUT):
        assert rendered(template, openai) == rendered(template, sharegpt)


def test_an_answer_is_one_turn():
    """Words and a call, or two calls, in turns of their own are two answers in a row."""
    for first in ({"from": "gpt", "value": "I look."}, {"from": "function_call", "value": WARM}):
        row = of_sharegpt([WARM], "21")
        row["conversations"].insert(1, first)
        with pytest.raises(RecordError, match='turn 3 of "conv.*as the turn before it has'):
            conversation(row)
    row = of_sharegpt([WARM], "21")
    row["conversations"][1]["reasoning_content"] = "T1"
    assert conversation(row).messages[1].thought == "T1"


@pytest.mark.parametrize("call", ["warm(K)", '{"name": "f"}'])
def test_a_call_in_a_form_of_its_own_is_the_words_themselves(call: str):
    _, spans = rendered(OWN, of_sharegpt([call], "21"))
    assert spans == [f"<tool_call>\n{call}\n</tool_call><|im_end|>", "So.<|im_end|>"]


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
def test_calls_that_are_none(value: object, message: str):
    problem = f'turn 2 of "conversations" has a wrong tool call; every tool call .*{message}'
    with pytest.raises(RecordError, match=problem):
        conversation(of_sharegpt([value], "21"))
