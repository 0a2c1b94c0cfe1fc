"""The fast encoders, in the place of tokenizers: the same ids and targets for any text."""

from __future__ import annotations

import functools
import json
import os
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from llmx.data.tokenize import byte_level as words_module
from llmx.data.tokenize.byte_level import (
    LONGEST,
    PATTERNS,
    BytePairs,
    NotConvertible,
    PretokenCache,
)
from llmx.data.tokenize.conversations import ConversationEncoder, Renderer
from llmx.data.tokenize.documents import TextEncoder, worker_count
from tests.chat_templates import LLAMA3_1, MISTRAL, QWEN2_5, QWEN3
from tests.data_rows import chat
from tests.small_tokenizers import byte_tokenizer

CORPUS = [
    "The lazy dog's tail isn't what it'll be; we've seen 1234 dogs, they're DON'T.",
    "  indented\n\n\tcode = {'a': 1}\r\n    return None  \n",
    "größer, naïve café — “quoted” … 北京大学的学生 12345 москва \ufb01ne",
    "aaaa bbbb aaab abab baba 0000 1111 !!!! ....",
]
PIECES = st.sampled_from(
    [" ", " ", " ", "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u200b", "\u0085",
     "\x00", "\x1c", "\x7f", "a", "ab", "Dog", "DOG", "'s", "'LL", "'re ", "'\u017f", "\u017f",
     "1", "12", "1234", "²", "ⅷ", "é", "e\u0301", "\u0301", " \u0301", "北京", "ü", "😀", "!", "?!",
     ",", "/", "...", "</s>", "<tool>", "\ufffd", "\u00b4", "\ufb01", "\ufb06", "İ", "ß", "\u01c5",
     "\u02b0", "\u2581", "\u1160", "\u093c", "incomprehensibilities", "“"]
)  # fmt: skip
TEXTS = st.lists(
    st.one_of(
        st.lists(PIECES, max_size=25).map("".join),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    ),
    max_size=5,
)
GPT2, LLAMA3, QWEN, QWEN35, TEKKEN, O200K = PATTERNS


def byte_level(pattern: str, *, prefix: bool = False, special: tuple[str, ...] = ("</s>",)) -> Any:
    """A real BPE, trained on the corpus, with this splitting pattern."""
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    whole = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.pre_tokenizer = whole if pattern == GPT2 else pre_tokenizers.Sequence([split, last])
    backend.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), list(special)
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS * 20, trainer)
    return backend


def word_piece() -> Tokenizer:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[UNK]", "</s>"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    backend.train_from_iterator(CORPUS * 20, trainer)
    return backend


KINDS = {
    "gpt2": lambda: byte_level(GPT2),
    "roberta": lambda: byte_level(GPT2, prefix=True),
    "llama3": lambda: byte_level(LLAMA3),
    "qwen": lambda: byte_level(QWEN),
    "qwen3.5": lambda: byte_level(QWEN35),
    "tekken": lambda: byte_level(TEKKEN),
    "o200k": lambda: byte_level(O200K),
    "bert": word_piece,
}


def fast_of(backend: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


@functools.cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    backend = KINDS[kind]()
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    return fast_of(backend)


def plain_ids(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
    """By tokenizers itself, with special tokens as the text that they are."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.encode_special_tokens = True
    return [one.ids for one in backend.encode_batch(texts, add_special_tokens=False)]


@functools.cache
def encoder_of(kind: str) -> TextEncoder:
    """Never new, so that words come from a table that other texts have filled."""
    encoder = TextEncoder(tokenizer_of(kind))
    encoder.choose(CORPUS)
    by = "tokenizers (it is no byte" if kind == "bert" else "tiktoken (equal to tokenizers on "
    assert encoder.description.startswith(by)
    return encoder


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(texts=TEXTS)
def test_the_ids_of_whole_texts(kind: str, texts: list[str]):
    found = [ids.tolist() for ids in encoder_of(kind).ids(texts)]
    assert found == plain_ids(tokenizer_of(kind), texts)


@pytest.mark.parametrize("name", [r"\p{L}", r"\p{N}", r"\s"])
def test_both_libraries_know_the_same_unicode(name: str):
    import tiktoken

    single = {bytes([byte]): byte for byte in range(256)}
    ours = tiktoken.Encoding("x", pat_str=name, mergeable_ranks=single, special_tokens={})
    theirs = pre_tokenizers.Split(Regex(name), behavior="removed", invert=True)
    points = [point for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    for start in range(0, len(points), 1 << 16):
        text = "".join(map(chr, points[start : start + (1 << 16)]))
        found = "".join(piece for piece, _ in theirs.pre_tokenize_str(text))
        assert ours.decode(ours.encode_ordinary(text)) == found


def state_of(kind: str) -> dict[str, Any]:
    return json.loads(tokenizer_of(kind).backend_tokenizer.to_str())


def restored(state: dict[str, Any]) -> PreTrainedTokenizerFast:
    return fast_of(Tokenizer.from_str(json.dumps(state)))


@pytest.mark.parametrize(
    ("part", "changes", "reason"),
    [
        ("pre_tokenizer", None, "no byte-level BPE"),
        ("normalizer", {"type": "Lowercase"}, "changes texts first"),
        ("model", {"dropout": 0.1}, "no plain BPE"),
    ],
)
def test_what_is_not_converted_says_why(part: str, changes: dict | None, reason: str):
    state = state_of("gpt2")
    state[part] = changes and {**(state[part] or {}), **changes}
    with pytest.raises(NotConvertible, match=reason):
        BytePairs.of(restored(state))


def test_keeping_only_what_matches_is_the_same_cut():
    """As Phi-4 has it."""
    state = state_of("o200k")
    split = state["pre_tokenizer"]["pretokenizers"][0]
    split |= {"behavior": "Removed", "invert": True}
    other = restored(state)
    wanted = plain_ids(tokenizer_of("o200k"), CORPUS)
    assert plain_ids(other, CORPUS) == wanted
    encoder = TextEncoder(other)
    assert encoder.convert() is not None
    assert [ids.tolist() for ids in encoder.ids(CORPUS)] == wanted
    split["invert"] = False
    with pytest.raises(NotConvertible, match="cutting texts into words is not known"):
        BytePairs.of(restored(state))


def test_merges_that_tiktoken_would_apply_differently_are_refused():
    """abc is made of ab + c, but a + bc comes first: the token is never made from its bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate([*alphabet, "bc", "ab", "abc"])}
    backend = Tokenizer(models.BPE(vocab, [("b", "c"), ("a", "b"), ("ab", "c")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # tokenizers: a|bc. tiktoken would make abc of it.
    assert backend.encode("abc").tokens == ["a", "bc"]
    backend.add_special_tokens(["</s>"])
    with pytest.raises(NotConvertible, match="not made by the merges before it"):
        BytePairs.of(fast_of(backend))


def test_texts_that_are_left_to_tokenizers():
    backend = byte_level(LLAMA3)
    backend.normalizer = normalizers.NFC()
    backend.add_tokens(["<think>"])
    tokenizer = fast_of(backend)
    decomposed = unicodedata.normalize("NFD", "größer")
    left = [decomposed, "a <think> b", " " * 10_000, "it'\u017f"]
    assert [BytePairs.of(tokenizer).takes(text) for text in left] == [False] * 4
    texts = [*left, "größer </s>"]
    encoder = TextEncoder(tokenizer)
    encoder.choose(CORPUS)
    assert encoder.description.startswith("tiktoken (equal to tokenizers on ")
    assert [ids.tolist() for ids in encoder.ids(texts)] == plain_ids(tokenizer, texts)


def test_other_ids_on_the_users_data_are_never_used(monkeypatch: pytest.MonkeyPatch):
    real = BytePairs.encode_pretokens

    def backwards(self, words):
        ids, begins, counts = real(self, words)
        return ids[::-1], begins, counts

    monkeypatch.setattr(BytePairs, "encode_pretokens", backwards)
    encoder = TextEncoder(tokenizer_of("gpt2"))
    encoder.choose(CORPUS)
    assert encoder.description == "tokenizers (tiktoken gave other ids on this data)"
    assert [ids.tolist() for ids in encoder.ids(CORPUS)] == plain_ids(tokenizer_of("gpt2"), CORPUS)


def test_threads_encode_at_the_same_time():
    texts = [f"{number} " * (50 - number) for number in range(50)]
    with ThreadPoolExecutor(4) as pool:
        found = [ids.tolist() for (ids,) in pool.map(encoder_of("gpt2").ids, [[t] for t in texts])]
    assert found == plain_ids(tokenizer_of("gpt2"), texts)


def test_as_many_cores_as_are_wanted_and_there(capsys: pytest.CaptureFixture[str]):
    cores = len(os.sched_getaffinity(0))
    assert (worker_count(0), worker_count(1)) == (cores, 1)
    assert not capsys.readouterr().err
    assert worker_count(cores + 1) == cores
    message = f"data.num_workers={cores + 1}, but this process may use {cores} cores: {cores} are"
    assert capsys.readouterr().err.startswith(message)


# The table of words


def test_a_word_is_encoded_once_and_forgotten_when_the_texts_change(monkeypatch):
    monkeypatch.setattr(words_module, "TABLE_BITS", 8)
    asked: list[bytes] = []

    def encode(pieces: list[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The bytes of words as their ids."""
        asked.extend(pieces)
        lengths = np.array([len(piece) for piece in pieces], np.int64)
        return np.frombuffer(b"".join(pieces), np.uint8), np.cumsum(lengths) - lengths, lengths

    words = PretokenCache(encode)
    long = b" " + b"x" * LONGEST
    words.encode([b"a b b b", b"b" + long])
    assert asked == [b"a", b" b", b"b", long]
    words.encode([b"a b b" + long])
    assert asked[4:] == [long]
    sizes = []
    for start in range(0, 2000, 50):  # the table fills, and is emptied
        text = " ".join(str(number) for number in range(start, start + 50)).encode()
        ids, counts = words.encode([text, b""])
        assert (ids.astype(np.uint8).tobytes(), counts.tolist()) == (text, [len(text), 0])
        sizes.append(len(words))
    assert max(sizes) <= 128 + 50
    assert sizes.count(0) >= 5


# Conversations

CONTROL = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")


@functools.cache
def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Its tokens reach over spaces and line breaks, with trimmed offsets as Llama 3's and GPT-2's
    have."""
    backend = byte_level(GPT2, special=("</s>", "<s>", *CONTROL))
    backend.add_tokens(["<think>", "</think>"])
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>")


PLAIN = [chat("The lazy", f"dog {i}. naïve", "北京 dog", "tail  ", system="The") for i in range(40)]
CONTENTS = st.lists(
    st.sampled_from(
        ["The", " dog", "\n", "\n\n", "  ", "北", "ï", "🙂", "<think>", "</think>", "<|im_end|>",
         "</s>", "<|eot_id|>", "12", "e\u0301", "\t"]
    ),
    min_size=1, max_size=6,
).map("".join)  # fmt: skip


@functools.cache
def chat_encoders(template: str, loss_on: str) -> tuple[Renderer, ConversationEncoder]:
    """Both ways; that they are equal is proven once for all examples."""
    tokenizer, named = chat_tokenizer(), "{%" not in template
    tokenizer.chat_template = None if named else template
    renderer = Renderer(tokenizer, template=template if named else "auto", loss_on=loss_on)
    chats = ConversationEncoder(renderer)
    chats.choose(PLAIN)
    assert chats.description.startswith("tiktoken, equal to tokenizers on "), template
    return renderer, chats


@pytest.mark.parametrize("template", [QWEN2_5, QWEN3, LLAMA3_1, MISTRAL, "chatml", "vicuna"])
@settings(max_examples=30)
@given(
    loss_on=st.sampled_from(["assistant", "last", "all"]),
    contents=st.lists(CONTENTS, min_size=1, max_size=3),
    system=st.one_of(st.just(""), CONTENTS),
)
def test_rows_are_those_of_the_slow_way(template: str, loss_on: str, contents: list, system: str):
    renderer, chats = chat_encoders(template, loss_on)
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


def test_spaces_at_the_end_of_an_answer_are_learned():
    """A library that trims offsets would let a token of spaces end before the answer does."""
    tokenizer = chat_tokenizer()
    (row,) = Renderer(tokenizer, template="chatml").conversations([chat("The", "dog  ")])
    learned = tokenizer.decode(row.tokens[row.targets], skip_special_tokens=False)
    assert learned == "dog  <|im_end|>"
    assert int(np.sum(row.targets)) == len(tokenizer("dog  <|im_end|>").input_ids)


def test_other_tokenizers_go_the_slow_way():
    slow = byte_tokenizer("<|im_end|>")
    slow.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    chats = ConversationEncoder(Renderer(slow, template="chatml"))
    chats.choose(PLAIN)
    assert chats.description == "tokenizers (it is no byte-level BPE)"
