"""One checkpoint from copied state to committed directory, in a thread of its own.

All ranks do this together, over a group that no other thread uses: a step, a vote, the next step
(docs/contracts.md, "Checkpoints"). Whatever fails on one rank, all give the save up alike, and
the checkpoints before it stay as they are.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmx.checkpoint import commit
from llmx.checkpoint.distributed.topology import Place, exchange
from llmx.checkpoint.fragments import check_cover, cover_of
from llmx.checkpoint.manifest import STATE, FileEntry, Manifest, make_manifest, rank_file
from llmx.checkpoint.save.fragments import Sums, hash_of_weights, specs_of, write_fragments
from llmx.checkpoint.state.engine_state import StateTensor
from llmx.checkpoint.tensors import TensorSpec, TensorWriter
from llmx.checkpoint.tidy import look_around, tidy
from llmx.config import CheckpointConfig
from llmx.errors import LlmxError
from llmx.train.save_files import state_text

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class SaveFailed(LlmxError, RuntimeError):
    """A checkpoint was given up, on all ranks alike."""

    def __init__(self, message: str, *, disk_full: bool) -> None:
        super().__init__(message)
        self.disk_full = disk_full


@dataclass
class SaveJob:
    """What is saved, and where."""

    step: int
    fragments: Sequence[StateTensor]
    state: Mapping[str, Any]
    """``state.json`` without the hash of the weights."""
    small_files: Mapping[str, bytes]
    place: Place
    group: Any
    hosts: Sequence[str]
    """Of each rank, for the manifest."""
    run_id: str
    config: CheckpointConfig
    damaged: frozenset[int]
    """Steps whose checkpoint is not usable: neither counted nor removed."""
    on_end: Callable[[SaveJob], None]
    """Called by the thread when the save is over, well or not."""
    course: int = 0
    """How often the run was sent back so far."""
    stall_s: float = 0.0
    """How long training waited for the copy; it also waits for the rest ``in_foreground``."""
    in_foreground: bool = False
    num_bytes: int = 0
    """Over all ranks; known when it is done."""
    background_s: float = 0.0
    error: BaseException | None = None
    warning: str = ""
    """What failed after the commit: older checkpoints that could not be removed."""
    _thread: threading.Thread | None = field(default=None, repr=False)

    def start(self) -> None:
        """Begin in a thread."""
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it is over, well or not."""
        assert self._thread is not None
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        began = time.perf_counter()
        if not self.in_foreground:
            give_way()
        try:
            self._save()
        except BaseException as error:
            self.error = error
        # The copy of the state is as large as the state.
        self.fragments = ()
        took_s = time.perf_counter() - began
        if self.in_foreground:
            self.stall_s += took_s
        else:
            self.background_s = took_s
        try:
            self.on_end(self)
        except OSError as error:  # a disk so full that not even the event could be written
            self.error = error

    def _save(self) -> None:
        directory, step, place = self.place.directory, self.step, self.place
        writer = commit.rank_writer(directory, step, place.rank, specs_of(self.fragments))
        manifest: Manifest | None = None
        try:
            self._together(lambda: commit.begin(directory, step) if place.leads else None)
            specs = self._together(lambda: self._reserve(writer))
            self._together(lambda: self._check_cover(specs) if place.rank == 0 else None)
            written = self._together(lambda: write_fragments(writer, self.fragments))
            # Rank 0's, so that hosts with disks of their own write the same bytes.
            state = self._together(
                lambda: self._with_hash([sums for _, sums in written]) if place.rank == 0 else None
            )[0]
            small = self._together(lambda: self._add_small(state) if place.leads else {})
            files = {rank_file(rank): entry for rank, (entry, _) in enumerate(written)}
            manifest = self._together(lambda: self._manifest(files, small))[0]
            self._together(
                lambda: commit.write_manifest(directory, step, manifest) if place.leads else None
            )
            self._together(lambda: commit.publish(directory, step) if place.leads else None)
        except BaseException as error:
            # What this host has published is taken back only where all know that one failed:
            # if it was the exchange that broke, another rank may have heard that all is well,
            # and have removed the checkpoint before this one.
            published = manifest if isinstance(error, SaveFailed) else None
            with contextlib.suppress(OSError):
                writer.close()
            with contextlib.suppress(OSError):
                if place.leads:
                    commit.abandon(directory, step, published=published)
            raise
        assert manifest is not None
        self.num_bytes = manifest.num_bytes
        # From here on the checkpoint stands, whatever happens.
        try:
            metric = self.config.metric
            found = self._together(
                lambda: look_around(directory, metric=metric) if place.leads else None
            )
            self._together(
                lambda: (
                    tidy(directory, found, step, damaged=self.damaged, config=self.config)
                    if place.leads
                    else None
                )
            )
        except SaveFailed as error:
            self.warning = str(error)

    def _together(self, act: Callable[[], Any]) -> list[Any]:
        """Every rank does its part; what all have returned, by rank. SaveFailed on all ranks if
        one failed."""
        value, failure = None, None
        try:
            value = act()
        except Exception as error:
            full = isinstance(error, OSError) and error.errno in NO_SPACE
            text = str(error) if isinstance(error, (OSError, LlmxError)) else repr(error)
            failure = (f"{text} (rank {self.place.rank} on {socket.gethostname()})", full)
        outcomes = exchange((value, failure), group=self.group)
        failures = [failure for _, failure in outcomes if failure is not None]
        if failures:
            raise SaveFailed(failures[0][0], disk_full=any(full for _, full in failures))
        return [value for value, _ in outcomes]

    def _reserve(self, writer: TensorWriter) -> list[TensorSpec]:
        writer.reserve()
        return writer.order

    def _check_cover(self, specs: list[list[TensorSpec]]) -> None:
        cover = cover_of({rank_file(rank): order for rank, order in enumerate(specs)})
        check_cover(cover, self.state["parameters"], self.state.get("buffers"))

    def _with_hash(self, sums: list[Sums]) -> dict[str, Any]:
        """The state as rank 0 has it."""
        return {**self.state, "weights_hash": hash_of_weights(self.state["parameters"], sums)}

    def _add_small(self, state: Mapping[str, Any]) -> dict[str, FileEntry]:
        files = {**self.small_files, STATE: state_text(state).encode()}
        return {
            name: commit.add_file(self.place.directory, self.step, name, data)
            for name, data in files.items()
        }

    def _manifest(
        self, files: dict[str, FileEntry], small: list[dict[str, FileEntry]]
    ) -> Manifest | None:
        """One for all; made by rank 0, which leads its storage."""
        if self.place.rank != 0:
            return None
        for rank, entries in enumerate(small):
            if entries and entries != small[0]:
                raise SaveFailed(f"rank {rank} has written other small files", disk_full=False)
        hosts = {rank_file(rank): host for rank, host in enumerate(self.hosts)}
        hosts.update(dict.fromkeys(small[0], self.hosts[0]))
        everything = {**files, **small[0]}
        return make_manifest(
            self.step, everything, hosts=hosts, run_id=self.run_id, course=self.course
        )


def give_way() -> None:
    """Where cores are scarce, training goes first. Linux gives each thread a priority."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
