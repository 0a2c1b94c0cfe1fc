"""What can be done to a host: slow it, cut it off, fill its disk, kill it.

Methods of ``host.Host``. Each can be undone, or ends with the cluster.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cluster.leftovers import CORE_GROUPS, CPU_GROUPS, MEMORY_GROUPS
from tests.cluster.requirements import Unsupported

if TYPE_CHECKING:
    from tests.cluster.host import Host


INTERFACE = "lan0"
"""The name of every host's link to the others; not ``eth0``, so that a default cannot fit."""


class Faults:
    """Mixed into Host."""

    def limit_bandwidth(self: Host, megabit_per_s: float | None) -> None:
        """Both directions of the host's link; None lifts it."""
        for pid, device in ((self.pid, INTERFACE), (self.cluster.switch_pid, self.port)):
            words = ["del", "dev", device, "root"]
            if megabit_per_s is not None:
                burst_kb = max(16, int(megabit_per_s * 2))
                rate = f"tbf rate {megabit_per_s}mbit burst {burst_kb}kb latency 400ms"
                words = ["replace", *words[1:], *rate.split()]
            tc = ["nsenter", "--target", str(pid), "--net", "tc", "qdisc", *words]
            done = subprocess.run(tc, capture_output=True, text=True)
            if done.returncode != 0:
                raise Unsupported(f"tc: {done.stderr.strip()}")

    def limit_cpu(self: Host, cores: float) -> None:
        """A quota of so many cores for all that runs on the host, now and later."""
        period_us = 100_000
        limits = {
            "cpu.cfs_period_us": str(period_us),
            "cpu.cfs_quota_us": str(int(cores * period_us)),
        }
        self._limit(CPU_GROUPS, limits, what="a CPU quota")

    def pin_to_core(self: Host, core: int | None) -> None:
        """All that runs on the host, now and later, on one core of this machine; None: on all."""
        cores = (CORE_GROUPS / "cpuset.cpus").read_text() if core is None else str(core)
        limits = {"cpuset.mems": "0", "cpuset.cpus": cores}
        self._limit(CORE_GROUPS, limits, what="a core of its own")

    def limit_memory(self: Host, mib: float) -> None:
        """So much RAM for all that runs on the host, now and later: the kernel's OOM killer ends
        the largest process of it when there is no more."""
        size = str(int(mib * 2**20))
        limits = {"memory.limit_in_bytes": size, "memory.memsw.limit_in_bytes": size}
        self._limit(MEMORY_GROUPS, limits, what="a memory limit")

    def _limit(self: Host, groups: Path, limits: dict[str, str], *, what: str) -> None:
        group = groups / f"{self.cluster.directory.name}-{self.name}"
        try:
            group.mkdir(exist_ok=True)
            for name, value in limits.items():
                (group / name).write_text(value)
        except OSError as error:
            raise Unsupported(f"{what} needs control groups v1 at {groups}: {error}") from None
        if group in self.cgroups:
            return  # all that runs is in it
        self.cgroups.add(group)
        for pid in self._outer_pids():
            (group / "cgroup.procs").write_text(str(pid))

    def _outer_pids(self: Host) -> list[int]:
        """The host's processes, numbered as they are here."""
        own = Path(f"/proc/{self.pid}/ns/pid").readlink()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and (entry / "ns/pid").readlink() == own:
                    found.append(int(entry.name))
            except OSError:  # it has just ended
                continue
        return found

    def block_high_ports(self: Host) -> None:
        """A firewall that drops what this host sends from a high port to a high port of another:
        ssh and the rendezvous pass, connections between ranks get no answer."""
        high = ["ipproto", "tcp", "sport", "32768-60999", "dport", "32768-60999"]
        try:
            self.run(["ip", "route", "replace", "default", "dev", "lo", "table", "77"])
            self.run(["ip", "rule", "add", *high, "lookup", "77"])
        except subprocess.CalledProcessError as error:
            raise Unsupported(f"rules of routes by port: {error.stderr}") from None

    def unblock_high_ports(self: Host) -> None:
        """Undo ``block_high_ports``."""
        self.run(["ip", "rule", "del", "lookup", "77"])

    def set_mtu(self: Host, size: int) -> None:
        """The largest packet that the host sends and expects; the switch takes 1500."""
        # Else the kernel passes many packets on as one, which no switch measures.
        words = ["ip", "link", "set", INTERFACE, "mtu", str(size), "gso_max_segs", "1"]
        self.run(words)

    def limit_packets(self: Host, size: int | None) -> None:
        """The switch drops longer packets to and from the host without a word, as a tunnel or a
        switch with a smaller MTU does, also those of open connections. None lifts it."""
        self._link("mtu", str(size or 1500))
        for host in self.cluster.hosts if size else ():
            if host.is_up:  # as in set_mtu
                host.run(["ip", "link", "set", INTERFACE, "gso_max_segs", "1"])

    def cut(self: Host) -> None:
        """Packets to and from the host vanish, its interface stays up: a broken switch."""
        self._link("nomaster")

    def restore(self: Host) -> None:
        """Undo ``cut``."""
        self._link("master", "bridge")

    def _link(self: Host, *words: str) -> None:
        inside = ["nsenter", "--target", str(self.cluster.switch_pid), "--net"]
        subprocess.run([*inside, "ip", "link", "set", self.port, *words], check=True)

    def add_disk(self: Host, path: str | Path, *, size_mib: float | None = None) -> None:
        """An empty private disk over ``path``, of a given size: the way to a full disk."""
        spec = {"mounts": [{"tmpfs": str(path), "size_mib": size_mib, "keep": []}]}
        self.run([*self.cluster.script("host_init.py"), json.dumps(spec)])

    def kill(self: Host, *, silent: bool = True) -> None:
        """End the host at once. Silent: the others see no closed connection, as on a power loss.

        ``host.boot()`` starts it again, with empty private disks.
        """
        if silent:
            self.cut()
        self.shut_down()
