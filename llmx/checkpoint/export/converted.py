"""The weights of a checkpoint in the layout that files of the Hub have, where memory's differs.

Fused experts apart, names of the Hub; without an engine and without a GPU. Used by
``python -m llmx export RUN_DIR`` for architectures that transformers converts; all others are
written without torch (``llmx.checkpoint.export.weights``).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from llmx.checkpoint.export.weights import ShardWriter, Weight, pieces
from llmx.checkpoint.fragments import FragmentIndex
from llmx.checkpoint.state.engine_state import TORCH_DTYPES, whole_tensor
from llmx.models.conversion import (
    WholeShapes,
    conversions_in_words,
    convert_export,
    plan_export,
)
from llmx.models.model import empty_network


def write_converted(
    directory: Path,
    weights: list[Weight],
    index: FragmentIndex,
    conversions: list[str],
    *,
    model: Path,
    trust_remote_code: bool,
    shard_bytes: int,
    on_bytes: Callable[[int], None],
) -> None:
    """Write the shards and their index into an existing directory, a few tensors at a time.

    Args:
        conversions: those of ``state.json``.
        model: directory with the ``config.json`` of the architecture.
        trust_remote_code: as in the run: an architecture of its own code is built with that.

    Raises:
        OSError: the disk is full or broken.
        LlmxError: a value does not fit the dtype; another version of transformers is needed.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    empty = empty_network(config, trust_remote_code=trust_remote_code)
    transforms = conversions_in_words(empty, conversions)
    by_name = {weight.name: weight for weight in weights}
    shapes = {weight.name: weight.shape for weight in weights}
    stand_in = WholeShapes(empty, transforms)
    shards = ShardWriter(directory, shard_bytes=shard_bytes)
    with torch.no_grad():
        for group in plan_export(empty, shapes, transforms):
            values = {
                name: _whole(by_name[name], index, on_bytes=on_bytes) for _, name in group.sources
            }
            for name, tensor in convert_export(group, values, stand_in).items():
                shards.add(whole_tensor(name, tensor.to("cpu", copy=True)))
        shards.finish()


def _whole(
    weight: Weight, index: FragmentIndex, *, on_bytes: Callable[[int], None]
) -> torch.Tensor:
    # A piece is valid until the next one is taken.
    parts = [np.array(piece) for piece in pieces(weight, index, on_bytes)]
    flat = torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, np.float32))
    return flat.view(TORCH_DTYPES[weight.written]).reshape(weight.shape)
