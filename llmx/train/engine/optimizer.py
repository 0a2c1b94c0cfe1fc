"""The optimizer that DeepSpeed wraps: ``optim.kind``, its parameter groups, what it needs built.

Parts of a network may have learning rates of their own, as factors of the schedule's:
``optim.layer_decay``, ``optim.lr_scale``, ``optim.muon_lr`` and ``adapter.lr``. Parameters with the
same factor share a group of the optimizer, so the schedule keeps their ratios.

Tried by ``python -m pytest tests/unit/test_train_optimizer.py``.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from llmx.config import AdapterConfig, OptimConfig
from llmx.config.accelerators import ACCELERATORS
from llmx.config.optimizers import EMBEDDINGS, HEAD, layer_factor, layer_number, optimizer_of
from llmx.errors import ConfigError
from llmx.models.adapter_names import is_added
from llmx.models.parameters import matching_parameters, whole_shape
from llmx.train.engine.muon import MATRICES, hidden_matrices


class Lion(torch.optim.Optimizer):
    """Keeps one number an element (``exp_avg``); weight decay is decoupled, as in AdamW.

    An update has the size ``lr`` in every element, so the learning rate is 3 to 10 times smaller
    than AdamW's, and the weight decay larger by as much.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. DeepSpeed passes no closure."""
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient = self.state[parameter], parameter.grad
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                average = state["exp_avg"]
                update = torch.lerp(average, gradient.to(average.dtype), 1 - beta1).sign_()
                parameter.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr)
                average.lerp_(gradient.to(average.dtype), 1 - beta2)


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
        for by_muon in (True, False) if matrices else (False,):
            for decays in (True, False):
                group = {"params": [], "weight_decay": weight_decay if decays else 0.0}
                if scale != 1.0:
                    group[LR_SCALE] = scale
                if matrices:
                    group[MATRICES] = by_muon
                groups[scale, by_muon, decays] = group
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
    kind = optimizer_of(optim.kind)
    matrices = hidden_matrices(model) if kind.matrices_apart else set()
    if kind.matrices_apart and not matrices:
        raise ConfigError(
            f"optim.kind={optim.kind}: {type(model).__name__} has no trained matrix inside a "
            "numbered layer. Set optim.kind=adamw."
        )
    groups = parameter_groups(
        model, weight_decay=optim.weight_decay, apart=apart, matrices=matrices
    )
    if kind.compiled:
        _need_compiler(optim.kind)
    fused = ACCELERATORS[accelerator].is_gpu or offloaded
    try:
        optimizer: torch.optim.Optimizer = imported(kind.factory)(groups, optim, fused=fused)
    except (RuntimeError, OSError, ImportError) as error:
        if not kind.compiled:
            raise
        raise ConfigError(
            f"DeepSpeed could not build its extension for optim.kind={optim.kind}: {error} "
            "Set optim.kind=adamw, which is PyTorch's own and needs no build."
        ) from error
    return optimizer


def own(groups: list[dict[str, Any]], optim: OptimConfig, *, fused: bool) -> torch.optim.Optimizer:
    """The factory of all kinds in ``CLASSES``."""
    path, keywords = CLASSES[optim.kind]
    values = {
        "lr": optim.lr,
        "betas": (optim.betas[0], optim.betas[1]),
        "eps": optim.eps,
        "fused": fused or None,
        "momentum": optim.muon_momentum,
        "adjust": optim.muon_adjust_lr,
    }
    try:
        make = imported(path)
    except (ImportError, RuntimeError, OSError) as error:
        if optim.kind != "adam8bit":
            raise
        raise ConfigError(
            f"optim.kind=adam8bit needs the package bitsandbytes, which cannot be imported here "
            f"({error}). Run `pip install llmx[qlora]` in the Python of every host."
        ) from error
    optimizer: torch.optim.Optimizer = make(groups, **{name: values[name] for name in keywords})
    return optimizer


ADAM = ("lr", "betas", "eps")
CLASSES = {
    "adamw": ("torch.optim:AdamW", (*ADAM, "fused")),
    "cpu_adam": ("deepspeed.ops.adam:DeepSpeedCPUAdam", ADAM),
    "fused_adam": ("deepspeed.ops.adam:FusedAdam", ADAM),
    "lion": (f"{__name__}:Lion", ("lr", "betas")),
    "sgd": ("torch.optim:SGD", ("lr",)),
    "muon": ("llmx.train.engine.muon:Muon", (*ADAM, "fused", "momentum", "adjust")),
    "adafactor": ("torch.optim:Adafactor", ("lr",)),
    "adam8bit": ("bitsandbytes.optim:AdamW8bit", ADAM),
}
"""Value of ``optim.kind`` -> the class, and the settings that it takes."""


def imported(path: str) -> Any:
    """What ``module:name`` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


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


def lr_scales(
    optim: OptimConfig, adapter: AdapterConfig, networks: Iterable[nn.Module]
) -> dict[int, float]:
    """Id of a trained parameter -> its part of the schedule's learning rate; left out where it is
    all of it.

    Raises:
        ConfigError: a pattern of ``optim.lr_scale`` matches no trained parameter, or there are no
            layers for ``optim.layer_decay``.
    """
    networks = list(networks)
    trained_parameters = [
        (name, parameter, network)
        for network in networks
        for name, parameter in network.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    ]
    for pattern in optim.lr_scale:
        names = [name for name, _, _ in trained_parameters]
        matching_parameters("optim.lr_scale", pattern, names, "trained parameters")
    trained = {id(network): network for _, _, network in trained_parameters}
    decays = {key: LayerDecay(network, optim) for key, network in trained.items()}
    beside_adapter = 1.0
    if adapter.kind != "none" and adapter.lr is not None:
        beside_adapter = optim.lr / adapter.lr
    matrices: set[int] = set()
    if optim.kind == "muon" and optim.muon_lr is not None:
        matrices = {matrix for network in networks for matrix in hidden_matrices(network)}
    factors: dict[int, float] = {}
    for name, parameter, network in trained_parameters:
        factor = decays[id(network)].factor(name)
        factor *= 1.0 if is_added(name) else beside_adapter
        if id(parameter) in matrices and optim.muon_lr is not None:
            adapter_lr = adapter.lr if is_added(name) else None
            factor *= optim.muon_lr / (adapter_lr or optim.lr)
        for pattern, scale in optim.lr_scale.items():
            factor *= scale if fnmatchcase(name, pattern) else 1.0
        # A tied weight is looked up by its first name: an embedding, where it is the head, too.
        factors.setdefault(id(parameter), factor)
    return {key: factor for key, factor in factors.items() if factor != 1.0}


class LayerDecay:
    """The factors of ``optim.layer_decay`` for the parameters of one network."""

    def __init__(self, network: nn.Module, optim: OptimConfig) -> None:
        self._decay = optim.layer_decay
        numbers = [layer_number(name) for name, _ in network.named_parameters()]
        self._layers = max((number for number in numbers if number is not None), default=-1) + 1
        self._embeddings = tuple(f"{name}." for name in _embeddings(network))
        if self._decay is not None and not self._layers:
            raise ConfigError(
                f"optim.layer_decay={self._decay}: {type(network).__name__} has no numbered "
                "layers. Set optim.layer_decay=null, or name its parts in optim.lr_scale."
            )

    def factor(self, name: str) -> float:
        if self._decay is None:
            return 1.0
        place: int | str | None = layer_number(name)
        if place is None:
            place = EMBEDDINGS if name.startswith(self._embeddings) else HEAD
        return layer_factor(self._decay, place, num_layers=self._layers)


def _embeddings(network: nn.Module) -> Iterator[str]:
    """Modules below the first layer: tables, and what is called so (the norm of BERT's)."""
    for name, module in network.named_modules():
        if isinstance(module, nn.Embedding) or "embed" in name.rpartition(".")[2]:
            yield name
