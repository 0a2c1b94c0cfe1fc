"""The rules of NCCL over gloo: it takes tensors on the GPU of the rank alone, one thread uses a
group, and all ranks call the same collectives in one order. ``differences`` compares what they
called. llmx's own objects go over gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves

from tests.pretend_gpu.devices import Devices, device_of
from tests.pretend_gpu.report import place

CALLS = (
    "all_reduce all_gather all_gather_into_tensor all_gather_single reduce_scatter "
    "reduce_scatter_tensor reduce_scatter_single broadcast reduce barrier all_to_all_single "
    "all_to_all gather scatter send recv"
).split()


def install(devices: Devices) -> None:
    """Replace the calls of ``torch.distributed``, before DeepSpeed takes them."""
    report = devices.report
    on_gloo: set[str] = set()
    threads: dict[str, int] = {}
    new_group, init = distributed_c10d.new_group, distributed_c10d.init_process_group

    def init_process_group(backend: str | None = None, **options: Any) -> None:
        bound = options.pop("device_id", None)
        if bound is not None and bound.index != devices.current:
            raise report.fault(f"NCCL is bound to {bound}, and the rank has set {devices.current}")
        init("gloo", **options)

    def make_group(ranks: Any = None, *words: Any, backend: str | None = None, **options: Any):
        # Bound to a device, NCCL splits the world: every rank has to call it.
        report.collective("world", f"new_group {ranks} {backend}")
        group = new_group(ranks, *words, backend="gloo", **options)
        if backend == "gloo" and isinstance(group, dist.ProcessGroup):
            on_gloo.add(group.group_name)
        return group

    def device_of_objects(group: Any = None) -> str:
        if not _is_gloo(group) and place().startswith("llmx/"):
            raise report.fault("NCCL is given Python objects")
        return "cpu" if _is_gloo(group) else f"cuda:{devices.current}"

    def _is_gloo(group: Any) -> bool:
        return isinstance(group, dist.ProcessGroup) and group.group_name in on_gloo

    def checked(name: str, raw: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **options: Any) -> Any:
            group = options.get("group")
            group = next((w for w in words if isinstance(w, dist.ProcessGroup)), group)
            tensors = [x for x in tree_leaves((words, options)) if isinstance(x, torch.Tensor)]
            if not _is_gloo(group) and any(device_of(x).type != "cuda" for x in tensors):
                raise report.fault(f"NCCL's {name} of a tensor on the CPU")
            this_thread, members = threading.get_ident(), _members(group)
            if not _is_gloo(group) and threads.setdefault(members, this_thread) != this_thread:
                raise report.fault(f"a second thread uses NCCL's group {members}")
            # Objects are pickled: their sizes may differ.
            sizes = sorted((x.numel(), str(x.dtype)) for x in tensors if x.dtype != torch.uint8)
            report.collective(members, f"{name} {sizes}")
            # What gloo copies is not NCCL's.
            watching, report.watching = report.watching, False
            try:
                return raw(*words, **options)
            finally:
                report.watching = watching

        return call

    def set_everywhere(name: str, call: Any) -> None:
        setattr(distributed_c10d, name, call)
        setattr(dist, name, call)

    set_everywhere("init_process_group", init_process_group)
    set_everywhere("new_group", make_group)
    distributed_c10d._get_object_coll_device = device_of_objects
    for name in CALLS:
        if hasattr(distributed_c10d, name):
            set_everywhere(name, checked(name, getattr(distributed_c10d, name)))


def _members(group: Any) -> str:
    """The name of a group, the same on its ranks."""
    if not isinstance(group, dist.ProcessGroup) or group is dist.group.WORLD:
        return "world"
    return f"{group.group_name} of {dist.get_process_group_ranks(group)}"


def differences(reports: list[dict[str, list[Any]]]) -> list[str]:
    """Where ranks call other collectives than the first rank of their group."""
    orders: list[dict[str, list[str]]] = []
    for report in reports:
        order: dict[str, list[str]] = {}
        for group, call, at in report["collective"]:
            order.setdefault(group, []).append(f"{call} at {at}")
        orders.append(order)
    found = []
    for group in sorted(set().union(*orders)):
        ranks = [rank for rank, order in enumerate(orders) if group in order]
        first = orders[ranks[0]][group]
        members = len(orders) if group.startswith("world ") else len(members_of(group))
        if len(ranks) != members:
            found.append(f"{group}: only ranks {ranks} call {first[0]}")
        for rank in ranks[1:]:
            other = orders[rank][group]
            pairs = zip([*first, "nothing"], [*other, "nothing"], strict=False)
            at, (one, two) = next(
                ((n, pair) for n, pair in enumerate(pairs) if pair[0] != pair[1]), (0, ("", ""))
            )
            if one != two:
                found.append(f"{group}, call {at}: rank {ranks[0]}: {one}; rank {rank}: {two}")
    return found


def members_of(group: str) -> list[str]:
    """The ranks in the name of a group."""
    return group[group.index("[") + 1 : group.index("]")].split(",")
