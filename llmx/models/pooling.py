"""One vector of the hidden states of a sequence, and which one a published model takes.

Shown by ``python -m pytest tests/unit/test_models_pooling.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

MEAN, CLS, LAST = POOLINGS = ("mean", "cls", "last")
"""The mean over a sequence's tokens, its first token, its last one."""

POOLING_FILE = "1_Pooling/config.json"
"""Where a model of sentence-transformers says how it pools."""
_PUBLISHED = {
    "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_cls_token": CLS,
    "pooling_mode_lasttoken": LAST,
}
_NAMES = {"mean": MEAN, "cls": CLS, "lasttoken": LAST}


def pooled(hidden: torch.Tensor, segment_ids: torch.Tensor, pooling: str) -> torch.Tensor:
    """fp32 [sequences, H]: a vector for each sequence, line by line, as they lie.

    Args:
        hidden: [B, T, H], or [1, B * T, H] where the lines lie one after the other.
        segment_ids: int [B, T], on the CPU: 1, 2, ... for the sequences of a line, 0 in the
            padding.
        pooling: of ``POOLINGS``.
    """
    lines, length = segment_ids.shape
    flat = hidden.reshape(lines * length, -1)
    real = segment_ids.reshape(-1) > 0
    if not bool(real.any()):  # the collectives of ZeRO need a graph
        return flat[:0].float() + flat.float().sum() * 0.0
    # Each sequence is a stretch of the tokens that are no padding.
    of_line = segment_ids.to(torch.long) + torch.arange(lines)[:, None] * (length + 1)
    _, counts = torch.unique_consecutive(of_line.reshape(-1)[real], return_counts=True)
    places = torch.nonzero(real).squeeze(1)
    stops = torch.cumsum(counts, 0)
    if pooling == MEAN:
        tokens = flat[places.to(flat.device, non_blocking=True)].float()
        # Not index_add, whose order of additions differs from run to run on CUDA.
        sums = torch.segment_reduce(tokens, "sum", lengths=counts.to(flat.device), unsafe=True)
        means: torch.Tensor = sums / counts.to(flat.device, torch.float32)[:, None]
        return means
    chosen = places[stops - counts] if pooling == CLS else places[stops - 1]
    return flat[chosen.to(flat.device, non_blocking=True)].float()


def published_pooling(path: str | None, *, revision: str | None = None) -> str | None:
    """How the model at ``path``, a directory or a Hub id, was published to be pooled
    (``1_Pooling/config.json`` of sentence-transformers); None where it does not say.

    Raises:
        ValueError: it pools in a way that is none of ``POOLINGS``; the text says which.
    """
    file = _published_file(path, revision)
    if file is None:
        return None
    values = json.loads(file.read_text(encoding="utf-8"))
    modes = values.get("pooling_mode")
    modes = [modes] if isinstance(modes, str) else modes
    if modes is None:
        modes = [
            key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
            for key, on in values.items()
            if key.startswith("pooling_mode_") and on
        ]
    if len(modes) == 1 and modes[0] in _NAMES:
        return _NAMES[modes[0]]
    raise ValueError(" and ".join(map(str, modes)) or "nothing")


def _published_file(path: str | None, revision: str | None) -> Path | None:
    if not path:
        return None
    local = Path(path).expanduser()
    if local.is_dir():
        file = local / POOLING_FILE
        return file if file.is_file() else None
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(path, POOLING_FILE, revision=revision)
    except OSError:  # not there, or no network
        return None
    return Path(found) if found else None


def pooling_config(pooling: str, *, width: int) -> dict[str, Any]:
    """What ``POOLING_FILE`` holds, as every version of sentence-transformers reads it."""
    return {
        "word_embedding_dimension": width,
        **{key: name == pooling for key, name in _PUBLISHED.items()},
        "include_prompt": True,
    }
