"""All ranks of a run come to the same data: found, made by one rank of each host, or in shards.

    stores = prepare_together(exp, tokenizer, task, ["train", "eval"], hosts=plan_hosts, host=0)

On several hosts each prepares a part, where there is enough work; what comes out is the same
bytes as on one. Hosts that share the disk of the cache put their parts there; from others they
are sent, and the finished store is sent back. A host that has no store gets that of another.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmx import text as human
from llmx.config import Experiment
from llmx.data.distributed.shards import assemble, write_shard
from llmx.data.distributed.transfer import Board, Channel, storage_groups
from llmx.data.distributed.units import BY_FILES, Owners, Unit, units_of
from llmx.data.examples import Encoding
from llmx.data.source.progress import PreparationProgress
from llmx.data.store.build import found, note_old_stores, prepare, progress_of
from llmx.data.store.samples import SampleStore, locked
from llmx.data.store.spec import DatasetSpec, dataset_spec
from llmx.data.store.summary import summary
from llmx.data.tokenize.workers import worker_count
from llmx.errors import DataError

_CALLS = itertools.count()
"""Every rank makes the same calls, so they agree on the number of each."""


@dataclass(frozen=True)
class Host:
    """A host of the run: its name and its first rank, which prepares."""

    name: str
    leader: int


@dataclass(frozen=True)
class _Place:
    """Where this process is in the run."""

    hosts: list[Host]
    host: int
    rank: int

    @property
    def leads(self) -> bool:
        return self.hosts[self.host].leader == self.rank


def prepare_together(
    exp: Experiment,
    tokenizer: Any,
    encoding: Encoding,
    splits: list[str],
    *,
    hosts: list[Host],
    host: int,
) -> list[SampleStore]:
    """The stores of these splits on every rank. Collective; ``encoding`` is the task, ``host`` this
    rank's place in ``hosts``. Waiting has no time-out. Rank 0 prints what became of the rows."""
    rank = int(os.environ["RANK"])
    place = _Place(hosts, host, rank)
    board = Board(f"data/{next(_CALLS)}")
    stores: list[SampleStore] = []
    for split in splits:
        if len(hosts) > 1:
            _among_hosts(exp, tokenizer, encoding, split, board, place)
        elif place.leads:
            prepare(exp, tokenizer, encoding, split=split)
            board.post(f"{split}/ready/0")
        board.read(f"{split}/ready/{host}")
        stores.append(prepare(exp, tokenizer, encoding, split=split))
        if rank == 0:
            print(f"Data ({split}): {summary(stores[-1])}", flush=True)
    return stores


def _among_hosts(
    exp: Experiment, tokenizer: Any, encoding: Encoding, split: str, board: Board, place: _Place
) -> None:
    """Bring the store to every host. Called by every rank."""
    spec = dataset_spec(exp, tokenizer, encoding, split) if place.leads else None
    if spec is not None:
        _agree(spec, split, board, place)
    how = board.read(f"{split}/how")
    if how["kind"] == "each":
        if spec is not None:
            prepare(exp, tokenizer, encoding, split=split)
            board.post(f"{split}/ready/{place.host}")
        return
    leaders = [place.hosts[h].leader for h in how["firsts"]]
    started = time.monotonic()
    units, shares = 0, Path()
    if how["kind"] == "share":
        if spec is not None:
            units, shares = _make_shard(spec, how, place)
            board.post(f"{split}/share/{place.host}", units)
        for number in range(len(place.hosts)):
            board.read(f"{split}/share/{number}")
    # All make it at once, for it is collective.
    channel = Channel() if len(leaders) > 1 else None
    first = place.hosts[how["from"]].leader
    if spec is not None and channel is not None and how["kind"] == "share":
        _gather(shares, channel, leaders, first, place.rank)
    if place.rank == first and how["kind"] == "share":
        assert spec is not None
        with locked(spec.path):
            if found(spec) is None:
                facts = {
                    "workers": sum(how["cores"]),
                    "hosts": len(place.hosts),
                    "tokenize_seconds": round(time.monotonic() - started, 3),
                    "resumed_at_row": 0,
                }
                assemble(spec, shares, units=units, how=facts)
    if place.rank == first:
        board.post(f"{split}/whole")
    board.read(f"{split}/whole")
    if spec is not None and channel is not None and place.rank in leaders:
        chain = [first, *(leader for leader in leaders if leader != first)]
        _spread(spec, channel, chain, place.rank)
    if channel is not None:
        channel.close()
    if spec is not None:
        if place.host in how["firsts"]:
            shutil.rmtree(_shards(spec), ignore_errors=True)
            board.post(f"{split}/there/{place.host}")
        board.read(f"{split}/there/{how['group'][place.host]}")
        board.post(f"{split}/ready/{place.host}")


def _agree(spec: DatasetSpec, split: str, board: Board, place: _Place) -> None:
    """The first ranks of all hosts tell what they have; that of the first host decides."""
    everybody = range(len(place.hosts))
    directory = spec.path.parent
    if place.host == 0:
        board.post(f"{split}/token", uuid.uuid4().hex)
    token = board.read(f"{split}/token")
    groups = storage_groups(board, directory, host=place.host, hosts=len(place.hosts), token=token)
    board.post(
        f"{split}/has/{place.host}",
        {
            "identity": {key: _digest(value) for key, value in spec.identity.items()},
            "store": found(spec) is not None,
            "cores": worker_count(spec.data.num_workers),
        },
    )
    facts = [board.read(f"{split}/has/{number}") for number in everybody]
    for number in everybody:
        if facts[number]["identity"] != facts[0]["identity"]:
            _refuse(facts, number, spec, place)
    group = groups()
    if place.host != 0:
        return
    have = [number for number in everybody if facts[number]["store"]]
    firsts = sorted(set(group))
    how: dict[str, Any] = {
        "group": group,
        "firsts": firsts,
        "cores": [fact["cores"] for fact in facts],
        "from": group[have[0]] if have else 0,
    }
    least = spec.data.share_from_mib
    large = least is not None and spec.split.source_bytes >= least * 2**20
    if len(have) == len(facts):
        how["kind"] = "each"
    elif have:
        how["kind"] = "send"
    else:
        how["kind"] = "share" if large else "each"
    board.post(f"{split}/how", how)


def _refuse(facts: list[dict[str, Any]], number: int, spec: DatasetSpec, place: _Place) -> None:
    here, there = facts[0]["identity"], facts[number]["identity"]
    different = ", ".join(key for key in here if here[key] != there.get(key))
    raise DataError(
        f"{place.hosts[number].name} would train on other data than {place.hosts[0].name}: "
        f"different there: {different} (sources are the bytes of {spec.split.path}). Give both "
        "the same files, e.g. by launch.sync=rsync with launch.sync_extra, and the same llmx."
    )


def _make_shard(spec: DatasetSpec, how: dict[str, Any], place: _Place) -> tuple[int, Path]:
    """This host's units; returns how many units there are in all, and where they lie."""
    hosts = len(place.hosts)
    whole = spec.data.packing != "concat"
    kind, units = units_of(spec.split, hosts=hosts, whole_documents=whole)
    owners = Owners(how["cores"])
    note_old_stores(spec)
    directory = _shards(spec) / kind
    title = f"Preparing {spec.path.name}, part {place.host + 1} of {hosts}"
    print(f"{title} (the rows are divided by {kind})", flush=True)
    progress = progress_of(spec, title)
    if kind == BY_FILES:
        listed = list(units)
        owned = {unit.number for unit in listed if owners.take(unit.size) == place.host}
        meter, total = spec.split.meter, sum(u.size for u in listed if u.number in owned)
        progress = PreparationProgress(title, total_bytes=total, read=lambda: meter.bytes)
        units = iter(listed)

    def mine(unit: Unit) -> bool:
        if kind == BY_FILES:
            return unit.number in owned
        return owners.take(unit.size) == place.host

    return write_shard(spec, units, directory, mine=mine, progress=progress), directory


def _gather(shares: Path, channel: Channel, leaders: list[int], first: int, rank: int) -> None:
    """The units of hosts with another disk come to the host that puts the store together."""
    if rank == first:
        for leader in leaders:
            if leader != first:
                size = channel.receive(shares, source=leader)
                print(
                    f"Received {human.size(size)} of prepared data from rank {leader}", flush=True
                )
    elif rank in leaders:
        channel.send(shares, to=first)


def _spread(spec: DatasetSpec, channel: Channel, chain: list[int], rank: int) -> None:
    """The finished store goes to all hosts with another disk: from each rank of ``chain``, which
    begins with the one that has it, to the next."""
    place = chain.index(rank)
    following = chain[place + 1] if place + 1 < len(chain) else None
    if place == 0:
        assert following is not None
        size = channel.send(spec.path, to=following)
        print(f"Sent {spec.path.name} ({human.size(size)}) to the other hosts", flush=True)
        return
    with locked(spec.path):
        temporary = spec.path.with_name(f"{spec.path.name}.tmp-received")
        channel.receive(temporary, source=chain[place - 1], forward=following)
        SampleStore.open(temporary).verify()
        if found(spec) is None:
            temporary.rename(spec.path)
        else:
            shutil.rmtree(temporary)


def _shards(spec: DatasetSpec) -> Path:
    return spec.path.with_name(f"{spec.path.name}.shards")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
