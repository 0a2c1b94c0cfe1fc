"""Two or three real hosts on one machine: the library behind the cluster tests.

    with Cluster(hosts=2, private_paths=["/tmp/work"]) as cluster:
        cluster.run("node-a", ["hostname"]).stdout              # "node-a\\n"
        node_b = cluster["node-b"]
        process = node_b.popen(["sleep", "60"])                 # a subprocess.Popen
        node_b.path("/tmp/work/file").read_text()               # node-b's own disk, from outside
        node_b.processes()                                      # {pid: argv}, without our daemons
        cluster.ssh_config                                      # for ssh -F and PDSH_SSH_ARGS_APPEND

A host is a set of namespaces: network, host name, mounts, processes, System V IPC. Its process 1
(``host_init.py``) dies with this Python, and the kernel then ends everything in it. On each host:

- the interface ``lan0`` (see ``INTERFACE``), joined to the others by a bridge; no way to the
  internet; every name resolves through the host's own ``/etc/hosts``;
- ``sshd`` on a port of its own, never 22 (``host.ssh_port``); any host logs in to any other as
  root with the key ``cluster.identity_file``; ``~/.ssh`` is empty and private;
- ``/dev/shm``, ``/run`` and every one of ``private_paths`` are private, empty disks. All else is
  this machine's file system: Python and the checkout are seen by every host at the same path,
  except what ``hidden`` names, e.g. ``hidden={"node-b": [REPO]}``, where ``.venv`` stays.

The control side (where ``python -m llmx`` runs) is a host, usually the first, or this machine's
own network with ``connect_root=True``. ``run`` and ``popen`` behave as if the program had been
started here: signals reach it, a kill kills it, the return code is its own.

Faults: ``limit_bandwidth``, ``add_latency``, ``limit_cpu``, ``cut`` / ``restore``, ``stop_sshd`` /
``start_sshd``, ``add_disk`` (a small tmpfs is a full disk), ``kill`` (silent, as a power loss).
They are in ``faults.py``, methods of Host. ``Unsupported`` says what this machine lacks.

``python -m tests.cluster up --hosts 2`` shows one.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster import leftovers
from tests.cluster.faults import Faults
from tests.cluster.requirements import Unsupported

INTERFACE = "lan0"
HERE = Path(__file__).resolve().parent
_PYTHON = [sys.executable, "-I", "-S"]
_SSHD = "/usr/sbin/sshd"


def wait_until(condition: Callable[[], Any], *, timeout_s: float, what: str) -> Any:
    """Poll until ``condition()`` is true and return its value; TimeoutError names ``what``."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.02)


class Host(Faults):
    """One machine of a cluster."""

    def __init__(self, cluster: Cluster, *, name: str, index: int, hidden: Iterable[str]) -> None:
        self.cluster = cluster
        self.name = name
        self.address = f"{cluster.subnet}.{index + 1}"
        self.ssh_port = 2201 + index
        self.port = f"port-{name}"[:15]
        """The host's socket on the switch."""
        self.hidden = tuple(hidden)
        self.directory = cluster.directory / name
        self.cgroup: Path | None = None
        self.pid = 0
        """Process 1 of the host, as seen from here; 0 while it is down."""
        self._init: subprocess.Popen[str] | None = None
        self._daemons: set[int] = set()

    def __repr__(self) -> str:
        return f"<Host {self.name} {self.address}:{self.ssh_port}>"

    @property
    def is_up(self) -> bool:
        return self._init is not None and self._init.poll() is None

    def boot(self) -> None:
        """Start the host's first process, plug it into the switch, start its sshd."""
        self._init, self.pid = start_init(self._spec(), log=self.directory / "init.log")
        end, switch = f"v{self.pid}", self.cluster.switch_pid
        ip_batch(
            switch,
            f"link add {self.port} type veth peer name {end}",
            f"link set {end} netns {self.pid} name {INTERFACE}",
            f"link set {self.port} master bridge up",
        )
        ip_batch(
            self.pid,
            "link set lo up",
            f"addr add {self.address}/24 dev {INTERFACE}",
            f"link set {INTERFACE} up",
        )
        self.start_sshd()

    def _spec(self) -> dict[str, Any]:
        cluster, ssh = self.cluster, Path.home() / ".ssh"
        ssh.mkdir(mode=0o700, exist_ok=True)
        keep = [str(cluster.directory)]
        mounts: list[dict[str, Any]] = [{"sysfs": "/sys"}]
        for path in ("/dev/shm", "/run", str(ssh), *cluster.private_paths):
            mounts.append({"tmpfs": str(path), "keep": keep})
        for path in self.hidden:
            mounts.append({"tmpfs": str(path), "keep": keep + python_paths()})
        hosts = self.directory / "hosts"
        hosts.write_text(cluster.hosts_file(self))
        mounts.append({"bind": str(hosts), "on": "/etc/hosts"})
        if (shadow := unlocked_shadow(self.directory)) is not None:
            mounts.append({"bind": str(shadow), "on": "/etc/shadow"})
        return {
            "name": self.name,
            "namespaces": ["net", "uts", "ipc", "pid", "mnt"],
            "mounts": mounts,
        }

    def path(self, path: str | os.PathLike[str]) -> Path:
        """A path of this host's own view of the disks, readable and writable from outside."""
        return Path(f"/proc/{self.pid}/root") / str(path).lstrip("/")

    def popen(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] = "/",
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a program on this host; ``env`` adds to this process's environment."""
        if not self.is_up:
            raise RuntimeError(f"{self.name} is down")
        group = ["--cgroup", str(self.cgroup)] if self.cgroup else []
        return subprocess.Popen(
            [*_PYTHON, str(HERE / "enter.py"), str(self.pid), *group, "--cwd", str(cwd), "--"]
            + [os.fspath(part) for part in argv],
            env={**os.environ, **(env or {})},
            **options,
        )

    def run(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        timeout_s: float = 60.0,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] = "/",
        stdin: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end; a failure or time-out shows what it wrote."""
        pipe = subprocess.PIPE
        process = self.popen(
            argv, env=env, cwd=cwd, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        try:
            stdout, stderr = process.communicate(stdin, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
            raise AssertionError(
                f"{self.name}: {argv} took more than {timeout_s:g} s\n{stdout}\n{stderr}"
            ) from None
        if check and process.returncode != 0:
            raise AssertionError(
                f"{self.name}: {argv} ended with {process.returncode}\n{stdout}\n{stderr}"
            )
        return subprocess.CompletedProcess(list(argv), process.returncode, stdout, stderr)

    def processes(self) -> dict[int, list[str]]:
        """What runs here beside process 1 and our own daemons: pid (the host's) -> argv.

        ssh sessions and zombies do not count: a session ends with what it runs.
        """
        found = {}
        for pid, argv in self._all_processes().items():
            if pid not in self._daemons and not argv[0].startswith("sshd"):
                found[pid] = argv
        return found

    def adopt_daemons(self) -> None:
        """Count all that runs now as part of the host; ``processes`` shows only what comes."""
        self._daemons = set(self._all_processes())

    def _all_processes(self) -> dict[int, list[str]]:
        found = {}
        for entry in self.path("/proc").iterdir():
            if not entry.name.isdigit() or entry.name == "1":
                continue
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:  # it has just ended
                continue
            if words:  # a zombie has none
                found[int(entry.name)] = words.rstrip("\0").split("\0")
        return found

    def start_sshd(self) -> None:
        """Start the host's sshd and wait until it answers."""
        config = self.directory / "sshd_config"
        config.write_text(self.cluster.sshd_config(self))
        self.path("/run/sshd").mkdir(exist_ok=True)
        self.run([_SSHD, "-f", config, "-E", self.directory / "sshd.log"])
        wait_until(
            lambda: f":{self.ssh_port}" in self.run(["ss", "-Hltn"]).stdout,
            timeout_s=10,
            what=f"sshd of {self.name} listens on port {self.ssh_port}",
        )
        self._daemons |= {
            pid for pid, argv in self._all_processes().items() if "[listener]" in argv[0]
        }

    def stop_sshd(self) -> None:
        """End sshd and its sessions: connection refused, as after a crash of the service."""
        for pid, argv in self._all_processes().items():
            if argv[0].startswith("sshd"):
                self.run(["kill", "-KILL", str(pid)], check=False)

    def shut_down(self) -> None:
        """End every process of the host, and wait until they are gone."""
        if self._init is None:
            return
        assert self._init.stdin is not None
        self._init.stdin.close()
        try:
            self._init.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._init.kill()
            self._init.wait()
        self.pid, self._init, self._daemons = 0, None, set()


class Cluster:
    """Hosts on a bridge. A context manager; ``close`` may be called twice.

    ``hosts``: how many, or their names. ``hidden``: per host, directories that are empty there
    (Python itself stays). ``loopback_names``: each host resolves its own name to 127.0.1.1, as
    Debian sets it up. ``connect_root``: this machine's own network joins, at ``root_address``.
    """

    def __init__(
        self,
        *,
        hosts: int | Sequence[str] = 2,
        private_paths: Iterable[str | os.PathLike[str]] = (),
        hidden: Mapping[str, Iterable[str | os.PathLike[str]]] | None = None,
        loopback_names: bool = False,
        connect_root: bool = False,
    ) -> None:
        names = (
            [f"node-{chr(ord('a') + i)}" for i in range(hosts)] if isinstance(hosts, int) else hosts
        )
        self.private_paths = tuple(os.path.abspath(path) for path in private_paths)
        self.loopback_names = loopback_names
        self.connect_root = connect_root
        self.subnet = free_subnet() if connect_root else "10.77.0"
        self.root_address = f"{self.subnet}.254" if connect_root else None
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
            _make_key(host.directory / "host_key")
        leftovers.sign(self.directory)
        _make_key(self.identity_file)
        self.ssh_config.write_text(self._ssh_config())
        self._switch, self.switch_pid = start_init(
            {"name": "switch", "namespaces": ["net", "pid"], "mounts": []},
            log=self.directory / "switch.log",
        )
        ip_batch(self.switch_pid, "link add bridge type bridge", "link set bridge up")
        if self.connect_root:
            near = f"lx{os.getpid() % 10**7}{self.subnet.rsplit('.', 1)[1]}"
            ip_batch(None, f"link add {near} type veth peer name root netns {self.switch_pid}")
            ip_batch(self.switch_pid, "link set root master bridge up")
            ip_batch(None, f"addr add {self.root_address}/24 dev {near}", f"link set {near} up")
        for host in self.hosts:
            host.boot()
        (self.directory / "hosts.json").write_text(
            json.dumps({h.name: {"pid": h.pid, "address": h.address} for h in self.hosts})
        )

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Host:
        for host in self.hosts:
            if host.name == name:
                return host
        raise KeyError(f"no host {name}; there are {', '.join(h.name for h in self.hosts)}")

    @property
    def first(self) -> Host:
        """The host where commands are usually typed."""
        return self.hosts[0]

    def run(
        self, host: str, argv: Sequence[Any], **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """``Host.run`` on the host of that name."""
        return self[host].run(argv, **options)

    def popen(self, host: str, argv: Sequence[Any], **options: Any) -> subprocess.Popen[Any]:
        """``Host.popen`` on the host of that name."""
        return self[host].popen(argv, **options)

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

    def sshd_config(self, host: Host) -> str:
        """The server's configuration: keys only, nothing of the machine's own."""
        return (
            f"Port {host.ssh_port}\n"
            f"HostKey {host.directory / 'host_key'}\n"
            f"AuthorizedKeysFile {self.identity_file}.pub\n"
            "PermitRootLogin prohibit-password\nPasswordAuthentication no\nUsePAM no\n"
            "StrictModes no\nUseDNS no\nMaxStartups 100\nMaxSessions 100\n"
            f"PidFile {host.directory / 'sshd.pid'}\nSubsystem sftp internal-sftp\n"
        )

    def _ssh_config(self) -> str:
        return "\n".join(
            f"Host {host.name} {host.address}\n  HostName {host.address}\n  Port {host.ssh_port}\n"
            f"  User root\n  IdentityFile {self.identity_file}\n  IdentitiesOnly yes\n"
            "  BatchMode yes\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n"
            "  LogLevel ERROR\n"
            for host in self.hosts
        )


def start_init(spec: dict[str, Any], *, log: Path) -> tuple[subprocess.Popen[str], int]:
    """Start a process 1; return the handle that keeps it alive, and its pid as seen here."""
    with log.open("w") as errors:
        init = subprocess.Popen(
            [*_PYTHON, str(HERE / "host_init.py"), json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    assert init.stdout is not None
    line = init.stdout.readline()
    init.stdout.close()
    if not line:
        init.wait()
        raise Unsupported(f"cannot make the host {spec['name']}: {log.read_text().strip()}")
    return init, int(json.loads(line)["pid"])


def ip_batch(pid: int | None, *lines: str) -> None:
    """``ip -batch`` in the network of process ``pid`` (None: this machine's own)."""
    inside = [] if pid is None else ["nsenter", "--target", str(pid), "--net"]
    subprocess.run(
        [*inside, "ip", "-batch", "-"],
        input="\n".join(lines) + "\n",
        text=True,
        check=True,
    )


def python_paths() -> list[str]:
    """Where this Python and its packages lie: a host without the checkout still has them."""
    return sorted({sys.prefix, sys.base_prefix})


def free_subnet() -> str:
    """Three numbers of a /24 that this machine's network does not use."""
    used = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=True).stdout
    start = os.getpid() % 200
    for step in range(200):
        subnet = f"10.77.{1 + (start + step) % 200}"
        if f" {subnet}." not in used:
            return subnet
    raise Unsupported("no free subnet in 10.77.0.0/16")


def unlocked_shadow(directory: Path) -> Path | None:
    """A copy of /etc/shadow in which root may log in by key; None where it already may."""
    lines = Path("/etc/shadow").read_text().splitlines(keepends=True)
    if not any(line.startswith("root:!") for line in lines):
        return None
    copy = directory / "shadow"
    copy.touch(mode=0o600)
    copy.write_text("".join(_unlocked(line) for line in lines))
    return copy


def _unlocked(line: str) -> str:
    name, password, rest = line.split(":", 2)
    return f"{name}:*:{rest}" if name == "root" and password.startswith("!") else line


def _make_key(path: Path) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "llmx-test-cluster", "-f", str(path)],
        check=True,
        stdin=subprocess.DEVNULL,
    )


def raise_interrupt_on_sigterm() -> None:
    """Let ``kill PID`` close a cluster as a Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
