"""Weights from scratch: drawn by threads and in turn, on any device, they are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmx.models import initialise as drawing
from llmx.models.initialise import initialise
from tests.small_models import CONVERTED, KINDS, converted_model, small_model

ALL = sorted({*KINDS, *CONVERTED})


def model_of(kind: str, **more: Any) -> Any:
    return small_model(kind, **more) if kind in KINDS else converted_model(kind, **more)


def values(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, torch.float32) for kind in ALL), ("llama", torch.bfloat16)]
)
def test_threads_draw_what_is_drawn_in_turn(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(kind, num_hidden_layers=5).to(dtype)
    with torch.no_grad():
        drawing._initialise(model, name="", owner=model, seed=7)
    in_turn = values(model)
    for threads in (1, 3):
        monkeypatch.setattr(drawing, "_num_threads", lambda threads=threads: threads)
        for parameter in model.parameters():
            parameter.data.fill_(3.0)
        batches = list(drawing._batches(drawing._layers(model)))
        assert [len(batch) for batch in batches] == ([1] * 5 if threads == 1 else [3, 2])
        initialise(model, seed=7)
        drawn = values(model)
        different = [name for name in drawn if not torch.equal(drawn[name], in_turn[name])]
        assert not different, different
    initialise(model, seed=8)
    assert any(not torch.equal(value, in_turn[name]) for name, value in values(model).items())


def test_a_weight_of_two_layers_is_drawn_in_turn() -> None:
    model = model_of("llama", num_hidden_layers=3)
    layers = model.model.layers
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    assert drawing._layers(model) == []


def test_what_is_whole_at_a_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", num_hidden_layers=5)
    monkeypatch.setattr(drawing, "_num_threads", lambda: 8)
    monkeypatch.setattr(
        drawing, "TOGETHER_BYTES", 2 * drawing._num_bytes(model.model.layers[0]) + 1
    )
    assert [len(b) for b in drawing._batches(drawing._layers(model))] == [2, 2, 1]
