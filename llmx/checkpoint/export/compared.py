"""Checks an export: compares the outputs of the model in another format with transformers'.

Imports torch. Tried by ``python -m pytest tests/unit/test_export_formats.py``.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import warnings
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from typing import Any

import torch

from llmx.checkpoint.manifest import CheckpointError
from llmx.errors import ConfigError
from llmx.models.model import auto_class, head_of

SHAPES = ((2, 9), (1, 1), (3, 17))
"""Batch and sequence: several, as neither may be fixed in the file."""
LIMITS = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 5e-2, "q8_0": 1e-1}
"""The largest relative difference of the outputs (of their norms), by the precision of the file."""

Answer = Callable[[dict[str, torch.Tensor]], torch.Tensor]
PACKAGES = {"onnx": ("onnx", "onnxruntime", "onnxscript"), "gguf": ("gguf",)}


def require_packages(form: str) -> None:
    """ConfigError with what has to be installed for ``form``, where that is missing."""
    missing = [name for name in PACKAGES.get(form, ()) if util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"--to {form} needs packages that are not installed here: {', '.join(missing)}. Run "
            f"`pip install llmx[{form}]`."
        )


def load_model(directory: Path, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """The model of a Hugging Face directory on the CPU in fp32, as it answers in use."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    loader = auto_class(head_of(config), config)
    with quiet():
        model = loader.from_pretrained(
            directory, dtype=torch.float32, trust_remote_code=trust_remote_code, **options
        )
    return model.eval()


def questions(model: Any, names: tuple[str, ...]) -> list[dict[str, torch.Tensor]]:
    """Inputs of each of ``SHAPES``: random tokens; the last rows are padded at their end."""
    generator = torch.Generator().manual_seed(0)
    pad = model.config.pad_token_id
    batches = []
    longest = int(getattr(model.config, "max_position_embeddings", None) or 2**30)
    for batch, length in SHAPES:
        length = min(length, longest)
        ids = torch.randint(0, model.config.vocab_size, (batch, length), generator=generator)
        if pad is not None:
            ids[ids == pad] = (pad + 1) % model.config.vocab_size
        mask = torch.ones_like(ids)
        if batch > 1 and length > 4:
            mask[-1, -3:] = 0
            ids[-1, -3:] = pad or 0
        values = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
        batches.append({name: values[name] for name in names})
    return batches


def compare(
    batches: list[dict[str, torch.Tensor]], references: list[torch.Tensor], answer: Answer,
    *, precision: str, name: str,
) -> str:  # fmt: skip
    """Raise CheckpointError where ``answer`` is another model; else say by how much it differs."""
    worst = 0.0
    for inputs, reference in zip(batches, references, strict=True):
        output = answer(inputs).float()
        if output.shape != reference.shape:
            raise CheckpointError(
                f"{name} gives {tuple(output.shape)}, where transformers gives "
                f"{tuple(reference.shape)}. Nothing was left there."
            )
        if reference.dim() == 3 and "attention_mask" in inputs:  # what padding says does not count
            is_token = inputs["attention_mask"].bool()
            output, reference = output[is_token], reference[is_token]
        difference = float((output - reference).norm() / reference.norm().clamp_min(1e-12))
        worst = max(worst, difference if difference == difference else float("inf"))
    if worst > LIMITS[precision]:
        raise CheckpointError(
            f"{name} answers otherwise than transformers: the outputs differ by {worst:.2g} of "
            f"their norm, and {LIMITS[precision]:g} is the limit for {precision}. Nothing was left "
            "there."
        )
    return f"outputs differ by {worst:.1e} from transformers' (limit {LIMITS[precision]:g})"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, libraries print no warnings, progress bars and notes of missing packages."""
    from transformers.utils import logging as transformers_logging

    bars = transformers_logging.is_progress_bar_enabled()
    loggers = [logging.getLogger(name) for name in ("transformers", "torch.onnx", "gguf")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        gc.collect()
