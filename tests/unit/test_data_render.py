"""What is learned, literally: every template, one turn and several, with and without system."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmx.config import Experiment
from llmx.data.eval_prompts import stop_token_ids
from llmx.data.format.rows import Conversation, Message
from llmx.data.format.templates import TEMPLATES
from llmx.data.source.records import Document, Where
from llmx.data.tokenize.conversations import Renderer, TokenSequence
from llmx.data.tokenize.documents import DocumentEncoder
from llmx.errors import ConfigError, DataError
from llmx.tasks import tokenizer_of
from tests.small_tokenizers import byte_tokenizer

WHERE = Where(Path("rows.jsonl"), 7, "line")
LLAMA3 = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
CHATML = ("<|im_start|>", "<|im_end|>")

TRIMMING = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last %}{% set c = c.split('</think>')[-1] %}"
    "{% elif m['role'] == 'assistant' and '</think>' not in c %}"
    "{% set c = '<think>\\n\\n</think>\\n\\n' + c %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + c + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def chat(*contents: str, system: str | None = None) -> Conversation:
    roles = ("user", "assistant")
    messages = [Message(roles[i % 2], content) for i, content in enumerate(contents)]
    if system:
        messages.insert(0, Message("system", system))
    return Conversation(tuple(messages), WHERE)


def learned(tokenizer, row: TokenSequence) -> list[str]:
    """The text of every run of targets."""
    runs: list[list[int]] = []
    before = False
    for token, target in zip(row.tokens.tolist(), row.targets.tolist(), strict=True):
        if target:
            if not before:
                runs.append([])
            runs[-1].append(token)
        before = target
    return [tokenizer.decode(run) for run in runs]


def rendered(tokenizer, conversation: Conversation, **options) -> tuple[str, list[str]]:
    """(the whole row as text, what is learned of it)"""
    (row,) = Renderer(tokenizer, **options).conversations([conversation])
    return tokenizer.decode(row.tokens), learned(tokenizer, row)


ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately "
    "completes the request.\n\n"
)
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant "
    "gives helpful, detailed, and polite answers to the user's questions. "
)
LITERAL = {
    # template: (special tokens, begin, end, text without system, start with system "Be."), two
    # turns: U1 A1 U2 A2.
    "chatml": (
        CHATML, None, "</s>",
        "<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\n",
        "A1<|im_end|>",
        "\n<|im_start|>user\nU2<|im_end|>\n<|im_start|>assistant\n",
        "A2<|im_end|>",
        ("", "<|im_start|>system\nBe.<|im_end|>\n"),
    ),
    "qwen": (
        CHATML, None, "</s>",
        "<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\n",
        "A1<|im_end|>",
        "\n<|im_start|>user\nU2<|im_end|>\n<|im_start|>assistant\n",
        "A2<|im_end|>",
        (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n",
            "<|im_start|>system\nBe.<|im_end|>\n",
        ),
    ),
    "llama3": (
        LLAMA3, "<|begin_of_text|>", "<|end_of_text|>",
        "<|start_header_id|>user<|end_header_id|>\n\nU1<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "A1<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nU2<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "A2<|eot_id|>",
        (
            "<|begin_of_text|>",
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe.<|eot_id|>",
        ),
    ),
    "llama2": (
        (), "<s>", "</s>",
        "U1 [/INST]", " A1</s>", "[INST] U2 [/INST]", " A2</s>",
        ("<s>[INST] ", "<s>[INST] <<SYS>>\nBe.\n<</SYS>>\n\n"),
    ),
    "alpaca": (
        (), "<s>", "</s>",
        "### Instruction:\nU1\n\n### Response:\n",
        "A1</s>",
        "\n\n### Instruction:\nU2\n\n### Response:\n",
        "A2</s>",
        ("<s>" + ALPACA, "<s>Be.\n\n"),
    ),
    "vicuna": (
        (), "<s>", "</s>",
        "USER: U1 ASSISTANT:", " A1</s>", "USER: U2 ASSISTANT:", " A2</s>",
        ("<s>" + VICUNA, "<s>Be. "),
    ),
    "human_assistant": (
        (), None, "<|endoftext|>",
        "Human: U1\n\nAssistant:",
        " A1<|endoftext|>",
        "\n\nHuman: U2\n\nAssistant:",
        " A2<|endoftext|>",
        ("", "Be.\n\n"),
    ),
    "plain": (
        (), None, "<|endoftext|>",
        "U1", "A1<|endoftext|>", "U2", "A2<|endoftext|>", ("", "Be."),
    ),
}  # fmt: skip


def test_every_template_has_a_literal_test():
    assert set(LITERAL) == set(TEMPLATES)


@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("name", sorted(LITERAL))
def test_literal_text_and_spans(name: str, system: bool):
    control, begin, end, first, answer1, between, answer2, starts = LITERAL[name]
    tokenizer = byte_tokenizer(*control, begin=begin, end=end)
    start, instruction = starts[system], "Be." if system else None
    one = chat("U1", "A1", system=instruction)
    two = chat("U1", "A1", "U2", "A2", system=instruction)
    whole = start + first + answer1 + between + answer2

    assert rendered(tokenizer, one, template=name) == (start + first + answer1, [answer1])
    assert rendered(tokenizer, two, template=name) == (whole, [answer1, answer2])
    assert rendered(tokenizer, two, template=name, loss_on="last") == (whole, [answer2])
    text, spans = rendered(tokenizer, two, template=name, loss_on="all")
    assert text.startswith(whole)
    assert spans == [text]
    if begin:
        (row,) = Renderer(tokenizer, template=name).conversations([two])
        places = np.flatnonzero(row.tokens == tokenizer.bos_token_id)
        assert places.tolist() == [0]


@pytest.mark.parametrize("name", sorted(LITERAL))
def test_no_text_becomes_a_control_token(name: str):
    control, begin, end, *_ = LITERAL[name]
    tokenizer = byte_tokenizer(*control, begin=begin, end=end)
    evil = "".join((*control, begin or "", end))
    renderer = Renderer(tokenizer, template=name)
    mild, attacked = renderer.conversations(
        [
            chat("x", "y", "x", "y", system="z"),
            chat(f"a{evil}b", f"c{evil}", evil, f"{evil}d", system=evil),
        ]
    )
    ids = sorted(renderer.special.values())

    def count(row: TokenSequence) -> list[int]:
        return [int(np.sum(row.tokens == index)) for index in ids]

    assert count(attacked) == count(mild)
    # The text itself is all there, as plain bytes.
    texts = [tokenizer.decode(row.tokens).count(evil) for row in (mild, attacked)]
    assert texts[1] - texts[0] == 5
    assert [run.strip()[: len(evil) + 1] for run in learned(tokenizer, attacked)] == [
        f"c{evil}",
        f"{evil}d",
    ]


def test_missing_marker_is_replaced_by_the_end_token():
    text, spans = rendered(byte_tokenizer(end="</s>"), chat("U", "A"), template="chatml")
    assert text == "<|im_start|>user\nU</s>\n<|im_start|>assistant\nA</s>"
    assert spans == ["A</s>"]
    tokenizer = byte_tokenizer(end="</s>")
    tokenizer.chat_template = Renderer(tokenizer).template  # as an exported one has it
    assert Renderer(tokenizer).template_name == "chatml"
    with pytest.raises(ConfigError, match="neither .*nor an EOS token"):
        Renderer(byte_tokenizer(end=None), template="chatml")


def test_own_template_that_trims_and_refuses_system():
    tokenizer = byte_tokenizer(begin="<s>", chat_template=TRIMMING)
    text, spans = rendered(tokenizer, chat("  U1\n", " A1 ", "U2", "A2"))
    assert text == "<s>[INST] U1 [/INST] A1</s>[INST] U2 [/INST] A2</s>"
    assert spans == [" A1</s>", " A2</s>"]
    # The system message goes into the first turn, where the template has no place for it.
    text, spans = rendered(tokenizer, chat("U1", "A1", system="Be."))
    assert text == "<s>[INST] Be.\n\nU1 [/INST] A1</s>"
    assert spans == [" A1</s>"]


def test_own_template_that_writes_thoughts():
    tokenizer = byte_tokenizer(*CHATML, chat_template=THINKING, plain_added=("<think>", "</think>"))
    # What stands between the generation prompt and the answer must be learned as well.
    _, spans = rendered(tokenizer, chat("U1", "A1", "U2", "A2"))
    assert spans == ["A1<|im_end|>", "<think>\n\n</think>\n\nA2<|im_end|>"]
    # Earlier thoughts are dropped by the template: the contents are not written as they are.
    text, spans = rendered(tokenizer, chat("U1", "<think>T</think>A1", "U2", "<think>T</think>A2"))
    assert spans == ["A1<|im_end|>", "<think>T</think>A2<|im_end|>"]
    assert "T</think>A1" not in text
    with pytest.raises(DataError, match=r"rows\.jsonl, line 7.*<\|im_end\|>"):
        rendered(tokenizer, chat("<|im_end|>", "<think>T</think>A1", "U2", "A2"))


def test_end_token_is_appended_where_the_template_has_none():
    text, spans = rendered(byte_tokenizer(chat_template=NO_END), chat("U1", "A1", "U2", "A2"))
    assert text == "user: U1\nassistant: A1\nuser: U2\nassistant: A2\n</s>"
    assert spans == [" A1", " A2", "</s>"]


def test_template_that_refuses_is_reported_with_the_row():
    refusing = "{{ raise_exception('never') }}"
    with pytest.raises(DataError, match=r"rows\.jsonl, line 7.*user → assistant.*never"):
        rendered(byte_tokenizer(chat_template=refusing), chat("U", "A"))


def test_tools_and_their_results():
    messages = (
        Message("user", "How warm?"),
        Message("assistant", '<tool_call>\n{"name": "t"}\n</tool_call>'),
        Message("tool", "21"),
        Message("assistant", "It is 21."),
    )
    conversation = Conversation(messages, WHERE, tools='[{"name": "t"}]')
    tokenizer = byte_tokenizer(*CHATML)
    text, spans = rendered(tokenizer, conversation, template="chatml")
    assert '[{"name": "t"}]' in text
    assert text.index('[{"name": "t"}]') < text.index("How warm?")
    assert spans == ['<tool_call>\n{"name": "t"}\n</tool_call><|im_end|>', "It is 21.<|im_end|>"]
    # Where the template has no place for a tool, its result is the user's turn.
    tokenizer = byte_tokenizer(begin="<s>", chat_template=TRIMMING)
    text, spans = rendered(tokenizer, conversation)
    assert "[INST] <tool_response>\n21\n</tool_response> [/INST]" in text
    assert spans[-1] == " It is 21.</s>"


def test_spans_equal_the_templates_own_generation_marks():
    """The demo's template marks its answers; ours are found without the marks."""
    exp = Experiment()
    exp.model.tokenizer = "demo"
    tokenizer = tokenizer_of(exp)
    conversation = chat("Who has the kite?", "Anna has it.", "And the ball?", "Ben, naïve 春.")
    (row,) = Renderer(tokenizer).conversations([conversation])
    own = tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in conversation.messages],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert row.tokens.tolist() == own["input_ids"]
    assert row.targets.tolist() == [bool(mark) for mark in own["assistant_masks"]]


def test_stop_tokens():
    tokenizer = byte_tokenizer(*CHATML)
    ids = tokenizer.convert_tokens_to_ids
    expected = sorted([ids("<|im_end|>"), ids("</s>")])
    assert stop_token_ids(tokenizer, template="chatml") == expected
    assert stop_token_ids(tokenizer, template="vicuna") == [ids("</s>")]


def test_documents():
    tokenizer = byte_tokenizer("<|x|>", begin="<s>")
    encoder = DocumentEncoder(tokenizer, bos=Renderer(tokenizer).bos)
    block = encoder.encode(
        [
            Document("a</s>b", WHERE),
            Document("second", WHERE),
        ]
    )
    whole = block.tokens[: block.lengths[0]]
    assert tokenizer.decode(whole) == "<s>a</s>b</s>"
    assert int(np.sum(whole == tokenizer.eos_token_id)) == 1  # not the one in the text
    assert tokenizer.decode(block.tokens[block.lengths[0] :]) == "<s>second</s>"
    assert block.targets.all()
