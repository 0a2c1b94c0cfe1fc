"""Loads the tokenizer of an experiment, and tells tokenizers apart by content.

A directory that holds nothing but a vocabulary, as older models were published, is read here:
``vocab.json`` and ``merges.txt`` are a byte-level BPE of GPT-2's kind, ``vocab.txt`` a WordPiece
of BERT's kind. Neither file names its special tokens, so they are taken by their usual names; a
vocabulary without an EOS token is refused with what to write.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmx.config import ModelConfig
from llmx.config.model_rules import ADD_SPECIAL, ADD_TOKENS, added_tokens
from llmx.data.format.templates import choose_template
from llmx.data.source.files import DEMO_DIRECTORY
from llmx.data.source.records import first_line, names
from llmx.data.tokenize.byte_level import byte_of_character
from llmx.errors import ConfigError
from llmx.text import plural, printable

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
        file_names = sorted(path.name for path in directory.iterdir())
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    return f"there is {names(file_names)}" if file_names else "it is empty"


def _byte_level(directory: Path) -> tuple[Any, str]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    place = printable(str(directory), keep="")
    vocab = _vocab(directory / "vocab.json")
    if missing := [c for c in map(chr, byte_of_character()) if c not in vocab]:
        raise ConfigError(
            f"{place}: vocab.json and merges.txt are no byte-level BPE ({len(missing)} of 256 "
            f"bytes have no token), and which other tokenizer they belong to is unknown. {HOW}."
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
    from transformers import BertTokenizer

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
    tokenizer = BertTokenizer(vocab=vocab, do_lower_case=not capitals, eos_token="[SEP]")
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


HOW_NAMED = "tokenizer.json, or vocab.json and merges.txt, or vocab.txt"
_NOTED: set[str] = set()
_FINGERPRINTS: dict[str, str] = {}
"""Digest of a tokenizer as it is -> its fingerprint; of this process."""


def load_tokenizer(model: ModelConfig, *, template: str, chats: bool) -> Any:
    """The Hugging Face tokenizer of ``model.tokenizer`` (default ``model.path``; ``demo`` is the
    bundled one). With ``chats`` it has the chat template that ``template`` chooses, so that an
    exported tokenizer renders what was trained. Raises ConfigError when it cannot be loaded.
    """
    name = model.tokenizer or model.path
    if not name:
        raise ConfigError(
            "Neither model.tokenizer nor model.path is set: no tokenizer to prepare data with. "
            "Set model.tokenizer to a Hub id or a directory, or to demo for the bundled one."
        )
    source = str(DEMO_DIRECTORY / "tokenizer") if name == "demo" else str(Path(name).expanduser())
    place, shown_name = Path(source), printable(name, keep="")
    key = "model.tokenizer" if model.tokenizer else "model.path"
    if place.is_file():
        raise ConfigError(f"{key}={shown_name} is a file. Give its directory, with {HOW_NAMED}.")
    if not place.is_dir() and place.is_absolute():
        raise ConfigError(f"{key}={shown_name}: no such directory.")
    alone = vocabulary_tokenizer(place) if place.is_dir() else None
    if alone is not None:
        tokenizer, reading = alone
        tokenizer.name_or_path = source
        _note(f"{key}={shown_name}: {reading}")
    else:
        tokenizer = _loaded(model, source, key=key)
    _add_tokens(tokenizer, model)
    if chats or template != "auto":
        tokenizer.chat_template = choose_template(tokenizer, template)[1]
    return tokenizer


def _add_tokens(tokenizer: Any, model: ModelConfig) -> None:
    """``model.add_tokens`` and ``model.add_special_tokens``, in this order.

    Raises ConfigError for one that the tokenizer has already.
    """
    tokens_to_add = added_tokens(model)
    if not tokens_to_add:
        return
    from transformers import AddedToken

    vocabulary: dict[str, int] = tokenizer.get_vocab()
    for key, tokens in ((ADD_TOKENS, model.add_tokens), (ADD_SPECIAL, model.add_special_tokens)):
        there = [token for token in tokens if token in vocabulary]
        if there:
            remainder = f" (and {len(there) - 1} more)" if len(there) > 1 else ""
            raise ConfigError(
                f"{key}: {printable(there[0])} is token {vocabulary[there[0]]} of the tokenizer "
                f"already{remainder}. Leave it out."
            )
        # As written: a normaliser that lowers case or adds spaces would never find them.
        tokenizer.add_tokens(
            [AddedToken(token, normalized=False, special=key == ADD_SPECIAL) for token in tokens],
            special_tokens=key == ADD_SPECIAL,
        )
    ids = tokenizer.convert_tokens_to_ids(tokens_to_add)
    _note(
        f"model.add_tokens: {plural(len(tokens_to_add), 'token')} added to the tokenizer, with the "
        f"ids {ids[0]} to {ids[-1]}"
    )


def _loaded(model: ModelConfig, source: str, *, key: str) -> Any:
    """Load a tokenizer by ``transformers``, from a directory or the Hub."""
    from transformers import AutoTokenizer

    shown_name = printable(source, keep="")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
        )
    except Exception as error:  # the Hub client's errors have no common base
        if Path(source).is_dir():
            raise ConfigError(
                f"{key}={shown_name} is a directory, but no tokenizer can be loaded from it "
                f"({first_line(error)}): {what_is_there(Path(source))}. {HOW}."
            ) from error
        raise ConfigError(
            f"The tokenizer {shown_name!r} cannot be loaded: {first_line(error)} It is neither a "
            "directory here nor reachable on the Hugging Face Hub. Check the spelling and the "
            "network; without network, download it elsewhere (`hf download "
            f"{shown_name} --local-dir DIR`) and set model.tokenizer=DIR."
        ) from error
    try:
        tokenizer("a")
    except Exception as error:  # whatever its files make it do
        raise ConfigError(
            f"{key}={shown_name}: its tokenizer fails on a text: {first_line(error)} Compare its "
            "tokenizer_config.json with the publisher's."
        ) from error
    return tokenizer


def without_row(tokenizer: Any, ids: Sequence[int] | np.ndarray, num_embeddings: int) -> str:
    """What is wrong with token ids where the embedding of the model has too few rows; else ""."""
    beyond = next((int(number) for number in ids if number >= num_embeddings), None)
    if beyond is None:
        return ""
    token = printable(str(tokenizer.convert_ids_to_tokens(beyond)), keep="")
    return (
        f"contains the token {token} (id {beyond}), and the embedding of the model has "
        f"{num_embeddings} rows (ids 0 to {num_embeddings - 1})."
    )


def _note(text: str) -> None:
    """Print a line on stderr, once per process."""
    if text not in _NOTED:
        _NOTED.add(text)
        print(text, file=sys.stderr, flush=True)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hex digest of all that decides which ids a text gets; equal for equal tokenizers,
    wherever they were loaded from."""
    state_text = tokenizer.backend_tokenizer.to_str()
    special, size = tokenizer.special_tokens_map, len(tokenizer)
    # Sorting a large vocabulary takes longer than all else; train and eval ask for the same.
    key = _digest(f"{state_text} {special} {size}")
    if key not in _FINGERPRINTS:
        state = json.loads(state_text)
        # Padding and truncation are settings of the last call, not of the tokenizer.
        state.pop("padding", None)
        state.pop("truncation", None)
        parts = [state, special, size]
        text = json.dumps(parts, sort_keys=True, ensure_ascii=False, default=str)
        _FINGERPRINTS[key] = _digest(text)
    return _FINGERPRINTS[key]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
