"""What is learned, literally: with our templates and with those of well-known models.

The whole rendering of each case stands in ``tests/golden/chat``, what is learned of it between «
and ».
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llmx.cli.generate import PromptLayout
from llmx.data.eval_prompts import stop_token_ids
from llmx.data.examples import TokenSequence
from llmx.data.format.columns import Reading
from llmx.data.format.formats import FORMATS
from llmx.data.format.rows import Conversation, Message
from llmx.data.format.templates import TEMPLATES
from llmx.data.source.records import Record
from llmx.data.tokenize.conversations import Renderer
from llmx.data.tokenize.documents import TextEncoder
from llmx.errors import ConfigError, DataError
from tests.chat_templates import OF_TRL, PUBLISHED
from tests.data_rows import CHATML, WHERE, chat, learned, turn
from tests.small_tokenizers import byte_tokenizer

LLAMA3 = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

NO_END = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def rendered(tokenizer, conversation: Conversation, **options) -> tuple[str, list[str]]:
    """(the whole row as text, what is learned of it)"""
    (row,) = Renderer(tokenizer, **options).conversations([conversation])
    return tokenizer.decode(row.tokens), learned(tokenizer, row)


OURS = {
    # template: (special tokens, begin, end)
    "chatml": (CHATML, None, "</s>"),
    "qwen": (CHATML, None, "</s>"),
    "llama3": (LLAMA3, "<|begin_of_text|>", "<|end_of_text|>"),
    "llama2": ((), "<s>", "</s>"),
    "alpaca": ((), "<s>", "</s>"),
    "vicuna": ((), "<s>", "</s>"),
    "human_assistant": ((), None, "<|endoftext|>"),
    "plain": ((), None, "<|endoftext|>"),
}


def of_template(name: str) -> tuple[Any, Renderer]:
    """The tokenizer and the renderer of a published template, or of ``ours/NAME``."""
    if name in PUBLISHED:
        tokenizer = PUBLISHED[name].tokenizer()
        return tokenizer, Renderer(tokenizer)
    name = name.removeprefix("ours/")
    control, begin, end = OURS[name]
    tokenizer = byte_tokenizer(*control, begin=begin, end=end)
    return tokenizer, Renderer(tokenizer, template=name)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_loss_is_on_all_answers_on_the_last_or_on_all_of_it(name: str):
    tokenizer, renderer = of_template(f"ours/{name}")
    two = chat("U1", "A1", "U2", "A2", system="Be.")
    text, answers = rendered(tokenizer, two, template=name)
    assert [answer.lstrip()[:2] for answer in answers] == ["A1", "A2"]
    assert rendered(tokenizer, two, template=name, loss_on="last") == (text, answers[1:])
    whole, spans = rendered(tokenizer, two, template=name, loss_on="all")
    assert whole.startswith(text)
    assert spans == [whole]
    (row,) = renderer.conversations([two])
    begins = np.flatnonzero(row.tokens == tokenizer.bos_token_id).tolist()
    assert begins == ([0] if tokenizer.bos_token else [])


def test_missing_marker_is_replaced_by_the_end_token():
    tokenizer = byte_tokenizer(end="</s>")
    text, spans = rendered(tokenizer, chat("U", "A"), template="chatml")
    assert text == "<|im_start|>user\nU</s>\n<|im_start|>assistant\nA</s>"
    assert spans == ["A</s>"]
    tokenizer.chat_template = Renderer(tokenizer).template  # as an exported one has it
    assert Renderer(tokenizer).template_name == "chatml"
    with pytest.raises(ConfigError, match="neither .*nor an EOS token"):
        Renderer(byte_tokenizer(end=None), template="chatml")


def test_own_templates_without_an_end_or_that_refuse():
    text, spans = rendered(byte_tokenizer(chat_template=NO_END), chat("U1", "A1", "U2", "A2"))
    assert text == "user: U1\nassistant: A1\nuser: U2\nassistant: A2\n</s>"
    assert spans == [" A1", " A2", "</s>"]
    refusing = byte_tokenizer(chat_template="{{ raise_exception('never') }}")
    with pytest.raises(DataError, match=r"rows\.jsonl, line 7.*user → assistant.*never"):
        rendered(refusing, chat("U", "A"))


def test_a_system_message_goes_into_the_first_turn_where_the_template_has_no_place_for_it():
    tokenizer, renderer = of_trl("gemma")
    (row,) = renderer.conversations([chat("U1\n", " A1 ", system=" Be.")])
    asked = "<bos><start_of_turn>user\nBe.\n\nU1<end_of_turn>\n<start_of_turn>model\n"
    assert marked(tokenizer, row) == f"{asked}«A1<end_of_turn>»"


def test_stop_tokens():
    tokenizer = byte_tokenizer(*CHATML)
    end, eos = tokenizer.convert_tokens_to_ids(["<|im_end|>", "</s>"])
    assert stop_token_ids(tokenizer, template="chatml") == sorted([end, eos])
    assert stop_token_ids(tokenizer, template="vicuna") == [eos]


def test_documents_have_a_begin_an_end_and_plain_text_between():
    tokenizer = byte_tokenizer("<|x|>", begin="<s>")
    ids = TextEncoder(tokenizer).ids(["a</s>b", "second"])
    first, second = map(Renderer(tokenizer).document, ids)
    assert tokenizer.decode(first.tokens) == "<s>a</s>b</s>"
    assert int(np.sum(first.tokens == tokenizer.eos_token_id)) == 1  # not the one in the text
    assert tokenizer.decode(second.tokens) == "<s>second</s>"
    assert first.targets.all()


# The templates of well-known models: turns x system x tools

HEAT = {"name": "heat", "description": "How warm it is",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}}  # fmt: skip
TOOLS = [{"type": "function", "function": HEAT}]
CALL = {"name": "heat", "arguments": {"place": "Wien"}}


def conversation(turns: int, *, system: bool, tools: bool) -> Conversation:
    """As it is read from a row of OpenAI messages."""
    called = [turn("assistant", "", tool_calls=[{"function": CALL}]), turn("tool", "21")]
    messages = [
        *([turn("system", "Be kind.")] if system else []),
        turn("user", "U1"),
        *(called if tools else []),
        turn("assistant", "A1"),
        *([turn("user", "U2"), turn("assistant", "A2")] if turns == 2 else []),
    ]
    row = {"messages": messages, "tools": TOOLS if tools else None}
    found = FORMATS["messages"].read(Record(row, WHERE), Reading(), Conversation)[0]
    assert isinstance(found, Conversation)
    return found


def marked(tokenizer, row: TokenSequence) -> str:
    """The row as text, with « and » around every run of what is learned."""
    edges = np.flatnonzero(np.diff(row.targets.astype(int), prepend=0, append=0))
    text, before = "", 0
    for place, edge in enumerate(edges.tolist()):
        text += tokenizer.decode(row.tokens[before:edge]) + "«»"[place % 2]
        before = edge
    return text + tokenizer.decode(row.tokens[before:])


@pytest.mark.parametrize("name", [*(f"ours/{name}" for name in OURS), *PUBLISHED])
def test_what_is_learned(name: str, golden: Callable[[str, str], None]):
    tokenizer, renderer = of_template(name)
    shown = ""
    for turns, system, tools in itertools.product((1, 2), (False, True), (False, True)):
        (row,) = renderer.conversations([conversation(turns, system=system, tools=tools)])
        text = marked(tokenizer, row)
        # Nothing is lost on the way, whatever the template has no place for.
        found = ["Be kind." in text, "How warm it is" in text, "21" in text.partition("U1")[2]]
        assert found == [system, tools, tools]
        shown += f"=== {turns} turns, system {system}, tools {tools} ===\n{text}\n\n"
    golden(f"chat/{name}.txt", shown)


@pytest.mark.parametrize(
    ("name", "tools"),
    [*((f"ours/{name}", False) for name in OURS), *itertools.product(PUBLISHED, (False, True))],
)
def test_no_text_becomes_a_control_token(name: str, tools: bool):
    tokenizer, renderer = of_template(name)
    evil = "".join(renderer.special)
    ids = sorted(renderer.special.values())

    def row(said: str) -> TokenSequence:
        call = {"name": "heat", "arguments": {"place": said}}
        calling = Message("assistant", f"<tool_call>{said}</tool_call>", calls=(call,))
        tool = json.dumps([{"type": "function", "function": {"name": "heat", "description": said}}])
        messages = [
            Message("system", said),
            Message("user", f"x{said}y"),
            *((calling, Message("tool", said)) if tools else ()),
            *(Message(role, f"x{said}y") for role in ("assistant", "user", "assistant")),
        ]
        whole = Conversation(tuple(messages), WHERE, tools=tool if tools else "")
        return renderer.conversations([whole])[0]

    mild, attacked = row("mild"), row(evil)
    text = tokenizer.decode(attacked.tokens)
    assert text.count(evil) - tokenizer.decode(mild.tokens).count(evil) >= 5
    counts = [[int(np.sum(row.tokens == index)) for index in ids] for row in (attacked, mild)]
    assert counts[0] == counts[1]
    # An answer is learned as a whole, and what the user said is not.
    runs = learned(tokenizer, attacked)
    assert len([run for run in runs if f"x{evil}y" in run]) == 2
    assert len(runs) == 2 + tools


CONTROL = re.compile(r"<\|\w+\|>|<\w+_of_\w+>|<\uff5c[^>]+\uff5c>|<\|\w+>|<\w+\|>|\[/?[A-Z_]{4,}\]")
NO_TEXT = {"idefics3", "llava_next", "smolvlm"}
"""Their contents are lists of parts, and they are refused."""
OTHER_PROMPT = re.compile("deepseek|nemotron")
"""Their generation prompt opens a thought, which is not in an answer without one."""


def of_trl(name: str) -> tuple[Any, Renderer]:
    """A tokenizer for a template of TRL, and its renderer."""
    jinja = OF_TRL[name]
    tokenizer = byte_tokenizer(
        *sorted(set(CONTROL.findall(jinja))), begin="<bos>", end="<eos>",
        chat_template=jinja, plain_added=("<think>", "</think>"),
    )  # fmt: skip
    return tokenizer, Renderer(tokenizer)


def screen_rows() -> dict[str, list[dict[str, Any]]]:
    """Chats by what is in them: calls and their results, thoughts in contents and beside them."""

    def asked(answer: str, *, beside: str = "", within: str = "") -> list[dict[str, Any]]:
        content = f"<think>\n{within}\n</think>\n\n{answer}" if within else answer
        field = {"reasoning_content": beside} if beside else {}
        return [turn("user", "Q"), turn("assistant", content, **field)]

    def calling(**field: str) -> list[dict[str, Any]]:
        call = {"id": "call00001", "type": "function", "function": CALL}
        return [turn("user", "Q"), turn("assistant", "", tool_calls=[call], **field),
                turn("tool", "21", tool_call_id="call00001")]  # fmt: skip

    return {
        "calls": [*calling(), turn("assistant", "A1")],
        "calls, then an answer": [*calling(), turn("assistant", "A1"), *asked("A2")],
        "a call at the end": calling()[:2],
        "a thought": asked("A1", within="T1"),
        "a thought that the prompt opens": asked("T1\n</think>\n\nA1"),
        "two thoughts": [*asked("A1", within="T1"), *asked("A2", within="T2")],
        "a thought beside": asked("A1", beside="T1"),
        "thoughts and calls": [
            *calling(reasoning_content="T0"), turn("assistant", "A1", reasoning_content="T1"),
            *asked("A2", beside="T2"),
        ],
    }  # fmt: skip


NO_FIELD = re.compile(
    "cohere|gemma(_training)?$|gemma3|gemma4(_v[234])?$|lfm2(_v2)?(_training)?$|llama3|phi3|"
    "qwen2_5|qwen3_instruct_2507|qwen3_vl"
)
"""Templates that write no thought beside an answer, and none in a content of their own."""
NO_CALLS = re.compile(
    "cohere|deepseek|gemma(_training)?$|gemma3|lfm2(_training)?$|llama3(_training)?$|phi3|"
    "qwen2_5_vl"
)
"""Templates without a form for calls (DeepSeek's do not close a second one): JSON in text."""
OTHER_OPENING = re.compile("nemotron|qwen3_5_nothink|deepseek_r1_distill_training")
"""They write another beginning of a thought than their generation prompt has."""
JSON_CALLS = re.compile("qwen2_5|qwen3(_training|_vl.*|_instruct.*)?$")


@pytest.mark.parametrize("name", [n for n in OF_TRL if n.removesuffix("_training") not in NO_TEXT])
def test_every_template_of_trl_writes_calls_and_thoughts_in_one_way(name: str):
    tokenizer, renderer = of_trl(name)
    stops, only_last = renderer.stop_token_ids, Renderer(tokenizer, loss_on="last")
    # What a model is asked is the template's own generation prompt.
    asked = tokenizer.apply_chat_template(
        [turn("user", "Q")], add_generation_prompt=True, return_dict=True
    )
    layout = PromptLayout(tokenizer, template="auto", system=None)
    assert layout.turns([Message("user", "Q")]) == asked["input_ids"]
    completions: dict[str, list[str]] = {}
    for case, messages in screen_rows().items():
        tools = TOOLS if "call" in case else None
        record = Record({"messages": messages, "tools": tools}, WHERE)
        row, _ = FORMATS["messages"].read(record, Reading(), Conversation)
        assert isinstance(row, Conversation)
        if NO_FIELD.match(name) and any("reasoning_content" in one for one in messages):
            with pytest.raises(DataError, match='not write "reasoning_content".*on_bad_row'):
                renderer.conversations([row])
            continue
        (sequence,) = renderer.conversations([row])
        completions[case] = learned(tokenizer, sequence)
        (alone,) = only_last.conversations([row])
        assert learned(tokenizer, alone) == completions[case][-1:]
        assert len(completions[case]) == sum(m.role == "assistant" for m in row.messages)
        # The model stops where it must, and nowhere before.
        assert int(sequence.tokens[-1]) in stops
        inner = np.isin(sequence.tokens[:-1], stops) & sequence.targets[:-1] & sequence.targets[1:]
        assert not inner.any()
        # What the template itself makes of the row, where it is not told otherwise.
        as_text = "rows with tools as JSON text" in str(sequence.notes)
        assert as_text == (tools is not None and bool(NO_CALLS.match(name)))
        written = tokenizer.decode(sequence.tokens)
        if not as_text and "thought" not in case:
            by_template = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
            assert by_template.startswith(written.removesuffix("<eos>"))
        lost = sum(f"T{i}" in str(messages) and f"T{i}" not in written for i in range(3))
        assert lost == sum(n for note, n in sequence.notes.items() if "thoughts" in note)
        if "thought" in case:
            last = "T2" if "T2" in str(messages) else "T1"
            assert completions[case][-1].count(last) == 1
            # It is opened and closed once.
            assert completions[case][-1].count("</think>") <= 1
            assert written.count("<think>") <= written.count("</think>")
        if case == "a thought that the prompt opens" and not OTHER_OPENING.match(name):
            prompt = tokenizer.apply_chat_template(
                messages[:1], add_generation_prompt=True, tokenize=False
            )
            assert written.startswith(prompt)
    # One syntax, whatever follows.
    first, second = (completions[case][0] for case in ("calls", "calls, then an answer"))
    assert first.endswith(second) or second.endswith(first)
    assert ("<tool_call>\n{" in first) == bool(NO_CALLS.match(name) or JSON_CALLS.match(name))


@pytest.mark.parametrize("name", [*PUBLISHED, *OF_TRL])
def test_a_model_that_has_learned_a_row_by_heart_completes_its_prompt(name: str):
    """The prompt and the completion are the trained row; the completion ends at a stop token; and
    the prompt is the template's generation prompt, unless a system message is moved."""
    tokenizer, renderer = (of_template if name in PUBLISHED else of_trl)(name)
    stops = stop_token_ids(tokenizer)
    for turns, system in itertools.product((1, 2), (False, True)):
        asked = conversation(turns, system=system, tools=False)
        if name.removesuffix("_training") in NO_TEXT:
            with pytest.raises(DataError, match="cannot render"):
                renderer.prompt(asked)
            continue
        (row,) = renderer.conversations([asked])
        prompt, completion = renderer.prompt(asked)
        assert [*prompt, *completion] == row.tokens.tolist()
        ends = [place for place, one in enumerate(completion) if one in stops]
        assert ends == [len(completion) - 1]
        messages = [turn(m.role, m.content) for m in asked.messages[:-1]]
        moved = name.startswith(("gemma", "mistral")) and messages[0]["role"] == "system"
        if not moved and not OTHER_PROMPT.match(name):
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True
            )
            assert prompt.tolist() == inputs["input_ids"]


def test_tools_of_all_rows_have_one_syntax():
    """A bare function is written as any other; what the template cannot write is refused."""
    tokenizer, renderer = of_trl("gptoss")
    function = {"name": "warm", "description": "How warm?", "parameters": {"type": "object"}}

    def text(tool: dict[str, Any]) -> str:
        value = {"messages": screen_rows()["calls"], "tools": [tool]}
        row = FORMATS["messages"].read(Record(value, WHERE), Reading(), Conversation)[0]
        assert isinstance(row, Conversation)
        return str(tokenizer.decode(renderer.conversations([row])[0].tokens))

    own = text({"type": "function", "function": function})
    assert "namespace functions" in own
    assert text(function) == own
    with pytest.raises(DataError, match=r"line 7.*no attribute 'description'.*on_bad_row=skip"):
        text({"name": "warm"})
