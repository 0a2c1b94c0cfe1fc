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
from typing import Any, cast

import torch
from torch import nn

from llmx.errors import ConfigError

PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]
"""Parameters of ``load_balancing_loss_func`` in nearly all of transformers' models."""


class Routing:
    """Records the routing of tokens in the micro batches of a step, on this rank."""

    def __init__(self, model: nn.Module) -> None:
        self.routers = list(_routers(model))
        self.coefficient = 0.0
        if _wants_loss(model):
            self._num_experts, self._top_k, self.coefficient = _loss_options(model, self.routers)
        self._active = False
        self._recorded: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        """Logits [N, experts] of each router, and the experts [N, k] that it chose."""
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
        self._active, self._recorded = True, []
        try:
            yield
        finally:
            # Before the backward pass, where activation checkpointing runs the routers again.
            self._active = False
        self._take((segment_ids > 0).sum(dim=1).tolist(), length=segment_ids.shape[1])
        self._recorded = []

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
                logits = parts[index].reshape(-1, parts[index].shape[-1])
                self._recorded.append((logits, _chosen(parts, num_tokens=len(logits))))

        return record

    def _take(self, tokens: list[int], *, length: int) -> None:
        """Count what was recorded of lines of ``length`` positions, whose first ``tokens`` are no
        padding. Known on the CPU: nothing waits for a device."""
        lines = [slice(at * length, at * length + count) for at, count in enumerate(tokens)]
        loads = [
            torch.stack([_count(chosen[line], experts=logits.shape[-1]) for line in lines]).sum(0)
            for logits, chosen in self._recorded
            if chosen is not None and len(chosen) == len(tokens) * length
        ]
        if loads:
            load = torch.stack(loads)
            self.load = load if self.load is None else self.load + load
        if self.coefficient:
            losses = [
                count
                * auxiliary_loss(
                    [logits[line] for logits, _ in self._recorded],
                    num_experts=self._num_experts,
                    top_k=self._top_k,
                )
                for line, count in zip(lines, tokens, strict=True)
            ]
            self._auxiliary = torch.stack(losses).sum()
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


def auxiliary_loss(logits: list[torch.Tensor], *, num_experts: int, top_k: int) -> torch.Tensor:
    """``load_balancing_loss_func`` of transformers for one line, without its table of tokens x
    experts: fp32 with a graph. ``logits``: of each router, [tokens, experts]."""
    counts, sums = (torch.zeros(num_experts, device=logits[0].device) for _ in range(2))
    for router_logits in logits:
        probabilities = router_logits.float().softmax(dim=-1)
        chosen = probabilities.detach().topk(top_k, dim=-1).indices
        counts = counts + _count(chosen, experts=num_experts)
        sums = sums + probabilities.sum(dim=0)
    visits = max(1, len(logits) * len(logits[0]))
    return num_experts * ((counts / visits) * (sums / visits)).sum()


def _count(chosen: torch.Tensor, *, experts: int) -> torch.Tensor:
    """[experts]: how often each of them was chosen."""
    table = torch.zeros(experts, device=chosen.device)
    return table.scatter_add_(0, chosen.reshape(-1), table.new_ones(chosen.numel()))


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


def _loss_function(model: nn.Module) -> Any:
    module = sys.modules[type(model).__module__]
    return getattr(module, "load_balancing_loss_func", None)


def _loss_options(model: nn.Module, routers: list[Any]) -> tuple[int, int, float]:
    """Number of experts, experts of a token and the weight of the auxiliary loss; refuses what has
    another one."""
    function, text = _loss_function(model), cast(Any, model.config).get_text_config()
    experts, top_k = (getattr(model, name, None) for name in ("num_experts", "num_experts_per_tok"))
    weights = [
        getattr(place, name, None)
        for name in ("router_aux_loss_coef", "aux_loss_coef")  # JetMoe's is the second
        for place in (model, text)
    ]
    coefficient = next((float(weight) for weight in weights if weight is not None), None)
    is_known = function and list(inspect.signature(function).parameters) == PARAMETERS
    has_numbers = isinstance(experts, int) and isinstance(top_k, int)
    if is_known and routers and has_numbers and coefficient is not None:
        return cast(int, experts), cast(int, top_k), coefficient
    raise ConfigError(
        f"model.config.output_router_logits=true asks for the auxiliary loss of a mixture of "
        f"experts, and {type(model).__name__} has none that llmx knows how to split over "
        "ranks. Set model.config.output_router_logits=false."
    )


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
