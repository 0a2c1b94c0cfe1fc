"""Weights that files have otherwise than memory: loaded, written, refused where wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from llmx.checkpoint.export import model as exporting
from llmx.cli.export import export
from llmx.config import ModelConfig
from llmx.errors import ConfigError
from llmx.models.factory import _empty_model
from llmx.models.load import Checkpoint, load_weights
from llmx.run.rundir import RunDir
from tests.small_models import CONVERTED, converted_model, same_weights, small_model
from tests.unit.test_checkpoint_export import VOCABULARY, save_model

FILE = "model.safetensors"
Tensors = dict[str, torch.Tensor]


def built(directory: Path) -> Any:
    """An empty model of the config in ``directory``, as a rank makes it."""
    config = AutoConfig.from_pretrained(directory)
    with _empty_model(stage=0, device=torch.device("cpu"), ds_config={}, dtype=torch.float32):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()
    return model


def loaded(directory: Path) -> Any:
    model = built(directory)
    load_weights(model, ModelConfig(path=str(directory), init="pretrained"))
    return model


def assert_written(model: Any, directory: Path) -> None:
    """``export_model`` writes what is in these files."""
    size = model.config.get_text_config().vocab_size
    found = exporting._as_files_have_it(model, vocab_size=size, padded=size, writes=True)
    ours = {name: tensor.clone() for name, tensor in found}
    files = load_file(directory / FILE)
    assert ours.keys() == files.keys()
    assert all(torch.equal(ours[name], files[name]) for name in files)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [*((kind, "hub") for kind in sorted(CONVERTED)), ("mixtral", "memory"), ("gpt_neox", "memory")],
)
def test_loaded_as_from_pretrained_loads_and_written_as_the_hub_has_it(
    kind: str, layout: str, tmp_path: Path
) -> None:
    converted_model(kind).save_pretrained(
        tmp_path, save_original_format=layout == "hub", max_shard_size="20KB"
    )
    reference, model = AutoModelForCausalLM.from_pretrained(tmp_path), loaded(tmp_path)
    same_weights(model, reference)
    reference.save_pretrained(tmp_path / "again")
    assert_written(model, tmp_path / "again")


def test_one_expert_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read together is one weight of one layer, never a whole file."""
    converted_model("mixtral").save_pretrained(tmp_path)
    together: list[set[str]] = [set()]
    real_read, real_fill = Checkpoint.tensor, torch.Tensor.copy_

    def read(self: Checkpoint, name: str) -> torch.Tensor:
        together[-1].add(name)
        return real_read(self, name)

    def fill(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if together[-1]:
            together.append(set())
        return real_fill(self, other)

    monkeypatch.setattr(Checkpoint, "tensor", read)
    monkeypatch.setattr(torch.Tensor, "copy_", fill)
    loaded(tmp_path)
    most = max(together, key=len)
    assert len(most) == 2 * CONVERTED["mixtral"]["num_local_experts"]
    assert len({name.split(".")[2] for name in most}) == 1


def saved(directory: Path, model: Any, change: Callable[[Tensors], Any]) -> Tensors:
    """The weights of a model directory of one file, after a change."""
    model.save_pretrained(directory)
    tensors = load_file(directory / FILE)
    change(tensors)
    save_file(tensors, directory / FILE, metadata={"format": "pt"})
    return tensors


def without(part: str) -> Callable[[Tensors], None]:
    def remove(tensors: Tensors) -> None:
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return remove


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("layers.1.block_sparse_moe.experts.3.w1.weight"),
         r"layers.1.*gate_up_proj.*missing or damaged"),
        (without(".experts.3."), r"gate_up_proj is \(3, 96, 32\) in the checkpoint and"),
        (lambda tensors: tensors.update(extra=torch.zeros(2)),
         r"has 1 weights that Mixtral\w+ does not, e.g. extra"),
    ],
)  # fmt: skip
def test_what_differs_from_the_model_is_refused_by_name(change, message, tmp_path) -> None:
    saved(tmp_path, converted_model("mixtral"), change)
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path)


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    model = small_model("llama")
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ConfigError, match=r"quantized weights \(fp8\).*in bf16"):
        load_weights(model, ModelConfig(path=str(tmp_path), init="pretrained"))


def test_two_values_for_one_tied_weight_are_refused(tmp_path: Path) -> None:
    tied, embedding = small_model("llama", tie_word_embeddings=True), "model.embed_tokens.weight"
    saved(tmp_path, tied, lambda t: t.update({"lm_head.weight": t[embedding].clone()}))
    same_weights(loaded(tmp_path), tied)
    saved(tmp_path, tied, lambda t: t.update({"lm_head.weight": t[embedding] + 1}))
    with pytest.raises(ConfigError, match=r"one weight in the model.*tie_word_embeddings=false"):
        loaded(tmp_path)
    saved(tmp_path, tied, lambda t: t.update({"lm_head.weight": t.pop(embedding)}))
    model = loaded(tmp_path)  # under its other name
    assert model.model.embed_tokens.weight is model.lm_head.weight
    same_weights(model, tied)


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "gpt_neox"])
def test_a_checkpoint_is_exported_as_the_hub_has_it(kind: str, memory: Path) -> None:
    """``python -m llmx export``, without an engine."""
    run, model = RunDir(memory / "run"), converted_model(kind, vocab_size=64)
    save_model(run, model, 12, precision="fp32")
    directory = export(run, dtype="fp32", shard_bytes=40_000)
    model.save_pretrained(memory / "reference")
    files = load_file(memory / "reference" / FILE)
    index = json.loads((directory / f"{FILE}.index.json").read_text())
    assert index["weight_map"].keys() == files.keys()
    for name, shard in index["weight_map"].items():
        tensor = load_file(directory / shard)[name]
        assert len(tensor) in (VOCABULARY, len(files[name])), name
        assert torch.equal(tensor, files[name][: len(tensor)]), name
    same_weights(loaded(directory), AutoModelForCausalLM.from_pretrained(directory))
