"""Documents: the ids of whole texts, for any text and every kind of tokenizer."""

from __future__ import annotations

import functools

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
    trainers,
)
from transformers import PreTrainedTokenizerFast

from llmx.data.tokenize import byte_level as words_module
from llmx.data.tokenize.byte_level import LONGEST, PATTERNS, PretokenCache
from llmx.data.tokenize.documents import DocumentEncoder

CORPUS = [
    "The lazy dog's tail isn't what it'll be; we've seen 1234 dogs, they're DON'T.",
    "  indented\n\n\tcode = {'a': 1}\r\n    return None  \n",
    "größer, naïve café — “quoted” … 北京大学的学生 12345 москва \ufb01ne",
    "aaaa bbbb aaab abab baba 0000 1111 !!!! ....",
]
PIECES = st.sampled_from(
    [" ", " ", " ", "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u200b", "\u0085",
     "\x00", "\x1c", "\x7f", "a", "ab", "Dog", "'s", "'LL", "12", "1234", "²", "é", "e\u0301",
     "\u0301", "北京", "ü", "😀", "!", ",", "...", "</s>", "\ufffd", "\u00b4", "\ufb01", "İ", "ß",
     "\u2581", "\u1160", "\u093c", "<tool>", "incomprehensibilities", "“"]
)  # fmt: skip
TEXTS = st.lists(
    st.one_of(
        st.lists(PIECES, max_size=25).map("".join),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    ),
    max_size=5,
)


def byte_level(pattern: str, *, prefix: bool = False) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    whole = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    gpt2 = pattern == next(iter(PATTERNS))
    backend.pre_tokenizer = whole if gpt2 else pre_tokenizers.Sequence([split, last])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
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


GPT2, LLAMA3, QWEN, QWEN35, TEKKEN, O200K = PATTERNS
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


@functools.cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    backend = KINDS[kind]()
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


@functools.cache
def encoder_of(kind: str) -> DocumentEncoder:
    """Never new, so that words come from a table that other texts have filled."""
    encoder = DocumentEncoder(tokenizer_of(kind), bos=[])
    encoder.choose(CORPUS)
    return encoder


@functools.cache
def reference_of(kind: str) -> Tokenizer:
    backend = Tokenizer.from_str(tokenizer_of(kind).backend_tokenizer.to_str())
    backend.encode_special_tokens = True
    return backend


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=40)
@given(texts=TEXTS)
def test_the_ids_of_whole_texts(kind: str, texts: list[str]):
    ids, counts = encoder_of(kind).ids(texts)
    wanted = [reference_of(kind).encode(text, add_special_tokens=False).ids for text in texts]
    assert counts.tolist() == [len(one) for one in wanted]
    assert ids.tolist() == [token for one in wanted for token in one]


@pytest.mark.parametrize("kind", KINDS)
def test_byte_level_kinds_are_encoded_by_words(kind: str):
    encoder = encoder_of(kind)
    if kind == "bert":
        assert encoder.description == "tokenizers (it is no byte-level BPE)"
        return
    assert encoder.description.startswith("tiktoken (equal to tokenizers on ")
    encoder.ids(["so many words of the dog " * 3])
    assert len(encoder._cache()) > 5


def counted(pieces: list[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The bytes of words as their ids."""
    sizes = np.array([len(piece) for piece in pieces], np.int64)
    return np.frombuffer(b"".join(pieces), np.uint8), np.cumsum(sizes) - sizes, sizes


@settings(deadline=None, max_examples=60)
@given(texts=st.lists(st.binary(max_size=60), max_size=6))
def test_words_put_together_are_the_text(texts: list[bytes]):
    words = PretokenCache(counted)
    for _ in range(2):  # from the encoder, from the table
        ids, counts = words.encode(texts)
        assert ids.astype(np.uint8).tobytes() == b"".join(texts)
        assert counts.tolist() == [len(text) for text in texts]


def test_a_word_is_encoded_once_and_forgotten_when_the_texts_change(monkeypatch):
    monkeypatch.setattr(words_module, "TABLE_BITS", 8)
    asked: list[bytes] = []

    def encode(pieces: list[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        asked.extend(pieces)
        return counted(pieces)

    words = PretokenCache(encode)
    long = b" " + b"x" * LONGEST
    words.encode([b"a b b b", b"b" + long])
    assert asked == [b"a", b" b", b"b", long]
    words.encode([b"a b b" + long])
    assert asked[4:] == [long]
    sizes = []
    for start in range(0, 2000, 50):  # the table fills, and is emptied
        text = " ".join(str(number) for number in range(start, start + 50)).encode()
        assert words.encode([text])[0].astype(np.uint8).tobytes() == text
        sizes.append(len(words))
    assert max(sizes) <= 128 + 50
    assert sizes.count(0) >= 5
