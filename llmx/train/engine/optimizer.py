"""The optimizer that DeepSpeed wraps: ``optim.kind``, its parameter groups, what it needs built."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from llmx.config import OptimConfig
from llmx.config.optimizers import optimizer_of
from llmx.errors import ConfigError
from llmx.models.parameters import whole_shape
from llmx.train.engine.lion import Lion
from llmx.train.engine.muon import MATRICES, Muon, hidden_matrices


def load_muon_uncompiled() -> None:
    """Load DeepSpeed's Muon kernels without compiling them: it loads them to compare types, and
    ``torch.compile`` would bring in all of inductor, a fifth of the start of a rank. Nothing here
    uses them (``llmx.train.engine.muon``)."""
    from deepspeed.runtime import compiler

    real = compiler.compile
    compiler.compile = lambda: lambda function: function
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    except ImportError:
        return  # a DeepSpeed without them
    finally:
        compiler.compile = real


Groups = list[dict[str, Any]]
LR_SCALE = "lr_scale"
"""Key of a parameter group: its part of the learning rate; left out where it is all of it."""


def parameter_groups(
    model: nn.Module,
    *,
    weight_decay: float,
    apart: Mapping[int, float] | None = None,
    matrices: Collection[int] = (),
) -> list[dict[str, Any]]:
    """Matrices decay, vectors (biases and norms) do not. Order as in the model.

    ``matrices``: ids of those that Muon updates, in groups of their own.
    ``apart``: id of a parameter -> its part of the schedule's learning rate (``lr_scales``).
    """
    apart = apart or {}
    groups: dict[tuple[float, bool, bool], dict[str, Any]] = {}
    for scale in dict.fromkeys((1.0, *apart.values())):
        own = {} if scale == 1.0 else {LR_SCALE: scale}
        for by_muon in (True, False) if matrices else (False,):
            mark = {MATRICES: by_muon} if matrices else {}
            for decays in (True, False):
                decay = weight_decay if decays else 0.0
                groups[scale, by_muon, decays] = {
                    "params": [],
                    "weight_decay": decay,
                    **own,
                    **mark,
                }
    for parameter in model.parameters():
        if parameter.requires_grad:
            decays = len(whole_shape(parameter)) > 1
            key = apart.get(id(parameter), 1.0), id(parameter) in matrices, decays
            groups[key]["params"].append(parameter)
    return [group for group in groups.values() if group["params"]]


def build_optimizer(
    model: nn.Module,
    optim: OptimConfig,
    *,
    accelerator: str,
    offloaded: bool = False,
    apart: Mapping[int, float] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer that DeepSpeed wraps. The learning rate is set at every step.
    ``apart`` as of ``parameter_groups``.

    AdamW is one fused kernel on CUDA, which moves a quarter of the memory, and on the CPU of an
    offload, where it is eight times as fast. A run on CPU ranks keeps the plain one: its results
    are those that were recorded.
    """
    optimizer = optimizer_of(optim.kind)
    matrices = hidden_matrices(model) if optimizer.matrices_apart else set()
    if optimizer.matrices_apart and not matrices:
        raise ConfigError(
            f"optim.kind={optim.kind}: {type(model).__name__} has no trained matrix inside a "
            "numbered layer. Set optim.kind=adamw."
        )
    groups = parameter_groups(
        model, weight_decay=optim.weight_decay, apart=apart, matrices=matrices
    )
    module, _, name = optimizer.factory.partition(":")
    make = getattr(importlib.import_module(module), name)
    fused = accelerator == "cuda" or offloaded
    if not optimizer.compiled:
        made: torch.optim.Optimizer = make(groups, optim, fused=fused)
        return made
    _need_compiler(optim.kind)
    try:
        made = make(groups, optim, fused=fused)
    except (RuntimeError, OSError, ImportError) as error:
        raise ConfigError(
            f"DeepSpeed could not build its extension for optim.kind={optim.kind}: {error} "
            "Set optim.kind=adamw, which is PyTorch's own and needs no build."
        ) from error
    return made


def adamw(groups: Groups, optim: OptimConfig, *, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, **_adam(optim), fused=fused or None)


def sgd(groups: Groups, optim: OptimConfig, *, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=optim.lr)


def adafactor(groups: Groups, optim: OptimConfig, *, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(groups, lr=optim.lr)


def lion(groups: Groups, optim: OptimConfig, *, fused: bool) -> torch.optim.Optimizer:
    return Lion(groups, lr=optim.lr, betas=(optim.betas[0], optim.betas[1]))


def muon(groups: Groups, optim: OptimConfig, *, fused: bool) -> torch.optim.Optimizer:
    momentum, adjust = optim.muon_momentum, optim.muon_adjust_lr
    return Muon(groups, **_adam(optim), momentum=momentum, adjust=adjust, fused=fused or None)


def adam8bit(groups: Groups, optim: OptimConfig, *, fused: bool) -> torch.optim.Optimizer:
    try:
        from bitsandbytes.optim import AdamW8bit
    except (ImportError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"optim.kind=adam8bit needs the package bitsandbytes, which cannot be imported here "
            f"({error}). Run `pip install llmx[qlora]` in the Python of every host."
        ) from error
    made: torch.optim.Optimizer = AdamW8bit(groups, **_adam(optim))
    return made


def cpu_adam(groups: Groups, optim: OptimConfig, *, fused: bool) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    made: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, **_adam(optim), adamw_mode=True)
    return made


def fused_adam(groups: Groups, optim: OptimConfig, *, fused: bool) -> torch.optim.Optimizer:
    if not fused:
        raise ConfigError("optim.kind=fused_adam needs CUDA. Set optim.kind=adamw.")
    from deepspeed.ops.adam import FusedAdam

    made: torch.optim.Optimizer = FusedAdam(groups, **_adam(optim), adam_w_mode=True)
    return made


def _adam(optim: OptimConfig) -> dict[str, Any]:
    return {"lr": optim.lr, "betas": (optim.betas[0], optim.betas[1]), "eps": optim.eps}


def _need_compiler(kind: str) -> None:
    missing = []
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        missing.append("a C++ compiler (apt-get install g++)")
    if not shutil.which("ninja"):
        missing.append("ninja (pip install ninja)")
    if missing:
        raise ConfigError(
            f"optim.kind={kind} is an extension that DeepSpeed compiles on each host, and this "
            f"one lacks {' and '.join(missing)}. Install it, or set optim.kind=adamw."
        )
