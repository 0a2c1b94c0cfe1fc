"""DeepSpeed's dynamic fp16 loss scale, made to grow after an update and not within it.

Shown by ``python -m pytest -m deepspeed tests/integration/test_train_engines.py``; without llmx by
``python docs/upstream/deepspeed_fp16_growing_scale.py``.
"""

from __future__ import annotations

from typing import Any

from llmx.checkpoint.state.values import loss_scaler


def grow_after_step(engine: Any) -> None:
    """Let the loss scale of ``engine`` grow when its optimizer's step is over.

    DeepSpeed 0.19.8 updates the scale in the middle of ``step`` (``_update_scale``), before it
    divides the gradients by it (``unscale_and_clip_grads``). At the step at which the scale
    doubles, gradients that were computed with the old scale are divided by the new one: that
    update is half of what it should be, at every stage, and at stage 3 the reported norm is, too.
    A scale that shrinks does so at a step that is not made, so that is left as it is.
    """
    scaler, optimizer = loss_scaler(engine), engine.optimizer
    if scaler is None:
        return
    update_scale, step = optimizer._update_scale, optimizer.step
    grown: list[float] = []

    def update_later(*args: Any, **kwargs: Any) -> None:
        before = scaler.cur_scale
        update_scale(*args, **kwargs)
        if scaler.cur_scale > before:
            grown.append(scaler.cur_scale)
            scaler.cur_scale = before

    def step_then_grow(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        if grown:
            scaler.cur_scale = grown.pop()
        return result

    optimizer._update_scale, optimizer.step = update_later, step_then_grow
