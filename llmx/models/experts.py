"""Mixtures of experts: the auxiliary loss that balances them, how balanced they are, ZeRO-3.

The auxiliary loss is transformers' own (Switch Transformer's), added where the model's config says
``output_router_logits: true``, weighted by its ``router_aux_loss_coef``. It is not linear in the
tokens, so what it is taken over must be said: here over each line of a batch (a packed row, or one
padded row), without its padding, and the lines are weighted by their tokens. So it is the same
however the lines are split over ranks and micro batches, and for one line it is the number that
transformers computes. Tried by ``python -m pytest tests/unit/test_train_experts.py``.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from llmx.errors import ConfigError
from llmx.models.loss import to_device

PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]
"""Parameters of ``load_balancing_loss_func`` in nearly all of transformers' models."""


class Routing:
    """Records the routing of tokens in the micro batches of a step, on this rank."""

    def __init__(self, model: nn.Module) -> None:
        self.routers = list(_routers(model))
        self.coefficient = 0.0
        if _wants_loss(model):
            self._num_experts, self._top_k = _loss_arguments(model, self.routers)
            self.coefficient = _coefficient(model) or 0.0
        self._active = False
        self._logits: list[torch.Tensor] = []
        self._chosen: list[torch.Tensor | None] = []
        self._auxiliary: torch.Tensor | None = None
        self.auxiliary_sum: torch.Tensor | None = None
        """Sum over the lines of the step so far: tokens of the line x its auxiliary loss."""
        self.load: torch.Tensor | None = None
        """[routers, experts]: how many tokens of the step each expert has had so far."""
        self._has_hooks = False

    def begin_step(self) -> None:
        self.auxiliary_sum = self.load = None

    @contextmanager
    def watch(self, segment_ids: torch.Tensor) -> Iterator[None]:
        """Inside, one forward of the lines that ``segment_ids`` [B, T] describe (0 is padding)."""
        if not self._has_hooks:  # behind those of DeepSpeed, which change what a module gives
            self._has_hooks = True
            for module, index in self.routers:
                module.register_forward_hook(self._recorder(index))
        self._active, self._logits, self._chosen = True, [], []
        try:
            yield
        finally:
            # Before the backward pass, where activation checkpointing runs the routers again.
            self._active = False
        self._take(segment_ids)
        self._logits, self._chosen = [], []

    def objective(self, loss: torch.Tensor, *, factor: float) -> torch.Tensor:
        """``loss`` with the weighted auxiliary loss of the last forward.

        Args:
            factor: what the sum over tokens is multiplied by: 1 / tokens of the step, and what
                DeepSpeed divides by.
        """
        if self._auxiliary is None:
            return loss
        auxiliary, self._auxiliary = self._auxiliary, None
        return loss + auxiliary * (self.coefficient * factor)

    def _recorder(self, index: int) -> Callable[..., None]:
        def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if self._active:
                parts = output if isinstance(output, tuple) else (output,)
                logits = parts[index]
                self._logits.append(logits.reshape(-1, logits.shape[-1]))
                self._chosen.append(_chosen(parts, num_tokens=len(self._logits[-1])))

        return record

    def _take(self, segment_ids: torch.Tensor) -> None:
        num_lines, length = segment_ids.shape
        device = self._logits[0].device
        # Padding gets a line of its own, which is left out. Known on the CPU: nothing waits.
        line = torch.arange(num_lines)[:, None].expand(-1, length)
        line = to_device(line.where(segment_ids > 0, num_lines).reshape(-1), device)
        tokens = to_device((segment_ids > 0).sum(dim=1).float(), device)
        with torch.no_grad():
            loads = [
                _count(line, chosen, experts=logits.shape[-1], lines=num_lines)[:-1].sum(dim=0)
                for logits, chosen in zip(self._logits, self._chosen, strict=True)
                if chosen is not None and len(chosen) == len(line)
            ]
            if loads:
                load = torch.stack(loads)
                self.load = load if self.load is None else self.load + load
        if self.coefficient:
            line_losses = auxiliary_losses(
                self._logits,
                line,
                tokens=tokens,
                num_experts=self._num_experts,
                top_k=self._top_k,
            )
            self._auxiliary = (line_losses * tokens).sum()
            summed = self._auxiliary.detach()
            before = self.auxiliary_sum
            self.auxiliary_sum = summed if before is None else before + summed

    def measure(self, *, tokens: int) -> dict[str, float]:
        """The routing metrics of a step for its ``train`` line in ``metrics.jsonl``. Collective.

        ``aux_loss``: before it is weighted, over all of the step's ``tokens``.
        ``expert_load_max``: of the worst layer, the load of its busiest expert over the mean
        (1 is balanced). ``experts_idle``: experts without any token, over all layers.
        """
        measured: dict[str, float] = {}
        if self.auxiliary_sum is not None:
            total = self.auxiliary_sum.double()
            torch.distributed.all_reduce(total)
            measured["aux_loss"] = float(total) / max(tokens, 1)
        if self.load is not None:
            load = self.load.double()
            torch.distributed.all_reduce(load)
            mean = load.mean(dim=1, keepdim=True).clamp(min=1e-9)
            measured["expert_load_max"] = float((load / mean).max())
            measured["experts_idle"] = int((load == 0).sum())
        return measured


def auxiliary_losses(
    logits: list[torch.Tensor],
    line: torch.Tensor,
    *,
    tokens: torch.Tensor,
    num_experts: int,
    top_k: int,
) -> torch.Tensor:
    """``load_balancing_loss_func`` of transformers for each line [B], fp32 with a graph.

    Args:
        logits: of each router, [N, experts] for the N = B x T positions.
        line: [N], the line of each position, B for padding.
        tokens: [B], positions of each line without padding.
    """
    num_lines = len(tokens)
    counts = torch.zeros(num_lines + 1, num_experts, device=tokens.device)
    sums = torch.zeros(num_lines + 1, num_experts, device=tokens.device)
    for router_logits in logits:
        probabilities = router_logits.float().softmax(dim=-1)
        chosen = probabilities.detach().topk(top_k, dim=-1).indices
        counts = counts + _count(line, chosen, experts=num_experts, lines=num_lines)
        sums = sums.index_add(0, line, probabilities)
    visits = (tokens * len(logits)).clamp(min=1)[:, None]
    return num_experts * ((counts[:-1] / visits) * (sums[:-1] / visits)).sum(dim=1)


def _count(line: torch.Tensor, chosen: torch.Tensor, *, experts: int, lines: int) -> torch.Tensor:
    """[lines + 1, experts]: how many positions of each line, and of the padding, chose each
    expert."""
    place = (line[:, None] * experts + chosen).reshape(-1)
    table = torch.zeros((lines + 1) * experts, device=chosen.device)
    return table.scatter_add_(0, place, torch.ones_like(place, dtype=table.dtype)).view(-1, experts)


def _chosen(parts: tuple[Any, ...], *, num_tokens: int) -> torch.Tensor | None:
    """The experts [N, k] that a router names for each token, where it does."""
    for part in parts:
        if isinstance(part, torch.Tensor) and part.dtype in (torch.int64, torch.int32):
            flat = part.reshape(-1, part.shape[-1]) if part.dim() > 1 else part[:, None]
            if len(flat) == num_tokens:
                return flat.long()
    return None


def _routers(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Modules that route, each with the place of its logits in its output.

    Transformers' models say so themselves, for ``output_router_logits``.
    """
    recorders: list[Any] = []
    for module in model.modules():
        declared = getattr(module, "_can_record_outputs", None)
        logits = declared.get("router_logits") if isinstance(declared, dict) else None
        for recorder in logits if isinstance(logits, list) else [logits] if logits else []:
            if recorder not in recorders:
                recorders.append(recorder)
    for name, module in model.named_modules():
        for recorder in recorders:
            kind = getattr(recorder, "target_class", recorder)
            part = getattr(recorder, "layer_name", None)
            if isinstance(kind, type) and isinstance(module, kind) and (part or "") in name:
                yield module, getattr(recorder, "index", 0)
                break


def _wants_loss(model: nn.Module) -> bool:
    config: Any = model.config
    configs = (config, config.get_text_config())
    return any(getattr(config, "output_router_logits", False) for config in configs)


def _coefficient(model: nn.Module) -> float | None:
    """The weight of the auxiliary loss; None if the model has none."""
    config: Any = model.config
    for name in ("router_aux_loss_coef", "aux_loss_coef"):  # JetMoe's is the second
        for place in (model, config.get_text_config()):
            if (value := getattr(place, name, None)) is not None:
                return float(value)
    return None


def _loss_function(model: nn.Module) -> Any:
    module = sys.modules[type(model).__module__]
    return getattr(module, "load_balancing_loss_func", None)


def _loss_arguments(model: nn.Module, routers: list[Any]) -> tuple[int, int]:
    """Number of experts, and experts of a token; refuses what has another auxiliary loss."""
    function = _loss_function(model)
    experts, top_k = (getattr(model, name, None) for name in ("num_experts", "num_experts_per_tok"))
    if (
        function is None
        or not routers
        or list(inspect.signature(function).parameters) != PARAMETERS
        or not isinstance(experts, int)
        or not isinstance(top_k, int)
        or _coefficient(model) is None
    ):
        raise ConfigError(
            f"model.config.output_router_logits=true asks for the auxiliary loss of a mixture of "
            f"experts, and {type(model).__name__} has none that llmx knows how to split over "
            "ranks. Set model.config.output_router_logits=false."
        )
    return experts, top_k


def accept_masks(model: nn.Module) -> None:
    """Keep a model with ``output_router_logits: true`` from failing at a mask [B, 1, T, T].

    Its own auxiliary loss takes [B, T] only, and is not used here: ``Routing`` computes it. Once a
    class, for the life of the process.
    """
    original = _loss_function(model)
    if original is None or not _wants_loss(model) or hasattr(original, "__wrapped__"):
        return
    names = list(inspect.signature(original).parameters)

    @functools.wraps(original)
    def tolerant(*arguments: Any, **keywords: Any) -> Any:
        by_name = {**dict(zip(names, arguments, strict=False)), **keywords}
        mask = by_name.get("attention_mask")
        if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 2):
            by_name["attention_mask"] = None
        return original(**by_name)

    vars(sys.modules[type(model).__module__])["load_balancing_loss_func"] = tolerant


def expert_blocks(model: nn.Module) -> list[type[nn.Module]]:
    """Classes of the modules that hold experts, by the names that transformers gives them."""
    classes: list[type[nn.Module]] = []
    for module in model.modules():
        children = module._modules.items()
        if any(
            name == "experts" or (child is not None and type(child).__name__.endswith("Experts"))
            for name, child in children
        ):
            classes.append(type(module))
    return list(dict.fromkeys(classes))


def gather_experts_together(model: nn.Module) -> None:
    """Under ZeRO-3, a block's experts are gathered when the block begins.

    Expert by expert, a rank whose tokens do not need one would not take part in its gathering,
    and all would wait for it forever. Before ``deepspeed.initialize``.
    """
    if blocks := expert_blocks(model):
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(model, blocks)
