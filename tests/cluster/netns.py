"""Two or three real hosts on one machine: the library behind the cluster tests.

    with Cluster(hosts=2, private_paths=["/tmp/work"]) as cluster:
        node_b = cluster["node-b"]
        node_b.run(["hostname"]).stdout                         # "node-b\\n"
        process = node_b.popen(["sleep", "60"])                 # a subprocess.Popen
        node_b.path("/tmp/work/file").read_text()               # node-b's own disk, from outside
        node_b.processes()                                      # {pid: argv}, without our daemons
        cluster.ssh_config                                      # for ssh -F

A host is a set of namespaces: network, host name, mounts, processes, System V IPC. Its process 1
(``host_init.py``) dies with this Python, and the kernel then ends everything in it. On each host:

- the interface ``lan0`` (see ``INTERFACE``), joined to the others by a bridge; no way to the
  internet; every name resolves through the host's own ``/etc/hosts``;
- ``sshd`` on a port of its own, never 22 (``host.ssh_port``); any host logs in to any other as
  root with the key ``cluster.identity_file``; ``~/.ssh`` is empty and private;
- ``/dev/shm``, ``/run`` and every one of ``private_paths`` are private, empty disks. All else is
  this machine's file system: Python and the checkout are seen by every host at the same path,
  except what ``hidden`` names, e.g. ``hidden={"node-b": [REPO]}``, where ``.venv`` stays.

The control side (where ``python -m llmx`` runs) is a host, usually the first. ``run`` and ``popen``
behave as if the program had been started here: signals reach it, a kill kills it, the return code
is its own.

Faults: ``limit_bandwidth``, ``limit_cpu``, ``pin_to_core``, ``limit_memory``,
``block_high_ports``, ``set_mtu``, ``limit_packets``, ``cut`` / ``restore``, ``stop_sshd`` /
``start_sshd``, ``add_disk`` (a small tmpfs is a full disk), ``kill`` (silent, as a power loss).
They are in ``faults.py``, methods of Host. ``Unsupported`` says what this machine lacks.

``python -m tests.cluster up`` shows one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.cluster import leftovers
from tests.cluster.faults import INTERFACE
from tests.cluster.host import Host, ip_batch, make_key, ssh_config, start_init, wait_until
from tests.cluster.requirements import Unsupported

__all__ = ["INTERFACE", "Cluster", "Host", "Unsupported", "wait_until"]

_SCRIPTS = ("host_init.py", "enter.py", "kernel.py")


class Cluster:
    """Hosts on a bridge. A context manager; ``close`` may be called twice.

    ``hosts``: how many, or their names. ``hidden``: per host, directories that are empty there
    (Python itself stays). ``loopback_names``: each host resolves its own name to 127.0.1.1, as
    Debian sets it up.
    """

    def __init__(
        self,
        *,
        hosts: int | Sequence[str] = 2,
        private_paths: Iterable[str | os.PathLike[str]] = (),
        hidden: Mapping[str, Iterable[str | os.PathLike[str]]] | None = None,
        loopback_names: bool = False,
    ) -> None:
        names = (
            [f"node-{chr(ord('a') + i)}" for i in range(hosts)] if isinstance(hosts, int) else hosts
        )
        self.private_paths = tuple(os.path.abspath(path) for path in private_paths)
        self.loopback_names = loopback_names
        self.switch_pid = 0
        self._switch: subprocess.Popen[str] | None = None
        leftovers.sweep()
        self.directory = Path(tempfile.mkdtemp(prefix=leftovers.PREFIX))
        self.identity_file = self.directory / "id_ed25519"
        self.ssh_config = self.directory / "ssh_config"
        self.hosts = tuple(
            Host(
                self,
                name=name,
                index=index,
                hidden=[os.path.abspath(path) for path in (hidden or {}).get(name, ())],
            )
            for index, name in enumerate(names)
        )
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self.directory.chmod(0o755)
        for host in self.hosts:
            host.directory.mkdir()
            make_key(host.directory / "host_key")
        leftovers.sign(self.directory)
        # Copies: a host from which the checkout is hidden still sees this directory.
        for name in _SCRIPTS:
            shutil.copy(Path(__file__).with_name(name), self.directory / name)
        make_key(self.identity_file)
        self.ssh_config.write_text(ssh_config(self.hosts))
        self._switch, self.switch_pid = start_init(
            self.script("host_init.py"),
            {"name": "switch", "namespaces": ["net", "pid"], "mounts": []},
            log=self.directory / "switch.log",
        )
        ip_batch(self.switch_pid, "link add bridge type bridge", "link set bridge up")
        for host in self.hosts:
            host.boot()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def script(self, name: str) -> list[str]:
        """The argv that starts one of the fixture's own scripts."""
        return [sys.executable, "-I", "-S", str(self.directory / name)]

    @property
    def first(self) -> Host:
        """The host where commands are usually typed."""
        return self.hosts[0]

    def close(self) -> None:
        """End all hosts and remove every trace."""
        for host in self.hosts:
            host.shut_down()
        if self._switch is not None:
            assert self._switch.stdin is not None
            self._switch.stdin.close()
            self._switch.wait()
            self._switch = None
        leftovers.remove_cgroups(self.directory)
        shutil.rmtree(self.directory, ignore_errors=True)

    def hosts_file(self, host: Host) -> str:
        """``/etc/hosts`` of one host."""
        lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
        for other in self.hosts:
            own = other is host and self.loopback_names
            lines.append(f"{'127.0.1.1' if own else other.address} {other.name}")
        return "\n".join(lines) + "\n"
