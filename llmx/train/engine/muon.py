"""Muon: the momentum of a hidden matrix, made orthogonal (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/); AdamW for all else.

An update needs a whole matrix, and ZeRO gives a rank parts of it. Momentum and weight decay are
those of each element, on whatever part a rank has; for the orthogonalisation alone the parts of a
matrix come together on one rank, in turn, and its result goes back. So the same gradients give the
same update, bit for bit, at every stage and on any number of ranks; they are clipped before it, as
for every other optimizer; and a checkpoint holds elements as ever. (DeepSpeed's own Muon clips
before the orthogonalisation at stage 0, and after it at stage 2.)

Tried by ``python -m pytest tests/unit/test_train_optimizer.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from llmx.checkpoint.state.layout import StateLayout
from llmx.collectives import all_gather
from llmx.config.optimizers import layer_number
from llmx.models.parameters import whole_shape

MATRICES = "matrices"
"""Key of a parameter group: whether Muon updates it."""
MOMENTUM = "momentum_buffer"
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


def hidden_matrices(network: nn.Module) -> set[int]:
    """Ids of what Muon updates: the trained matrices inside the numbered layers. Embeddings, heads
    and vectors are left to AdamW."""
    return {
        id(parameter)
        for name, parameter in network.named_parameters()
        if parameter.requires_grad
        and layer_number(name) is not None
        and _is_matrix(name, parameter)
    }


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether it is a matrix, or one for each expert."""
    dimensions = len(whole_shape(parameter))
    return dimensions == 2 or (dimensions == 3 and ".experts." in name)


def computing_dtype(device: torch.device) -> torch.dtype:
    """The dtype of the products: bf16; fp32 on a GPU before Ampere (V100), which emulates bf16."""
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    return torch.float32 if old else torch.bfloat16


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """About the nearest matrix whose singular values are all alike, as bf16: five steps of
    Newton-Schulz with the published coefficients, as ``torch.optim.Muon`` does them.

    Args:
        matrix: [rows, columns], or several [n, rows, columns].
    """
    a, b, c = COEFFICIENTS
    turned = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.to(computing_dtype(matrix.device), copy=True)
    x = x.mT if turned else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    add = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(STEPS):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if turned else x).bfloat16()


def update_scale(shape: Sequence[int], *, adjust: str) -> float:
    """The factor of a matrix's learning rate (``optim.muon_adjust_lr``)."""
    rows, columns = shape[-2:]
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


@dataclass(frozen=True)
class Part:
    """Elements ``[start, start + length)`` of a matrix, at ``offset`` of a tensor that the
    optimizer updates."""

    shape: tuple[int, ...]
    start: int = 0
    length: int = 0
    offset: int = 0


class Muon(torch.optim.Optimizer):
    """Muon for the groups with ``matrices``, AdamW for the others."""

    steps_are_tensors = True
    """AdamW's own, of PyTorch's kind (``values.write_scalars``)."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        adjust: str,
        betas: tuple[float, float],
        eps: float,
        fused: bool | None,
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "fused": fused, MATRICES: False})
        self.momentum, self.adjust = momentum, adjust
        adamw_groups = [group for group in self.param_groups if not group[MATRICES]]
        # It shares the groups, which DeepSpeed changes in place, and the states.
        self._adamw = (
            torch.optim.AdamW(adamw_groups, lr=lr, betas=betas, eps=eps, fused=fused)
            if adamw_groups
            else None
        )
        self._device: torch.device | None = None
        self._owners: dict[int, int] = {}
        self._mine: dict[int, list[Part]] = {}
        self._split: dict[int, list[Part]] = {}
        self.state_names: Callable[[str], tuple[str, ...]] | None = None
        """Name of a parameter -> its states (``engine_state.states_table``)."""

    def distribute(
        self,
        layout: StateLayout,
        *,
        shapes: Mapping[str, tuple[int, ...]],
        device: torch.device,
    ) -> None:
        """Learn which parts of which matrices are in which tensor of which rank. Collective.

        Args:
            shapes: those of the whole matrices that Muon updates, by name.
            device: where the ranks exchange, and the matrices are computed.
        """
        number = {id(owner): index for index, owner in enumerate(layout.owners)}
        pieces = [piece for piece in layout.trained if piece.name in shapes]
        local_pieces = [(number[id(p.owner)], p.name, p.start, p.length, p.offset) for p in pieces]
        holders: dict[str, set[int]] = {}
        pieces_by_rank = all_gather(local_pieces) if layout.partitioned else [local_pieces]
        place: dict[str, int] = {}
        for rank, parts in enumerate(pieces_by_rank):
            for index, name, *_ in parts:
                holders.setdefault(name, set()).add(rank)
                place[name] = index
        self._device = device
        self._owners = {id(owner.tensor): index for index, owner in enumerate(layout.owners)}
        local_parts = {name: Part(shapes[name], *where) for _, name, *where in local_pieces}
        for name in sorted(place):
            part = local_parts.get(name, Part(shapes[name]))
            if len(holders[name]) > 1:
                self._split.setdefault(place[name], []).append(part)
            elif part.length:
                self._mine.setdefault(place[name], []).append(part)
        self.state_names = lambda name: (MOMENTUM,) if name in shapes else ("exp_avg", "exp_avg_sq")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Collective once distributed. DeepSpeed passes
        no closure."""
        for group in self.param_groups:
            for tensor in group["params"] if group[MATRICES] else ():
                if tensor.grad is not None:
                    self._update(tensor, lr=group["lr"], decay=group["weight_decay"])
        adamw_groups = [group for group in self.param_groups if not group[MATRICES]]
        if self._adamw is not None and adamw_groups:
            self._adamw.param_groups, self._adamw.state = adamw_groups, self.state
            self._adamw.step()

    def _update(self, tensor: torch.Tensor, *, lr: float, decay: float) -> None:
        state = self.state[tensor]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(tensor)
        assert tensor.grad is not None
        values, momentum = tensor.data.view(-1), state[MOMENTUM].view(-1)
        gradient = tensor.grad.to(momentum.dtype).reshape(-1)
        momentum.lerp_(gradient, 1 - self.momentum)
        values.mul_(1 - lr * decay)
        index = self._owners.get(id(tensor))
        if index is None:  # not in an engine: the parameter itself
            whole_parts = (
                [Part(tuple(tensor.shape), 0, tensor.numel(), 0)] if tensor.dim() > 1 else []
            )
            split: list[Part] = []
        else:
            whole_parts, split = self._mine.get(index, []), self._split.get(index, [])

        def ahead(part: Part) -> torch.Tensor:
            """The momentum of the next step (Nesterov's)."""
            there = slice(part.offset, part.offset + part.length)
            return gradient[there].lerp(momentum[there], self.momentum).to(torch.bfloat16)

        def apply(part: Part, update: torch.Tensor) -> None:
            there = values[part.offset : part.offset + part.length]
            scale = update_scale(part.shape, adjust=self.adjust)
            there.add_(update.to(there.device, there.dtype), alpha=-lr * scale)

        device = self._device or tensor.device
        for part in whole_parts:
            apply(part, orthogonal(ahead(part).view(part.shape).to(device)).reshape(-1))
        if split:
            self._exchange(split, ahead, apply, device=device)

    def _exchange(
        self,
        parts: list[Part],
        ahead: Callable[[Part], torch.Tensor],
        apply: Callable[[Part, torch.Tensor], None],
        *,
        device: torch.device,
    ) -> None:
        """Matrices that several ranks have parts of: as many at a time as there are ranks, each
        whole on one of them. All ranks take part, also in those that they have nothing of."""
        rank, world = dist.get_rank(), dist.get_world_size()
        # Gloo adds no bf16 everywhere; a sum with zeros is exact in both.
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        for first in range(0, len(parts), world):
            together = parts[first : first + world]
            matrices = []
            for owner, part in enumerate(together):
                matrix = torch.zeros(math.prod(part.shape), dtype=dtype, device=device)
                if part.length:
                    matrix[part.start : part.start + part.length] = ahead(part).to(device, dtype)
                dist.reduce(matrix, dst=owner)
                matrices.append(matrix)
            if rank < len(together):
                shape = together[rank].shape
                matrices[rank].copy_(orthogonal(matrices[rank].view(shape)).reshape(-1))
            for owner, part in enumerate(together):
                dist.broadcast(matrices[owner], src=owner)
                if part.length:
                    apply(part, matrices[owner][part.start : part.start + part.length])
