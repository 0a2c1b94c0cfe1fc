"""The final model as a Hugging Face directory, from every ZeRO stage.

Gathered a few parameters at a time and written shard by shard, so that no more than one shard
is in memory; checked; and only then moved to its name. Tried by
``python -m pytest -m deepspeed tests/integration/test_train_export.py``.
"""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from llmx.checkpoint.export.weights import ShardWriter
from llmx.checkpoint.state.engine_state import whole_tensor
from llmx.checkpoint.tensors import SHARD_BYTES, write_tensors
from llmx.models.adapter import Adapter
from llmx.models.adapter_names import (
    CONFIG_FILE,
    QUANTIZATION_FILE,
    WEIGHTS_FILE,
    exported_name,
)
from llmx.models.conversion import (
    WholeShapes,
    conversions_to_revert,
    convert_export,
    plan_export,
)
from llmx.models.generate import write_generation_config
from llmx.models.parameters import (
    output_embedding,
    persistent_buffers,
    vocabulary_parameters,
    whole,
    whole_shape,
)

NO_FILES: Mapping[str, str] = MappingProxyType({})
GATHER_BYTES = 256 * 2**20
"""Parameters gathered together under ZeRO-3: few collectives, bounded memory."""


def export_model(
    model: nn.Module,
    config: Any,
    *,
    tokenizer: Any,
    vocab_size: int,
    directory: Path,
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
    files: Mapping[str, str] = NO_FILES,
) -> None:
    """Write ``directory`` for ``from_pretrained`` of the network's auto class
    (``AutoModelForCausalLM``, ``AutoModelForSequenceClassification``). Collective.

    Args:
        model: the module inside the engine.
        config: its config; the copy that is written names ``vocab_size`` and ``dtype``.
        vocab_size: rows kept of the embeddings (they may have been padded).
        directory: replaced as a whole when everything is written and checked.
        files: further ones, by relative path: their text (``Task.export_files``).

    Raises:
        RuntimeError: what is on disk lacks a weight of the model, or has another shape.
    """
    writes = torch.distributed.get_rank() == 0
    partial = directory.with_name(f".{directory.name}.partial")
    final = exported_config(config, vocab_size=vocab_size, dtype=dtype)
    if writes:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    shards = ShardWriter(partial, shard_bytes=shard_bytes)
    for name, tensor in _as_files_have_it(
        model, vocab_size=vocab_size, padded=config.get_text_config().vocab_size, writes=writes
    ):
        # Counters and the like among the buffers keep their dtype. A copy: the gathered value is
        # gone with the next one.
        value = tensor.to(dtype) if tensor.is_floating_point() else tensor
        shards.add(whole_tensor(name, value.detach().to("cpu", copy=True)))
    if not writes:
        return
    shards.finish()
    write_description(
        partial, model, config, tokenizer=tokenizer, vocab_size=vocab_size, dtype=dtype, files=files
    )
    check_export(partial, model, final)
    shutil.rmtree(directory, ignore_errors=True)
    os.replace(partial, directory)


def export_adapter(
    model: nn.Module,
    adapter: Adapter,
    config: Any,
    *,
    tokenizer: Any,
    vocab_size: int,
    directory: Path,
    dtype: torch.dtype,
    files: Mapping[str, str] = NO_FILES,
) -> None:
    """Write ``directory`` for ``PeftModel.from_pretrained``: the adapter alone. Collective.

    Args:
        model: the module inside the engine.
        config: its config.
        directory: replaced as a whole when everything is written.
        files: further ones, by relative path: their text (``Task.export_files``).
    """
    writes = torch.distributed.get_rank() == 0
    partial = directory.with_name(f".{directory.name}.partial")
    adapter_parameters = [
        (name, parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name in adapter.trained
    ]
    tensors = []
    tables = vocabulary_parameters(model)
    for part in _parts([[pair] for pair in adapter_parameters]):
        flat = [pair for group in part for pair in group]
        with torch.no_grad(), whole(list({id(p): p for _, p in flat}.values())):
            for name, parameter in flat if writes else ():
                value = parameter.detach()
                if id(parameter) in tables:  # rows beyond it only pad the vocabulary
                    value = value[:vocab_size]
                value = value.to("cpu", dtype, copy=True)
                tensors.append(whole_tensor(exported_name(name), value))
    if not writes:
        return
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_tensors(partial / WEIGHTS_FILE, tensors, metadata={"format": "pt"})
    write_adapter_config(partial, adapter)
    final = exported_config(config, vocab_size=vocab_size, dtype=dtype)
    if output_embedding(model) is not None:
        write_generation_config(partial, model, final, tokenizer=tokenizer)
    tokenizer.save_pretrained(partial)
    write_files(partial, files)
    shutil.rmtree(directory, ignore_errors=True)
    os.replace(partial, directory)


def write_adapter_config(directory: Path, adapter: Adapter) -> None:
    """``adapter_config.json``, as peft writes it; and how the base was quantized."""
    files = {CONFIG_FILE: adapter.description, QUANTIZATION_FILE: adapter.quantization}
    for name, values in files.items():
        if values is not None:
            text = json.dumps(values, indent=2, sort_keys=True) + "\n"
            (directory / name).write_text(text, encoding="utf-8")


def write_description(
    directory: Path,
    model: nn.Module,
    config: Any,
    *,
    tokenizer: Any,
    vocab_size: int,
    dtype: torch.dtype,
    files: Mapping[str, str] = NO_FILES,
) -> None:
    """Write the files of a Hugging Face directory besides the weights, and ``files``."""
    final = exported_config(config, vocab_size=vocab_size, dtype=dtype)
    write_config(directory, model, final)
    if output_embedding(model) is not None:  # a classifier generates nothing
        write_generation_config(directory, model, final, tokenizer=tokenizer)
    tokenizer.save_pretrained(directory)
    write_files(directory, files)


def write_files(directory: Path, files: Mapping[str, str]) -> None:
    """Write texts into files by their relative paths."""
    for name, text in files.items():
        place = directory / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")


def write_config(directory: Path, model: nn.Module, config: Any) -> None:
    """``config.json``, and the code of a model that brought its own (model.trust_remote_code)."""
    if getattr(model, "_auto_class", None) is not None:
        from transformers.dynamic_module_utils import custom_object_save

        directory.mkdir(parents=True, exist_ok=True)
        custom_object_save(model, directory, config=config)
    config.save_pretrained(directory)


def exported_config(config: Any, *, vocab_size: int, dtype: torch.dtype) -> Any:
    """The config as others should see it: true vocabulary, cache on, the dtype on disk."""
    final = copy.deepcopy(config)
    text = final.get_text_config()
    text.vocab_size = vocab_size
    for part in (text, final):
        part.use_cache = True
        part.dtype = dtype
    return final


def _as_files_have_it(
    model: nn.Module, *, vocab_size: int, padded: int, writes: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and whole values as files of the Hub have them: fused experts apart. Collective.

    Tied weights once, persistent buffers too; rows of an embedding or a head beyond ``vocab_size``
    are left out. A value is valid until the next one is taken. Nothing is yielded on a rank
    that does not write (``writes``).
    """
    trim = _Trim(model, vocab_size=vocab_size, padded=padded)
    parameters, buffers = dict(model.named_parameters()), dict(persistent_buffers(model))
    shapes = {name: trim.shape(name, parameter) for name, parameter in parameters.items()}
    shapes.update((name, tuple(buffer.shape)) for name, buffer in buffers.items())
    conversions = conversions_to_revert(model)
    groups = plan_export(model, shapes, conversions)
    stand_in = WholeShapes(model, conversions)
    by_name = {group.sources[0][1]: group for group in groups}
    sharded = [
        [(name, parameters[name]) for _, name in group.sources if name in parameters]
        for group in groups
    ]
    for part in _parts([members for members in sharded if members]):
        with torch.no_grad(), whole([parameter for members in part for _, parameter in members]):
            for members in part if writes else ():
                group = by_name[next(name for name, _ in members)]
                values = {name: trim.value(name, parameter) for name, parameter in members}
                values.update((n, buffers[n]) for _, n in group.sources if n in buffers)
                if group.key:  # what is put together anew is so on the host
                    values = {name: value.cpu() for name, value in values.items()}
                yield from convert_export(group, values, stand_in).items()
    for group in groups if writes else ():
        if all(name in buffers for _, name in group.sources):
            yield from convert_export(group, buffers, stand_in).items()


class _Trim:
    """Leaves out the rows of an embedding or a head that only pad the vocabulary."""

    def __init__(self, model: nn.Module, *, vocab_size: int, padded: int) -> None:
        self._tables = set(vocabulary_names(model))
        self._rows, self._padded = vocab_size, padded

    def value(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        value = parameter.data
        trims = name in self._tables and value.shape[0] == self._padded
        return value[: self._rows] if trims else value

    def shape(self, name: str, parameter: nn.Parameter) -> tuple[int, ...]:
        shape = whole_shape(parameter)
        trims = name in self._tables and shape[0] == self._padded
        return (self._rows, *shape[1:]) if trims else shape


def vocabulary_names(model: nn.Module) -> list[str]:
    """The parameters that have a row for each token, tied ones under their first name."""
    tables = vocabulary_parameters(model)
    return [name for name, parameter in model.named_parameters() if id(parameter) in tables]


def _parts(
    groups: list[list[tuple[str, nn.Parameter]]],
) -> Iterator[list[list[tuple[str, nn.Parameter]]]]:
    """Groups that are gathered at the same time."""
    part: list[list[tuple[str, nn.Parameter]]] = []
    size = 0
    for group in groups:
        part.append(group)
        size += sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for _, p in group)
        if size >= GATHER_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def check_export(directory: Path, model: nn.Module, config: Any) -> None:
    """Raise RuntimeError unless every weight of a model of ``config`` is on disk, in its shape.

    Read from the files' headers: a weight saved from one shard only has shape [0] or a part.
    """
    from safetensors import safe_open

    on_disk: dict[str, list[int]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            names = list(opened.keys())
            shapes = {name: opened.get_slice(name).get_shape() for name in names}
        on_disk.update(shapes)
        least = sum(math.prod(shape) for shape in shapes.values())
        if file.stat().st_size < least:
            raise RuntimeError(f"{file} has {file.stat().st_size} bytes for {least} weights")
    with torch.device("meta"):
        empty: Any = type(model)(config)
    empty.tie_weights()
    shapes = {name: tuple(parameter.shape) for name, parameter in empty.named_parameters()}
    conversions = conversions_to_revert(model)
    stand_in = WholeShapes(empty, conversions)
    values = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    expected = {
        name: list(tensor.shape)
        for group in plan_export(empty, shapes, conversions)
        for name, tensor in convert_export(group, values, stand_in).items()
    }
    differing = {
        name: (on_disk.get(name), shape)
        for name, shape in expected.items()
        if on_disk.get(name) != shape
    }
    if differing:
        name, (shape_on_disk, shape) = next(iter(differing.items()))
        raise RuntimeError(
            f"The exported model is wrong in {len(differing)} of {len(expected)} weights, e.g. "
            f"{name}: {shape_on_disk} on disk, {shape} in the model. Nothing was put in place."
        )
