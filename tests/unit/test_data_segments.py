"""Conversations by the fast encoder: the tokens and the learned ones of the slow way, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from llmx.data.format.rows import Conversation, Message
from llmx.data.source.records import Where
from llmx.data.tokenize.conversations import ConversationEncoder, Renderer
from tests.chat_templates import LLAMA3_1, MISTRAL, QWEN2_5, QWEN3
from tests.small_tokenizers import byte_tokenizer

WHERE = Where(Path("rows.jsonl"), 7, "line")
CONTROL = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
TEXT = "The quick brown fox. \n\nThe lazy dog!  12 345 naïve 中文 中文 assistant user system\n" * 50


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A real byte-level BPE whose tokens reach over spaces and line breaks, with trimmed offsets
    as Llama 3's and GPT-2's have."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["</s>", "<s>", *CONTROL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT], trainer)
    backend.add_tokens(["<think>", "</think>"])
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>")


def chat(*contents: str, system: str = "") -> Conversation:
    messages = [Message(("user", "assistant")[i % 2], text) for i, text in enumerate(contents)]
    return Conversation(((Message("system", system),) if system else ()) + tuple(messages), WHERE)


PLAIN = [
    chat("The quick", f"fox {i}. naïve", "中文 dog", "lazy  ", system="The") for i in range(40)
]
words = st.lists(
    st.sampled_from(
        ["The", " fox", "\n", "\n\n", "  ", "中", "ï", "🙂", "<think>", "</think>", "<|im_end|>",
         "</s>", "<|eot_id|>", "12", "e\u0301", "\t"]
    ),
    min_size=1, max_size=6,
).map("".join)  # fmt: skip


@settings(max_examples=15, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("template", [QWEN2_5, QWEN3, LLAMA3_1, MISTRAL, "chatml", "vicuna"])
@pytest.mark.parametrize("loss_on", ["assistant", "last", "all"])
def test_rows_are_those_of_the_slow_way(
    tokenizer: Any, template: str, loss_on: str, data: st.DataObject
):
    # Not a fixture: the proof is made once for all examples of a case.
    renderer, chats = _encoders(tokenizer, template, loss_on)
    contents = data.draw(st.lists(words, min_size=1, max_size=3))
    system = data.draw(st.one_of(st.just(""), words))
    turns = [text for pair in zip(contents, reversed(contents), strict=True) for text in pair]
    rows = [chat(*turns, system=system), PLAIN[0]]
    try:
        expected = renderer.conversations(rows)
    except ValueError as error:  # a template that rewrites contents, and a special token in one
        with pytest.raises(type(error)):
            chats.sequences(rows)
        return
    for mine, slow in zip(chats.sequences(rows), expected, strict=True):
        assert mine.tokens.tolist() == slow.tokens.tolist()
        assert mine.targets.tolist() == slow.targets.tolist()


_MADE: dict[tuple[str, str], tuple[Renderer, ConversationEncoder]] = {}


def _encoders(tokenizer: Any, template: str, loss_on: str) -> tuple[Renderer, ConversationEncoder]:
    if (template, loss_on) not in _MADE:
        named = "{%" not in template
        tokenizer.chat_template = None if named else template
        renderer = Renderer(tokenizer, template=template if named else "auto", loss_on=loss_on)
        chats = ConversationEncoder(renderer)
        chats.choose(PLAIN)
        assert chats.description.startswith("tiktoken, equal to tokenizers on "), template
        _MADE[template, loss_on] = renderer, chats
    return _MADE[template, loss_on]


def test_spaces_at_the_end_of_an_answer_are_learned(tokenizer: Any):
    """A library that trims offsets would let a token of spaces end before the answer does."""
    renderer = Renderer(tokenizer, template="chatml")
    (row,) = renderer.conversations([chat("The", "fox  ")])
    learned = tokenizer.decode(row.tokens[row.targets], skip_special_tokens=False)
    assert learned == "fox  <|im_end|>"
    assert int(np.sum(row.targets)) == len(tokenizer("fox  <|im_end|>").input_ids)


def test_other_tokenizers_go_the_slow_way(tokenizer: Any):
    slow = byte_tokenizer("<|im_end|>")
    slow.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    chats = ConversationEncoder(Renderer(slow, template="chatml"))
    chats.choose(PLAIN)
    assert chats.description == "tokenizers"
