"""Optimizer states that DeepSpeed keeps in files (ZeRO-Infinity, ``offload_optimizer=nvme``).

Between two steps the values of a sub-group are in its swap files and nowhere else: saving maps
the files, restoring goes through DeepSpeed's own swapper. Tried by
``python -m pytest -m deepspeed tests/integration/test_state_nvme.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from llmx.checkpoint.fragments import MASTER


@dataclass(frozen=True)
class SwappedGroup:
    """One sub-group of ZeRO-3 that is swapped out."""

    optimizer: Any
    """DeepSpeed's ZeRO-3 optimizer."""
    number: int

    def mapped(self) -> dict[str, torch.Tensor]:
        """``master`` and the optimizer's states, as files mapped into memory.

        Good until the next step: copy them before.
        """
        master, *states = self._info.tensors
        found = {MASTER: self._map(master.swap_path)}
        for state in states:
            # "exp_avg-<sub-group>", see _get_state_tensors in DeepSpeed's optimizer_utils.py.
            key = state.compute_tensor.ds_id.removesuffix(f"-{self._flat.ds_id}")
            found[key] = self._map(state.swap_path)
        return found

    def _map(self, path: str) -> torch.Tensor:
        size = self.optimizer.fp16_partitioned_groups_flat_numel[self.number]
        return torch.from_file(path, shared=False, size=size, dtype=self._info.dtype())

    @contextlib.contextmanager
    def loaded(self) -> Iterator[None]:
        """Inside, the sub-group is in memory; then it and the model's parameters are written."""
        self.optimizer._optimizer_states_and_gradient_swap_in(self.number)
        yield
        self.optimizer._reassign_or_swap_out_partitioned_parameters(self.number)
        self.optimizer._optimizer_states_and_gradient_swap_out(self.number)

    @property
    def _flat(self) -> Any:
        return self.optimizer.fp32_partitioned_groups_flat[self.number]

    @property
    def _info(self) -> Any:
        return self.optimizer.optimizer_swapper.swap_params_info[self._flat.ds_id]


def swapped_group(optimizer: Any, number: int) -> SwappedGroup | None:
    """A sub-group of ZeRO-3 that lies in files; None where it is in memory (a small one is)."""
    if optimizer._swappable_optimizer_subgroup(number):
        return SwappedGroup(optimizer, number)
    return None
