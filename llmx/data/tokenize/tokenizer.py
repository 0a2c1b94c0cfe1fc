"""Loads the tokenizer of an experiment, and tells tokenizers apart by content."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from llmx.config import Experiment
from llmx.data.format.templates import choose_template
from llmx.data.tokenize.vocabulary import HOW, vocabulary_tokenizer, what_is_there
from llmx.errors import ConfigError
from llmx.text import printable

DEMO_DIRECTORY = Path(__file__).resolve().parents[2] / "assets" / "demo"
"""The bundled set: train.jsonl, eval.jsonl, tokenizer/ (made by scripts/make_demo_data.py)."""


HOW_NAMED = "tokenizer.json, or vocab.json and merges.txt, or vocab.txt"
_NOTED: set[str] = set()
_FINGERPRINTS: dict[str, str] = {}
"""Digest of a tokenizer as it is -> its fingerprint; of this process."""


def load_tokenizer(exp: Experiment) -> Any:
    """The Hugging Face tokenizer of ``model.tokenizer`` (default ``model.path``; ``demo`` is the
    bundled one), with the chat template that ``data.template`` chooses, so that an exported
    tokenizer renders what was trained. Raises ConfigError when it cannot be loaded.
    """
    name = exp.model.tokenizer or exp.model.path
    if not name:
        raise ConfigError(
            "Neither model.tokenizer nor model.path is set: no tokenizer to prepare data with. "
            "Set model.tokenizer to a Hub id or a directory, or to demo for the bundled one."
        )
    source = str(DEMO_DIRECTORY / "tokenizer") if name == "demo" else str(Path(name).expanduser())
    place, shown = Path(source), printable(name, keep="")
    key = "model.tokenizer" if exp.model.tokenizer else "model.path"
    if place.is_file():
        raise ConfigError(
            f"{key}={shown} is a file. Give the directory that it lies in, with {HOW_NAMED}."
        )
    if not place.is_dir() and place.is_absolute():
        raise ConfigError(f"{key}={shown}: there is no such directory.")
    alone = vocabulary_tokenizer(place) if place.is_dir() else None
    if alone is not None:
        tokenizer, how = alone
        tokenizer.name_or_path = source
        _note(f"{key}={shown}: {how}")
    else:
        tokenizer = _loaded(exp, source, key=key)
    if exp.task.kind == "sft" or exp.data.template != "auto":
        tokenizer.chat_template = choose_template(tokenizer, exp.data.template)[1]
    return tokenizer


def _loaded(exp: Experiment, source: str, *, key: str) -> Any:
    """By ``transformers``, from a directory or the Hub."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            source,
            revision=exp.model.revision,
            trust_remote_code=exp.model.trust_remote_code,
        )
    except Exception as error:  # the Hub client's errors have no common base
        shown = printable(source, keep="")
        if Path(source).is_dir():
            raise ConfigError(
                f"{key}={shown} is a directory, but no tokenizer can be loaded from it: "
                f"{what_is_there(Path(source))}. {HOW}."
            ) from error
        raise ConfigError(
            f"The tokenizer {shown!r} cannot be loaded: {_first_line(error)} It is neither a "
            "directory here nor reachable on the Hugging Face Hub. Check the spelling and the "
            "network; without network, download it elsewhere (`hf download "
            f"{shown} --local-dir DIR`) and set model.tokenizer=DIR."
        ) from error


def _note(text: str) -> None:
    """A line on stderr, once in a process."""
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


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    if not lines:
        return f"{type(error).__name__}."
    return f"{type(error).__name__}: {printable(lines[0]).rstrip('.: ')}."
