"""``metrics.jsonl``: the truth about a run, one JSON object a line, written by rank 0.

The lines are described in ``docs/contracts.md``. Shown by ``tail -f RUN_DIR/metrics.jsonl``.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

GIB = 2**30


class MetricsWriter:
    """Appends lines, each flushed at once. On the other ranks it writes nothing."""

    def __init__(self, path: Path, *, enabled: bool) -> None:
        self._stream = path.open("a", encoding="utf-8") if enabled else None

    def write(self, kind: str, **values: Any) -> None:
        """One line. A number that is not finite becomes null, with ``"nonfinite": true``."""
        if self._stream is None:
            return
        line: dict[str, Any] = {"kind": kind, "time": time.time(), **values}
        for key, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                line[key] = None
                line["nonfinite"] = True
        self._stream.write(json.dumps(line, allow_nan=False) + "\n")
        self._stream.flush()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


def memory_gib(device_type: str) -> float:
    """Peak memory of this process, GiB: of the device under CUDA, resident RAM on CPU."""
    if device_type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / GIB
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts KiB, macOS bytes.
    return peak * (1 if sys.platform == "darwin" else 1024) / GIB


def flops_of_step(
    *,
    num_parameters: int,
    embedding_parameters: int,
    head_parameters: int,
    layers: int,
    hidden: int,
    tokens: int,
    target_tokens: int,
    square_tokens: int,
) -> float:
    """Floating point operations that the step's tokens need, forward and backward.

    6 a parameter and token, where the head counts only at target positions (nothing else is
    computed there) and an embedding is a look-up; and for attention 6 x layers x hidden x n^2
    a row of n tokens, the causal half. Recomputed activations do not count: this is MFU.
    """
    body = num_parameters - embedding_parameters - head_parameters
    return (
        6.0 * body * tokens
        + 6.0 * head_parameters * target_tokens
        + 6.0 * layers * hidden * square_tokens
    )


def model_flops(model: Any, config: Any, *, num_parameters: int) -> dict[str, int]:
    """The model's part of the arguments of ``flops_of_step``."""
    text = config.get_text_config()
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()

    def size(parameter: Any) -> int:
        return int(getattr(parameter, "ds_numel", parameter.numel()))

    tied = head.weight is embedding.weight
    return {
        "num_parameters": num_parameters,
        # A tied matrix is counted once among the parameters: as the head.
        "embedding_parameters": 0 if tied else size(embedding.weight),
        "head_parameters": size(head.weight),
        "layers": int(text.num_hidden_layers),
        "hidden": int(text.hidden_size),
    }
