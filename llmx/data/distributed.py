"""All ranks of a run come to the same data: one host prepares it, and sends it to the others.

    stores = prepare_together(data, seed, tokenizer, task, ["train", "eval"], hosts=["a", "a", "b"])

Each host has a leader, its first rank. The leaders compare what they are to prepare. The first
that has the store, else the first of all, prepares it; the storages that lack it get it in a chain
(``llmx.spread``).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from datetime import date as Date
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from llmx import text as human
from llmx.collectives import all_gather
from llmx.config import DataConfig
from llmx.data.examples import Encoding
from llmx.data.format.rendering import write_day
from llmx.data.store.build import find_store, prepare, prepare_spec
from llmx.data.store.samples import SampleStore, cannot_write, check_sums, locked
from llmx.data.store.spec import DatasetSpec, cache_directory, dataset_spec
from llmx.errors import DataError
from llmx.spread import find_topology, pass_on

FOREVER = timedelta(days=365)
"""A preparation may take as long as it takes; if a rank dies, the run is ended from outside."""


def prepare_together(
    data: DataConfig,
    seed: int,
    tokenizer: Any,
    encoding: Encoding,
    splits: list[str],
    *,
    hosts: Sequence[str],
    date: str | None = None,
) -> list[SampleStore]:
    """The stores of these splits on every rank. Collective; ``encoding`` is the task, ``hosts``
    the name of each rank's host. Rank 0's ``date`` (of the first attempt; by default today) is the
    day that chat templates write.

    Raises DataError: on every rank alike where hosts have other data, or a file cannot be sent;
    on one rank, which ends the others, where it cannot be prepared or a directory not be made.
    """
    # Of all ranks, although only leaders send: DeepSpeed binds each rank to its GPU, and torch then
    # makes the ranks outside of a new group take part in an ncclCommSplit
    # (_new_process_group_helper in torch/distributed/distributed_c10d.py), also for a gloo group,
    # whose members do not: the run would hang at the next group that NCCL makes.
    group = torch.distributed.new_group(backend="gloo", timeout=FOREVER)
    day = all_gather(date or Date.today().isoformat(), group=group)[0]
    write_day(Date.fromisoformat(day))
    leaders = [hosts.index(name) for name in dict.fromkeys(hosts)]
    rank = torch.distributed.get_rank()
    stores: list[SampleStore] = []
    for split in splits:
        spec = None
        if rank in leaders:
            spec = dataset_spec(data, seed, tokenizer, encoding, split)
        facts = all_gather(_facts(spec), group=group)
        _check_same({hosts[leader]: facts[leader] for leader in leaders})
        first = next((leader for leader in leaders if facts[leader]["store"]), leaders[0])
        if spec is not None and rank == first:
            prepare_spec(spec)
        send_to_all(cache_directory(data).absolute() / "data" / facts[0]["name"], group=group)
        stores.append(prepare(data, seed, tokenizer, encoding, split=split))
    torch.distributed.destroy_process_group(group)
    return stores


def _facts(spec: DatasetSpec | None) -> dict[str, Any]:
    """The data that a host would train on, for comparison, and whether it is prepared there. Empty
    where this rank leads no host."""
    if spec is None:
        return {}
    digests = {
        key: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
        for key, value in spec.identity.items()
    }
    return {
        "identity": digests,
        "path": str(spec.split.path),
        "name": spec.path.name,
        "store": find_store(spec) is not None,
    }


def _check_same(facts: Mapping[str, dict[str, Any]]) -> None:
    """Raise DataError where a host has other data than the first one. ``facts``: by host."""
    first, here = next(iter(facts.items()))
    for host, there in facts.items():
        if different := {key for key, _ in here["identity"].items() ^ there["identity"].items()}:
            raise DataError(
                f"{host} would train on other data than {first}: different there: "
                f"{', '.join(sorted(different))} (sources are the bytes of {here['path']}). Give "
                "both the same files, e.g. by launch.sync=rsync with launch.sync_extra, and the "
                "same llmx."
            )


def send_to_all(store: Path, *, group: Any) -> None:
    """Send a directory that was published on some storage to those that lack it. Collective over
    ``group``.

    ``store``: its path on this rank.

    Raises DataError on every rank alike where a storage cannot take a file; on one rank where its
    directory cannot be made, or what came has another checksum.
    """
    # Waits for the rank that prepares.
    present = all_gather((store / "meta.json").exists(), group=group)
    if all(present):
        return
    try:
        storages = find_topology(store.parent, create=True, group=group).leaders
    except OSError as error:
        raise cannot_write(store.parent, error) from error
    filled = {storage for storage, here in zip(storages, present, strict=True) if here}
    route = [present.index(True), *sorted(set(storages) - filled)]
    if len(route) == 1:
        return
    rank = torch.distributed.get_rank()
    sizes: dict[str, int] = {}
    if rank == route[0]:
        sizes = {file.name: file.stat().st_size for file in sorted(store.glob("[!.]*"))}
    receives = rank in route[1:]
    with locked(store) if receives else contextlib.nullcontext():
        target = store.with_name(f"{store.name}.tmp-received") if receives else store
        for file, size in all_gather(sizes, group=group)[route[0]].items():
            if failed := pass_on(target / file, size, route, group=group):
                raise DataError(
                    f"The prepared data {store.name} cannot be stored on the host of rank "
                    f"{failed[0]}: {failed[1]}. Free some space there, or set data.cache_dir to "
                    "another disk."
                )
        if receives:
            check_sums(target, json.loads((target / "meta.json").read_text(encoding="utf-8")))
            if store.exists():
                shutil.rmtree(target)
            else:
                target.rename(store)
    if sizes:
        total = human.size(sum(sizes.values()))
        print(f"Sent {store.name} ({total}) to the other hosts", flush=True)
    all_gather(None, group=group)
