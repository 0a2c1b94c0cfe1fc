"""What one rank holds of the state into its file, and the hash of all weights on the way.

Tried by ``python -m pytest tests/unit/test_train_save_job.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from llmx.checkpoint.fragments import BUFFER, FROZEN, MASTER
from llmx.checkpoint.manifest import CheckpointError, FileEntry
from llmx.checkpoint.state.engine_state import StateTensor
from llmx.checkpoint.state.hashing import combine, lanes
from llmx.checkpoint.tensors import Fragment, TensorSpec, TensorWriter

WEIGHTS = (MASTER, FROZEN)
Sums = dict[str, list[int]]
"""Parameter -> two sums over the elements of one rank (``llmx.checkpoint.state.hashing``)."""


def specs_of(fragments: Sequence[StateTensor]) -> list[TensorSpec]:
    """What will be in the file."""
    return [TensorSpec(each.key, each.dtype, each.tensor.numel()) for each in fragments]


def write_fragments(
    writer: TensorWriter, fragments: Sequence[StateTensor]
) -> tuple[FileEntry, Sums]:
    """Write, sync and close a rank's file; its part of the hash of the weights.

    Raises:
        CheckpointError: a value is not finite.
        OSError: the disk is full or broken.
    """
    sums: Sums = {}
    by_key = {each.key: each for each in fragments}

    def values() -> Iterator[Fragment]:
        for spec in writer.order:
            fragment = by_key[spec.key]
            tensor = fragment.tensor.detach().cpu()
            if fragment.state in WEIGHTS:
                two = sums.setdefault(fragment.name, [0, 0])
                for lane, value in enumerate(lanes(tensor, fragment.start).tolist()):
                    two[lane] += value
            # What is not trained may be infinite from the first (masks are).
            if fragment.state not in (FROZEN, BUFFER) and not is_finite(tensor):
                raise CheckpointError(f"{fragment.state} of {fragment.name} is not finite")
            yield Fragment(spec.key, spec.dtype, spec.num_elements, as_buffer(tensor))

    with writer:
        return writer.write(values()), sums


def hash_of_weights(parameters: Mapping[str, Mapping[str, Any]], sums: Sequence[Sums]) -> str:
    """32 hexadecimal digits, as ``llmx.checkpoint.state.engine_state.weights_hash`` says them.

    Args:
        parameters: ``state.json``'s table.
        sums: of all ranks.
    """
    names = [name for name, entry in parameters.items() if not entry["tied_to"]]
    total = torch.zeros(len(names), 2, dtype=torch.int64)
    for row, name in enumerate(names):
        for lane in range(2):
            # Sums wrap around at 64 bits, as they do on a device.
            value = sum(each[name][lane] for each in sums if name in each) % 2**64
            total[row, lane] = value - 2**64 if value >= 2**63 else value
    return combine(names, total)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite; makes no copy."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) and torch.isfinite(high))


def as_buffer(tensor: torch.Tensor) -> Any:
    """The bytes of a contiguous tensor on the CPU, not copied."""
    return tensor.contiguous().view(torch.uint8).numpy()
