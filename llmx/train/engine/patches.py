"""Two faults of DeepSpeed's engine, corrected in a running one.

What ZeRO-3 fetches ahead and keeps is known for training and for other forward passes apart. The
dynamic fp16 loss scale grows after an update and not within it.

Shown by ``python -m pytest -m deepspeed tests/integration/test_train_engines.py``; without llmx by
``python docs/upstream/deepspeed_zero3_gathers_after_eval.py`` and ``python
docs/upstream/deepspeed_fp16_growing_scale.py``.
"""

from __future__ import annotations

from typing import Any

import torch

from llmx.checkpoint.state.values import loss_scaler


def know_passes_apart(engine: Any) -> None:
    """Let ``engine`` remember several orders of its modules: one of the passes that train, and for
    each network one of its passes without gradients.

    DeepSpeed 0.19.8 has one coordinator (``PartitionedParameterCoordinator``), which learns the
    order of modules from a forward pass and what follows it, and what to release after each of
    them. A pass in another order makes it learn anew: the two micro steps after an evaluation fetch
    nothing ahead. What it releases is not even learned anew (``__params_to_release`` is cached by
    module and place, over the end of an order): after an evaluation that came first, as that before
    training does, each forward pass of training releases all parameters, and the backward pass
    gathers them one by one. Where a loss takes a pass without gradients in each micro step
    (``embed``, a live reference), or several passes before the backward pass (``ppo``), nothing was
    ever fetched ahead.

    Nothing happens at other stages.
    """
    offload = getattr(engine.optimizer, "parameter_offload", None)
    if offload is not None:
        offload.param_coordinator = ByPass(offload)


def another(offload: Any) -> Any:
    """A coordinator like the one that ``DeepSpeedZeRoOffload`` has made for itself."""
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    return PartitionedParameterCoordinator(
        prefetch_bucket_sz=offload._prefetch_bucket_sz,
        max_reuse_distance_in_numel=offload._max_reuse_distance_in_numel,
        max_available_parameters_in_numel=offload._max_available_parameters_in_numel,
        allgather_stream=offload._DeepSpeedZeRoOffload__allgather_stream,
        # One for all: what is under way when another one takes over is waited for.
        inflight_param_registry=offload.module.ds_inflight_param_registry,
        prefetch_nvme=offload.offload_device == OffloadDeviceEnum.nvme,
        timers=offload.timers,
        zero_quantized_weights=offload.zero_quantized_weights,
        zero_quantized_nontrainable_weights=offload.zero_quantized_nontrainable_weights,
        fast_sharding_for_leaf_module=offload.fast_sharding_for_leaf_module,
        log_trace_cache_warnings=offload.log_trace_cache_warnings,
    )


class ByPass:
    """Several coordinators in the place of one: forward passes go to the one that is theirs, what
    happens within a backward pass (what is computed again there, too) to that of training. So a
    pass without gradients may lie between a forward pass and its backward pass, and all forward
    passes with gradients before a backward pass are one order with it."""

    def __init__(self, offload: Any) -> None:
        self._offload, self._modules = offload, list(offload.module.modules())
        self._training = self._current = another(offload)
        self._others: dict[str, Any] = {}
        """Coordinators of evaluations, by network."""
        self._external: dict[Any, int] = {}
        self._network = ""
        self._goes_on = False
        """A forward pass has begun whose backward pass is to come."""
        offload.module.register_forward_pre_hook(self._note, prepend=True, with_kwargs=True)

    def _note(self, _module: Any, _inputs: Any, named_inputs: dict[str, Any]) -> None:
        self._network = named_inputs.get("network_name", "")

    def reset_step(self) -> None:
        """A forward pass begins: DeepSpeed calls this before each one. Collective while an order is
        being learned."""
        if not self._offload.forward_hooks:
            return  # within whole_weights, nothing is fetched
        if torch.is_grad_enabled():
            self._current, goes_on = self._training, self._goes_on
            self._goes_on = True
            if goes_on:
                return
        else:
            self._current = self._without_gradients(self._network)
        # DeepSpeed's external parameters are of other modules: peft's layers look at the weights of
        # their adapters. Once used, they are fetched for it; an order without them is an error.
        external = sum(len(module._external_params) for module in self._modules)
        if external != self._external.get(self._current, 0) and self._current.is_complete_trace():
            self._current._invalidate_trace()
        self._external[self._current] = external
        self._current.reset_step()

    def release_backward_leftovers(self) -> None:
        """A backward pass has ended."""
        self._training.release_backward_leftovers()
        self._goes_on = False
        # Of modules that are called without the engine, which is not seen to begin.
        self._current = self._without_gradients("")

    def _without_gradients(self, network: str) -> Any:
        if network not in self._others:
            self._others[network] = another(self._offload)
        return self._others[network]

    def _invalidate_trace(self) -> None:
        """Hooks are registered anew, after ``whole_weights``. What is learned counts, since no
        pass within was seen; it must not be left for later, as modules have other ids by then."""
        for coordinator in (self._training, *self._others.values()):
            if coordinator.is_record_trace():
                coordinator.reset_step()

    def is_invalid_trace(self) -> bool:
        """Asked before hooks are registered anew."""
        return False

    def __getattr__(self, name: str) -> Any:
        # DeepSpeed asks in the same way, in the thread of the hook.
        in_backward = torch._C._current_graph_task_id() != -1
        return getattr(self._training if in_backward else self._current, name)


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
