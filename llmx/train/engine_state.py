"""A DeepSpeed engine's state into fragments of a checkpoint, and back.

Fragments know nothing of ranks, ZeRO stages or precision (docs/contracts.md, "Checkpoints"), so
any engine of the same model goes on from them. Tried by
``python -m pytest -m deepspeed tests/integration/test_state_resume.py``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from llmx.train.engine import Engine
from llmx.train.state_hash import hash_pieces
from llmx.train.state_layout import Owner, Piece, state_layout
from llmx.train.state_refresh import before_restore, refresh_model
from llmx.train.state_values import (
    buffer_table,
    check_kind,
    check_tables,
    is_scalar,
    optimizer_kind,
    parameter_table,
    read_counters,
    read_loss_scaler,
    read_scalars,
    replay_cpu_adam,
    write_counters,
    write_loss_scaler,
    write_scalars,
)

MASTER, FROZEN, BUFFER = "master", "frozen", "buffer"

DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""As safetensors calls them."""
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

STAGING_BYTES = 32 * 2**20
"""What is read at a time on the way to a device, or to another dtype."""


@dataclass(frozen=True)
class StateTensor:
    """One fragment: a view of live memory, good until the next step changes it."""

    state: str
    """``master``, ``exp_avg``, ..., ``frozen`` or ``buffer``."""
    name: str
    """The parameter's."""
    start: int
    """Its first element in the flattened parameter."""
    tensor: torch.Tensor
    """1-D, contiguous, on whatever device it lives."""

    @property
    def dtype(self) -> str:
        """As safetensors calls it."""
        return DTYPE_NAMES[self.tensor.dtype]


class Fragments(Protocol):
    """What ``restore`` reads from: ``llmx.checkpoint.fragments.FragmentIndex``."""

    def states(self) -> Collection[str]:
        """Names of the states that are there."""

    def dtype(self, state: str, name: str) -> str:
        """How a parameter's values are stored: ``F32``, ``BF16``, ..."""

    def read_range(self, state: str, name: str, start: int, stop: int, out: memoryview) -> None:
        """Elements ``[start, stop)`` into ``out`` (bytes, of exactly that size)."""


def capture(engine: Engine, *, world: int) -> list[StateTensor]:
    """This rank's fragments; over all ranks every element exactly once. Copies nothing.

    What all ranks hold alike is shared out, an equal part each.
    """
    layout = state_layout(engine.engine)
    rank = torch.distributed.get_rank()
    trained, frozen = layout.trained, layout.frozen
    if not layout.partitioned:
        trained = share(trained, rank=rank, world=world)
    if not layout.frozen_partitioned:
        frozen = share(frozen, rank=rank, world=world)
    found = [StateTensor(MASTER, piece.name, piece.start, piece.values) for piece in trained]
    for state in optimizer_states(layout.owners):
        found += [_of_optimizer(piece, state) for piece in trained]
    found += [StateTensor(FROZEN, piece.name, piece.start, piece.values) for piece in frozen]
    buffers = share(layout.buffers, rank=rank, world=world)
    found += [StateTensor(BUFFER, piece.name, piece.start, piece.values) for piece in buffers]
    return found


def share(pieces: list[Piece], *, rank: int, world: int) -> list[Piece]:
    """This rank's equal part of the elements of ``pieces``, laid end to end."""
    total = sum(len(piece.values) for piece in pieces)
    first, last = total * rank // world, total * (rank + 1) // world
    mine, offset = [], 0
    for piece in pieces:
        begin, end = max(first - offset, 0), min(last - offset, len(piece.values))
        if begin < end:
            mine.append(piece.part(begin, end))
        offset += len(piece.values)
    return mine


def optimizer_states(owners: list[Owner]) -> list[str]:
    """Names of what the optimizer keeps for each element; none before its first step."""
    return sorted({key for owner in owners for key in _states_of(owner)})


def _states_of(owner: Owner) -> dict[str, torch.Tensor]:
    return {
        key: value
        for key, value in owner.optimizer.state.get(owner.tensor, {}).items()
        if torch.is_tensor(value)
        and not is_scalar(key, value)
        and value.shape == owner.tensor.shape
    }


def _of_optimizer(piece: Piece, state: str) -> StateTensor:
    whole = _states_of(piece.owner)[state].view(-1)
    part = whole[piece.offset : piece.offset + len(piece.values)]
    return StateTensor(state, piece.name, piece.start, part)


def state_values(engine: Engine) -> dict[str, Any]:
    """What of the state is no tensor, in the form of ``state.json``. The same on every rank."""
    layout = state_layout(engine.engine)
    base = layout.owners[0].optimizer
    return {
        "zero_stage": engine.stage,
        "precision": engine.precision,
        "optimizer": {"kind": optimizer_kind(base), "scalars": read_scalars(layout.owners)},
        "loss_scaler": read_loss_scaler(engine.engine),
        "engine": read_counters(engine.engine),
        "parameters": parameter_table(engine.module),
        "buffers": buffer_table(engine.module),
    }


def weights_hash(engine: Engine) -> str:
    """32 hexadecimal digits for all weights at full precision. Collective.

    The same for the same weights on any number of ranks, at any ZeRO stage
    (``llmx.train.state_hash``).
    """
    layout = state_layout(engine.engine)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    pieces = layout.trained
    if not layout.partitioned:
        pieces = share(pieces, rank=rank, world=world)
    frozen = layout.frozen
    if not layout.frozen_partitioned:
        frozen = share(frozen, rank=rank, world=world)
    names = [name for name, _ in engine.module.named_parameters()]
    return hash_pieces([*pieces, *frozen], names=names, device=engine.device)


@torch.no_grad()
def restore(engine: Engine, index: Fragments, state: dict[str, Any]) -> None:
    """Put a checkpoint into an engine of the same model. Collective.

    It may have been written by any number of ranks, at any ZeRO stage and precision. Each rank
    reads the ranges that it holds, ``STAGING_BYTES`` at a time where they do not go straight
    to their place.

    Args:
        engine: new, or one that has trained: everything is replaced.
        index: the checkpoint's fragments.
        state: its ``state.json``; read are ``optimizer``, ``loss_scaler``, ``engine``,
            ``parameters`` and ``buffers``.

    Raises:
        ConfigError: another model or another optimizer. Nothing was changed.
    """
    inner, layout = engine.engine, state_layout(engine.engine)
    check_tables(engine.module, state["parameters"], state.get("buffers", {}))
    check_kind(state["optimizer"]["kind"], optimizer_kind(layout.owners[0].optimizer))
    before_restore(inner)
    scalars = state["optimizer"]["scalars"]
    saved = sorted(set(index.states()) - {MASTER, FROZEN, BUFFER})
    for owner in layout.owners:
        _prepare(owner, saved, scalars)
    for piece in layout.trained:
        _fill(piece.values, index, MASTER, piece)
        states = _states_of(piece.owner)
        for name in saved:
            whole = states[name].view(-1)
            _fill(whole[piece.offset : piece.offset + len(piece.values)], index, name, piece)
    for piece in layout.frozen:
        _fill(piece.values, index, FROZEN, piece)
    for piece in layout.buffers:
        _fill(piece.values, index, BUFFER, piece)
    replay_cpu_adam(layout.owners, scalars)
    refresh_model(inner)
    write_loss_scaler(inner, state.get("loss_scaler"))
    write_counters(inner, state["engine"])


def _prepare(owner: Owner, states: list[str], scalars: dict[str, float]) -> None:
    """Make the optimizer's states as it would at its first step, where it has none yet.

    Padding among them is 0, as it would be after any number of steps.
    """
    if not states and not scalars:
        owner.optimizer.state.pop(owner.tensor, None)  # saved before the first step
        return
    kept = owner.optimizer.state[owner.tensor]
    for name in states:
        if name not in kept:
            # DeepSpeedCPUAdam keeps fp32 moments of a half-precision master.
            wide = getattr(owner.optimizer, "fp32_optimizer_states", False)
            kept[name] = torch.zeros_like(
                owner.tensor.data, dtype=torch.float32 if wide else owner.tensor.dtype
            )
    write_scalars(owner, scalars)


def _fill(values: torch.Tensor, index: Fragments, state: str, piece: Piece) -> None:
    """Read ``len(values)`` elements of a state, beginning where the piece begins."""
    stored = _DTYPES[index.dtype(state, piece.name)]
    if values.device.type == "cpu" and values.dtype == stored:
        index.read_range(state, piece.name, piece.start, piece.start + len(values), _bytes(values))
        return
    step = STAGING_BYTES // stored.itemsize
    staging = torch.empty(min(step, len(values)), dtype=stored)
    for first in range(0, len(values), step):
        part = values[first : first + step]
        begin = piece.start + first
        into = staging[: len(part)]
        index.read_range(state, piece.name, begin, begin + len(part), _bytes(into))
        part.copy_(into)


def _bytes(values: torch.Tensor) -> memoryview:
    return memoryview(values.view(torch.uint8).numpy())
