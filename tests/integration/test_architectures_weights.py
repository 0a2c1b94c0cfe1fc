"""Causal architectures of ``transformers``, small: their weights are loaded as
``from_pretrained`` loads them, written as ``save_pretrained`` writes them, and their auxiliary loss
is the library's. Every one of them by night, 25 families for each landing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llmx.checkpoint.export import model as exporting
from llmx.checkpoint.export.weights import ShardWriter
from llmx.checkpoint.state.engine_state import whole_tensor
from llmx.config import ModelConfig
from llmx.errors import ConfigError
from llmx.models.experts import Routing
from llmx.models.factory import _empty_model
from llmx.models.load import load_weights
from tests.architectures import FAMILIES, architectures, each_family, small_config
from tests.small_models import same_weights

pytestmark = pytest.mark.deepspeed


def made(kind: str) -> Any:
    """A model of weights that all differ: nothing is equal by being zero or one."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(small_config(kind))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.eval()


def loaded(directory: Path, *, like: Any) -> Any:
    # Not that of the directory: gemma4's shrunk config cannot be read back.
    config = copy.deepcopy(like.config)
    with _empty_model(stage=0, device=torch.device("cpu"), ds_config={}, dtype=torch.float32):
        model = type(like)._from_config(config, dtype=torch.float32)
    model.tie_weights()
    load_weights(model, ModelConfig(path=str(directory), init="pretrained"))
    return model


def from_pretrained(directory: Path, *, like: Any) -> Any:
    return type(like).from_pretrained(directory, config=copy.deepcopy(like.config))


def files_of(directory: Path) -> dict[str, torch.Tensor]:
    return {k: v for f in directory.glob("*.safetensors") for k, v in load_file(f).items()}


@pytest.mark.parametrize("kind", each_family())
def test_weights_are_loaded_and_written_as_transformers_does(kind: str, tmp_path: Path) -> None:
    model = made(kind)
    for layout in ("hub", "memory"):
        directory = tmp_path / layout
        model.save_pretrained(directory, save_original_format=layout == "hub")
        reference = from_pretrained(directory, like=model)
        ours = loaded(directory, like=model)
        same_weights(ours, reference)
        exported = tmp_path / f"{layout}-exported"
        write(ours, exported)
        reference.save_pretrained(tmp_path / f"{layout}-again")
        files, again = files_of(exported), files_of(tmp_path / f"{layout}-again")
        names = set(reference.state_dict())
        # Of a tied weight either name will do; transformers chooses by another rule.
        assert {n for n in files.keys() ^ again.keys() if n not in names} == set()
        assert all(torch.equal(files[name], again[name]) for name in files.keys() & again.keys())
        same_weights(loaded(exported, like=model), reference)
        same_weights(from_pretrained(exported, like=model), reference)


def write(model: Any, directory: Path) -> None:
    size = model.config.get_text_config().vocab_size
    directory.mkdir()
    shards = ShardWriter(directory)
    for name, tensor in exporting._as_files_have_it(
        model, vocab_size=size, padded=size, writes=True
    ):
        shards.add(whole_tensor(name, tensor.detach().clone()))
    shards.finish()
    model.config.save_pretrained(directory)


def has_auxiliary_loss(kind: str) -> bool:
    return hasattr(small_config(kind).get_text_config(), "output_router_logits")


@pytest.mark.parametrize(
    ("among", "at_least"),
    [
        pytest.param(FAMILIES, 9, id="families"),
        pytest.param(architectures(), 21, id="all", marks=pytest.mark.nightly),
    ],
)
def test_the_auxiliary_loss_is_that_of_transformers(among: tuple[str, ...], at_least: int) -> None:
    # In one test: which these are is known only when every config was imported.
    kinds = [kind for kind in among if has_auxiliary_loss(kind)]
    assert len(kinds) >= at_least
    for kind in kinds:
        check_auxiliary_loss(kind)


def check_auxiliary_loss(kind: str) -> None:
    from transformers import AutoModelForCausalLM

    config = small_config(kind)
    config.get_text_config().output_router_logits = True
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(5, 90, (1, 12))
    try:
        routing = Routing(model)
    except ConfigError:
        with_it = model(input_ids=ids, output_router_logits=True)
        assert kind in ("doge",) or getattr(with_it, "aux_loss", None) is None, kind
        return
    with routing.watch(torch.ones(1, 12, dtype=torch.int64)):
        output = model(input_ids=ids, use_cache=False)
    assert routing.auxiliary_sum is not None, kind
    assert routing.coefficient > 0, kind
    assert float(routing.auxiliary_sum.detach()) / 12 == pytest.approx(
        float(output.aux_loss.detach()), rel=1e-4
    ), kind
