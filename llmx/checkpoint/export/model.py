"""The final model as a Hugging Face directory, from every ZeRO stage.

Gathered a few parameters at a time and written shard by shard, so that no more than one shard
is in memory; checked; and only then moved to its name. Tried by
``python -m pytest -m deepspeed tests/integration/test_train_export.py``.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from llmx.checkpoint.export.weights import ShardWriter
from llmx.checkpoint.state.engine_state import whole_tensor
from llmx.checkpoint.tensors import SHARD_BYTES
from llmx.models.adapter import Adapter
from llmx.models.adapter_names import (
    CONFIG_FILE,
    QUANTIZATION_FILE,
    WEIGHTS_FILE,
    exported_name,
)
from llmx.models.conversion import (
    Group,
    WholeShapes,
    conversions_to_revert,
    convert_export,
    plan_export,
)
from llmx.models.generate import write_generation_config
from llmx.models.load import Checkpoint
from llmx.models.parameters import (
    in_parts,
    output_embedding,
    persistent_buffers,
    vocabulary_parameters,
    whole,
    whole_bytes,
    whole_shape,
)

NO_FILES: Mapping[str, str] = MappingProxyType({})


def export_model(
    model: nn.Module,
    config: Any,
    *,
    tokenizer: Any,
    vocab_size: int,
    directory: Path,
    dtype: torch.dtype,
    adapter: Adapter | None = None,
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
        adapter: written alone, for ``PeftModel.from_pretrained``.
        files: further ones, by relative path: their text (``Task.export_files``).

    Raises:
        RuntimeError: what is on disk lacks a weight of the model, or has another shape.
    """
    writes = torch.distributed.get_rank() == 0
    partial = directory.with_name(f".{directory.name}.partial")
    if writes:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    if adapter is None:
        shards = ShardWriter(partial, shard_bytes=shard_bytes)
        padded = config.get_text_config().vocab_size
        tensors = _as_files_have_it(model, vocab_size=vocab_size, padded=padded, writes=writes)
    else:
        shards = ShardWriter(partial, shard_bytes=sys.maxsize, file=WEIGHTS_FILE)
        tensors = _adapter_tensors(model, adapter, vocab_size=vocab_size, writes=writes)
    for name, tensor in tensors:
        # Counters and the like among the buffers keep their dtype. A copy: the gathered value is
        # gone with the next one.
        value = tensor.to(dtype) if tensor.is_floating_point() else tensor
        shards.add(whole_tensor(name, value.detach().to("cpu", copy=True)))
    if not writes:
        return
    shards.finish()
    described = {"tokenizer": tokenizer, "vocab_size": vocab_size, "dtype": dtype, "files": files}
    write_description(partial, model, config, whole=adapter is None, adapter=adapter, **described)
    if adapter is None:
        check_export(partial, model, exported_config(config, vocab_size=vocab_size, dtype=dtype))
    shutil.rmtree(directory, ignore_errors=True)
    os.replace(partial, directory)


def write_description(
    directory: Path,
    model: nn.Module,
    config: Any,
    *,
    tokenizer: Any,
    vocab_size: int,
    dtype: torch.dtype,
    files: Mapping[str, str] = NO_FILES,
    adapter: Adapter | None = None,
    whole: bool = True,
) -> None:
    """Write the files of a Hugging Face directory besides the weights, and ``files``.

    Args:
        adapter: its ``adapter_config.json``, and how its base was quantized, are written, too.
        whole: with the ``config.json`` of the network.
    """
    final = exported_config(config, vocab_size=vocab_size, dtype=dtype)
    if whole:
        write_config(directory, model, final)
    if output_embedding(model) is not None:  # a classifier generates nothing
        write_generation_config(directory, model, final, tokenizer=tokenizer)
    tokenizer.save_pretrained(directory)
    values = {}
    if adapter is not None:
        values = {CONFIG_FILE: adapter.description, QUANTIZATION_FILE: adapter.quantization}
    texts = {
        name: json.dumps(value, indent=2, sort_keys=True) + "\n"
        for name, value in values.items()
        if value is not None
    }
    for name, text in {**texts, **files}.items():
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
    parameters = dict(model.named_parameters())
    tensors = {**parameters, **dict(persistent_buffers(model))}
    shapes = {name: whole_shape(tensor) for name, tensor in tensors.items()}
    cut = [name for name in vocabulary_names(model) if shapes[name][0] == padded]
    shapes.update((name, (vocab_size, *shapes[name][1:])) for name in cut)
    conversions = conversions_to_revert(model)
    stand_in = WholeShapes(model, conversions)

    def gathered(group: Group) -> list[nn.Parameter]:
        return [parameters[name] for _, name in group.sources if name in parameters]

    groups = plan_export(model, shapes, conversions)
    for part in in_parts(groups, lambda group: sum(map(whole_bytes, gathered(group)))):
        with torch.no_grad(), whole([weight for group in part for weight in gathered(group)]):
            for group in part if writes else ():
                values = {name: tensors[name].data for _, name in group.sources}
                values.update((name, values[name][:vocab_size]) for name in cut if name in values)
                if group.key:  # what is put together anew is so on the host
                    values = {name: value.cpu() for name, value in values.items()}
                yield from convert_export(group, values, stand_in).items()


def _adapter_tensors(
    model: nn.Module, adapter: Adapter, *, vocab_size: int, writes: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """peft's names and the whole values of an adapter, as of ``_as_files_have_it``; a weight of
    several names under each. Collective."""
    named = model.named_parameters(remove_duplicate=False)
    trained = [(name, parameter) for name, parameter in named if name in adapter.trained]
    tables = vocabulary_parameters(model)
    for part in in_parts(trained, lambda pair: whole_bytes(pair[1])):
        with torch.no_grad(), whole(list({id(p): p for _, p in part}.values())):
            for name, parameter in part if writes else ():
                value = parameter.detach()
                yield exported_name(name), value[:vocab_size] if id(parameter) in tables else value


def vocabulary_names(model: nn.Module) -> list[str]:
    """The parameters that have a row for each token, tied ones under their first name."""
    tables = vocabulary_parameters(model)
    return [name for name, parameter in model.named_parameters() if id(parameter) in tables]


def check_export(directory: Path, model: nn.Module, config: Any) -> None:
    """Raise RuntimeError unless every weight of a model of ``config`` is on disk, in its shape.

    Read from the files' headers: a weight saved from one shard only has shape [0] or a part.
    """
    on_disk = Checkpoint(sorted(directory.glob("*.safetensors"))).shapes
    with torch.device("meta"):
        empty: Any = type(model)(config)
    empty.tie_weights()
    values = dict(empty.named_parameters())
    conversions = conversions_to_revert(model)
    stand_in = WholeShapes(empty, conversions)
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    expected = {
        name: tuple(tensor.shape)
        for group in plan_export(empty, shapes, conversions)
        for name, tensor in convert_export(group, values, stand_in).items()
    }
    differing = [name for name, shape in expected.items() if on_disk.get(name) != shape]
    if differing:
        name = differing[0]
        raise RuntimeError(
            f"The exported model is wrong in {len(differing)} of {len(expected)} weights, e.g. "
            f"{name}: {on_disk.get(name)} on disk, {expected[name]} in the model. Nothing was put "
            "in place."
        )
