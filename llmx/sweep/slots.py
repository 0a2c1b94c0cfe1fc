"""Which slots of the cluster a trial gets (``sweep.slots_per_trial``). Pure, but for the cores of
Slurm's hosts.

The hosts of ``hardware`` are one pool. A trial gets slots of one device type: on one host where any
host of that type has so many, else on several. What it gets is written into its own hardware as
plain values, so its snapshot trains the same alone.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass

from llmx.config import Experiment, HardwareConfig, HostConfig
from llmx.config.hardware_rules import on_cpus
from llmx.errors import ConfigError
from llmx.launch.transports import transport_of
from llmx.launch.transports.slurm import share_of_cores, slurm_cores
from llmx.plan.threads import SHARED_BY
from llmx.text import plural


@dataclass(frozen=True)
class Placed:
    """The slots on which one trial runs."""

    shares: tuple[tuple[HostConfig, tuple[int, ...]], ...]
    """Hosts with all their slots, and which of these, from 0 on."""

    @property
    def kind(self) -> tuple[str, float | None]:
        """The device and the least RAM of a host, None where it is not known: by these two parts of
        a cluster differ for the memory of a trial."""
        shares_gib = [share.memory_gib for share in map(_host, self.shares) if share.memory_gib]
        is_known = len(shares_gib) == len(self.shares)
        return self.shares[0][0].device, min(shares_gib) if is_known else None

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of slots of each host."""
        return tuple(len(slots) for _, slots in self.shares)

    @property
    def has_whole_hosts(self) -> bool:
        """Whether no other trial can have a slot of its hosts meanwhile."""
        return all(len(slots) == host.slots for host, slots in self.shares)

    def __str__(self) -> str:
        """The slots as a journal names them: ``node-a:0,1 node-b:0``."""
        return " ".join(f"{host.name}:{','.join(map(str, slots))}" for host, slots in self.shares)


class Slots:
    """The slots of the hosts that trials run on now."""

    def __init__(self) -> None:
        self._taken: dict[tuple[str, int], set[int]] = {}

    def take(self, hosts: Sequence[HostConfig], count: int, first: Placed) -> Placed | None:
        """``count`` free slots; None where a trial must end before. ``first``: what a free cluster
        gives, whose shape every trial has, so that they compare."""
        for device in dict.fromkeys(host.device for host in hosts):
            free = [(host, self._free(host)) for host in hosts if host.device == device]
            placed = _choose(free, count, alone=len(first.shares) == 1)
            if placed is not None and placed.shape == first.shape:
                for host, slots in placed.shares:
                    self._taken.setdefault(_place(host), set()).update(slots)
                return placed
        return None

    def give_back(self, placed: Placed | None) -> None:
        """Free the slots of a trial that is over."""
        for host, slots in placed.shares if placed else ():
            self._taken.get(_place(host), set()).difference_update(slots)

    def _free(self, host: HostConfig) -> list[int]:
        used = self._taken.get(_place(host), set())
        return [slot for slot in range(host.slots) if slot not in used]


def placed_at(hosts: Sequence[HostConfig], text: str) -> Placed | None:
    """The slots that a journal names (``node-a:0,1 node-b:0``); None where a host is gone."""
    by_name = {host.name: host for host in hosts}
    shares = []
    for word in text.split():
        name, _, slots = word.rpartition(":")
        if name not in by_name:
            return None
        shares.append((by_name[name], tuple(int(slot) for slot in slots.split(","))))
    return Placed(tuple(shares)) if shares else None


def first_of(hardware: HardwareConfig, count: int) -> Placed:
    """The slots of a trial on a free cluster; ConfigError where it has too few of any type."""
    hosts = hardware.hosts
    totals: dict[str, int] = {}
    for host in hosts:
        totals[host.device] = totals.get(host.device, 0) + host.slots
    for device in totals:
        alike = [host for host in hosts if host.device == device]
        alone = any(host.slots >= count for host in alike)
        placed = _choose([(host, list(range(host.slots))) for host in alike], count, alone=alone)
        if placed is not None:
            return placed
    counted = ", ".join(f"{plural(total, 'slot')} of {name}" for name, total in totals.items())
    raise ConfigError(
        f"sweep.slots_per_trial={count}, but hardware has {counted or 'no host'}, and a trial gets "
        f"slots of one type. Use at most {max(totals.values(), default=1)}."
    )


def _choose(
    free: Sequence[tuple[HostConfig, list[int]]], count: int, *, alone: bool
) -> Placed | None:
    """On the host with the fewest free slots that suffice; over several, the freest first."""
    if alone:
        fits = [(host, slots) for host, slots in free if len(slots) >= count]
        if not fits:
            return None
        host, slots = min(fits, key=lambda pair: len(pair[1]))
        return Placed(((host, tuple(slots[:count])),))
    shares: list[tuple[HostConfig, tuple[int, ...]]] = []
    for host, slots in sorted(free, key=lambda pair: -len(pair[1])):
        part = slots[: count - sum(len(chosen) for _, chosen in shares)]
        if part:
            shares.append((host, tuple(part)))
    if sum(len(chosen) for _, chosen in shares) < count:
        return None
    return Placed(tuple(shares))


def placed_on(exp: Experiment, placed: Placed) -> Experiment:
    """The experiment on its slots: hosts, devices, RAM and the share of cores as plain values."""
    hardware = exp.hardware
    hosts = [_host(share) for share in placed.shares]
    if on_cpus(hardware) or transport_of(exp.launch.transport).allocates:
        hosts = [dataclasses.replace(host, gpus=[]) for host in hosts]
    keeps_first = hardware.hosts[0].name == hosts[0].name
    env, launch = dict(hardware.env), exp.launch
    if launch.transport == "slurm":
        if launch.slurm.cpus_per_task is None:
            max_slots = max(host.slots for host, _ in placed.shares)
            names = [host.name for host in hosts]
            share = share_of_cores(slurm_cores(os.environ, names), max_slots)
            slurm = dataclasses.replace(launch.slurm, cpus_per_task=share)
            launch = dataclasses.replace(launch, slurm=slurm)
    else:
        env[SHARED_BY] = str(max(host.slots for host, _ in placed.shares))
    return dataclasses.replace(
        exp,
        launch=launch,
        hardware=dataclasses.replace(
            hardware,
            kind="static",
            hosts=hosts,
            slots=None,
            master_addr=hardware.master_addr if keeps_first else None,
            reach=hardware.reach if keeps_first else None,
            env=env,
        ),
    )


def _host(share: tuple[HostConfig, tuple[int, ...]]) -> HostConfig:
    """A host as its part: the slots of the trial, and their share of the RAM."""
    host, slots = share
    gpus = [host.gpus[slot] for slot in slots] if host.gpus else list(map(str, slots))
    memory = host.memory_gib and host.memory_gib * len(slots) / host.slots
    return dataclasses.replace(host, slots=len(slots), gpus=gpus, memory_gib=memory)


def _place(host: HostConfig) -> tuple[str, int]:
    return host.address or host.name, host.ssh_port
