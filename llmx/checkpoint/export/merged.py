"""A pretrained model with an adapter worked into its weights: a plain Hugging Face directory.

The base's own files are read tensor by tensor and written again under their own names; those that
the adapter changes are computed in fp32. Neither model nor network is ever whole in memory. Tried
by ``python -m pytest tests/unit/test_models_adapter.py``.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llmx.checkpoint.export.weights import ShardWriter
from llmx.checkpoint.state.engine_state import TORCH_DTYPES, whole_tensor
from llmx.config import ModelConfig
from llmx.errors import ConfigError
from llmx.models.adapter_names import (
    CONFIG_FILE,
    MAGNITUDE,
    MATRIX_A,
    MATRIX_B,
    PREFIX,
    QUANTIZATION_FILE,
    WEIGHTS_FILE,
    read_quantization,
)
from llmx.models.conversion import plan_load
from llmx.models.load import Checkpoint, checkpoint_files
from llmx.models.model import empty_network
from llmx.models.network_config import network_config
from llmx.models.parameters import persistent_buffers
from llmx.models.quantized import Quantization, is_quantized, rounded, trained_dtype

NOT_OF_A_MODEL = (CONFIG_FILE, WEIGHTS_FILE, QUANTIZATION_FILE, "config.json")
"""Files beside an adapter that are not copied."""


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter in peft's format, opened: tensors are read when they are asked for."""

    config: dict[str, Any]
    tensors: Checkpoint
    quantization: dict[str, Any] | None = None
    """How training kept the weights of its base in 4 bits."""

    @classmethod
    def read(cls, directory: Path) -> AdapterFiles:
        config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        return cls(config, Checkpoint([directory / WEIGHTS_FILE]), read_quantization(directory))

    @property
    def layers(self) -> set[str]:
        """Names of the adapted layers."""
        return {
            name.removeprefix(PREFIX).removesuffix(MATRIX_A)
            for name in self.tensors.names
            if name.endswith(MATRIX_A)
        }

    @property
    def whole(self) -> dict[str, str]:
        """Parameters that were trained whole -> their names in the file."""
        return {
            name.removeprefix(PREFIX): name for name in self.tensors.names if ".lora_" not in name
        }

    def merged(self, layer: str, base: torch.Tensor, *, transposed: bool) -> torch.Tensor:
        """The weight of an adapted layer, fp32; ``transposed``: stored as GPT-2's are."""
        config, start = self.config, f"{PREFIX}{layer}"
        first = self.tensors.tensor(start + MATRIX_A).float()
        second = self.tensors.tensor(start + MATRIX_B).float()
        rank = config["r"]
        scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
        weight = (base.t() if transposed else base).float() + scale * (second @ first)
        if config.get("use_dora"):
            magnitude = self.tensors.tensor(start + MAGNITUDE).float()
            weight *= (magnitude / torch.linalg.norm(weight, dim=1))[:, None]
        merged: torch.Tensor = weight.t().contiguous() if transposed else weight
        return merged


@torch.no_grad()
def write_merged(
    directory: Path,
    adapter: Path,
    source: ModelConfig,
    *,
    dtype: str,
    shard_bytes: int,
) -> int:
    """Write a model into an existing directory: weights, config, and what lies beside the adapter
    (tokenizer, generation config). Returns the number of its parameters.

    Args:
        adapter: a directory of peft, and the ``config.json`` of the network, where that is not
            the one of ``source``.
        source: the model that it was trained on.
        dtype: safetensors' name, for all that is floating point.

    Raises:
        ConfigError: the base is not the adapter's, or its files cannot be merged piece by piece.
        OSError: the disk is full or broken.
    """
    from transformers import AutoConfig

    files, base = AdapterFiles.read(adapter), Checkpoint(checkpoint_files(source))
    described = adapter if (adapter / "config.json").is_file() else None
    config = (
        AutoConfig.from_pretrained(described, trust_remote_code=source.trust_remote_code)
        if described
        else network_config(source)
    )
    network = empty_network(config, trust_remote_code=source.trust_remote_code)
    shards = ShardWriter(directory, shard_bytes=shard_bytes)
    elements = 0
    for name, tensor in _merged_tensors(network, files, base, source):
        value = tensor.to(TORCH_DTYPES[dtype]) if tensor.is_floating_point() else tensor
        shards.add(whole_tensor(name, value.contiguous().clone()))
        elements += value.numel()
    shards.finish()
    config.dtype = TORCH_DTYPES[dtype]
    config.architectures = [type(network).__name__]
    config.save_pretrained(directory)
    code_directory = Path(source.path or "").expanduser()
    for path in sorted(code_directory.glob("*.py")) if code_directory.is_dir() else ():
        shutil.copy2(path, directory / path.name)  # the code of a model that brought its own
    for path in sorted(path for path in adapter.rglob("*") if path.is_file()):
        place = path.relative_to(adapter)
        if place.as_posix() not in NOT_OF_A_MODEL:
            (directory / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, directory / place)
    return elements


def _merged_tensors(
    network: Any, files: AdapterFiles, base: Checkpoint, source: ModelConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names as the base's files have them, and values."""
    parameters = dict(network.named_parameters(remove_duplicate=False))
    targets = {**parameters, **dict(persistent_buffers(network))}
    plan = plan_load(network, base.shapes, targets)
    layers, trained_whole = files.layers, files.whole
    # A weight of several names was trained under each of them.
    trained = {
        id(parameters[name]): trained_whole[name] for name in trained_whole if name in parameters
    }
    unknown = [name for name in trained_whole if name not in parameters]
    unknown += [name for name in layers if f"{name}.weight" not in parameters]
    if unknown:
        raise ConfigError(
            f"model.path={source.path} has no {unknown[0]}, which the adapter changes: it is of "
            "another model."
        )
    written: set[int] = set()
    for group in plan.groups:
        changed = [
            name
            for name in group.targets
            if id(targets[name]) in trained or name.removesuffix(".weight") in layers
        ]
        written.update(id(targets[name]) for name in group.targets)
        if group.transform is not None:
            if changed:
                raise ConfigError(
                    f"{changed[0]} lies in the files of model.path={source.path} fused with "
                    "others, and cannot be merged there. Use the adapter itself (--to adapter)."
                )
            for _, name in group.sources:
                yield name, base.tensor(name)
            continue
        (name,), (_, on_disk) = group.targets, group.sources[0]
        value = base.tensor(on_disk)
        layer = name.removesuffix(".weight")
        quantization = files.quantization if layer != name else None
        if quantization and is_quantized(layer, network.get_submodule(layer), quantization):
            # As training has multiplied with it.
            value = value.to(trained_dtype(quantization))
            value = rounded(value, Quantization.read(quantization))
        if id(targets[name]) in trained:
            value = files.tensors.tensor(trained[id(targets[name])])
        elif layer != name and layer in layers:
            transposed = type(network.get_submodule(layer)).__name__ == "Conv1D"
            value = files.merged(layer, value, transposed=transposed)
        yield on_disk, value
    for name, exported in trained_whole.items():
        if id(parameters[name]) not in written:  # a new head
            written.add(id(parameters[name]))
            yield name, files.tensors.tensor(exported)
