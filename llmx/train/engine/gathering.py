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
        offload.param_coordinator = ByGradients(
            offload.param_coordinator, another(offload), list(offload.module.modules())
        )


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
    """Both coordinators in the place of one: forward passes go to the one that is theirs, what
    happens within a backward pass (what is computed again there, too) to that of training. So a
    pass without gradients may lie between a forward pass and its backward pass."""

    def __init__(self, training: Any, other: Any, modules: list[Any]) -> None:
        self._training, self._other, self._modules = training, other, modules
        self._current = training
        self._external = {training: 0, other: 0}

    def reset_step(self) -> None:
        """A forward pass begins: DeepSpeed calls this before each one. Collective while an order is
        being learned."""
        self._current = self._training if torch.is_grad_enabled() else self._other
        # DeepSpeed's external parameters are of other modules: peft's layers look at the weights of
        # their adapters. Once used, they are fetched for it; an order without them is an error.
        external = sum(len(module._external_params) for module in self._modules)
        if external != self._external[self._current] and self._current.is_complete_trace():
            self._current._invalidate_trace()
        self._external[self._current] = external
        self._current.reset_step()

    def release_backward_leftovers(self) -> None:
        """A backward pass has ended."""
        self._training.release_backward_leftovers()

    def _invalidate_trace(self) -> None:
        """Hooks are registered anew (``whole_weights``). Passes without them were of the current
        coordinator; what the other one has learned counts. It must not be left for later: modules
        have other ids by then."""
        if not self._current.is_invalid_trace():
            self._current._invalidate_trace()
        for one in (self._training, self._other):
            if one is not self._current and one.is_record_trace():
                one.reset_step()

    def is_invalid_trace(self) -> bool:
        """Whether nothing is known, nor being learned."""
        return bool(self._training.is_invalid_trace() and self._other.is_invalid_trace())

    def __getattr__(self, name: str) -> Any:
        # DeepSpeed asks in the same way, in the thread of the hook.
        in_backward = torch._C._current_graph_task_id() != -1
        return getattr(self._training if in_backward else self._current, name)
