"""One checkpoint from live state to a committed directory, in a thread of its own. Needs torch.

``HostCopies`` holds the copy of the state that the thread writes while training continues.
``SaveJob`` is the save. It is collective, over a group that no other thread uses: after each step
the ranks gather whether it succeeded (docs/development/contracts.md, "Checkpoints"). When one rank
fails, all abandon the save, and the checkpoints before it are left as they are. When to save is
decided by ``llmx.train.saver``.

Tried by ``python -m pytest tests/unit/test_train_save.py``; on a GPU by ``tests/gpu``.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from llmx.checkpoint import commit
from llmx.checkpoint.fragments import BUFFER, FROZEN, MASTER, check_cover, cover_of
from llmx.checkpoint.manifest import (
    STATE,
    CheckpointError,
    FileEntry,
    Manifest,
    rank_file,
)
from llmx.checkpoint.retention import apply_retention, take_inventory
from llmx.checkpoint.state.engine_state import StateTensor, as_buffer, combine, lanes
from llmx.checkpoint.tensors import Fragment, TensorSpec, TensorWriter
from llmx.collectives import all_gather
from llmx.config import CheckpointConfig
from llmx.errors import LlmxError, storage_fault
from llmx.hardware.survey import ram_available
from llmx.spread import StorageTopology

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
        """Bytes that the last copy took, which the next one uses again."""
        return sum(block.nbytes for block in self._blocks)

    def copy(self, fragments: Iterable[StateTensor]) -> list[StateTensor]:
        """Copy all elements, those from a device perhaps as more fragments. Waits for the copy."""
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
            for device in {fragment.tensor.device for fragment in fragments}:
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


def fits(num_bytes: int, *, group: Any = None) -> bool:
    """Whether every host has memory for the copies of all its ranks. ``num_bytes``: of this one.

    The same answer on every rank. Collective.
    """
    host = Path("/proc/sys/kernel/random/boot_id")
    name = (socket.gethostname(), host.read_text() if host.exists() else "")
    by_rank = all_gather((name, num_bytes, ram_available() or 0), group=group)
    return all(room_for(by_rank, host) for host in {entry[0] for entry in by_rank})


def room_for(by_rank: Sequence[tuple[Any, int, int]], host: Any) -> bool:
    """Whether the copies of all ranks of ``host`` fit into its memory. ``by_rank``: (host, bytes to
    copy, bytes available)."""
    num_bytes = sum(entry[1] for entry in by_rank if entry[0] == host)
    available = min(entry[2] for entry in by_rank if entry[0] == host)
    return num_bytes <= (1 - RESERVE) * available


T = TypeVar("T")


class SaveFailed(LlmxError, RuntimeError):
    """A checkpoint was not saved, on all ranks alike."""

    def __init__(self, message: str, *, fault: int = 0) -> None:
        super().__init__(message)
        self.fault = fault
        """The errno of a disk that is full or fails; 0 for another cause."""


@dataclass
class SaveJob:
    """A checkpoint that is being saved: its content, and the thread that writes it."""

    step: int
    fragments: Sequence[StateTensor]
    state: Mapping[str, Any]
    """``state.json`` without the hash of the weights."""
    small_files: Mapping[str, bytes]
    topology: StorageTopology
    group: Any
    hosts: Sequence[str]
    """Host of each rank, for the manifest."""
    run_id: str
    config: CheckpointConfig
    damaged: frozenset[int]
    """Steps whose checkpoint is not usable: neither counted nor removed."""
    on_end: Callable[[SaveJob], None]
    """Called by the thread when the save is over, well or not."""
    num_rollbacks: int = 0
    """How often the run was rolled back so far."""
    blocking_s: float = 0.0
    """How long training was blocked: by the copy, and ``in_foreground`` by the rest, too."""
    in_foreground: bool = False
    num_bytes: int = 0
    """Over all ranks; known when it is done."""
    background_s: float = 0.0
    error: BaseException | None = None
    warning: str = ""
    """What failed after the commit: older checkpoints that could not be removed."""
    _thread: threading.Thread | None = field(default=None, repr=False)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it is over, well or not."""
        assert self._thread is not None
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        began = time.perf_counter()
        if not self.in_foreground:  # where cores are scarce, training goes first
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        try:
            self._save()
        except BaseException as error:
            self.error = error
        # The copy of the state is as large as the state.
        self.fragments = ()
        took_s = time.perf_counter() - began
        if self.in_foreground:
            self.blocking_s += took_s
        else:
            self.background_s = took_s
        try:
            self.on_end(self)
        except OSError as error:  # a disk so full that not even the event could be written
            self.error = error

    def _save(self) -> None:
        directory, step, topology = self.topology.directory, self.step, self.topology
        specs = [TensorSpec(f.key, f.dtype, f.tensor.numel()) for f in self.fragments]
        writer = commit.rank_writer(directory, step, topology.rank, specs)
        manifest: Manifest | None = None
        try:
            self._on_leaders(lambda: commit.begin(directory, step))
            orders = self._on_all_ranks(lambda: self._reserve(writer))
            self._on_rank_0(lambda: self._check_cover(orders))
            parameters = self.state["parameters"]
            names = [name for name, entry in parameters.items() if not entry["tied_to"]]
            written = self._on_all_ranks(lambda: write_fragments(writer, self.fragments, names))
            sums = torch.stack([sums_of_rank for _, sums_of_rank in written])
            # Rank 0's, so that hosts with disks of their own write the same bytes.
            state = self._on_rank_0(
                lambda: {**self.state, "weights_hash": combine(names, sums.sum(dim=0))}
            )
            small = self._on_leaders(lambda: self._add_small(state))
            files = {rank_file(rank): entry for rank, (entry, _) in enumerate(written)}
            manifest = self._on_rank_0(lambda: self._manifest(files, small))
            self._on_leaders(lambda: commit.write_manifest(directory, step, manifest))
            self._on_leaders(lambda: commit.publish(directory, step))
        except BaseException as error:
            # What this host has published is withdrawn only where all ranks know of the failure:
            # if the all-gather itself broke, another rank may have seen a success and removed the
            # checkpoint before this one.
            published = manifest if isinstance(error, SaveFailed) else None
            with contextlib.suppress(OSError):
                writer.close()
            with contextlib.suppress(OSError):
                if topology.leads:
                    commit.abandon(directory, step, published=published)
            raise
        self.num_bytes = manifest.num_bytes
        # From here on the checkpoint counts, whatever happens.
        try:
            inventories = self._on_leaders(
                lambda: take_inventory(
                    directory, storage=topology.storage, metric=self.config.metric
                )
            )
            self._on_leaders(
                lambda: apply_retention(
                    directory, inventories, step, damaged=self.damaged, config=self.config
                )
            )
        except SaveFailed as error:
            self.warning = str(error)

    def _on_all_ranks(self, act: Callable[[], Any]) -> list[Any]:
        """Call ``act`` on every rank; the results, by rank. SaveFailed on all if one failed."""
        value, failure = None, None
        try:
            value = act()
        except Exception as error:
            fault = getattr(storage_fault(error), "errno", 0)
            text = str(error) if isinstance(error, (OSError, LlmxError)) else repr(error)
            failure = (f"{text} (rank {self.topology.rank} on {socket.gethostname()})", fault)
        outcomes = all_gather((value, failure), group=self.group)
        failures = [failure for _, failure in outcomes if failure is not None]
        if failures:
            raise SaveFailed(failures[0][0], fault=max(code for _, code in failures))
        return [value for value, _ in outcomes]

    def _on_leaders(self, act: Callable[[], Any]) -> list[Any]:
        """Call ``act`` on the ranks that act for a storage; the results by rank, else None."""
        return self._on_all_ranks(lambda: act() if self.topology.leads else None)

    def _on_rank_0(self, act: Callable[[], T]) -> T:
        """Call ``act`` on rank 0 alone; its result, on all ranks."""
        result: T = self._on_all_ranks(lambda: act() if self.topology.rank == 0 else None)[0]
        return result

    def _reserve(self, writer: TensorWriter) -> list[TensorSpec]:
        writer.reserve()
        return writer.order

    def _check_cover(self, orders: list[list[TensorSpec]]) -> None:
        cover = cover_of({rank_file(rank): order for rank, order in enumerate(orders)})
        states = self.state.get("optimizer", {}).get("states")
        check_cover(cover, self.state["parameters"], self.state.get("buffers"), states)

    def _add_small(self, state: Mapping[str, Any]) -> dict[str, FileEntry]:
        text = json.dumps(state, indent=1, ensure_ascii=False) + "\n"
        files = {**self.small_files, STATE: text.encode()}
        return {
            name: commit.add_file(self.topology.directory, self.step, name, data)
            for name, data in files.items()
        }

    def _manifest(
        self, files: dict[str, FileEntry], small: list[dict[str, FileEntry] | None]
    ) -> Manifest:
        """The manifest for all storages; made by rank 0, which leads its storage."""
        first = small[0]
        assert first is not None
        for rank, entries in enumerate(small):
            if entries and entries != first:
                raise SaveFailed(f"rank {rank} has written other small files")
        hosts = {rank_file(rank): host for rank, host in enumerate(self.hosts)}
        hosts.update(dict.fromkeys(first, self.hosts[0]))
        return Manifest(
            self.step,
            {**files, **first},
            hosts=hosts,
            run_id=self.run_id,
            num_rollbacks=self.num_rollbacks,
        )


WEIGHTS = (MASTER, FROZEN)


def write_fragments(
    writer: TensorWriter, fragments: Sequence[StateTensor], names: Sequence[str]
) -> tuple[FileEntry, torch.Tensor]:
    """Write, sync and close a rank's file; its part of the hash of the weights (``lanes`` of each
    of the ``names``, [len(names), 2] int64).

    Raises:
        CheckpointError: a value is not finite.
        OSError: the disk is full or broken.
    """
    sums = torch.zeros(len(names), 2, dtype=torch.int64)
    row = {name: number for number, name in enumerate(names)}
    by_key = {fragment.key: fragment for fragment in fragments}

    def values() -> Iterator[Fragment]:
        for spec in writer.order:
            fragment = by_key[spec.key]
            tensor = fragment.tensor.detach().cpu()
            if fragment.state in WEIGHTS:
                sums[row[fragment.name]] += lanes(tensor, fragment.start)
            # What is not trained may be infinite (masks are).
            if fragment.state not in (FROZEN, BUFFER) and not is_finite(tensor):
                raise CheckpointError(f"{fragment.state} of {fragment.name} is not finite")
            yield Fragment(spec.key, spec.dtype, spec.num_elements, as_buffer(tensor))

    with writer:
        return writer.write(values()), sums


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite; makes no copy."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) and torch.isfinite(high))
