"""The copy of the state that a thread writes while training goes on.

Tried by ``python -m pytest tests/unit/test_train_host_copies.py``; on a GPU by ``tests/gpu``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import torch

from llmx.checkpoint.state.engine_state import StateTensor

BLOCK_BYTES = 64 * 2**20
"""Page-locked at a time: PyTorch rounds such a request up to a power of two."""
ALIGNMENT = 8
"""Bytes; a block is a multiple of it."""


class HostCopies:
    """Copies of a state in host memory, for a thread that writes them while training goes on.

    What lives on a device goes to page-locked memory, at the speed of the bus; it is kept for
    the next copy, since to lock pages takes longer than to fill them. So a copy is good until the
    next one. What lives in host memory gets memory of its own each time.
    """

    def __init__(
        self,
        *,
        devices: Collection[str] = ("cuda",),
        allocate: Callable[[int], torch.Tensor] = lambda num_bytes: torch.empty(
            num_bytes, dtype=torch.uint8, pin_memory=True
        ),
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._devices, self._allocate, self._block_bytes = devices, allocate, block_bytes
        self._blocks: list[torch.Tensor] = []

    @property
    def held_bytes(self) -> int:
        """What a copy needs no more: it is here from the last one."""
        return sum(block.nbytes for block in self._blocks)

    def copy(self, fragments: Iterable[StateTensor]) -> list[StateTensor]:
        """The same elements, those from a device perhaps cut into more fragments. Waits for it."""
        fragments = list(fragments)
        try:
            copies, at = [], 0
            for fragment in fragments:
                if fragment.tensor.device.type in self._devices and fragment.tensor.numel():
                    pieces, at = self._into_blocks(fragment, at)
                    copies += pieces
                else:
                    copies.append(_own_copy(fragment))
        except RuntimeError:
            # The system lets no more pages be locked: slower, and as good.
            self._devices, self._blocks = (), []
            return [_own_copy(fragment) for fragment in fragments]
        finally:
            for device in {each.tensor.device for each in fragments}:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
        return copies

    def _into_blocks(self, fragment: StateTensor, at: int) -> tuple[list[StateTensor], int]:
        """``at``: bytes of the blocks that are taken. Returns the copy, and the same after it."""
        values, pieces, done = fragment.tensor.detach(), [], 0
        at = -(-at // ALIGNMENT) * ALIGNMENT
        while done < len(values):
            number, offset = divmod(at, self._block_bytes)
            if number == len(self._blocks):
                self._blocks.append(self._allocate(self._block_bytes))
            part = values[done : done + (self._block_bytes - offset) // values.element_size()]
            into = self._blocks[number][offset : offset + part.nbytes].view(values.dtype)
            into.copy_(part, non_blocking=True)
            pieces.append(replace(fragment, start=fragment.start + done, tensor=into))
            done += len(part)
            at += part.nbytes
        return pieces, at


def _own_copy(fragment: StateTensor) -> StateTensor:
    return replace(fragment, tensor=fragment.tensor.detach().to("cpu", copy=True))
