"""The part of a model's state that a rank holds, and where DeepSpeed keeps it.

Every wrapper of an optimizer lays out the fp32 master values in its own way; here each becomes a
list of ``Piece``s, named as in ``module.named_parameters()`` and without padding. They are views
of live memory, or of DeepSpeed's swap files (``offload_optimizer=nvme``). Tried by
``python -m pytest tests/unit/test_train_state.py`` and ``python -m pytest -m deepspeed
tests/integration/test_state_resume.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from llmx.checkpoint.fragments import MASTER
from llmx.errors import ConfigError
from llmx.models.parameters import persistent_buffers


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
        tensors = {MASTER: self._map(master.swap_path)}
        for state in states:
            # "exp_avg-<sub-group>", see _get_state_tensors in DeepSpeed's optimizer_utils.py.
            key = state.compute_tensor.ds_id.removesuffix(f"-{self._flat.ds_id}")
            tensors[key] = self._map(state.swap_path)
        return tensors

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


@dataclass(frozen=True)
class Owner:
    """A tensor that the optimizer updates: one parameter, or many in a flat buffer."""

    tensor: torch.Tensor
    optimizer: torch.optim.Optimizer
    """The one with this tensor's states."""
    swap: SwappedGroup | None = None
    """Where its values are between steps, if not in memory."""

    def values(self) -> dict[str, torch.Tensor]:
        """``master`` and what the optimizer keeps for each element, each flat. Live memory."""
        if self.swap is not None:
            return self.swap.mapped()
        state = self.optimizer.state.get(self.tensor, {})
        other = states_of_another_shape(state, self.tensor)
        states = {
            key: value.detach().view(-1)
            for key, value in state.items()
            if torch.is_tensor(value) and not is_scalar(key, value) and key not in other
        }
        return {MASTER: self.tensor.detach().view(-1), **states}

    def whole_states(self) -> dict[str, torch.Tensor]:
        """States of another shape than the parameter: a row and a column of Adafactor's. They are
        the optimizer's own tensors, and belong to one whole parameter (``check_states``)."""
        state = {} if self.swap is not None else self.optimizer.state.get(self.tensor, {})
        return {key: state[key].detach() for key in states_of_another_shape(state, self.tensor)}


def states_of_another_shape(states: dict[str, Any], tensor: torch.Tensor) -> dict[str, list[int]]:
    """Name -> shape of the states of ``tensor`` that are neither of its shape nor a number."""
    return {
        key: list(value.shape)
        for key, value in states.items()
        if torch.is_tensor(value) and not is_scalar(key, value) and value.shape != tensor.shape
    }


def is_scalar(key: str, value: Any) -> bool:
    """A number, or a tensor of one number as torch keeps its step counts."""
    if torch.is_tensor(value):
        return value.dim() == 0 and (key == "step" or not value.is_floating_point())
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Piece:
    """Elements ``[start, start + length)`` of one trained parameter that are on this rank."""

    name: str
    start: int
    length: int
    owner: Owner
    offset: int
    """Their offset in the flattened owner."""

    def part(self, first: int, last: int) -> Piece:
        """Elements ``[first, last)`` of this piece."""
        return replace(
            self, start=self.start + first, length=last - first, offset=self.offset + first
        )

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Its elements of the flattened owner, or of one of its states."""
        return flat[self.offset : self.offset + self.length]


@dataclass(frozen=True)
class UntrainedPiece:
    """Elements ``[start, start + length)`` of what is not trained: a parameter or a buffer."""

    name: str
    start: int
    values: torch.Tensor
    """A 1-D view of live memory."""

    @property
    def length(self) -> int:
        return len(self.values)

    def part(self, first: int, last: int) -> UntrainedPiece:
        """Elements ``[first, last)`` of it."""
        return UntrainedPiece(self.name, self.start + first, self.values[first:last])


@dataclass(frozen=True)
class StateLayout:
    """The part of a model's state on one rank. Names in the model's order."""

    trained: list[Piece]
    frozen: list[UntrainedPiece]
    buffers: list[UntrainedPiece]
    owners: list[Owner]
    """All of them, also one that holds nothing but padding on this rank."""
    partitioned: bool
    """Each trained element is on one rank; otherwise every rank has all of them."""
    frozen_partitioned: bool


class UnsavableState(ConfigError):
    """A kind of state that llmx does not know how to save."""

    def __init__(self, kind: str) -> None:
        super().__init__(
            f"zero.extra chose {kind}, whose state llmx cannot save. Take that key out of "
            "zero.extra, or set checkpoint.every_steps=null, checkpoint.every_minutes=null, "
            "checkpoint.at_end=false and checkpoint.on_signal=false."
        )


def state_layout(engine: Any) -> StateLayout:
    """The layout of a DeepSpeed engine (``deepspeed.initialize``'s). Reads nothing, copies nothing.

    Raises:
        UnsavableState: ``zero.extra`` makes DeepSpeed keep it in a way that is not known here.
    """
    optimizer = engine.optimizer
    read = _readers().get(type(optimizer))
    if read is None and isinstance(optimizer, torch.optim.Optimizer):
        read = _plain
    if read is None:
        raise UnsavableState(type(optimizer).__name__)
    if engine.mp_world_size > 1:
        raise UnsavableState("tensor parallelism")
    if engine.has_moe_layers:
        raise UnsavableState("DeepSpeed's mixture of experts")
    if engine.torch_autocast_z0_gradscaler or getattr(optimizer, "torch_autocast_gradscaler", None):
        raise UnsavableState("torch_autocast with fp16")
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    owners, trained = read(optimizer, names)
    order = {name: number for number, name in enumerate(names.values())}
    sharded = hasattr(optimizer, "fp16_partitioned_groups")
    return StateLayout(
        trained=sorted(trained, key=lambda piece: (order[piece.name], piece.start)),
        frozen=[
            _sharded(parameter, name) if sharded else UntrainedPiece(name, 0, _flat(parameter))
            for name, parameter in engine.module.named_parameters()
            if not parameter.requires_grad
        ],
        buffers=[
            UntrainedPiece(name, 0, _flat(buffer))
            for name, buffer in persistent_buffers(engine.module)
        ],
        owners=owners,
        partitioned=read in (_partitioned, _stage3),
        frozen_partitioned=sharded,
    )


Reader = Callable[[Any, dict[int, str]], "tuple[list[Owner], list[Piece]]"]


def _readers() -> dict[type, Reader]:
    """Readers by exact class: a subclass (ZenFlow, SuperOffload) keeps its states elsewhere."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    return {
        DeepSpeedZeroOptimizer_Stage3: _stage3,
        DeepSpeedZeroOptimizer: _partitioned,
        BF16_Optimizer: _partitioned,
        FP16_Optimizer: _flat_groups,
        FP16_UnfusedOptimizer: _separate,
    }


def _plain(optimizer: Any, names: dict[int, str]) -> tuple[list[Owner], list[Piece]]:
    """Stage 0 in fp32: the client's optimizer on the parameters themselves."""
    owners, pieces = [], []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owners.append(Owner(parameter, optimizer))
            pieces.append(Piece(names[id(parameter)], 0, parameter.numel(), owners[-1], 0))
    return owners, pieces


def _separate(optimizer: Any, names: dict[int, str]) -> tuple[list[Owner], list[Piece]]:
    """Stage 0 in half precision: one fp32 copy of each parameter, whole on every rank."""
    owners, pieces = [], []
    for group, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for parameter, master in zip(group, masters, strict=True):
            owners.append(Owner(master, optimizer.optimizer))
            pieces.append(Piece(names[id(parameter)], 0, master.numel(), owners[-1], 0))
    return owners, pieces


def _flat_groups(optimizer: Any, names: dict[int, str]) -> tuple[list[Owner], list[Piece]]:
    """Stage 0 in half precision with FusedAdam: one flat fp32 buffer a group, whole everywhere."""
    owners, pieces = [], []
    for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
        owners.append(Owner(flat, optimizer.optimizer))
        offset = 0
        for parameter in group:
            pieces.append(Piece(names[id(parameter)], 0, parameter.numel(), owners[-1], offset))
            offset += parameter.numel()
    return owners, pieces


def _partitioned(optimizer: Any, names: dict[int, str]) -> tuple[list[Owner], list[Piece]]:
    """Stages 1 and 2: an equal part of each group's flat buffer, cut without regard to parameters.

    DeepSpeed records on every parameter which of its elements are where (``tensor_fragment.py``).
    """
    bf16 = hasattr(optimizer, "bf16_groups")
    groups = optimizer.bf16_groups if bf16 else optimizer.bit16_groups
    flats = (
        optimizer.fp32_groups_flat_partition if bf16 else optimizer.single_partition_of_fp32_groups
    )
    owners: list[Owner] = []
    pieces: list[Piece] = []
    for number, (group, flat) in enumerate(zip(groups, flats, strict=True)):
        owners.append(Owner(flat, optimizer.optimizer))
        if getattr(optimizer, "round_robin_gradients", False):
            pieces += _round_robin(optimizer, number, names, owners[-1])
            continue
        for parameter in group:
            mapping = parameter._hp_mapping
            if mapping is None:  # no element of it is here
                continue
            here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
            pieces.append(
                Piece(names[id(parameter)], here.start, there.numel, owners[-1], there.start)
            )
    return owners, pieces


def _round_robin(
    optimizer: Any, number: int, names: dict[int, str], owner: Owner
) -> Iterator[Piece]:
    """The pieces with ``round_robin_gradients``: the flat buffer has the parameters in another
    order, and DeepSpeed records on them where they would lie without it."""
    size = owner.tensor.numel()
    start = size * torch.distributed.get_rank(group=optimizer.real_dp_process_group[number])
    group = optimizer.round_robin_bit16_groups[number]
    offsets = optimizer.round_robin_bit16_offsets[number]
    for parameter, offset in zip(group, offsets, strict=True):
        first, stop = max(offset, start), min(offset + parameter.numel(), start + size)
        if first < stop:
            yield Piece(names[id(parameter)], first - offset, stop - first, owner, first - start)


def _stage3(optimizer: Any, names: dict[int, str]) -> tuple[list[Owner], list[Piece]]:
    """Stage 3: an equal part of each parameter, the last ones padded, one after the other."""
    owners, pieces = [], []
    for number, group in enumerate(optimizer.fp16_groups):
        flat = optimizer.fp32_partitioned_groups_flat[number]
        swapped = optimizer._swappable_optimizer_subgroup(number)  # a small one is in memory
        # With a partial offload (offload_optimizer.ratio) what stays on the device has its own.
        stays = optimizer.offload_optimizer and optimizer.subgroup_to_device[number] != "cpu"
        of_group = optimizer.backup_optimizer if stays else optimizer.optimizer
        swap = SwappedGroup(optimizer, number) if swapped else None
        owners.append(Owner(flat, of_group, swap))
        offset = 0
        for parameter in group:
            start, length = _own_range(parameter)
            if length:
                pieces.append(Piece(names[id(parameter)], start, length, owners[-1], offset))
            offset += parameter.partition_numel()
    return owners, pieces


def _own_range(parameter: Any) -> tuple[int, int]:
    """First element and number of elements of this rank's part, without the padding."""
    part = parameter.partition_numel()
    start = part * torch.distributed.get_rank(group=parameter.ds_process_group)
    return start, max(0, min(part, parameter.ds_numel - start))


def _sharded(parameter: Any, name: str) -> UntrainedPiece:
    """This rank's part of a parameter that is not trained, in the dtype of the model."""
    start, length = _own_range(parameter)
    return UntrainedPiece(name, start, parameter.ds_tensor.data[:length])


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1)
