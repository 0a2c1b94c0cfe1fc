"""A DeepSpeed engine's state into fragments of a checkpoint, and back.

Fragments know nothing of ranks, ZeRO stages or precision (docs/development/contracts.md), so any
engine of the same model can be restored from them. Master values and the model's own
(half-precision, gathered, second copies) are different memory at most stages: after a restore the
model is refreshed from the master values, as DeepSpeed does it after a step.

The hash of all weights does not depend on how they are partitioned. Every element is mixed with
its position and the results are added up modulo 2^64, in two lanes: sums of parts compose, so each
rank adds what it holds and one small all-reduce does the rest. It tells two runs apart by a single
bit of a single weight; it is not secure against collisions made on purpose.

Tried by ``python -m pytest -m deepspeed tests/integration/test_state_resume.py`` and
``python -m pytest tests/unit/test_train_state.py``.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from llmx.checkpoint.fragments import BUFFER, FROZEN, MASTER, FragmentIndex, fragment_key
from llmx.checkpoint.state.layout import (
    Owner,
    Piece,
    StateLayout,
    UnsavableState,
    UntrainedPiece,
    state_layout,
)
from llmx.checkpoint.state.values import (
    Table,
    buffer_table,
    check_kind,
    check_tables,
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
from llmx.checkpoint.tensors import Fragment
from llmx.errors import ConfigError
from llmx.models.conversion import effective_conversions
from llmx.models.model import Model
from llmx.models.quantized import quantized_layers

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
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def as_buffer(tensor: torch.Tensor) -> Any:
    """The bytes of a contiguous tensor on the CPU, not copied."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def whole_tensor(name: str, tensor: torch.Tensor) -> Fragment:
    """A tensor on the CPU for a file of whole ones, such as an export. Shares its memory."""
    dtype = DTYPE_NAMES[tensor.dtype]
    return Fragment(name, dtype, tensor.numel(), as_buffer(tensor), tuple(tensor.shape))


CHUNK = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Elements mixed at a time: what fits a processor's cache, or fills a GPU."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_POSITION = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def lanes(values: torch.Tensor, start: int) -> torch.Tensor:
    """Two int64 sums of elements ``start, start + 1, ...`` of a parameter.

    ``lanes(x, 0) == lanes(x[:k], 0) + lanes(x[k:], k)`` for every ``k`` (modulo 2^64).

    Args:
        values: 1-D, any dtype; its bits count, not its values (-0.0 is not 0.0).
    """
    total = torch.zeros(2, dtype=torch.int64, device=values.device)
    bits = values.detach().view(_BITS[values.element_size()])
    chunk = CHUNK[values.device.type]
    positions = torch.arange(min(chunk, len(bits)), device=values.device).mul_(_POSITION)
    for first in range(0, len(bits), chunk):
        mixed = bits[first : first + chunk].to(torch.int64, copy=True)
        # splitmix64 of bits and position; ">>" of int64 keeps the sign, hence the masks.
        mixed.add_(positions[: len(mixed)])
        mixed.add_(_signed((start + first + 1) * _POSITION % 2**64))
        mixed.bitwise_xor_((mixed >> 30).bitwise_and_((1 << 34) - 1)).mul_(_FIRST)
        mixed.bitwise_xor_((mixed >> 27).bitwise_and_((1 << 37) - 1)).mul_(_SECOND)
        mixed.bitwise_xor_((mixed >> 31).bitwise_and_((1 << 33) - 1))
        total[0] += mixed.sum()
        # The second lane is no linear function of the first.
        total[1] += mixed.bitwise_xor_((mixed >> 32).bitwise_and_((1 << 32) - 1)).mul_(_FIRST).sum()
    return total


def combine(names: Iterable[str], sums: torch.Tensor) -> str:
    """The hash of a model: 32 hexadecimal digits.

    Args:
        names: of all parameters.
        sums: ``[len(names), 2]`` int64, over all elements.
    """
    digest = hashlib.blake2b(digest_size=16)
    rows = dict(zip(names, sums.tolist(), strict=True))
    for name in sorted(rows):
        digest.update(f"{name}\0{rows[name][0]}\0{rows[name][1]}\n".encode())
    return digest.hexdigest()


def hash_parts(
    parts: Iterable[tuple[str, int, torch.Tensor]], *, names: list[str], device: torch.device
) -> str:
    """The hash over all ranks, each with elements that no other rank has. Collective.

    Args:
        parts: name of the parameter, first element, values (1-D).
        names: of all parameters.
        device: where the process group reduces.
    """
    row = {name: number for number, name in enumerate(names)}
    sums = torch.zeros(len(names), 2, dtype=torch.int64, device=device)
    for name, start, values in parts:
        sums[row[name]] += lanes(values, start).to(device)
    torch.distributed.all_reduce(sums)
    return combine(names, sums)


@torch.no_grad()
def refresh_model(engine: Any) -> None:
    """Make the model's parameters those of the master values. Collective."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp16_partitioned_groups"):
        _stage3(optimizer, engine.module)
    elif hasattr(optimizer, "update_lp_params"):  # stages 1 and 2
        optimizer.update_lp_params()
    elif hasattr(optimizer, "fp32_groups"):
        for group, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for parameter, master in zip(group, masters, strict=True):
                parameter.data.copy_(master.data)
    elif hasattr(optimizer, "fp32_groups_flat"):
        for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            offset = 0
            for parameter in group:
                values = flat.data[offset : offset + parameter.numel()]
                parameter.data.copy_(values.view_as(parameter))
                offset += parameter.numel()


def forget_dummy_step(engine: Any) -> None:
    """Undo the update that DeepSpeed makes at the start of stage 0 in half precision.

    It steps the optimizer once on gradients of zero to allocate its states, which decays the
    master values and counts as a step: the run would differ from the other stages' ever after
    (``FP16_UnfusedOptimizer.initialize_optimizer_states``).
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "loss_scale_config"):
        optimizer.optimizer.state.clear()
        optimizer.refresh_fp32_params()


def _stage3(optimizer: Any, module: Any) -> None:
    for number in range(len(optimizer.fp16_groups)):
        if not optimizer._swappable_optimizer_subgroup(number):  # else done with its restoring
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
    # hpZ's second copy within a host: made anew at the next gathering. DeepSpeed forgets those
    # of trained parameters at each step; here those of frozen ones are outdated, too.
    for parameter in module.parameters():
        parameter.ds_secondary_tensor = None
    optimizer.checkpoint_event_epilogue()


STAGING_BYTES = 32 * 2**20
"""What is read at a time on the way to a device, or to another dtype."""


class Engine(Protocol):
    """The part of ``llmx.train.engine.build.Engine`` that is used here, without an import of it."""

    engine: Any
    """DeepSpeed's."""
    device: torch.device
    stage: int
    precision: str
    frozen_fingerprints: dict[str, str]

    @property
    def networks(self) -> Mapping[str, Model]: ...

    @property
    def module(self) -> nn.Module: ...

    @property
    def main(self) -> Model: ...

    def is_saved(self, parameter_name: str) -> bool: ...


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
    def key(self) -> str:
        """The key in a rank's file (docs/development/contracts.md)."""
        return fragment_key(self.state, self.name, self.start)

    @property
    def dtype(self) -> str:
        """safetensors' name of the dtype."""
        return DTYPE_NAMES[self.tensor.dtype]


def saved_layout(engine: Engine) -> StateLayout:
    """The layout of the saved state: all but frozen models, which come from their source."""
    layout = state_layout(engine.engine)
    return replace(
        layout,
        frozen=[part for part in layout.frozen if engine.is_saved(part.name)],
        buffers=[part for part in layout.buffers if engine.is_saved(part.name)],
    )


def _tables(engine: Engine) -> tuple[Table, Table]:
    """``parameter_table`` and ``buffer_table`` of the saved state."""
    parameters, buffers = parameter_table(engine.module), buffer_table(engine.module)
    return (
        {name: about for name, about in parameters.items() if engine.is_saved(name)},
        {name: about for name, about in buffers.items() if engine.is_saved(name)},
    )


def capture(engine: Engine, *, world: int) -> list[StateTensor]:
    """This rank's fragments; over all ranks every element exactly once. Copies nothing.

    What all ranks hold alike is shared out, an equal part each.
    """
    layout = saved_layout(engine)
    rank = torch.distributed.get_rank()
    trained = _trained(layout, rank=rank, world=world)
    values = {id(owner): owner.values() for owner in layout.owners}
    states = {state for of_owner in values.values() for state in of_owner} - {MASTER}
    tensors = [
        StateTensor(state, piece.name, piece.start, piece.of(values[id(piece.owner)][state]))
        for state in (MASTER, *sorted(states))
        for piece in trained
        if state in values[id(piece.owner)]
    ]
    tensors += [
        StateTensor(state, piece.name, 0, value.view(-1))
        for number, piece in enumerate(layout.trained)
        if number % world == rank
        for state, value in sorted(piece.owner.whole_states().items())
    ]
    frozen = _frozen(layout, rank=rank, world=world)
    tensors += [StateTensor(FROZEN, part.name, part.start, part.values) for part in frozen]
    buffers = share(layout.buffers, rank=rank, world=world)
    tensors += [StateTensor(BUFFER, part.name, part.start, part.values) for part in buffers]
    return tensors


P = TypeVar("P", Piece, UntrainedPiece)


def share(pieces: list[P], *, rank: int, world: int) -> list[P]:
    """This rank's equal part of the elements of ``pieces``, laid end to end."""
    total = sum(piece.length for piece in pieces)
    first, last = total * rank // world, total * (rank + 1) // world
    parts, offset = [], 0
    for piece in pieces:
        begin, end = max(first - offset, 0), min(last - offset, piece.length)
        if begin < end:
            parts.append(piece.part(begin, end))
        offset += piece.length
    return parts


def _trained(layout: StateLayout, *, rank: int, world: int) -> list[Piece]:
    """The trained pieces that this rank saves, and no other."""
    return layout.trained if layout.partitioned else share(layout.trained, rank=rank, world=world)


def _frozen(layout: StateLayout, *, rank: int, world: int) -> list[UntrainedPiece]:
    if layout.frozen_partitioned:
        return layout.frozen
    return share(layout.frozen, rank=rank, world=world)


def states_table(layout: StateLayout, parameters: Table) -> dict[str, dict[str, list[int]]] | None:
    """Parameter -> state -> shape, where they are not one value an element of the same states for
    all; else None. The same on every rank."""
    optimizer: Any = layout.owners[0].optimizer
    names = getattr(optimizer, "state_names", None)
    shapes: dict[str, list[int]] = {
        name: of["shape"] for name, of in parameters.items() if of["trained"] and not of["tied_to"]
    }
    if names is not None:
        if not any(owner.optimizer.state.get(owner.tensor) for owner in layout.owners):
            return {name: {} for name in shapes}  # before the first step
        return {name: dict.fromkeys(names(name), shape) for name, shape in shapes.items()}
    if not any(owner.whole_states() for owner in layout.owners):
        return None
    table: dict[str, dict[str, list[int]]] = {}
    for piece in layout.trained:
        states = [state for state in piece.owner.values() if state != MASTER]
        table[piece.name] = dict.fromkeys(states, shapes[piece.name])
        for state, value in piece.owner.whole_states().items():
            table[piece.name][state] = list(value.shape)
    return table


def state_values(engine: Engine) -> dict[str, Any]:
    """The state besides the tensors, as in ``state.json``. The same on every rank."""
    layout = state_layout(engine.engine)
    base = layout.owners[0].optimizer
    parameters, buffers = _tables(engine)
    table = states_table(layout, parameters)
    return {
        "zero_stage": engine.stage,
        "precision": engine.precision,
        "optimizer": {
            "kind": optimizer_kind(base),
            "scalars": read_scalars(layout.owners),
            **({} if table is None else {"states": table}),
        },
        "loss_scaler": read_loss_scaler(engine.engine),
        "engine": read_counters(engine.engine),
        "parameters": parameters,
        "buffers": buffers,
        **({"frozen": engine.frozen_fingerprints} if engine.frozen_fingerprints else {}),
        # An adapter's weights lie in files as in memory.
        "conversions": (
            [] if engine.main.adapter is not None else effective_conversions(engine.main.module)
        ),
    }


def weights_hash(engine: Engine) -> str | None:
    """32 hexadecimal digits for all weights at full precision. Collective.

    The same for the same weights on any number of ranks, at any ZeRO stage.
    None where the state cannot be read (``UnsavableState``).
    """
    try:
        layout = saved_layout(engine)
    except UnsavableState:
        return None
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    masters = {id(owner): owner.values()[MASTER] for owner in layout.owners}
    parts = [
        (piece.name, piece.start, piece.of(masters[id(piece.owner)]))
        for piece in _trained(layout, rank=rank, world=world)
    ]
    parts += [
        (part.name, part.start, part.values) for part in _frozen(layout, rank=rank, world=world)
    ]
    names = [name for name, _ in engine.module.named_parameters() if engine.is_saved(name)]
    return hash_parts(parts, names=names, device=engine.device)


def frozen_fingerprints(engine: Engine) -> dict[str, str]:
    """Model -> hash of its frozen weights as they lie in memory: of a frozen model all, of one
    with an adapter its base. Collective.

    A checkpoint does not hold them; a run goes on with other ones only by mistake.
    """
    names = [
        name for name, model in engine.networks.items() if not model.spec.trained or model.adapter
    ]
    if not names:
        return {}
    layout = state_layout(engine.engine)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    parts = _frozen(layout, rank=rank, world=world)
    frozen = [n for n, _ in engine.module.named_parameters() if not engine.is_saved(n)]
    fingerprints = {}
    for name in names:
        prefix = f"{name}." if len(engine.networks) > 1 else ""
        of_model = [parameter for parameter in frozen if parameter.startswith(prefix)]
        model_names = set(of_model)
        parts_of_model = [
            (part.name, part.start, part.values) for part in parts if part.name in model_names
        ]
        # Weights in 4 bits are no parameters, and every rank holds them whole.
        packed = {
            f"{prefix}{layer}.packed": quantized.packed.flatten()
            for layer, quantized in quantized_layers(engine.networks[name].module).items()
        }
        parts_of_model += [(layer, 0, packed[layer]) for layer in list(packed)[rank::world]]
        fingerprints[name] = hash_parts(
            parts_of_model, names=[*of_model, *packed], device=engine.device
        )
    return fingerprints


def check_frozen(engine: Engine, state: dict[str, Any]) -> None:
    """Raise ConfigError where a frozen model is not the one that the checkpoint was trained with.
    In another precision its weights are rounded otherwise: nothing is compared then."""
    if state.get("precision") != engine.precision:
        return
    for name, written in state.get("frozen", {}).items():
        current = engine.frozen_fingerprints.get(name)
        if current is not None and current != written:
            raise ConfigError(
                f"The frozen weights of the model {name!r} are others than when the checkpoint was "
                f"written ({current[:12]} now, {written[:12]} then): its source has changed, or "
                "the precision that the task gives it. Bring back what the run began with."
            )


@torch.no_grad()
def restore(engine: Engine, index: FragmentIndex, state: dict[str, Any]) -> None:
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
    inner, layout = engine.engine, saved_layout(engine)
    check_tables(*_tables(engine), state["parameters"], state.get("buffers", {}))
    check_frozen(engine, state)
    check_kind(state["optimizer"]["kind"], optimizer_kind(layout.owners[0].optimizer))
    if hasattr(inner.optimizer, "checkpoint_event_prologue"):
        inner.optimizer.checkpoint_event_prologue()  # a gathered parameter would hide new values
    scalars = state["optimizer"]["scalars"]
    saved = sorted(set(index.states()) - {MASTER, FROZEN, BUFFER})
    for owner in layout.owners:
        pieces = [piece for piece in layout.trained if piece.owner is owner]
        with owner.swap.loaded() if owner.swap else contextlib.nullcontext():
            elementwise, other_shapes = _states_of(pieces, saved, state)
            _fill_owner(owner, pieces, index, elementwise, scalars, other_shapes)
    for part in layout.frozen:
        _fill(part.values, index, FROZEN, part)
    for part in layout.buffers:
        _fill(part.values, index, BUFFER, part)
    replay_cpu_adam(layout.owners, scalars)
    refresh_model(inner)
    write_loss_scaler(inner, state.get("loss_scaler"))
    write_counters(inner, state["engine"])


def _states_of(
    pieces: list[Piece], saved: list[str], state: dict[str, Any]
) -> tuple[list[str], dict[str, list[int]]]:
    """The saved states of a tensor of the optimizer: those with a value for each element, and
    the shapes of others. Where parameters differ, one of nothing but padding has none until the
    next step."""
    table = state["optimizer"].get("states")
    if table is None:
        return saved, {}
    shapes = table[pieces[0].name] if pieces else {}
    shape = state["parameters"][pieces[0].name]["shape"] if pieces else []
    other_shapes = {name: of for name, of in shapes.items() if of != shape}
    return [name for name in shapes if name not in other_shapes], other_shapes


def _fill_owner(
    owner: Owner,
    pieces: list[Piece],
    index: FragmentIndex,
    saved: list[str],
    scalars: dict[str, float],
    other_shapes: dict[str, list[int]],
) -> None:
    """Values of one tensor of the optimizer, and its states.

    States are made as the optimizer would at its first step, where it has none yet. Padding
    among them is 0, as it would be after any number of steps.

    Args:
        other_shapes: shapes of the states that have another shape than the parameter.
    """
    if not saved and not other_shapes and (not scalars or not pieces):
        owner.optimizer.state.pop(owner.tensor, None)  # saved before the first step
    else:
        states = owner.optimizer.state[owner.tensor]
        for state in saved:
            if state not in states:
                # DeepSpeedCPUAdam keeps fp32 moments of a half-precision master.
                wide = getattr(owner.optimizer, "fp32_optimizer_states", False)
                dtype = torch.float32 if wide else owner.tensor.dtype
                stored = TORCH_DTYPES[index.dtype(state, pieces[0].name)] if pieces else dtype
                if not stored.is_floating_point:  # moments in 8 bits
                    dtype = stored
                states[state] = torch.zeros_like(owner.tensor.data, dtype=dtype)
        for state, shape in other_shapes.items():
            dtype = TORCH_DTYPES[index.dtype(state, pieces[0].name)]
            states[state] = torch.zeros(shape, dtype=dtype, device=owner.tensor.device)
            all_elements = replace(pieces[0], start=0, length=states[state].numel())
            _fill(states[state].view(-1), index, state, all_elements)
        write_scalars(owner, scalars)
    values = replace(owner, swap=None).values()
    for piece in pieces:
        for state in (MASTER, *saved):
            _fill(piece.of(values[state]), index, state, piece)


def _fill(
    values: torch.Tensor, index: FragmentIndex, state: str, piece: Piece | UntrainedPiece
) -> None:
    """Read ``len(values)`` elements of a state, from the start of the piece."""
    if not len(values):
        return  # an empty buffer lies in no file
    stored = TORCH_DTYPES[index.dtype(state, piece.name)]
    if values.device.type == "cpu" and values.dtype == stored:
        index.read_range(
            state, piece.name, piece.start, piece.start + len(values), as_buffer(values)
        )
        return
    step = STAGING_BYTES // stored.itemsize
    staging = torch.empty(min(step, len(values)), dtype=stored)
    for first in range(0, len(values), step):
        part = values[first : first + step]
        begin = piece.start + first
        into = staging[: len(part)]
        index.read_range(state, piece.name, begin, begin + len(part), as_buffer(into))
        part.copy_(into)
