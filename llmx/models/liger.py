"""Liger-Kernel's fused norms, rotary embeddings and gated products, where they are right.

``model.liger_kernel=null`` uses them on CUDA where the package is installed on every host and a
tiny model of the same config has the same loss and gradient with them as without. Cross entropy
stays ours, at target positions (``llmx.models.loss``). Shown by
``python -m pytest tests/unit/test_train_isolation.py``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from llmx.collectives import first_problem
from llmx.config import ModelConfig
from llmx.errors import ConfigError
from llmx.models.isolation import computed_alone, line_of, tiny_model
from llmx.models.tiny import tiny_config

FULL_PRECISION, LOW_PRECISION = (1e-4, 1e-3), (0.01, 0.05)
"""Tolerances of loss and gradient: in 16 bits the kernels round at other places than modules."""


def wants_liger(
    model: ModelConfig, config: Any, *, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether this run uses Liger-Kernel: the same answer on all ranks. Collective.

    Raises ConfigError where it was asked for and cannot be had or is wrong.
    """
    choice = model.liger_kernel
    if choice is False or (choice is None and device.type != "cuda"):
        return False
    problem = liger_problem(config, device=device, dtype=dtype, remote=model.trust_remote_code)
    failure = first_problem(problem)
    if failure is None:
        if torch.distributed.get_rank() == 0:
            print("Liger-Kernel computes norms, rotary embeddings and gated products.", flush=True)
        return True
    rank, text = failure
    if choice:
        raise ConfigError(
            f"model.liger_kernel=true does not work on rank {rank}: {text}. "
            "Set model.liger_kernel=null, which leaves it off here."
        )
    if torch.distributed.get_rank() == 0 and text != NOT_INSTALLED:
        print(f"Liger-Kernel is not used: rank {rank}: {text}.", flush=True)
    return False


NOT_INSTALLED = "the package is not installed there (pip install liger-kernel)"


def liger_problem(
    config: Any, *, device: torch.device, dtype: torch.dtype, remote: bool = False
) -> str | None:
    """Why Liger-Kernel is not right for this model on this device; None where a tiny model of the
    same config computes the same loss and gradient with it as without."""
    if importlib.util.find_spec("liger_kernel") is None:
        return NOT_INSTALLED
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        if config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
            return f"it has no kernels for the architecture {config.model_type}"
    except ImportError as error:
        return f"this version of it does not fit: {line_of(error)}"
    try:
        model = tiny_model(tiny_config(config, real_heads=True), remote=remote).to(
            device=device, dtype=dtype
        )
    except Exception as error:
        return f"no small model of its class could be tried ({line_of(error)})"
    name = type(model).__name__
    with _patches_undone(model):
        try:
            without = computed_alone(model, device)
            apply_liger(model)
            fused = computed_alone(model, device)
        except Exception as error:
            return f"{name} fails with it: {type(error).__name__}: {line_of(error)}"
    tolerances = FULL_PRECISION if dtype == torch.float32 else LOW_PRECISION
    difference = fused.difference(without, tolerances)
    return None if difference is None else f"{name} has another loss ({difference})"


def apply_liger(model: nn.Module) -> None:
    """Give the modules of ``model`` Liger-Kernel's ``forward``; they stay what they are, with
    DeepSpeed's hooks."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(
        model=model, cross_entropy=False, fused_linear_cross_entropy=False
    )


@contextlib.contextmanager
def _patches_undone(model: nn.Module) -> Iterator[None]:
    """Afterwards the modelling file has its own functions again: Liger-Kernel replaces some there,
    for every model of the process."""
    namespace = vars(sys.modules[type(model).__module__])
    before = dict(namespace)
    try:
        yield
    finally:
        namespace.clear()
        namespace.update(before)
