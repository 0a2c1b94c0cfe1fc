"""Tokenizers of directories that hold nothing but a vocabulary, as older models were published.

``vocab.json`` and ``merges.txt`` are a byte-level BPE of GPT-2's kind, ``vocab.txt`` a WordPiece of
BERT's kind. Neither file names its special tokens, so they are taken by their usual names, and what
cannot be told (a vocabulary without an EOS token) is refused with what to write.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmx.data.source.records import names
from llmx.data.tokenize.byte_level import byte_of_character
from llmx.errors import ConfigError
from llmx.text import printable

DESCRIBED = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "config.json",
             "special_tokens_map.json", "added_tokens.json", "tiktoken.model")  # fmt: skip
"""Files that say more than the vocabulary: with one of them, ``transformers`` decides."""
HOW = (
    "A tokenizer is a directory with tokenizer.json and tokenizer_config.json, as "
    "`save_pretrained` writes it"
)
_WORDPIECE = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]",
              "cls_token": "[CLS]", "mask_token": "[MASK]"}  # fmt: skip


def vocabulary_tokenizer(directory: Path) -> tuple[Any, str] | None:
    """(the tokenizer, how its files were read) of a directory with a vocabulary alone; None for
    any other directory. Raises ConfigError where the vocabulary cannot be read or used."""
    if any((directory / name).exists() for name in DESCRIBED):
        return None
    if (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file():
        return _byte_level(directory)
    if (directory / "vocab.txt").is_file():
        return _wordpiece(directory)
    return None


def what_is_there(directory: Path) -> str:
    """The files of a directory, for a message that its tokenizer cannot be loaded."""
    try:
        found = sorted(path.name for path in directory.iterdir())
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    return f"there is {names(found)}" if found else "it is empty"


def _byte_level(directory: Path) -> tuple[Any, str]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    place = printable(str(directory), keep="")
    vocab = _vocab(directory / "vocab.json")
    if missing := [c for c in map(chr, byte_of_character()) if c not in vocab]:
        raise ConfigError(
            f"{place}: vocab.json and merges.txt are no byte-level BPE ({len(missing)} of 256 "
            f"bytes have no token), and which other tokenizer they belong to is not said. {HOW}."
        )
    ends = ("</s>", "<|endoftext|>") if "<s>" in vocab else ("<|endoftext|>", "</s>")
    end = next((token for token in ends if token in vocab), None)
    if end is None:
        raise ConfigError(
            f"{place}: neither <|endoftext|> nor </s> is in vocab.json, so its EOS token and its "
            f"pattern for words are not known. {HOW}: bring those two files, too."
        )
    try:
        model = models.BPE.from_file(str(directory / "vocab.json"), str(directory / "merges.txt"))
    except Exception as error:  # the library raises Exception itself
        raise ConfigError(
            f"{place}: merges.txt does not fit vocab.json ({printable(str(error))}). Copy both "
            "again."
        ) from error
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    usual = {"eos_token": end}
    if end == "</s>":
        usual |= {"bos_token": "<s>", "pad_token": "<pad>", "unk_token": "<unk>",
                  "mask_token": "<mask>"}  # fmt: skip
    special = {name: token for name, token in usual.items() if token in vocab}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    return tokenizer, f"vocab.json and merges.txt as a byte-level BPE like GPT-2's, EOS {end}"


def _wordpiece(directory: Path) -> tuple[Any, str]:
    from transformers import BertTokenizerFast

    place = printable(str(directory), keep="")
    try:
        text = (directory / "vocab.txt").read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{place}: vocab.txt cannot be read ({error}).") from error
    # Not splitlines(): a token may be a line break of another kind.
    lines = text.removesuffix("\n").split("\n")
    vocab = {line.rstrip("\r"): index for index, line in enumerate(lines)}
    if missing := [token for token in _WORDPIECE.values() if token not in vocab]:
        raise ConfigError(
            f"{place}: vocab.txt has no {', '.join(missing)}, so it is no WordPiece vocabulary of "
            f"BERT's kind. {HOW}."
        )
    # What the vocabulary cannot write in capitals was lower case when it was made.
    capitals = any(token.isascii() and token.isalpha() and not token.islower() for token in vocab)
    tokenizer = BertTokenizerFast(vocab=vocab, do_lower_case=not capitals, eos_token="[SEP]")
    case = "with capitals" if capitals else "in lower case"
    return tokenizer, f"vocab.txt as a WordPiece like BERT's ({case}), EOS [SEP]"


def _vocab(path: Path) -> dict[str, int]:
    try:
        vocab = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{printable(str(path))} cannot be read ({error}).") from error
    if not isinstance(vocab, dict) or not all(isinstance(index, int) for index in vocab.values()):
        raise ConfigError(
            f"{printable(str(path))} is no vocabulary, which is an object of tokens and their "
            "numbers. Copy it again."
        )
    return vocab
