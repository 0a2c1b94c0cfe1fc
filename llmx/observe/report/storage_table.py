"""What a plan takes of its hosts beside device memory, as a table: RAM, NVMe, disk, ``/dev/shm``.

``python -m llmx plan hardware=a100x8 model=llama3_8b`` prints it below the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from llmx import text as human
from llmx.plan.types import HostStorage, Plan, StoragePlan

if TYPE_CHECKING:
    from rich.console import RenderableType

UNKNOWN = "unknown"
RAM_PARTS: tuple[tuple[str, Callable[[HostStorage], int | None]], ...] = (
    ("RAM: processes", lambda host: host.processes_bytes),
    ("RAM: loading", lambda host: host.loading_bytes),
    ("RAM: training", lambda host: host.training_bytes),
    ("RAM: offload", lambda host: host.offload_bytes),
    ("RAM: offload buffers", lambda host: host.staging_bytes),
)


def storage_parts(plan: Plan, here: Mapping[str, Any] | None = None) -> list[RenderableType]:
    """The table, hosts that are alike in one column; nothing of a plan of an older llmx. ``here``:
    what this machine has now (``llmx.hardware.survey.space_facts``)."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    storage = plan.storage
    if storage is None:
        return []
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("")
    for host in storage.hosts:
        table.add_column(host.names, justify="right", overflow="fold")
    for name, values in rows(plan, storage, here or {}):
        if name:
            table.add_row(name, *values)
        else:
            table.add_section()
    return [Text("\nEach host, beside device memory", style="bold"), table]


def rows(
    plan: Plan, storage: StoragePlan, here: Mapping[str, Any]
) -> list[tuple[str, tuple[str, ...]]]:
    """(what, by host); what no host needs is left out. An empty name: a line between sections."""
    hosts = storage.hosts
    local = {host.name for host in plan.hosts if host.is_local}
    found: list[tuple[str, tuple[str, ...]]] = []

    def row(name: str, of: Callable[[HostStorage], int | None], *, always: bool = False) -> None:
        values = [of(host) for host in hosts]
        if always or any(value is None or value for value in values):
            found.append((name, tuple(_size(value) for value in values)))

    def now(name: str, key: str) -> None:
        """What this machine has, below what it needs."""
        if here.get(key) is not None and any(local & set(host.hosts) for host in hosts):
            size = human.size(here[key])
            found.append((name, tuple(size if local & set(h.hosts) else "" for h in hosts)))

    for name, of in RAM_PARTS:
        row(name, of)
    row("RAM at most", lambda host: host.ram_bytes, always=True)
    optional = all(host.saves_optional for host in hosts)
    row("RAM: copies for saves" + ", if free" * optional, lambda host: host.saves_bytes)
    if any(host.ram_has_bytes for host in hosts):
        row("RAM of the host", lambda host: host.ram_has_bytes, always=True)
    now("RAM available now", "ram_available_bytes")
    found.append(("", ()))
    row("NVMe", lambda host: host.nvme_bytes)
    row("disk: one checkpoint", lambda host: host.checkpoint_bytes, always=True)
    at_once = storage.checkpoints_at_once
    many = "no limit" if at_once is None else str(at_once)
    found.append(("disk: checkpoints at once", (many,) * len(hosts)))
    row("disk: model/", lambda host: host.model_bytes)
    found.append(("disk at most", tuple(_disk(storage, host) for host in hosts)))
    now("disk free now", "free_bytes")
    row("disk: weights of the Hub", lambda host: host.download_bytes)
    row("/dev/shm without P2P", lambda host: host.shm_bytes)
    return found


def _disk(storage: StoragePlan, host: HostStorage) -> str:
    if host.checkpoint_bytes is None or host.model_bytes is None:
        return UNKNOWN
    most = storage.disk_bytes(host.checkpoint_bytes, host.model_bytes)
    return "no limit" if most is None else human.size(most)


def _size(value: int | None) -> str:
    return UNKNOWN if value is None else human.size(value)
