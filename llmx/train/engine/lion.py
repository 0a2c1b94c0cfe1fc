"""Lion: the sign of an interpolated momentum (Chen et al. 2023, "Symbolic Discovery of
Optimization Algorithms", algorithm 2).

PyTorch has none, and DeepSpeed's are extensions that every host must compile. Each element is
updated by itself, so parameters can be cut into any parts. Tried by
``python -m pytest tests/unit/test_train_optimizer.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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
        return loss
