"""Loads the tokenizer of an experiment, and tells tokenizers apart by content."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from llmx.config import Experiment
from llmx.data.templates import choose_template
from llmx.errors import ConfigError

DEMO_DIRECTORY = Path(__file__).resolve().parent.parent / "assets" / "demo"
"""The bundled set: train.jsonl, eval.jsonl, tokenizer/ (made by scripts/make_demo_data.py)."""


_FINGERPRINTS: dict[str, str] = {}
"""Digest of a tokenizer as it is -> its fingerprint; of this process."""


def load_tokenizer(exp: Experiment) -> Any:
    """The Hugging Face tokenizer of ``model.tokenizer`` (default ``model.path``; ``demo`` is the
    bundled one), with the chat template that ``data.template`` chooses, so that an exported
    tokenizer renders what was trained. Raises ConfigError when it cannot be loaded.
    """
    from transformers import AutoTokenizer

    name = exp.model.tokenizer or exp.model.path
    if not name:
        raise ConfigError(
            "Neither model.tokenizer nor model.path is set: no tokenizer to prepare data with. "
            "Set model.tokenizer to a Hub id or a directory, or to demo for the bundled one."
        )
    source = str(DEMO_DIRECTORY / "tokenizer") if name == "demo" else str(Path(name).expanduser())
    if not Path(source).is_dir() and Path(source).is_absolute():
        raise ConfigError(f"model.tokenizer={name!r}: there is no such directory.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source,
            revision=exp.model.revision,
            trust_remote_code=exp.model.trust_remote_code,
        )
    except Exception as error:  # the Hub client's errors have no common base
        raise ConfigError(
            f"The tokenizer {name!r} cannot be loaded: {_first_line(error)} It is neither a "
            "directory here nor reachable on the Hugging Face Hub. Check the spelling and the "
            "network; without network, download it elsewhere (`hf download "
            f"{name} --local-dir DIR`) and set model.tokenizer=DIR."
        ) from error
    if exp.task.kind == "sft" or exp.data.template != "auto":
        tokenizer.chat_template = choose_template(tokenizer, exp.data.template)[1]
    return tokenizer


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
    return f"{type(error).__name__}: {lines[0].rstrip('.')}." if lines else type(error).__name__
