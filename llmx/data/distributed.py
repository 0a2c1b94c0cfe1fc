"""All ranks of a run come to the same data: one host prepares it, and sends it to the others.

    stores = prepare_together(data, seed, tokenizer, task, ["train", "eval"], hosts=hosts, host=0)

Each host has a leader, its first rank. The leaders compare what they are to prepare, and which of
them share the disk of the cache. The first host that has the store, else the first host, prepares
it; the disks that lack it get it in a chain. Small values go through the key-value store of the
ranks' rendezvous, in which a rank may wait for hours; a collective would be ended after half an
hour by the time-out of its process group. Files go through a gloo group of all ranks, made when
they are sent.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date as Date
from datetime import timedelta
from pathlib import Path
from typing import Any

from llmx import text as human
from llmx.config import DataConfig
from llmx.data.examples import Encoding
from llmx.data.format.rendering import write_day
from llmx.data.store.build import find_store, prepare, prepare_spec
from llmx.data.store.samples import SampleStore, cannot_write, locked
from llmx.data.store.spec import DatasetSpec, dataset_spec
from llmx.errors import DataError

FOREVER = timedelta(days=365)
"""A preparation may take as long as it takes; if a rank dies, the run is ended from outside."""
CHUNK_BYTES = 16 << 20

_CALLS = itertools.count()
"""Every rank makes the same calls, so they agree on the number of each."""


@dataclass(frozen=True)
class Host:
    """A host of the run: its name and its first rank, which prepares."""

    name: str
    leader: int


def prepare_together(
    data: DataConfig,
    seed: int,
    tokenizer: Any,
    encoding: Encoding,
    splits: list[str],
    *,
    hosts: list[Host],
    host: int,
    date: str | None = None,
) -> list[SampleStore]:
    """The stores of these splits on every rank. Collective; ``encoding`` is the task, ``host`` this
    rank's place in ``hosts``. Waiting has no time-out. Rank 0's ``date`` (of the first attempt; by
    default today) is the day that chat templates write."""
    rank = int(os.environ["RANK"])
    call = next(_CALLS)
    days = RankStore(f"data/{call}")
    if rank == 0:
        days.set("date", date or Date.today().isoformat())
    write_day(Date.fromisoformat(days.get("date")))
    stores: list[SampleStore] = []
    for split in splits:
        values = RankStore(f"data/{call}/{split}")
        spec = None
        if hosts[host].leader == rank:
            spec = dataset_spec(data, seed, tokenizer, encoding, split)
            if len(hosts) > 1:
                chain = _chain(spec, values, hosts, host)
                if host == 0:
                    values.set("chain", chain)
        ranks: list[int] = values.get("chain") if len(hosts) > 1 else [hosts[0].leader]
        if spec is not None and rank == ranks[0]:
            prepare_spec(spec)
            values.set("prepared")
        values.get("prepared")
        if len(ranks) > 1:
            transfer = FileTransfer()  # by all ranks at once, for it is collective
            if spec is not None and rank in ranks:
                _pass_on(spec, transfer, ranks, rank)
            transfer.close()
            if rank == ranks[-1]:
                values.set("sent")
            values.get("sent")
        stores.append(prepare(data, seed, tokenizer, encoding, split=split))
    return stores


def _chain(spec: DatasetSpec, values: RankStore, hosts: list[Host], host: int) -> list[int]:
    """The rank that has or prepares the store, and then one rank for each disk that lacks it.
    Called by one rank of each host.

    Raises DataError where the hosts have other data.
    """
    number = len(hosts)
    disks = storage_topology(values, spec.path.parent, host=host, hosts=number)
    local_facts = {
        "identity": {key: _digest(value) for key, value in spec.identity.items()},
        "store": find_store(spec) is not None,
    }
    facts = values.all_gather("has", local_facts, host=host, hosts=number)
    here = facts[0]["identity"]
    for other, fact in zip(hosts, facts, strict=True):
        there = fact["identity"]
        if there != here:
            different = ", ".join(key for key in here if here[key] != there.get(key))
            raise DataError(
                f"{other.name} would train on other data than {hosts[0].name}: different there: "
                f"{different} (sources are the bytes of {spec.split.path}). Give both the same "
                "files, e.g. by launch.sync=rsync with launch.sync_extra, and the same llmx."
            )
    filled = {disks[index] for index, fact in enumerate(facts) if fact["store"]}
    source = min(filled, default=0)
    lacking = sorted(set(disks) - filled - {disks[source]})
    return [hosts[index].leader for index in (source, *lacking)]


def _pass_on(spec: DatasetSpec, transfer: FileTransfer, ranks: list[int], rank: int) -> None:
    """The finished store goes from each of ``ranks``, of which the first has it, to the next."""
    place = ranks.index(rank)
    following = ranks[place + 1] if place + 1 < len(ranks) else None
    if place == 0:
        assert following is not None
        size = transfer.send(spec.path, to=following)
        print(f"Sent {spec.path.name} ({human.size(size)}) to the other hosts", flush=True)
        return
    with locked(spec.path):
        temporary = spec.path.with_name(f"{spec.path.name}.tmp-received")
        transfer.receive(temporary, source=ranks[place - 1], forward=following)
        SampleStore.open(temporary).verify()
        if find_store(spec) is None:
            temporary.rename(spec.path)
        else:
            shutil.rmtree(temporary)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


class RankStore:
    """A key-value store that every rank reads; each key is written once."""

    def __init__(self, name: str) -> None:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
        )
        self._store = PrefixStore(f"llmx/{name}", store)

    def set(self, key: str, value: Any = None) -> None:
        """Write a value, as JSON."""
        self._store.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        """The value, as soon as it is written, however long that takes."""
        self._store.wait([key], FOREVER)
        return json.loads(self._store.get(key))

    def all_gather(self, key: str, value: Any, *, host: int, hosts: int) -> list[Any]:
        """The values of all hosts, in order; called by one rank of each."""
        self.set(f"{key}/{host}", value)
        return [self.get(f"{key}/{number}") for number in range(hosts)]


class FileTransfer:
    """Sends files from rank to rank. Every rank of the run makes it, whether it sends or not.

    The group has all ranks, although only some of them send: DeepSpeed binds each rank to its GPU
    (``device_id`` of ``init_process_group``), and torch then makes the ranks outside of a new
    group take part in an ``ncclCommSplit`` (``_new_process_group_helper`` in
    ``torch/distributed/distributed_c10d.py``), also for a gloo group, whose members do not: the
    run would hang at the next group that NCCL makes.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        self._group = dist.new_group(backend="gloo", timeout=FOREVER)

    def close(self) -> None:
        """Destroy the process group; nothing can be sent afterwards."""
        import torch.distributed as dist

        dist.destroy_process_group(self._group)

    def send(self, directory: Path, *, to: int) -> int:
        """Send the files of a directory to one rank; returns the bytes."""
        import torch

        files = sorted(path for path in directory.iterdir() if path.name[0] != ".")
        sizes = {path.name: path.stat().st_size for path in files}
        head = json.dumps(sizes).encode()
        self._send(torch.tensor([len(head)]), to)
        self._send(torch.frombuffer(bytearray(head), dtype=torch.uint8), to)
        for path in files:
            with path.open("rb") as stream:
                for length in _chunks(sizes[path.name]):
                    chunk = bytearray(stream.read(length))
                    if len(chunk) != length:
                        raise DataError(f"{path} has changed while it was sent.")
                    self._send(torch.frombuffer(chunk, dtype=torch.uint8), to)
        return sum(sizes.values())

    def receive(self, directory: Path, *, source: int, forward: int | None = None) -> int:
        """Write what ``source`` sends into ``directory``; returns the bytes.

        ``forward``: a rank that gets each chunk passed on as soon as it is here, so that files
        go to many hosts in a chain, in about the time of one transfer.
        """
        import torch

        length = torch.zeros(1, dtype=torch.int64)
        self._receive(length, source, forward)
        head = torch.zeros(int(length), dtype=torch.uint8)
        self._receive(head, source, forward)
        sizes: dict[str, int] = json.loads(head.numpy().tobytes())
        directory.mkdir(parents=True, exist_ok=True)
        for name, size in sizes.items():
            # Whole or not at all: a journal must not be found beside half a file.
            temporary = directory / f".{name}.received"
            with temporary.open("wb") as stream:
                for piece in _chunks(size):
                    chunk = torch.empty(piece, dtype=torch.uint8)
                    self._receive(chunk, source, forward)
                    stream.write(chunk.numpy().data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, directory / Path(name).name)
        return sum(sizes.values())

    def _send(self, tensor: Any, to: int) -> None:
        import torch.distributed as dist

        dist.send(tensor, dst=to, group=self._group)

    def _receive(self, tensor: Any, source: int, forward: int | None) -> None:
        import torch.distributed as dist

        dist.recv(tensor, src=source, group=self._group)
        if forward is not None:
            dist.send(tensor, dst=forward, group=self._group)


def storage_topology(store: RankStore, directory: Path, *, host: int, hosts: int) -> list[int]:
    """The first host that shares ``directory`` with each host. Called by one rank of each host,
    which touches a file there and looks for those of the others."""
    token = store.all_gather("token", uuid.uuid4().hex, host=host, hosts=hosts)[0]
    marks = [directory / f".host-{token}-{number}" for number in range(hosts)]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        marks[host].touch()
    except OSError as error:
        raise cannot_write(directory, error) from error
    store.all_gather("marked", None, host=host, hosts=hosts)
    first_sharing_host = next(number for number, mark in enumerate(marks) if mark.exists())
    topology = store.all_gather("sees", first_sharing_host, host=host, hosts=hosts)
    marks[host].unlink(missing_ok=True)
    return topology


def _chunks(size: int) -> Iterator[int]:
    for start in range(0, size, CHUNK_BYTES):
        yield min(CHUNK_BYTES, size - start)
