"""Loads the tokenizer of an experiment, and tells tokenizers apart by content.

A directory that holds nothing but a vocabulary, as older models were published, is read here. Its
files do not name the special tokens, so they are taken by their usual names.
"""

from __future__ import annotations

import functools
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
WORDPIECE = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
"""The special tokens of BERT, with its ids 0 to 4."""


def _of_vocabulary(directory: Path, *, key: str) -> Any:
    """The tokenizer of a directory with a vocabulary alone; None for any other directory.

    Raises ConfigError where the vocabulary cannot be read or used."""
    if any((directory / name).exists() for name in DESCRIBED):
        return None
    for file_names, kind, read in (
        (("vocab.json", "merges.txt"), "a byte-level BPE like GPT-2's", _byte_level),
        (("vocab.txt",), "a WordPiece like BERT's", _wordpiece),
    ):
        if not all((directory / name).is_file() for name in file_names):
            continue
        reading = f"{' and '.join(file_names)} as {kind}"
        try:
            tokenizer = read(directory)
        except Exception as error:  # tokenizers raises Exception itself
            raise ConfigError(
                f"{printable(str(directory), keep='')}: cannot read {reading} "
                f"({first_line(error)[:-1]}). {HOW}."
            ) from error
        tokenizer.name_or_path = str(directory)
        _note(f"{key}: {reading}, EOS {tokenizer.eos_token}")
        return tokenizer
    return None


def _byte_level(directory: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = json.loads((directory / "vocab.json").read_text(encoding="utf-8"))
    if missing := [c for c in map(chr, byte_of_character()) if c not in vocab]:
        raise ValueError(f"{len(missing)} of 256 bytes have no token")
    usual = {"eos_token": "<|endoftext|>"}
    if "<s>" in vocab or "<|endoftext|>" not in vocab:
        usual = {"eos_token": "</s>", "bos_token": "<s>", "pad_token": "<pad>",
                 "unk_token": "<unk>", "mask_token": "<mask>"}  # fmt: skip
    if usual["eos_token"] not in vocab:
        raise ValueError("it has no EOS token: neither <|endoftext|> nor </s>")
    backend = Tokenizer(
        models.BPE.from_file(str(directory / "vocab.json"), str(directory / "merges.txt"))
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = {name: token for name, token in usual.items() if token in vocab}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def _wordpiece(directory: Path) -> Any:
    from transformers import BertTokenizer

    # Not splitlines(): a token may be a line break of another kind.
    lines = (directory / "vocab.txt").read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    vocab = {line.rstrip("\r"): index for index, line in enumerate(lines)}
    if missing := [token for token in WORDPIECE if token not in vocab]:
        raise ValueError(f"it has no {', '.join(missing)}")
    # What the vocabulary cannot write in capitals was lower case when it was made.
    capitals = any(token.isascii() and token.isalpha() and not token.islower() for token in vocab)
    return BertTokenizer(vocab=vocab, do_lower_case=not capitals, eos_token="[SEP]")


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
    place = Path(source)
    key = "model.tokenizer" if model.tokenizer else "model.path"
    shown_key = f"{key}={printable(name, keep='')}"
    if place.is_file():
        raise ConfigError(
            f"{shown_key} is a file. Give its directory, with tokenizer.json, or vocab.json and "
            "merges.txt, or vocab.txt."
        )
    if not place.is_dir() and place.is_absolute():
        raise ConfigError(f"{shown_key}: no such directory.")
    tokenizer = _of_vocabulary(place, key=shown_key) if place.is_dir() else None
    if tokenizer is None:
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
            try:
                file_names = sorted(path.name for path in Path(source).iterdir())
                there = f"there is {names(file_names)}" if file_names else "it is empty"
            except OSError as problem:
                there = f"it cannot be read ({problem.strerror})"
            raise ConfigError(
                f"{key}={shown_name} is a directory, but no tokenizer can be loaded from it "
                f"({first_line(error)}): {there}. {HOW}."
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


@functools.cache
def _note(text: str) -> None:
    """Print a line on stderr, once per process."""
    print(text, file=sys.stderr, flush=True)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hex digest of all that decides which ids a text gets; equal for equal tokenizers,
    wherever they were loaded from."""
    state = tokenizer.backend_tokenizer.to_str()
    return _fingerprint(
        state, json.dumps(tokenizer.special_tokens_map, default=str), len(tokenizer)
    )


@functools.lru_cache(maxsize=4)
def _fingerprint(state: str, special: str, size: int) -> str:
    """Sorting a large vocabulary takes longer than all else; train and eval ask for the same."""
    contents = json.loads(state)
    for key in ("padding", "truncation"):  # settings of the last call, not of the tokenizer
        contents.pop(key, None)
    text = json.dumps([contents, json.loads(special), size], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
