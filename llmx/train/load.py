"""Pretrained weights, read tensor by tensor from memory-mapped files.

Under ZeRO-3 rank 0 reads one tensor, broadcasts it, and every rank keeps its shard: neither
the model nor its checkpoint is ever whole in anybody's memory. At the other stages each rank
reads for itself, straight to its device. Tried by
``python -m pytest -m deepspeed tests/integration/test_train_models.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from llmx.config import ModelConfig
from llmx.errors import ConfigError
from llmx.train.initialise import whole

INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WHOLE_FILES = ("model.safetensors", "pytorch_model.bin")

OLD_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.attn\.(masked_)?bias$")
"""Tensors of checkpoints that older versions wrote: computed anew, not learned."""


def checkpoint_files(model: ModelConfig) -> list[Path]:
    """The weight files of ``model.path``, a directory or a Hub id, in a fixed order."""
    directory = _directory(model)
    for name in INDEX_FILES:
        index = directory / name
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            files = [directory / name for name in names]
            absent = [file.name for file in files if not file.is_file()]
            if absent:
                raise ConfigError(
                    f"model.path={model.path}: {name} names {len(absent)} files that are not "
                    f"there, e.g. {absent[0]}. Fetch the model again."
                )
            return files
    for name in WHOLE_FILES:
        if (directory / name).is_file():
            return [directory / name]
    raise ConfigError(
        f"model.path={model.path} has no weights: none of "
        f"{', '.join(INDEX_FILES + WHOLE_FILES)} is in {directory}. "
        "Set model.init=scratch to train from its config alone."
    )


def _directory(model: ModelConfig) -> Path:
    if model.path is None:
        raise ConfigError(
            "model.init=pretrained needs model.path, a directory or a Hub id. "
            "Set it, or model.init=scratch."
        )
    local = Path(model.path).expanduser()
    if local.is_dir():
        return local
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors"]
    try:
        found = Path(snapshot_download(model.path, revision=model.revision, allow_patterns=wanted))
        if not any(found.glob("*.safetensors")):
            wanted = ["*.json", "pytorch_model*.bin"]
            found = Path(
                snapshot_download(model.path, revision=model.revision, allow_patterns=wanted)
            )
    except Exception as error:
        raise ConfigError(
            f"model.path={model.path} is no directory here, and the Hub did not give it: {error} "
            "Set model.path to a local directory, or HF_HOME to a cache that has it."
        ) from error
    return found


class Checkpoint:
    """Tensors by name over all files; each is read when it is asked for."""

    def __init__(self, files: list[Path]) -> None:
        self._file: dict[str, Path] = {}
        self._mapped: dict[str, torch.Tensor] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            if file.suffix == ".safetensors":
                from safetensors import safe_open

                with safe_open(str(file), framework="pt", device="cpu") as opened:
                    for name in list(opened.keys()):
                        self._file[name] = file
                        self._shapes[name] = tuple(opened.get_slice(name).get_shape())
            else:
                # Mapped, not read; and nothing but tensors is unpickled.
                tensors = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
                self._mapped.update(tensors)
                self._shapes.update((name, tuple(x.shape)) for name, x in tensors.items())

    @property
    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """From the file's header: nothing is read."""
        return self._shapes[name]

    def tensor(self, name: str) -> torch.Tensor:
        if name in self._mapped:
            return self._mapped[name]
        from safetensors import safe_open

        # Opened anew each time: the pages that were touched are given back with the tensor,
        # where one open file would in the end hold the whole checkpoint.
        with safe_open(str(self._file[name]), framework="pt", device="cpu") as opened:
            return opened.get_tensor(name)


def names_in_checkpoint(
    wanted: list[str], available: list[str], *, prefix: str
) -> tuple[dict[str, str], list[str]]:
    """Where each name of the model is found, and the names found nowhere.

    Published checkpoints of a base model lack its prefix (``h.0...`` for GPT-2's
    ``transformer.h.0...``), and a model may lack what a checkpoint has.
    """
    have = set(available)
    found: dict[str, str] = {}
    absent: list[str] = []
    for name in wanted:
        bare = name.removeprefix(f"{prefix}.") if prefix else name
        for candidate in (name, bare, f"{prefix}.{name}"):
            if candidate in have:
                found[name] = candidate
                break
        else:
            absent.append(name)
    return found, absent


@torch.no_grad()
def load_weights(model: nn.Module, source: ModelConfig) -> None:
    """Fill every parameter and persistent buffer of ``model``. Collective under ZeRO-3.

    Raises ConfigError that names what the checkpoint lacks, and what it has beyond the model
    (but for tied weights, and buffers of older versions that the architecture may ignore).
    """
    if _renamed(model):
        raise ConfigError(
            f"{type(model).__name__} stores its weights under other names or shapes than it "
            "has in memory (fused experts, say), which is not read piece by piece here. Save "
            "it once with transformers' save_pretrained(save_original_format=False)."
        )
    checkpoint = Checkpoint(checkpoint_files(source))
    targets: dict[str, torch.Tensor] = dict(_persistent(model))
    prefix = getattr(model, "base_model_prefix", "")
    found, absent = names_in_checkpoint(list(targets), checkpoint.names, prefix=prefix)
    if absent:
        raise ConfigError(
            f"model.path={source.path} lacks {len(absent)} of {len(targets)} weights of "
            f"{type(model).__name__}, e.g. {absent[0]}. It has e.g. {checkpoint.names[0]}. "
            "Is it another architecture, or a damaged checkpoint?"
        )
    if unused := unused_names(model, checkpoint.names, set(found.values()), prefix=prefix):
        raise ConfigError(
            f"model.path={source.path} has {len(unused)} weights that {type(model).__name__} "
            f"does not, e.g. {unused[0]}. Trained without them it would be another model. "
            "Remove what changes it from model.config, or choose its own architecture."
        )
    # All of them before the first is read, and on every rank alike: nobody waits for a
    # broadcast that never comes.
    for name, target in targets.items():
        shape, on_disk = tuple(getattr(target, "ds_shape", target.shape)), found[name]
        if checkpoint.shape(on_disk) != shape:
            raise ConfigError(
                f"model.path={source.path}: {name} is {checkpoint.shape(on_disk)} in the "
                f"checkpoint and {shape} in the model. Remove what changes it from model.config."
            )
    for name, target in targets.items():
        _fill(target, checkpoint, found[name])


def unused_names(
    model: nn.Module, available: list[str], used: set[str], *, prefix: str
) -> list[str]:
    """Names of the checkpoint that should be in ``model`` and are not."""
    ignored = [*OLD_BUFFERS, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    pattern = re.compile("|".join(f"(?:{one})" for one in ignored))
    # A tied weight is a parameter once, and may be in the checkpoint under each of its names.
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return [
        name
        for name in sorted(set(available) - used)
        if not known & {name, f"{prefix}.{name}"} and not pattern.search(name)
    ]


def _fill(target: torch.Tensor, checkpoint: Checkpoint, key: str) -> None:
    sharded = isinstance(target, nn.Parameter) and hasattr(target, "ds_id")
    # The broadcast of rank 0's values reaches the others: they need not read at all.
    reads = not sharded or torch.distributed.get_rank() == 0
    with whole([target] if isinstance(target, nn.Parameter) else [], modified=True):
        if reads:
            target.copy_(checkpoint.tensor(key))


def _persistent(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters (tied ones once) and the buffers that a checkpoint holds."""
    yield from model.named_parameters()
    for module_name, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{module_name}.{name}" if module_name else name), buffer


def _renamed(model: nn.Module) -> bool:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(get_model_conversion_mapping(model, add_legacy=False))
