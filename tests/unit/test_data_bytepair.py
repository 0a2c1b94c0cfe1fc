"""tiktoken in place of tokenizers: the same ids for any text, or no conversion."""

from __future__ import annotations

import json
import unicodedata
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from llmx.data.source.records import Document, Where
from llmx.data.tokenize.byte_level import PATTERNS, BytePairs, NotConvertible
from llmx.data.tokenize.documents import DocumentEncoder

CORPUS = [
    "The lazy dog's tail isn't what it'll be; we've seen 1234 dogs, they're DON'T.",
    "  indented\n\n\tcode = {'a': 1}\r\n    return None  \n",
    "größer, naïve café — “quoted” … 北京大学的学生 12345 москва",
    "aaaa bbbb aaab abab baba 0000 1111 !!!! ....",
]  # fmt: skip


def trained(pattern: str, *, normalizer=None, special=("</s>", "<|x|>")) -> PreTrainedTokenizerFast:
    """A real BPE, trained on the corpus, with this splitting pattern."""
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False)
    gpt2 = pattern == next(iter(PATTERNS))
    backend.pre_tokenizer = whole if gpt2 else pre_tokenizers.Sequence([split, last])
    if normalizer:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


CONVERTED = {pattern: trained(pattern) for pattern in PATTERNS}


def reference(tokenizer, text: str) -> list[int]:
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.encode_special_tokens = True
    return backend.encode(text, add_special_tokens=False).ids


PIECES = st.sampled_from(
    ["'s", "'LL", "'re ", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "a", "ab", "Dog",
     "1", "12", "1234", "²", "ⅷ", "é", "e\u0301", "北京", "ü", "😀", "!", "?!", "...", "</s>",
     "<|x|>", "\u200b", "\u0085", "\x00", "\u017f", "'\u017f", "\ufb06", "\u0301", " \u0301",
     "/", "\u01c5", "\u02b0", "DOG"]
)  # fmt: skip
TEXTS = st.one_of(
    st.lists(PIECES, max_size=30).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
)


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(deadline=None, max_examples=60)
@given(text=TEXTS)
def test_same_ids_for_any_text(pattern: str, text: str):
    tokenizer = CONVERTED[pattern]
    fast = converted(pattern)
    if fast.takes(text):
        assert fast.encode(text).tolist() == reference(tokenizer, text)


_FAST: dict[str, BytePairs] = {}


def converted(pattern: str) -> BytePairs:
    if pattern not in _FAST:
        _FAST[pattern] = BytePairs.of(CONVERTED[pattern])
    return _FAST[pattern]


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


def state_of(tokenizer) -> dict:
    return json.loads(tokenizer.backend_tokenizer.to_str())


def changed(tokenizer, **changes) -> PreTrainedTokenizerFast:
    """The tokenizer with parts of its tokenizer.json replaced (``a__b`` is b inside a)."""
    state = state_of(tokenizer)
    for name, value in changes.items():
        place = state
        *path, last = name.split("__")
        for key in path:
            place = place[key]
        place[last] = value
    backend = Tokenizer.from_str(json.dumps(state))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


GPT2 = next(iter(PATTERNS))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pre_tokenizer": None}, "no byte-level BPE"),
        ({"normalizer": {"type": "Lowercase"}}, "changes texts first"),
        ({"model__dropout": 0.1}, "no plain BPE"),
    ],
)
def test_what_is_not_converted_says_why(changes: dict, reason: str):
    with pytest.raises(NotConvertible, match=reason):
        BytePairs.of(changed(CONVERTED[GPT2], **changes))


def test_keeping_only_what_matches_is_the_same_cut():
    """As Phi-4 has it."""
    tokenizer = CONVERTED[list(PATTERNS)[-1]]
    steps = state_of(tokenizer)["pre_tokenizer"]
    steps["pretokenizers"][0] |= {"behavior": "Removed", "invert": True}
    other = changed(tokenizer, pre_tokenizer=steps)
    for text in CORPUS:
        assert reference(other, text) == reference(tokenizer, text)
        assert BytePairs.of(other).encode(text).tolist() == reference(other, text)
    steps["pretokenizers"][0]["invert"] = False
    with pytest.raises(NotConvertible, match="cutting texts into words is not known"):
        BytePairs.of(changed(tokenizer, pre_tokenizer=steps))


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
        BytePairs.of(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


def test_texts_that_are_left_to_tokenizers():
    tokenizer = trained(list(PATTERNS)[1], normalizer=normalizers.NFC())
    tokenizer.backend_tokenizer.add_tokens(["<think>"])
    fast = BytePairs.of(tokenizer)
    decomposed = unicodedata.normalize("NFD", "größer")
    left = [decomposed, "a <think> b", " " * 10_000, "it'\u017f"]
    assert [fast.takes(text) for text in left] == [False] * 4
    documents = [Document(text, Where("file", 1, "line")) for text in [*left, "größer </s>"]]
    encoder = DocumentEncoder(tokenizer, bos=[])
    encoder.choose(CORPUS)
    assert encoder.description.startswith("tiktoken (equal to tokenizers on ")
    block = encoder.encode(documents)
    end = tokenizer.eos_token_id
    wanted = [id_ for d in documents for id_ in [*reference(tokenizer, d.text), end]]
    assert block.tokens.tolist() == wanted
    assert block.lengths.sum() == len(wanted)


def test_other_ids_on_the_users_data_are_never_used(monkeypatch):
    encoder = DocumentEncoder(CONVERTED[GPT2], bos=[])
    real = BytePairs.encode_pretokens

    def backwards(self, words):
        ids, begins, counts = real(self, words)
        return ids[::-1], begins, counts

    monkeypatch.setattr(BytePairs, "encode_pretokens", backwards)
    encoder.choose(CORPUS)
    assert encoder.description == "tokenizers (tiktoken gave other ids on this data)"
    block = encoder.encode([Document(CORPUS[0], Where("f", 1, "line"))])
    wanted = reference(CONVERTED[GPT2], CORPUS[0])
    assert block.tokens[:-1].tolist() == wanted


def test_threads_encode_at_the_same_time():
    encoder = DocumentEncoder(CONVERTED[GPT2], bos=[])
    encoder.choose(CORPUS)
    where = Where("f", 1, "line")
    batches = [[Document(f"{i} " * (50 - i), where)] for i in range(50)]
    with ThreadPoolExecutor(4) as pool:
        blocks = list(pool.map(encoder.encode, batches))
    for block, batch in zip(blocks, batches, strict=True):
        assert np.array_equal(block.tokens, encoder.encode(batch).tokens)
