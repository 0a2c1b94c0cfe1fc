"""The optimizers by ``optim.kind``: the factory of each, and its properties before a rank exists.

To add one: an ``Optimizer`` and its factory in one file of your package, and an entry point of
``llmx.optimizers`` (``llmx.config.plugins``). No torch here; the ranks import the factory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmx.config.hardware_rules import on_cpus
from llmx.config.plugins import OPTIMIZERS

if TYPE_CHECKING:
    from llmx.config.schema import Experiment


@dataclass(frozen=True)
class Optimizer:
    """One value of ``optim.kind``."""

    factory: str
    """``module:function``, called on a rank as ``factory(groups, optim, fused=...)``; it returns a
    ``torch.optim.Optimizer``. ``groups``: parameter groups with their weight decay; ``optim``: the
    ``OptimConfig``; ``fused``: on CUDA, or on the CPU of an offload."""
    state_bytes: int
    """Bytes of the states of a trained element, beside its master weight."""
    temporary_bytes: int = 0
    """Temporary bytes of an element while it is updated."""
    unfused_bytes: int = 0
    """The same where it is not fused, in addition."""
    matrices_apart: bool = False
    """Whether it keeps only a momentum (4 bytes) of the matrices inside the layers, which get
    parameter groups of their own (``llmx.train.engine.muon``)."""
    needs: Callable[[Experiment], Iterator[str]] = lambda exp: iter(())
    """Yields what keeps an experiment from using it: value, rule and fix."""
    reads: tuple[str, ...] = ("betas", "eps")
    """The settings of ``optim`` that not every optimizer uses, and it does."""
    compiled: str = ""
    """``c++`` or ``cuda``: DeepSpeed compiles it on each host, with that compiler."""
    lr: float | None = None
    """The usual learning rate, where AdamW's says nothing about it."""
    lr_factor: float = 1.0
    """Usual learning rate as a multiple of AdamW's."""


def optimizer_of(kind: str) -> Optimizer:
    """The optimizer that ``optim.kind`` names. Raises ConfigError for one that is not installed."""
    optimizer: Optimizer = OPTIMIZERS.load(kind)
    return optimizer


def state_bytes(kind: str) -> int:
    """Bytes of optimizer states for each trained element, beside its master weight, for most
    parameters."""
    optimizer = optimizer_of(kind)
    return 4 if optimizer.matrices_apart else optimizer.state_bytes


def _fused_adam_needs(exp: Experiment) -> Iterator[str]:
    if on_cpus(exp.hardware):
        yield "optim.kind=fused_adam needs CUDA. Use optim.kind=adamw."
    if exp.zero.offload_optimizer != "none":
        yield (
            "optim.kind=fused_adam runs on the GPU, but the optimizer is offloaded. Use "
            "optim.kind=cpu_adam."
        )


def _adam8bit_needs(exp: Experiment) -> Iterator[str]:
    if exp.zero.stage != 0:
        yield (
            f"optim.kind=adam8bit keeps a scale for each 256 values of a parameter, and zero.stage="
            f"{exp.zero.stage} gives a rank parts of parameters. Use zero=stage0, which is as good "
            "on one GPU; on several, ZeRO shards the moments of optim.kind=adamw."
        )
    if on_cpus(exp.hardware):
        yield (
            "optim.kind=adam8bit needs CUDA: the fast kernels of bitsandbytes are those for GPUs. "
            "Use optim.kind=adamw."
        )


def _adafactor_needs(exp: Experiment) -> Iterator[str]:
    if exp.zero.stage != 0:
        yield (
            f"optim.kind=adafactor keeps a row and a column of each matrix, and zero.stage="
            f"{exp.zero.stage} gives a rank parts of matrices. Use zero=stage0; or optim=muon or "
            "optim=lion, which keep 4 bytes a parameter at every stage."
        )


def _muon_needs(exp: Experiment) -> Iterator[str]:
    if "nvme" in (exp.zero.offload_optimizer, exp.zero.offload_param):
        yield (
            "optim.kind=muon exchanges parts of matrices between ranks, and is not made for states "
            "that are swapped to NVMe. Use zero=stage3_offload, or optim.kind=adamw."
        )


OWN = "llmx.train.engine.optimizer:own"
# PyTorch's AdamW without its fused kernel makes the denominator twice; Lion makes its update. A row
# and a column of a matrix (Adafactor) are next to nothing.
ADAMW = Optimizer(OWN, state_bytes=8, unfused_bytes=8)
CPU_ADAM = Optimizer(OWN, state_bytes=8, compiled="c++")
FUSED_ADAM = Optimizer(OWN, state_bytes=8, compiled="cuda", needs=_fused_adam_needs)
LION = Optimizer(OWN, state_bytes=4, temporary_bytes=4, reads=("betas",), lr_factor=0.25)
SGD = Optimizer(OWN, state_bytes=0, reads=(), lr=1e-2)
MUON = Optimizer(
    OWN,
    state_bytes=8,
    matrices_apart=True,
    needs=_muon_needs,
    reads=("betas", "eps", "muon_lr", "muon_momentum", "muon_adjust_lr"),
)
ADAFACTOR = Optimizer(OWN, state_bytes=0, reads=(), lr=1e-2, needs=_adafactor_needs)
ADAM8BIT = Optimizer(OWN, state_bytes=2, needs=_adam8bit_needs)


EMBEDDINGS, HEAD = "embeddings", "head"
"""What is below the first layer, and what is above the last one."""


def layer_number(parameter: str) -> int | None:
    """The number of the layer that a parameter is in, from its dotted name."""
    return next((int(part) for part in parameter.split(".") if part.isdecimal()), None)


def layer_factor(decay: float, place: int | str, *, num_layers: int) -> float:
    """``decay`` to the power of how many layers ``place`` is below the head: as in BEiT's and
    ELECTRA's fine-tuning, 1 for the head, ``decay`` for the last layer, and so on down."""
    if place == HEAD:
        return 1.0
    number = -1 if place == EMBEDDINGS else int(place)
    return float(decay ** (num_layers - number))
