"""Corpora and tokenizers of the data benchmarks: real text, repeated with variation.

Every repetition of a document has a tenth of its words put elsewhere and one in 25 made new (its
letters in another order), so that neither a cache of lines nor one of words is flattered: real
text too goes on bringing new words. Of the last tenth of the real English web text 15 % of the
words stand nowhere before; as new words become rarer (Heaps' law, exponent 0.7) that is 4 to 5 %
where there are 36 MiB, and 1 % where there are 5 GB.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MIB = 1 << 20
COMMA = "\uff0c"
REPEATED_BYTES = 100_000_000
"""A larger corpus repeats what it has after so many bytes: making it all takes longer."""


def documents(real_data: Path, language: str) -> tuple[list[list[str]], str]:
    """(pieces of each document, what stands between them)"""
    if language == "Chinese":
        text = (real_data / "CLUECorpusSmall_sampled.txt").read_text(encoding="utf-8")
        return [line.split(COMMA) for line in text.splitlines() if line], COMMA
    lines = (real_data / "c4_demo.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    verse = (real_data / "tinyshakespeare.txt").read_text(encoding="utf-8")
    texts += [verse[i : i + 2500] for i in range(0, len(verse), 2500)]
    return [text.split(" ") for text in texts], " "


def varied(real_data: Path, language: str, *, seed: int = 0) -> Iterator[str]:
    """Documents without end."""
    known, between = documents(real_data, language)
    rng = random.Random(seed)
    while True:
        words = list(rng.choice(known))
        for _ in range(len(words) // 10):
            i, j = rng.randrange(len(words)), rng.randrange(len(words))
            words[i], words[j] = words[j], words[i]
        for _ in range(len(words) // 25):
            i = rng.randrange(len(words))
            words[i] = "".join(rng.sample(words[i], len(words[i])))
        yield between.join(words)


def write_corpus(real_data: Path, path: Path, *, size: int, language: str = "English") -> int:
    """JSON Lines of about ``size`` bytes; returns the bytes of text in it."""
    written = text = 0
    with path.open("w", encoding="utf-8") as stream:
        for document in varied(real_data, language):
            line = json.dumps({"text": document}, ensure_ascii=False) + "\n"
            stream.write(line)
            written += len(line.encode())
            text += len(document.encode())
            if written >= min(size, REPEATED_BYTES):
                break
    block = path.read_bytes() if written < size else b""
    with path.open("ab") as stream:
        blocks = 1
        while written < size:
            stream.write(block)
            written += len(block)
            blocks += 1
    return text * blocks


def make_tokenizers(real_data: Path, place: Path, names: set[str]) -> dict[str, Path]:
    """By name: real vocabularies, and models learned from the real text where there is none."""
    makers = {
        "byte-level BPE": lambda: _real(real_data, place, spaced=False),
        "byte-level BPE, space first": lambda: _real(real_data, place, spaced=True),
        "WordPiece": lambda: _word_piece(real_data),
        "SentencePiece BPE": lambda: _sentence_bpe(_lines(real_data)),
        "Unigram": lambda: _unigram(_lines(real_data)[::4]),
    }
    from transformers import PreTrainedTokenizerFast

    for name in names:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=makers[name](), eos_token="</s>")
        tokenizer.save_pretrained(place / name)
    return {name: place / name for name in names}


def _real(real_data: Path, place: Path, *, spaced: bool) -> Any:
    """The real 50k BPE; ``spaced``: with a space before every text, as RoBERTa has it."""
    from tokenizers import Tokenizer

    from tests.realdata import real_tokenizer_dir

    path = real_tokenizer_dir(real_data, place / "real") / "tokenizer.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    state["pre_tokenizer"]["add_prefix_space"] = spaced
    return Tokenizer.from_str(json.dumps(state))


def _lines(real_data: Path) -> list[str]:
    """What models are learned from; little Chinese, of which nearly every word is new."""
    english = [" ".join(words) for words in documents(real_data, "English")[0]]
    chinese = [piece for words in documents(real_data, "Chinese")[0][::16] for piece in words]
    return [line for text in [*english, *chinese] for line in text.splitlines()]


def _word_piece(real_data: Path) -> Any:
    """BERT's, with its real Chinese vocabulary."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    vocabulary = models.WordPiece.read_file(str(real_data / "bert_zh_vocab.txt"))
    vocabulary["</s>"] = len(vocabulary)
    backend = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend


def _sentence_bpe(lines: list[str]) -> Any:
    """As Llama 2 and Mistral have it: no pre-tokenizer, unknown characters as bytes."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    marks = normalizers.Replace(" ", "\u2581")
    backend.normalizer = marks
    backend.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    control = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend.train_from_iterator(
        lines,
        trainers.BpeTrainer(vocab_size=8_000, special_tokens=control, show_progress=False),
    )
    state = json.loads(backend.to_str())
    state["pre_tokenizer"] = None
    state["added_tokens"] = state["added_tokens"][:2]
    backend = Tokenizer.from_str(json.dumps(state))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), marks])
    return backend


def _unigram(lines: list[str]) -> Any:
    """As T5 and XLM-R have it."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    backend = Tokenizer(models.Unigram())
    joined = normalizers.Replace(Regex(" {2,}"), " ")
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), joined])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(
        lines,
        trainers.UnigramTrainer(
            vocab_size=8_000,
            special_tokens=["<unk>", "</s>"],
            unk_token="<unk>",
            show_progress=False,
        ),
    )
    return backend
