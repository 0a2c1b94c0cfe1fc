"""The hash of weights, the same however they are cut; what of an engine's state is no tensor; and
how equal parts are cut: without DeepSpeed's ranks."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.fp16 import loss_scaler
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, AdamW

from llmx.checkpoint.fragments import BUFFER, Cover, FragmentIndex, Range, check_cover
from llmx.checkpoint.manifest import CheckpointError
from llmx.checkpoint.state import engine_state
from llmx.checkpoint.state import values as of_engine
from llmx.checkpoint.state.engine_state import _fill, combine, lanes, share
from llmx.checkpoint.state.layout import Owner, UnsavableState, UntrainedPiece, state_layout
from llmx.errors import ConfigError

MASK = (1 << 64) - 1


def splitmix(bits: int, position: int) -> tuple[int, int]:
    """One element's two lanes in exact integers, for comparison."""
    x = (bits + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    x ^= x >> 31
    return x, ((x ^ (x >> 32)) * 0xBF58476D1CE4E5B9) & MASK


def test_the_hash_is_splitmix64_of_bits_and_position() -> None:
    values = torch.tensor([0.0, -0.0, 1.5, -3e30, float("nan")])
    expected = [0, 0]
    for position, bits in enumerate(values.view(torch.int32).tolist()):
        one, two = splitmix(bits & MASK, position + 10)
        expected = [(expected[0] + one) & MASK, (expected[1] + two) & MASK]
    assert [x & MASK for x in lanes(values, 10).tolist()] == expected


@given(
    st.integers(1, 300),
    st.lists(st.integers(0, 300), max_size=6),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]),
)
def test_hashes_of_parts_add_up_to_the_whole(size: int, cuts: list[int], dtype: Any) -> None:
    values = torch.randint(0, 100, (size,), generator=torch.Generator().manual_seed(size)).to(dtype)
    edges = sorted({0, size, *(cut for cut in cuts if cut < size)})
    whole = lanes(values, 0)
    with mock.patch.dict(engine_state.CHUNK, cpu=7):
        parts = [lanes(values[a:b], a) for a, b in itertools.pairwise(edges)]
    assert torch.equal(sum(parts), whole)
    # Names count, and their order does not.
    sums = torch.stack([whole, whole + 1])
    assert combine(["a", "b"], sums) == combine(["b", "a"], sums.flip(0))
    assert combine(["a", "b"], sums) not in (combine(["a", "c"], sums), combine(["b", "a"], sums))


class Tied(nn.Module):
    """A tied weight, a frozen one, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4)
        self.norm.weight.requires_grad_(False)
        self.register_buffer("mask", torch.ones(3), persistent=False)


def test_tables_name_each_parameter_and_whom_it_is_tied_to() -> None:
    table = of_engine.parameter_table(Tied())
    assert table["embedding.weight"] == {"shape": [6, 4], "trained": True, "tied_to": None}
    assert table["head.weight"]["tied_to"] == "embedding.weight"
    assert table["norm.weight"]["trained"] is False
    buffers = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert set(of_engine.buffer_table(Tied())) == buffers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("norm.bias"), "model has 1 parameters that the checkpoint lacks.*bias"),
        (lambda t: t.update(more=t["norm.bias"]), "checkpoint has 1 parameters that the model"),
        (lambda t: t["norm.bias"].update(shape=[5]), "norm.bias is 5 in the checkpoint and 4 in"),
        (lambda t: t["norm.weight"].update(trained=True), "norm.weight is 4 in .* 4, not trained"),
        (lambda t: t["head.weight"].update(tied_to=None), "6x4, tied to embedding.weight"),
    ],
)
def test_another_model_is_named(change, message) -> None:
    parameters, buffers = of_engine.parameter_table(Tied()), of_engine.buffer_table(Tied())
    saved = json.loads(json.dumps(parameters))
    of_engine.check_tables(parameters, buffers, saved, buffers)
    change(saved)
    with pytest.raises(ConfigError, match=message):
        of_engine.check_tables(parameters, buffers, saved, buffers)


def engine_of(optimizer: Any, module: nn.Module) -> Any:
    """What of DeepSpeed's engine the layout reads, at stage 0 in fp32."""
    return SimpleNamespace(
        optimizer=optimizer,
        module=module,
        mp_world_size=1,
        has_moe_layers=False,
        torch_autocast_z0_gradscaler=None,
    )


def test_the_layout_of_a_plain_optimizer_has_what_is_not_trained_apart() -> None:
    model = Tied()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = state_layout(engine_of(AdamW(trained), model))
    assert [piece.name for piece in found.trained] == ["embedding.weight", "norm.bias"]
    assert [part.name for part in found.frozen] == ["norm.weight"]
    assert [part.name for part in found.buffers] == list(of_engine.buffer_table(model))
    assert not found.partitioned
    # Views: what is written there is in the model.
    found.frozen[0].values.fill_(7)
    found.trained[1].of(found.trained[1].owner.values()["master"]).fill_(5)
    assert model.norm.weight.tolist() == [7] * 4
    assert model.norm.bias.tolist() == [5] * 4


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("alignment", [1, 8])
def test_parameters_of_round_robin_gradients_have_their_names(
    world: int, alignment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order that DeepSpeed gives them, from any rank: a piece that had another one's name
    was right for a resume on the same ranks alone."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    model = nn.ParameterList(torch.rand(size) for size in (7, 30, 1, 4, 19, 2))
    groups = [list(model)[:3], list(model)[3:]]
    optimizer = object.__new__(DeepSpeedZeroOptimizer)
    orders = [optimizer._round_robin_reorder(group, world)[0] for group in groups]
    ends = [[*itertools.accumulate(-(-len(p) // alignment) * alignment for p in o)] for o in orders]
    offsets = [[0, *each[:-1]] for each in ends]
    flats = [torch.full((-(-each[-1] // world) * world,), -1.0) for each in ends]
    for order, starts, flat in zip(orders, offsets, flats, strict=True):
        for parameter, start in zip(order, starts, strict=True):
            flat[start : start + len(parameter)] = parameter.detach()
    found = {name: torch.zeros(len(each)) for name, each in model.named_parameters()}
    for rank in range(world):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None, rank=rank: rank)
        vars(optimizer).update(
            bit16_groups=groups,
            single_partition_of_fp32_groups=[flat.chunk(world)[rank] for flat in flats],
            optimizer=None,
            real_dp_process_group=[None, None],
            round_robin_gradients=True,
            round_robin_bit16_groups=orders,
            round_robin_bit16_offsets=offsets,
        )
        for piece in state_layout(engine_of(optimizer, model)).trained:
            found[piece.name][piece.start :][: piece.length] += piece.of(piece.owner.tensor)
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter), name


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"optimizer": SimpleNamespace()}, "SimpleNamespace"),
        ({"mp_world_size": 2}, "tensor parallelism"),
        ({"has_moe_layers": True}, "DeepSpeed's mixture of experts"),
        ({"torch_autocast_z0_gradscaler": object()}, "torch_autocast with fp16"),
    ],
)
def test_what_cannot_be_saved_is_refused(change: dict[str, Any], what: str) -> None:
    model = Tied()
    engine = engine_of(SGD(model.parameters(), lr=1.0), model)
    state_layout(engine)
    vars(engine).update(change)
    with pytest.raises(UnsavableState, match=f"zero.extra chose {what}, whose state"):
        state_layout(engine)


def test_states_of_another_shape_are_refused_and_never_dropped() -> None:
    """Adafactor keeps a row and a column of a matrix: a checkpoint used to leave them out."""
    weight = nn.Parameter(torch.ones(4, 3))
    for known in (AdamW, SGD, torch.optim.Adagrad, torch.optim.RMSprop):
        of_engine.check_states(known([weight], lr=0.1), partitioned=True)
    optimizer = torch.optim.Adafactor([weight])
    of_engine.check_states(optimizer, partitioned=False)
    message = r"Adafactor keeps states .* \(row_var of shape \[4, 1\], col_var .* optim.kind=adamw"
    with pytest.raises(ConfigError, match=message):
        of_engine.check_states(optimizer, partitioned=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    owner = Owner(weight, optimizer)
    assert set(owner.values()) == {"master"}
    shapes = {name: list(x.shape) for name, x in owner.whole_states().items()}
    assert shapes == {"row_var": [4, 1], "col_var": [1, 3]}


def test_a_checkpoint_whose_parameters_differ_in_states_lacks_none() -> None:
    """Muon beside AdamW; a row and a column of Adafactor's."""
    states = {"m": {"momentum_buffer": [4, 3]}, "e": {"row_var": [4, 1], "col_var": [1, 3]}}
    table = {n: {"shape": [4, 3], "trained": True, "tied_to": None} for n in states}
    sizes = {("master", "m"): 12, ("master", "e"): 12, ("momentum_buffer", "m"): 12,
             ("row_var", "e"): 4, ("col_var", "e"): 3}  # fmt: skip

    def cover(sizes: dict[tuple[str, str], int]) -> Cover:
        return {key: [Range(0, size, "F32", "a", "|".join(key))] for key, size in sizes.items()}

    check_cover(cover(sizes), table, states=states)
    for state, name in sizes:
        less = {key: size for key, size in sizes.items() if key != (state, name)}
        with pytest.raises(CheckpointError, match=f"{state} of {name} lacks"):
            check_cover(cover(less), table, states=states)
    with pytest.raises(CheckpointError, match="no such parameter with that state"):
        check_cover(cover({**sizes, ("exp_avg", "m"): 12}), table, states=states)


@given(st.lists(st.integers(0, 30), max_size=8), st.integers(1, 9))
def test_shares_are_equal_and_cover_everything_once(sizes: list[int], world: int) -> None:
    pieces = [UntrainedPiece(f"p{n}", 0, torch.arange(size)) for n, size in enumerate(sizes)]
    shares = [share(pieces, rank=rank, world=world) for rank in range(world)]
    counts = [sum(part.length for part in mine) for mine in shares]
    assert max(counts) - min(counts) <= 1
    covered = [
        (part.name, part.start + n)
        for part in itertools.chain.from_iterable(shares)
        for n in range(part.length)
        if part.values[n] == part.start + n
    ]
    assert covered == [(f"p{n}", k) for n, size in enumerate(sizes) for k in range(size)]
    empty, index = UntrainedPiece("mask", 0, torch.zeros(0)), FragmentIndex([])
    assert share([empty], rank=0, world=1) == []
    _fill(empty.values, index, BUFFER, empty)  # it lies in no file, and is restored from none
    index.close()


def stepped(make: Any, steps: int) -> Owner:
    parameter = nn.Parameter(torch.ones(5))
    optimizer = make([parameter])
    for _ in range(steps):
        parameter.grad = torch.ones(5)
        optimizer.step()
    return Owner(parameter, optimizer)


def test_step_counts_go_into_a_new_optimizer_as_torch_keeps_them() -> None:
    owner, fresh = stepped(AdamW, 3), stepped(AdamW, 0)
    assert of_engine.read_scalars([owner]) == {"step": 3}
    assert of_engine.read_scalars([fresh, stepped(SGD, 2)]) == {}
    of_engine.write_scalars(fresh, {"step": 3})
    mine, theirs = (one.optimizer.state[one.tensor]["step"] for one in (fresh, owner))
    assert torch.equal(mine, theirs)
    assert mine.dtype == theirs.dtype
    # DeepSpeed's FusedAdam counts on the last tensor of a group alone: the greatest counts.
    last = nn.Parameter(torch.ones(2))
    owner.optimizer.state[last] = {"step": 9, "exp_avg": torch.zeros(2)}
    assert of_engine.read_scalars([owner, Owner(last, owner.optimizer)]) == {"step": 9}
    kinds = [of_engine.optimizer_kind(stepped(k, 0).optimizer) for k in (AdamW, SGD)]
    assert kinds == ["adamw", "sgd"]
    of_engine.check_kind("adamw", "cpu_adam")
    with pytest.raises(ConfigError, match="written with optim.kind=adamw, this run has .*sgd"):
        of_engine.check_kind("adamw", "sgd")


def test_a_loss_scaler_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """After overflows, half-way into its window: the same scale at every later step; from a run
    at stage 0, what that knows."""
    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 1)
    scale = {"init_scale": 2**16, "scale_window": 4, "min_scale": 1, "delayed_shift": 2,
             "consecutive_hysteresis": False}  # fmt: skip

    def engine_with(**optimizer: Any) -> Any:
        return SimpleNamespace(optimizer=SimpleNamespace(**optimizer), fp16_enabled=lambda: True)

    scaler, other, fresh = (
        loss_scaler.CreateLossScaler(torch.half, 1.0, True, dict(scale)) for _ in range(3)
    )
    for overflow in (True, True, False, False, False, True, False):
        scaler.update_scale(overflow)
    values = json.loads(json.dumps(of_engine.read_loss_scaler(engine_with(loss_scaler=scaler))))
    assert (values["cur_iter"], values["last_overflow_iter"]) == (7, 5)
    assert set(values) == {"cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"}
    of_engine.write_loss_scaler(engine_with(loss_scaler=other), values)
    for overflow in (False, False, False, False, True, True, False):
        scaler.update_scale(overflow)
        other.update_scale(overflow)
        assert vars(other) == vars(scaler)
    config = loss_scaler.LossScaleConfig(torch.float16, True, 1.0, dict(scale))
    plain = engine_with(loss_scale_config=config)
    known = {"cur_scale": 512.0, "cur_iter": 9, "last_overflow_iter": 3}
    of_engine.write_loss_scaler(plain, {**known, "cur_hysteresis": 1})
    assert {name: getattr(config, name) for name in known} == known
    of_engine.write_loss_scaler(engine_with(loss_scaler=fresh), of_engine.read_loss_scaler(plain))
    assert (fresh.cur_scale, fresh.cur_iter, fresh.cur_hysteresis) == (512.0, 9, 2)
