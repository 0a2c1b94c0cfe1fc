"""What ZeRO-3 fetches ahead and keeps, known for training and for other forward passes apart.

Shown by ``python -m pytest -m deepspeed tests/integration/test_train_engines.py``; without llmx by
``python docs/upstream/deepspeed_zero3_gathers_after_eval.py``.
"""

from __future__ import annotations

from typing import Any

import torch


def know_evaluations_apart(engine: Any) -> None:
    """Let ``engine`` remember two orders of its modules: of passes with gradients, and without.

    DeepSpeed 0.19.8 has one coordinator (``PartitionedParameterCoordinator``), which learns the
    order of modules from a pass, and what to release after each of them. A pass in another order
    makes it learn anew: the two micro steps after an evaluation fetch nothing ahead. What it
    releases is not even learned anew (``__params_to_release`` is cached by module and place, over
    the end of an order): after an evaluation that came first, as that before training does, each
    forward pass of training releases all parameters, and the backward pass gathers them one by one.
    Where a loss takes a pass without gradients in each micro step (``embed``, a live reference),
    nothing was ever fetched ahead.

    Nothing happens at other stages.
    """
    offload = getattr(engine.optimizer, "parameter_offload", None)
    if offload is not None:
        offload.param_coordinator = ByGradients(offload.param_coordinator, another(offload))


def another(offload: Any) -> Any:
    """A coordinator like the one that ``DeepSpeedZeRoOffload`` has made for itself."""
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

    return type(offload.param_coordinator)(
        prefetch_bucket_sz=offload._prefetch_bucket_sz,
        max_reuse_distance_in_numel=offload._max_reuse_distance_in_numel,
        max_available_parameters_in_numel=offload._max_available_parameters_in_numel,
        allgather_stream=offload._DeepSpeedZeRoOffload__allgather_stream,
        # One for both: what is under way when the other one takes over is waited for.
        inflight_param_registry=offload.module.ds_inflight_param_registry,
        prefetch_nvme=offload.offload_device == OffloadDeviceEnum.nvme,
        timers=offload.timers,
        zero_quantized_weights=offload.zero_quantized_weights,
        zero_quantized_nontrainable_weights=offload.zero_quantized_nontrainable_weights,
        fast_sharding_for_leaf_module=offload.fast_sharding_for_leaf_module,
        log_trace_cache_warnings=offload.log_trace_cache_warnings,
    )


class ByGradients:
    """Both coordinators in the place of one: the one of the pass that is under way. What computes
    again within a backward pass (activation checkpointing) begins no pass."""

    def __init__(self, training: Any, other: Any) -> None:
        self._training, self._other = training, other
        self._current = training

    def reset_step(self) -> None:
        """A forward pass begins: DeepSpeed calls this before each one. Collective while an order is
        being learned."""
        wanted = self._training if torch.is_grad_enabled() else self._other
        if wanted is not self._current:
            # An order that was just learned counts from here on. Left for later, it would have
            # modules whose hooks, and ids, are others by then (``whole_weights``).
            if self._current.is_record_trace():
                self._current.reset_step()
            self._current = wanted
        self._current.reset_step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._current, name)
