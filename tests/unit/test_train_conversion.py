"""Weights that files have otherwise than memory: loaded, written, refused where wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from llmx.checkpoint.export import model as exporting
from llmx.cli.export import export
from llmx.config import ModelConfig
from llmx.errors import ConfigError
from llmx.models.conversion import conversions_in_words, effective_conversions
from llmx.models.factory import _empty_model
from llmx.models.load import load_weights
from llmx.run.rundir import RunDir
from tests.small_models import CONVERTED, converted_model, same_weights, small_model
from tests.unit.test_checkpoint_export import save_model


def built(directory: Path) -> Any:
    """An empty model of the config in ``directory``, as a rank makes it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory)
    with _empty_model(stage=0, device=torch.device("cpu"), ds_config={}, dtype=torch.float32):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()
    return model


def loaded(directory: Path) -> Any:
    model = built(directory)
    load_weights(model, ModelConfig(path=str(directory), init="pretrained"))
    return model


def written(model: Any) -> dict[str, torch.Tensor]:
    """What ``export_model`` writes."""
    size = model.config.get_text_config().vocab_size
    found = exporting._as_files_have_it(model, vocab_size=size, padded=size, writes=True)
    return {name: tensor.clone() for name, tensor in found}


@pytest.mark.parametrize("layout", ["hub", "memory"])
@pytest.mark.parametrize("kind", sorted(CONVERTED))
def test_loaded_as_from_pretrained_loads_and_written_as_the_hub_has_it(
    kind: str, layout: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    converted_model(kind).save_pretrained(
        tmp_path, save_original_format=layout == "hub", max_shard_size="20KB"
    )
    reference, model = AutoModelForCausalLM.from_pretrained(tmp_path), loaded(tmp_path)
    same_weights(model, reference)
    reference.save_pretrained(tmp_path / "again")
    files, ours = load_file(tmp_path / "again" / "model.safetensors"), written(model)
    assert ours.keys() == files.keys()
    assert all(torch.equal(ours[name], files[name]) for name in files)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_neox"])
def test_from_scratch_it_is_written_as_the_hub_has_it(kind: str, tmp_path: Path) -> None:
    model = converted_model(kind)
    model.save_pretrained(tmp_path)
    files, ours = load_file(tmp_path / "model.safetensors"), written(model)
    assert ours.keys() == files.keys()
    assert all(torch.equal(ours[name], files[name]) for name in files)
    words = effective_conversions(model)
    assert words
    assert [repr(one) for one in conversions_in_words(model, words)] == words


def test_one_expert_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read together is one weight of one layer, never a whole file."""
    from llmx.models.load import Checkpoint

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


def damaged(tmp_path: Path, change: Any) -> Path:
    """A mixtral of one file, changed."""
    converted_model("mixtral").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def test_a_missing_expert_is_refused_by_name(tmp_path: Path) -> None:
    name = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    with pytest.raises(ConfigError, match=r"layers.1.*gate_up_proj.*missing or damaged"):
        loaded(damaged(tmp_path, lambda tensors: tensors.pop(name)))


def test_a_layer_that_lacks_an_expert_everywhere_is_refused(tmp_path: Path) -> None:
    def fewer(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".experts.3." in name]:
            del tensors[name]

    with pytest.raises(ConfigError, match=r"gate_up_proj is \(3, 96, 32\) in the checkpoint and"):
        loaded(damaged(tmp_path, fewer))


def test_what_the_model_lacks_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has 1 weights that Mixtral\w+ does not, e.g. extra"):
        loaded(damaged(tmp_path, lambda tensors: tensors.update(extra=torch.zeros(2))))


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    converted_model("mixtral").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = built(tmp_path)
    with pytest.raises(ConfigError, match=r"quantized weights \(fp8\).*in bf16"):
        load_weights(model, ModelConfig(path=str(tmp_path), init="pretrained"))


def test_two_values_for_one_tied_weight_are_refused(tmp_path: Path) -> None:
    small_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    same_weights(loaded(tmp_path), small_model("llama", tie_word_embeddings=True))
    tensors["lm_head.weight"] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"one weight in the model.*tie_word_embeddings=false"):
        loaded(tmp_path)


def test_a_tied_weight_under_its_other_name(tmp_path: Path) -> None:
    small_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = loaded(tmp_path)
    assert model.model.embed_tokens.weight is model.lm_head.weight
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])
    same_weights(model, small_model("llama", tie_word_embeddings=True))


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "gpt_neox"])
def test_a_checkpoint_is_exported_as_the_hub_has_it(kind: str, memory: Path) -> None:
    """``python -m llmx export``, without an engine."""
    from transformers import AutoModelForCausalLM

    run = RunDir(memory / "run")
    model = converted_model(kind, vocab_size=64)
    save_model(run, model, 12, precision="fp32")
    directory = export(run, dtype="fp32", shard_bytes=40_000)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    model.save_pretrained(memory / "reference")
    files = load_file(memory / "reference" / "model.safetensors")
    assert index["weight_map"].keys() == files.keys()
    for file in sorted(directory.glob("*.safetensors")):
        assert file.stat().st_size < 60_000
        with safe_open(str(file), framework="pt") as opened:
            for name in list(opened.keys()):
                rows = len(opened.get_tensor(name))
                assert torch.equal(opened.get_tensor(name), files[name][:rows]), name
    same = loaded(directory)
    reference = AutoModelForCausalLM.from_pretrained(directory)
    same_weights(same, reference)
