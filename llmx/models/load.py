"""Pretrained weights, read tensor by tensor from memory-mapped files.

Under ZeRO-3 rank 0 reads one tensor (or the few that become one weight, such as a layer's
experts), broadcasts it, and every rank keeps its shard: neither the model nor its checkpoint is
ever whole in anybody's memory. At the other stages each rank
reads for itself, straight to its device. Tried by
``python -m pytest -m deepspeed tests/integration/test_train_models.py``.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from llmx.config import ModelConfig
from llmx.config.model_rules import quantized_problem
from llmx.errors import ConfigError
from llmx.models.conversion import Group, LoadPlan, WholeShapes, plan_load
from llmx.models.initialise import initialise
from llmx.models.parameters import persistent_buffers, vocabulary_parameters, whole, whole_shape
from llmx.models.pooling import head_names, pooler_names
from llmx.models.spec import BACKBONE, CAUSAL_LM, CLASSIFICATION

INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WHOLE_FILES = ("model.safetensors", "pytorch_model.bin")

PROGRESS_S = 10.0
"""Between two lines on the progress: a log without a new line for long counts as a hang
(``launch.loading_timeout_s``)."""
MEAN_ROWS = 1024
"""Rows of a table that are summed at a time."""

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

    patterns = ["*.json", "*.safetensors"]
    try:
        directory = Path(
            snapshot_download(model.path, revision=model.revision, allow_patterns=patterns)
        )
        if not any(directory.glob("*.safetensors")):
            patterns = ["*.json", "pytorch_model*.bin"]
            directory = Path(
                snapshot_download(model.path, revision=model.revision, allow_patterns=patterns)
            )
    except Exception as error:
        raise ConfigError(
            f"model.path={model.path} is no directory here, and the Hub did not give it: {error} "
            "Set model.path to a local directory, or HF_HOME to a cache that has it."
        ) from error
    return directory


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

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape, from the files' headers: no tensor is read."""
        return dict(self._shapes)

    def tensor(self, name: str) -> torch.Tensor:
        if name in self._mapped:
            return self._mapped[name]
        from safetensors import safe_open

        # Opened anew each time: the pages that were touched are given back with the tensor,
        # where one open file would in the end hold the whole checkpoint.
        with safe_open(str(self._file[name]), framework="pt", device="cpu") as opened:
            value: torch.Tensor = opened.get_tensor(name)
            return value


OnArrival = Callable[[str, torch.Tensor], None]
"""Takes a weight that the model has no memory for (on the meta device), by name."""


@torch.no_grad()
def load_weights(
    model: nn.Module,
    source: ModelConfig,
    *,
    seed: int = 0,
    head: str = CAUSAL_LM,
    replaced: bool = False,
    new_tokens: Sequence[int] = (),
    on_arrival: OnArrival | None = None,
) -> set[str]:
    """Fill every parameter and persistent buffer of ``model``; the names of those that were drawn
    since the checkpoint lacks them. Collective under ZeRO-3.

    Takes what ``from_pretrained`` takes, in the layout of the Hub or in that of memory
    (``llmx.models.conversion``). What it converts is noted on the model for the export.

    Args:
        seed: of what is drawn.
        head: of the model. The checkpoint may lack a classification head, and the pooler of a
            backbone; both leave out what the checkpoint has of another head.
        replaced: draw the head anew, also where the checkpoint has one.
        new_tokens: ids that the checkpoint knows nothing of. Their rows of embedding and head
            become the mean of those of the tokens before them, whether the checkpoint has
            fewer rows than the model or spare ones.
        on_arrival: gets the weights of layers on the meta device (``llmx.models.quantized``).

    Raises ConfigError that names what the checkpoint lacks, and what it has beyond the model
    (but for tied weights, and what the architecture says may be ignored).
    """
    quantization = getattr(getattr(model, "config", None), "quantization_config", None)
    if problem := quantized_problem(quantization, f"model.path={source.path}"):
        raise ConfigError(problem)
    checkpoint = Checkpoint(checkpoint_files(source))
    # Tied parameters under each name.
    targets: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    targets.update(persistent_buffers(model))
    plan = plan_load(model, checkpoint.shapes, targets)
    inside, may_draw = f"{model.base_model_prefix}.", set[str]()
    if head == BACKBONE:
        may_draw = pooler_names(model)
        if any(name.startswith(inside) for name in checkpoint.names):
            plan.unexpected = [name for name in plan.unexpected if name.startswith(inside)]
    elif head == CLASSIFICATION:
        may_draw = head_names(model)
        plan.unexpected = [
            name for name in plan.unexpected if name.startswith(inside) and ".pooler." not in name
        ]
    if replaced:
        plan.drop({name for name in may_draw if not name.startswith(inside)})
    drawn = _check_names(model, source, checkpoint, plan, targets, may_draw=may_draw)
    # All of them before the first is read, and on every rank alike: nobody waits for a
    # broadcast that never comes.
    tables = vocabulary_parameters(model) if new_tokens else set()
    for name, stored_shape in plan.shapes.items():
        shape = whole_shape(targets[name])
        grows = (
            id(targets[name]) in tables
            and stored_shape[0] < shape[0]
            and stored_shape[1:] == shape[1:]
        )
        if stored_shape != shape and not grows:
            raise ConfigError(
                f"model.path={source.path}: {name} is {stored_shape} in the checkpoint and {shape} "
                "in the model. Remove what changes it from model.config."
            )
    _check_tied(source, checkpoint, plan, targets)
    if drawn:
        initialise(model, seed=seed, only=drawn)
    stand_in = WholeShapes(model)
    filled: set[int] = set()
    printed_at = time.monotonic()
    for number, group in enumerate(plan.groups):
        if time.monotonic() - printed_at >= PROGRESS_S:
            printed_at = time.monotonic()
            print(
                f"Loading weights: {number:,} of {len(plan.groups):,}", file=sys.stderr, flush=True
            )
        group_targets = {name: targets[name] for name in group.targets}
        if not {id(target) for target in group_targets.values()} <= filled:
            grown = tables & {id(target) for target in group_targets.values()}
            rows = new_tokens if grown else ()
            _fill(
                group_targets, group, checkpoint, stand_in, new_tokens=rows, on_arrival=on_arrival
            )
        filled.update(id(target) for target in group_targets.values())
    cast(Any, model)._weight_conversions = plan.conversions
    return drawn


def _check_names(
    model: nn.Module,
    source: ModelConfig,
    checkpoint: Checkpoint,
    plan: LoadPlan,
    targets: dict[str, torch.Tensor],
    *,
    may_draw: Collection[str],
) -> set[str]:
    """Raise for weights that are missing on either side; names that the model itself draws."""
    provided = {id(targets[name]) for name in plan.shapes if name in targets}
    absent = [name for name, target in targets.items() if id(target) not in provided]
    may_lack = _pattern(getattr(model, "_keys_to_ignore_on_load_missing", None))
    drawn = {name for name in absent if name in may_draw or may_lack.search(name)}
    if missing := [name for name in absent if name not in drawn]:
        raise ConfigError(
            f"model.path={source.path} lacks {len(missing)} of {len(targets)} weights of "
            f"{type(model).__name__}, e.g. {missing[0]}. It has e.g. {checkpoint.names[0]}. "
            "Is it another architecture, or a damaged checkpoint?"
        )
    ignored = _pattern(getattr(model, "_keys_to_ignore_on_load_unexpected", None), *OLD_BUFFERS)
    unused = [name for name in plan.unexpected if not ignored.search(name)]
    if unused:
        raise ConfigError(
            f"model.path={source.path} has {len(unused)} weights that {type(model).__name__} "
            f"does not, e.g. {unused[0]}. Trained without them it would be another model. "
            "Remove what changes it from model.config, or choose its own architecture."
        )
    return drawn


def _pattern(patterns: Iterable[str] | None, *more: str) -> re.Pattern[str]:
    """Any of ``patterns``; of none, one that is never found."""
    alternatives = [*(patterns or ()), *more]
    return re.compile(
        "|".join(f"(?:{pattern})" for pattern in alternatives) if alternatives else r"(?!)"
    )


def _check_tied(
    source: ModelConfig,
    checkpoint: Checkpoint,
    plan: LoadPlan,
    targets: dict[str, torch.Tensor],
) -> None:
    """Raise where one weight of the model is two different ones in the checkpoint."""
    first: dict[int, str] = {}
    plain = {group.targets[0]: group.sources[0][1] for group in plan.groups if not group.key}
    for name, on_disk in plain.items():
        other = first.setdefault(id(targets[name]), name)
        if other != name and not torch.equal(
            checkpoint.tensor(plain[other]), checkpoint.tensor(on_disk)
        ):
            raise ConfigError(
                f"model.path={source.path}: {other} and {name} are one weight in the model and "
                "two different ones in the checkpoint. Set "
                "model.config.tie_word_embeddings=false."
            )


def _fill(
    targets: dict[str, torch.Tensor],
    group: Group,
    checkpoint: Checkpoint,
    stand_in: WholeShapes,
    *,
    new_tokens: Sequence[int] = (),
    on_arrival: OnArrival | None = None,
) -> None:
    parameters = [target for target in targets.values() if isinstance(target, nn.Parameter)]
    sharded = any(hasattr(parameter, "ds_id") for parameter in parameters)
    # The broadcast of rank 0's values reaches the others: they need not read at all.
    reads = not sharded or torch.distributed.get_rank() == 0
    with whole(parameters, modified=True):
        if reads:
            for name, value in group.convert(checkpoint.tensor, stand_in).items():
                if on_arrival is not None and targets[name].is_meta:
                    on_arrival(name, value)
                elif new_tokens:
                    fill_rows(targets[name], value, new_tokens)
                else:
                    targets[name].copy_(value)


def fill_rows(table: torch.Tensor, value: torch.Tensor, new_tokens: Sequence[int]) -> None:
    """A table of the vocabulary from one with fewer rows, or with spare ones: rows of new tokens
    are the mean of all before the first of them, what else is missing is 0."""
    num_known = min(len(value), min(new_tokens))
    mean = torch.zeros(value.shape[1:], dtype=torch.float64)
    for first in range(0, num_known, MEAN_ROWS):
        mean += value[first : min(first + MEAN_ROWS, num_known)].sum(0, dtype=torch.float64)
    mean /= num_known
    table[: len(value)].copy_(value)
    table[len(value) :].zero_()
    table[list(new_tokens)] = mean.to(table.device, table.dtype)
