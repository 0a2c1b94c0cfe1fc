"""What ZeRO-3 gathers ahead of the module that needs it, and what only when that begins."""

from __future__ import annotations

from typing import Any

from tests.pretend_gpu.report import Report


def install(report: Report) -> None:
    """To be called after llmx is imported."""
    from deepspeed.runtime.zero import partitioned_param_coordinator as of_zero

    coordinator = of_zero.PartitionedParameterCoordinator
    fetch = coordinator.fetch_sub_module
    gather = coordinator._PartitionedParameterCoordinator__all_gather_params

    def fetch_sub_module(self: Any, current_submodule: Any, forward: bool) -> None:
        self.fetches_for = current_submodule
        fetch(self, current_submodule, forward)

    def all_gather_params(self: Any, params: set[Any], forward: bool) -> None:
        module = self.fetches_for
        own = {p.ds_id for p in of_zero.iter_params(module, recurse=of_zero.z3_leaf_module(module))}
        for param in params:
            if param.ds_status == of_zero.ZeroParamStatus.NOT_AVAILABLE:
                report.fetch(training=module.training, ahead=param.ds_id not in own)
        gather(self, params, forward)

    coordinator.fetch_sub_module = fetch_sub_module
    coordinator._PartitionedParameterCoordinator__all_gather_params = all_gather_params
