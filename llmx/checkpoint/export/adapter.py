"""An adapter as a directory of ``peft``: from a checkpoint, read piece by piece.

Standard library and numpy only. Tried by
``python -m pytest -m deepspeed tests/integration/test_adapter.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmx.checkpoint.export.weights import list_weights, pieces
from llmx.checkpoint.fragments import FragmentIndex
from llmx.checkpoint.tensors import Fragment, write_tensors
from llmx.models.adapter_names import WEIGHTS_FILE, exported_name

METADATA = {"format": "pt"}


def write_adapter(
    directory: Path,
    state: Mapping[str, Any],
    index: FragmentIndex,
    *,
    dtype: str,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> int:
    """Write ``adapter_model.safetensors`` into an existing directory; the number of parameters.

    A weight that has several names (an embedding that is the output head, too) is written under
    each: peft keeps a copy for every module that is trained whole.

    Args:
        state: ``state.json``.
        dtype: safetensors' name.

    Raises:
        OSError: the disk is full or broken.
        CheckpointError: a value does not fit the dtype.
    """
    weights = list_weights(state, index, dtype=dtype)
    prefix = state.get("main_prefix", "")
    names: dict[str, list[str]] = {weight.name: [weight.name] for weight in weights}
    for name, entry in state["parameters"].items():
        if entry["tied_to"] and name.startswith(prefix):
            names[entry["tied_to"].removeprefix(prefix)].append(name.removeprefix(prefix))
    tensors = [
        Fragment(
            exported_name(name),
            weight.written,
            weight.num_elements,
            pieces(weight, index, on_bytes),
            weight.shape,
        )
        for weight in weights
        for name in names[weight.name]
    ]
    write_tensors(directory / WEIGHTS_FILE, tensors, metadata=METADATA)
    return sum(weight.num_elements for weight in weights)
