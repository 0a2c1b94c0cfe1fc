"""The model's parameters from restored master values, as DeepSpeed refreshes them after a step.

Master values and the model's own (half-precision, gathered, second copies) are different memory
at most stages; after a restore all of them must agree. Tried by
``python -m pytest -m deepspeed tests/integration/test_state_resume.py``.
"""

from __future__ import annotations

from typing import Any

import torch


def before_restore(engine: Any) -> None:
    """Give back what ZeRO-3 has gathered: a gathered parameter would hide the new values."""
    if hasattr(engine.optimizer, "checkpoint_event_prologue"):
        engine.optimizer.checkpoint_event_prologue()


@torch.no_grad()
def refresh_model(engine: Any) -> None:
    """Make the model's parameters those of the master values. Collective."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp16_partitioned_groups"):
        _stage3(optimizer, engine.module)
    elif hasattr(optimizer, "update_lp_params"):  # stages 1 and 2
        optimizer.update_lp_params()
    elif hasattr(optimizer, "fp32_groups"):
        for group, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for parameter, master in zip(group, masters, strict=True):
                parameter.data.copy_(master.data)
    elif hasattr(optimizer, "fp32_groups_flat"):
        for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            offset = 0
            for parameter in group:
                values = flat.data[offset : offset + parameter.numel()]
                parameter.data.copy_(values.view_as(parameter))
                offset += parameter.numel()


def forget_dummy_step(engine: Any) -> None:
    """Undo the update that DeepSpeed makes at the start of stage 0 in half precision.

    It steps the optimizer once on gradients of zero to allocate its states, which decays the
    master values and counts as a step: the run would differ from the other stages' ever after
    (``FP16_UnfusedOptimizer.initialize_optimizer_states``).
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "loss_scale_config"):
        optimizer.optimizer.state.clear()
        optimizer.refresh_fp32_params()


def _stage3(optimizer: Any, module: Any) -> None:
    for number in range(len(optimizer.fp16_groups)):
        if not optimizer._swappable_optimizer_subgroup(number):  # else done with its restoring
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
    # hpZ's second copy within a host: made anew at the next gathering. DeepSpeed forgets those
    # of trained parameters at each step; here those of frozen ones are outdated, too.
    for parameter in module.parameters():
        parameter.ds_secondary_tensor = None
    optimizer.checkpoint_event_epilogue()
