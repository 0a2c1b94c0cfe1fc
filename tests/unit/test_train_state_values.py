"""What of an engine's state is no tensor, and how equal parts are cut: without DeepSpeed's ranks.

``python -m pytest tests/unit/test_train_state_values.py``
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from llmx.checkpoint.fragments import BUFFER, Cover, FragmentIndex, Range, check_cover
from llmx.checkpoint.manifest import CheckpointError
from llmx.checkpoint.state.engine_state import _fill, share
from llmx.checkpoint.state.layout import Owner, UnsavableState, UntrainedPiece, state_layout
from llmx.checkpoint.state.values import (
    buffer_table,
    check_kind,
    check_states,
    check_tables,
    optimizer_kind,
    parameter_table,
    read_loss_scaler,
    read_scalars,
    write_loss_scaler,
    write_scalars,
)
from llmx.errors import ConfigError


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
    table = parameter_table(Tied())
    assert table["embedding.weight"] == {"shape": [6, 4], "trained": True, "tied_to": None}
    assert table["head.weight"]["tied_to"] == "embedding.weight"
    assert table["norm.weight"]["trained"] is False
    assert set(buffer_table(Tied())) == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }


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
def test_another_model_is_named(change: Any, message: str) -> None:
    model = Tied()
    saved = json.loads(json.dumps(parameter_table(model)))
    check_tables(parameter_table(model), buffer_table(model), saved, buffer_table(model))
    change(saved)
    with pytest.raises(ConfigError, match=message):
        check_tables(parameter_table(model), buffer_table(model), saved, buffer_table(model))


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
    optimizer = torch.optim.AdamW(trained)
    found = state_layout(engine_of(optimizer, model))
    assert [piece.name for piece in found.trained] == ["embedding.weight", "norm.bias"]
    assert [part.name for part in found.frozen] == ["norm.weight"]
    assert [part.name for part in found.buffers] == list(buffer_table(model))
    assert not found.partitioned
    # Views: what is written there is in the model.
    found.frozen[0].values.fill_(7)
    found.trained[1].of(found.trained[1].owner.values()["master"]).fill_(5)
    assert model.norm.weight.tolist() == [7] * 4
    assert model.norm.bias.tolist() == [5] * 4


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
    engine = engine_of(torch.optim.SGD(model.parameters(), lr=1.0), model)
    state_layout(engine)
    vars(engine).update(change)
    with pytest.raises(UnsavableState, match=f"zero.extra chose {what}, whose state"):
        state_layout(engine)


def test_states_of_another_shape_are_refused_and_never_dropped() -> None:
    """Adafactor keeps a row and a column of a matrix: a checkpoint used to leave them out."""
    weight = nn.Parameter(torch.ones(4, 3))
    for known in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop):
        check_states(known([weight], lr=0.1), partitioned=True)
    optimizer = torch.optim.Adafactor([weight])
    check_states(optimizer, partitioned=False)
    message = r"Adafactor keeps states .* \(row_var of shape \[4, 1\], col_var .* optim.kind=adamw"
    with pytest.raises(ConfigError, match=message):
        check_states(optimizer, partitioned=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    owner = Owner(weight, optimizer)
    assert set(owner.values()) == {"master"}
    assert {name: list(x.shape) for name, x in owner.whole_states().items()} == {
        "row_var": [4, 1],
        "col_var": [1, 3],
    }


def test_a_checkpoint_whose_parameters_differ_in_states_lacks_none() -> None:
    """Muon beside AdamW; a row and a column of Adafactor's."""
    states = {"m": {"momentum_buffer": [4, 3]}, "e": {"row_var": [4, 1], "col_var": [1, 3]}}
    table = {n: {"shape": [4, 3], "trained": True, "tied_to": None} for n in states}
    sizes = {("master", "m"): 12, ("master", "e"): 12, ("momentum_buffer", "m"): 12,
             ("row_var", "e"): 4, ("col_var", "e"): 3}  # fmt: skip

    def cover(leave: tuple[str, str] | None = None) -> Cover:
        return {
            key: [Range(0, size, "F32", "a", "|".join(key))]
            for key, size in sizes.items()
            if key != leave
        }

    check_cover(cover(), table, states=states)
    for key in sizes:
        with pytest.raises(CheckpointError, match=f"{key[0]} of {key[1]} lacks"):
            check_cover(cover(key), table, states=states)
    extra = cover() | {("exp_avg", "m"): [Range(0, 12, "F32", "a", "exp_avg|m")]}
    with pytest.raises(CheckpointError, match="no such parameter with that state"):
        check_cover(extra, table, states=states)


@given(st.lists(st.integers(0, 30), max_size=8), st.integers(1, 9))
def test_shares_are_equal_and_cover_everything_once(sizes: list[int], world: int) -> None:
    pieces = [UntrainedPiece(f"p{n}", 0, torch.arange(size)) for n, size in enumerate(sizes)]
    shares = [share(pieces, rank=rank, world=world) for rank in range(world)]
    counts = [sum(part.length for part in mine) for mine in shares]
    assert max(counts) - min(counts) <= 1
    covered = [
        (part.name, part.start + n)
        for mine in shares
        for part in mine
        for n in range(part.length)
        if part.values[n] == part.start + n
    ]
    assert covered == [(f"p{n}", k) for n, size in enumerate(sizes) for k in range(size)]


def stepped(make: Any, steps: int) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(torch.ones(5))
    optimizer = make([parameter])
    for _ in range(steps):
        parameter.grad = torch.ones(5)
        optimizer.step()
    return parameter, optimizer


def test_step_counts_go_into_a_new_optimizer_as_torch_keeps_them() -> None:
    parameter, optimizer = stepped(torch.optim.AdamW, 3)
    assert read_scalars([Owner(parameter, optimizer)]) == {"step": 3}
    fresh, other = stepped(torch.optim.AdamW, 0)
    assert read_scalars([Owner(fresh, other)]) == {}
    write_scalars(Owner(fresh, other), {"step": 3})
    assert torch.equal(other.state[fresh]["step"], optimizer.state[parameter]["step"])
    assert other.state[fresh]["step"].dtype == optimizer.state[parameter]["step"].dtype
    assert read_scalars([Owner(*stepped(torch.optim.SGD, 2))]) == {}


def test_the_greatest_step_counts() -> None:
    """DeepSpeed's FusedAdam counts on the last tensor of a group alone."""
    parameter, optimizer = stepped(torch.optim.AdamW, 1)
    last = nn.Parameter(torch.ones(2))
    optimizer.state[last] = {"step": 9, "exp_avg": torch.zeros(2)}
    owners = [Owner(parameter, optimizer), Owner(last, optimizer)]
    assert read_scalars(owners) == {"step": 9}


def test_kinds() -> None:
    assert optimizer_kind(stepped(torch.optim.AdamW, 0)[1]) == "adamw"
    assert optimizer_kind(stepped(torch.optim.SGD, 0)[1]) == "sgd"
    check_kind("adamw", "cpu_adam")
    check_kind("sgd", "sgd")
    with pytest.raises(ConfigError, match="written with optim.kind=adamw, this run has .*sgd"):
        check_kind("adamw", "sgd")


def scalers() -> dict[str, Any]:
    """DeepSpeed's own two kinds, as its engines hold them."""
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, LossScaleConfig

    arguments = {
        "init_scale": 2**16,
        "scale_window": 4,
        "min_scale": 1,
        "delayed_shift": 2,
        "consecutive_hysteresis": False,
    }
    zero = CreateLossScaler(
        torch.half, static_loss_scale=1.0, dynamic_scaling=True, dynamic_loss_args=dict(arguments)
    )
    plain = LossScaleConfig(torch.float16, True, 1.0, dict(arguments))
    return {
        "zero": SimpleNamespace(
            optimizer=SimpleNamespace(loss_scaler=zero), fp16_enabled=lambda: True
        ),
        "plain": SimpleNamespace(
            optimizer=SimpleNamespace(loss_scale_config=plain), fp16_enabled=lambda: True
        ),
    }


def test_a_loss_scaler_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """After overflows, half-way into its window: the same scale at every later step."""
    monkeypatch.setattr("deepspeed.runtime.fp16.loss_scaler.dist.get_rank", lambda: 1)
    engine, fresh = scalers()["zero"], scalers()["zero"]
    scaler, other = engine.optimizer.loss_scaler, fresh.optimizer.loss_scaler
    for overflow in (True, True, False, False, False, True, False):
        scaler.update_scale(overflow)
    values = json.loads(json.dumps(read_loss_scaler(engine)))
    assert values["cur_iter"] == 7
    assert values["last_overflow_iter"] == 5
    assert set(values) == {"cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"}
    write_loss_scaler(fresh, values)
    for overflow in (False, False, False, False, True, True, False):
        scaler.update_scale(overflow)
        other.update_scale(overflow)
        assert vars(other) == vars(scaler)


def test_a_loss_scaler_of_another_stage_takes_what_it_knows() -> None:
    both = scalers()
    values = {"cur_scale": 512.0, "cur_iter": 9, "last_overflow_iter": 3, "cur_hysteresis": 1}
    write_loss_scaler(both["plain"], values)
    config = both["plain"].optimizer.loss_scale_config
    assert (config.cur_scale, config.cur_iter, config.last_overflow_iter) == (512.0, 9, 3)
    write_loss_scaler(both["zero"], read_loss_scaler(both["plain"]))
    scaler = both["zero"].optimizer.loss_scaler
    assert (scaler.cur_scale, scaler.cur_iter, scaler.cur_hysteresis) == (512.0, 9, 2)


def test_an_empty_buffer_lies_in_no_file_and_is_restored_from_none() -> None:
    empty = UntrainedPiece("mask", 0, torch.zeros(0))
    assert share([empty], rank=0, world=1) == []
    index = FragmentIndex([])
    _fill(empty.values, index, BUFFER, empty)
    index.close()
