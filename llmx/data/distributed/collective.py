"""All ranks of a run come to the same data: found, prepared by one host or by each, or in shards.

    stores = prepare_together(data, seed, tokenizer, task, ["train", "eval"], hosts=hosts, host=0)

One rank of each host, its leader, prepares. What comes out is the same bytes as on one host. Hosts
that share the disk of the cache put their shards there; from others they are sent, and the
finished store is sent back. A host that has no store gets that of another.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmx import text as human
from llmx.config import DataConfig
from llmx.data.distributed.shards import assemble, shard_of, stage_shard
from llmx.data.distributed.transfer import FileTransfer, RankStore, storage_topology
from llmx.data.examples import Encoding
from llmx.data.store.build import found, note_old_stores, prepare, prepare_spec
from llmx.data.store.samples import SampleStore, locked
from llmx.data.store.spec import DatasetSpec, dataset_spec
from llmx.data.store.summary import lost_rows, summary
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
class _Ranks:
    """The hosts of the run, and which host and rank this process is."""

    hosts: list[Host]
    host: int
    rank: int

    @property
    def leads(self) -> bool:
        return self.hosts[self.host].leader == self.rank


def prepare_together(
    data: DataConfig,
    seed: int,
    tokenizer: Any,
    encoding: Encoding,
    splits: list[str],
    *,
    hosts: list[Host],
    host: int,
) -> list[SampleStore]:
    """The stores of these splits on every rank. Collective; ``encoding`` is the task, ``host`` this
    rank's place in ``hosts``. Waiting has no time-out. Rank 0 prints what became of the rows."""
    ranks = _Ranks(hosts, host, int(os.environ["RANK"]))
    call = next(_CALLS)
    stores: list[SampleStore] = []
    for split in splits:
        store = RankStore(f"data/{call}/{split}")
        if len(hosts) > 1:
            spec = dataset_spec(data, seed, tokenizer, encoding, split) if ranks.leads else None
            plan = _agreed(spec, store, ranks)
            if plan["kind"] != "each":
                _bring(spec, plan, store, ranks)
        if ranks.leads:
            prepare(data, seed, tokenizer, encoding, split=split)
            store.set(f"ready/{host}")
        store.get(f"ready/{host}")
        stores.append(prepare(data, seed, tokenizer, encoding, split=split))
        if ranks.rank == 0:
            for line in (f"Data ({split}): {summary(stores[-1])}", *lost_rows(stores[-1].meta)):
                print(line, flush=True)
    return stores


def _agreed(spec: DatasetSpec | None, store: RankStore, ranks: _Ranks) -> dict[str, Any]:
    """How the store comes to every host: ``each`` host prepares it or has it, each prepares a
    ``shard``, or one prepares it or has it and must ``send`` it. Called by every rank; the leaders
    have a ``spec``, and the first host decides."""
    if spec is not None:
        proposed = _proposed(spec, store, ranks)
        if ranks.host == 0:
            store.set("plan", proposed)
    plan: dict[str, Any] = store.get("plan")
    return plan


def _proposed(spec: DatasetSpec, store: RankStore, ranks: _Ranks) -> dict[str, Any]:
    host, hosts = ranks.host, len(ranks.hosts)
    disks = storage_topology(store, spec.path.parent, host=host, hosts=hosts)
    own = {
        "identity": {key: _digest(value) for key, value in spec.identity.items()},
        "store": found(spec) is not None,
        "cores": worker_count(spec.data.num_workers),
    }
    facts = store.all_gather("has", own, host=host, hosts=hosts)
    for number, fact in enumerate(facts):
        if fact["identity"] != facts[0]["identity"]:
            raise _other_data(facts[0]["identity"], fact["identity"], number, spec, ranks)
    have = [number for number in range(hosts) if facts[number]["store"]]
    least = spec.data.share_from_mib
    large = least is not None and spec.split.source_bytes >= least * 2**20
    if len(have) == hosts or not (have or large):
        kind = "each"
    else:
        kind = "shard" if not have and spec.split.divisible else "send"
    return {
        "kind": kind,
        "disks": disks,
        "from": disks[have[0]] if have else 0,
        "cores": [fact["cores"] for fact in facts],
    }


def _other_data(
    here: dict[str, str], there: dict[str, str], number: int, spec: DatasetSpec, ranks: _Ranks
) -> DataError:
    different = ", ".join(key for key in here if here[key] != there.get(key))
    return DataError(
        f"{ranks.hosts[number].name} would train on other data than {ranks.hosts[0].name}: "
        f"different there: {different} (sources are the bytes of {spec.split.path}). Give both "
        "the same files, e.g. by launch.sync=rsync with launch.sync_extra, and the same llmx."
    )


def _bring(spec: DatasetSpec | None, plan: dict[str, Any], store: RankStore, ranks: _Ranks) -> None:
    """Bring the store to every disk. Called by every rank; ``spec`` is that of the leaders."""
    hosts, disks, started = len(ranks.hosts), plan["disks"], time.monotonic()
    first = ranks.hosts[plan["from"]].leader
    leaders = [ranks.hosts[number].leader for number in sorted(set(disks))]
    if spec is not None:
        name = ""
        if plan["kind"] == "shard":
            name = _staged(spec, plan["cores"], ranks)
        elif ranks.rank == first:
            prepare_spec(spec)
        store.set(f"shard/{ranks.host}", name)
    names = [store.get(f"shard/{number}") for number in range(hosts)]
    # All ranks make it at once, for it is collective.
    transfer = FileTransfer() if len(leaders) > 1 else None
    if spec is not None and plan["kind"] == "shard":
        shards = [_shards(spec) / name for name in names]
        for number, shard in enumerate(shards):
            sender = ranks.hosts[disks[number]].leader
            if transfer is not None and sender != first:
                _send_shard(shard, transfer, sender, first, ranks.rank)
        if ranks.rank == first:
            facts = {
                "workers": sum(plan["cores"]),
                "hosts": hosts,
                "tokenize_seconds": round(time.monotonic() - started, 3),
                "resumed_at_row": 0,
            }
            with locked(spec.path):
                if found(spec) is None:
                    assemble(spec, shards, how=facts)
    if ranks.rank == first:
        store.set("whole")
    store.get("whole")
    if transfer is not None:
        if spec is not None and ranks.rank in leaders:
            chain = [first, *(leader for leader in leaders if leader != first)]
            _send_store(spec, transfer, chain, ranks.rank)
        transfer.close()
    if spec is not None:
        if disks[ranks.host] == ranks.host:
            shutil.rmtree(_shards(spec), ignore_errors=True)
            store.set(f"there/{ranks.host}")
        store.get(f"there/{disks[ranks.host]}")


def _staged(spec: DatasetSpec, cores: list[int], ranks: _Ranks) -> str:
    """Stage this host's shard; returns the name of its folder."""
    note_old_stores(spec)
    title = f"Preparing {spec.path.name}, shard {ranks.host + 1} of {len(ranks.hosts)}"
    print(title, flush=True)
    pieces = shard_of(spec.split, cores, ranks.host)
    return stage_shard(spec, pieces, _shards(spec), number=ranks.host, title=title)


def _send_shard(shard: Path, transfer: FileTransfer, sender: int, first: int, rank: int) -> None:
    """A shard of a host with another disk comes to the one that puts the store together."""
    if rank == sender:
        transfer.send(shard, to=first)
    elif rank == first:
        size = human.size(transfer.receive(shard, source=sender))
        print(f"Received {size} of prepared data from rank {sender}", flush=True)


def _send_store(spec: DatasetSpec, transfer: FileTransfer, chain: list[int], rank: int) -> None:
    """The finished store goes to all other disks: from each rank of ``chain``, which begins with
    the one that has it, to the next."""
    place = chain.index(rank)
    following = chain[place + 1] if place + 1 < len(chain) else None
    if place == 0:
        assert following is not None
        size = transfer.send(spec.path, to=following)
        print(f"Sent {spec.path.name} ({human.size(size)}) to the other hosts", flush=True)
        return
    with locked(spec.path):
        temporary = spec.path.with_name(f"{spec.path.name}.tmp-received")
        transfer.receive(temporary, source=chain[place - 1], forward=following)
        SampleStore.open(temporary).verify()
        if found(spec) is None:
            temporary.rename(spec.path)
        else:
            shutil.rmtree(temporary)


def _shards(spec: DatasetSpec) -> Path:
    return spec.path.with_name(f"{spec.path.name}.shards")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
