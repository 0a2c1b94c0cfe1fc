"""The copy of the state that a thread writes while training continues, and whether a host has
memory for it.

Tried by ``python -m pytest tests/unit/test_train_host_copies.py tests/unit/test_train_saver.py``;
on a GPU by ``tests/gpu``.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from llmx.checkpoint.state.engine_state import StateTensor
from llmx.collectives import all_gather

BLOCK_BYTES = 64 * 2**20
"""Page-locked at a time: PyTorch rounds such a request up to a power of two."""
ALIGNMENT = 8
"""Bytes; a block is a multiple of it."""


class HostCopies:
    """Copies of a state in host memory, for a thread that writes them while training continues.

    What lives on a device goes to page-locked memory, at the speed of the bus; it is kept for
    the next copy, since to lock pages takes longer than to fill them. So a copy is good until the
    next one. What lives in host memory gets memory of its own each time.
    """

    def __init__(
        self,
        *,
        devices: Collection[str] = ("cuda",),
        allocate: Callable[[int], torch.Tensor] = lambda num_bytes: torch.empty(
            num_bytes, dtype=torch.uint8, pin_memory=True
        ),
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._devices, self._allocate, self._block_bytes = devices, allocate, block_bytes
        self._blocks: list[torch.Tensor] = []

    @property
    def held_bytes(self) -> int:
        """What a copy needs no more: it is here from the last one."""
        return sum(block.nbytes for block in self._blocks)

    def copy(self, fragments: Iterable[StateTensor]) -> list[StateTensor]:
        """The same elements, those from a device perhaps cut into more fragments. Waits for it."""
        fragments = list(fragments)
        try:
            copies, at = [], 0
            for fragment in fragments:
                if fragment.tensor.device.type in self._devices and fragment.tensor.numel():
                    pieces, at = self._into_blocks(fragment, at)
                    copies += pieces
                else:
                    copies.append(_own_copy(fragment))
        except RuntimeError:
            # The system lets no more pages be locked: slower, and as good.
            self._devices, self._blocks = (), []
            return [_own_copy(fragment) for fragment in fragments]
        finally:
            for device in {each.tensor.device for each in fragments}:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
        return copies

    def _into_blocks(self, fragment: StateTensor, at: int) -> tuple[list[StateTensor], int]:
        """``at``: bytes of the blocks that are taken. Returns the copy, and the same after it."""
        values, pieces, done = fragment.tensor.detach(), [], 0
        at = -(-at // ALIGNMENT) * ALIGNMENT
        while done < len(values):
            number, offset = divmod(at, self._block_bytes)
            if number == len(self._blocks):
                self._blocks.append(self._allocate(self._block_bytes))
            part = values[done : done + (self._block_bytes - offset) // values.element_size()]
            into = self._blocks[number][offset : offset + part.nbytes].view(values.dtype)
            into.copy_(part, non_blocking=True)
            pieces.append(replace(fragment, start=fragment.start + done, tensor=into))
            done += len(part)
            at += part.nbytes
        return pieces, at


def _own_copy(fragment: StateTensor) -> StateTensor:
    return replace(fragment, tensor=fragment.tensor.detach().to("cpu", copy=True))


RESERVE = 0.2
"""Part of the free memory that a copy of the state never takes."""


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may still take: of the host, and of its control groups (which is
    what a container or a job is killed by)."""
    free = [_meminfo(root / "proc/meminfo")]
    for group, files in _control_groups(root):
        limit = _number(group / files.limit)
        if limit is not None:
            # The kernel frees pages of files before it kills anything.
            cached = _stat(group / "memory.stat", files.cached)
            free.append(limit - (_number(group / files.used) or 0) + cached)
    return max(0, min(free))


def fits(num_bytes: int, *, group: Any = None) -> bool:
    """Whether every host has memory for the copies of all its ranks. ``num_bytes``: of this one.

    The same answer on every rank. Collective.
    """
    host = Path("/proc/sys/kernel/random/boot_id")
    name = (socket.gethostname(), host.read_text() if host.exists() else "")
    everyone = all_gather((name, num_bytes, available_bytes()), group=group)
    return all(room_for(everyone, host) for host in {entry[0] for entry in everyone})


def room_for(everyone: Sequence[tuple[Any, int, int]], host: Any) -> bool:
    """``everyone``: (host, bytes to copy, bytes available) of each rank."""
    wanted = sum(entry[1] for entry in everyone if entry[0] == host)
    available = min(entry[2] for entry in everyone if entry[0] == host)
    return wanted <= (1 - RESERVE) * available


@dataclass(frozen=True)
class _Files:
    """The files of a control group with its limit and usage."""

    limit: str
    used: str
    cached: str
    """A line of its ``memory.stat``."""


_SECOND = _Files("memory.max", "memory.current", "inactive_file")
_FIRST = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""By version of the kernel's interface."""


def _control_groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """This process's own and those above it, each with its limit: a job of Slurm or a service is
    in a group far below the root. In a container the names may be those of the host, and only
    the root is there."""
    mounted = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, name = line.split(":", 2)
        first = "memory" in controllers.split(",")
        if first or not controllers:
            base, files = (mounted / "memory", _FIRST) if first else (mounted, _SECOND)
            own = PurePosixPath(name.lstrip("/"))
            for group in (own, *own.parents):
                yield base / group, files


def _meminfo(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such group, or "max"
        return None


def _stat(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
