"""One pretend host: its first process, its sshd, and programs that run on it.

Made by ``netns.Cluster``, whose module documentation has the whole picture.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.cluster.faults import INTERFACE, Faults
from tests.cluster.requirements import Unsupported

if TYPE_CHECKING:
    from tests.cluster.netns import Cluster


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
        self.address = f"10.77.0.{index + 1}"
        self.ssh_port = 2201 + index
        self.port = f"port-{name}"[:15]
        """The host's socket on the switch."""
        self.hidden = tuple(hidden)
        self.directory = cluster.directory / name
        self.cgroups: set[Path] = set()
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
        self._init, self.pid = start_init(
            self.cluster.script("host_init.py"), self._spec(), log=self.directory / "init.log"
        )
        end, switch = f"v{self.pid}", self.cluster.switch_pid
        # The same after a restart: the others remember it.
        mac = f"02:00:00:00:00:{self.ssh_port % 256:02x}"
        ip_batch(
            switch,
            f"link add {self.port} type veth peer name {end} address {mac}",
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
        # A host's shells start alike on every machine: what somebody's start-up files run may take
        # long (pyenv waits a minute for a lock that a killed shell has left), or say something.
        for name in (".bashrc", ".bash_profile", ".profile"):
            if (start_up := Path.home() / name).is_file():
                mounts.append({"bind": "/dev/null", "on": str(start_up)})
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
        group = ["--cgroups", ":".join(map(str, self.cgroups))] if self.cgroups else []
        return subprocess.Popen(
            [*self.cluster.script("enter.py"), str(self.pid), *group, "--cwd", str(cwd), "--"]
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

    def bind(self, source: str | os.PathLike[str], *, on: str | os.PathLike[str]) -> None:
        """Show ``source`` at the existing path ``on``, on this host only."""
        spec = {"mounts": [{"bind": os.fspath(source), "on": os.fspath(on)}]}
        self.run([*self.cluster.script("host_init.py"), json.dumps(spec)])

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
        config.write_text(sshd_config(self))
        self.path("/run/sshd").mkdir(exist_ok=True)
        self.run(["/usr/sbin/sshd", "-f", config, "-E", self.directory / "sshd.log"])
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
        # Sockets that cannot say goodbye over a cut link keep the dead host's network, and with it
        # the cable, for minutes; the host may be booted before that.
        if self.cluster.switch_pid:
            inside = ["nsenter", "--target", str(self.cluster.switch_pid), "--net"]
            unplug = [*inside, "ip", "link", "del", self.port]
            subprocess.run(unplug, capture_output=True, check=False)
        self.pid, self._init, self._daemons = 0, None, set()


def start_init(
    script: list[str], spec: dict[str, Any], *, log: Path
) -> tuple[subprocess.Popen[str], int]:
    """Start a process 1; return the handle that keeps it alive, and its pid as seen here."""
    with log.open("w") as errors:
        init = subprocess.Popen(
            [*script, json.dumps(spec)],
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


def ip_batch(pid: int, *lines: str) -> None:
    """``ip -batch`` in the network of process ``pid``."""
    subprocess.run(
        ["nsenter", "--target", str(pid), "--net", "ip", "-batch", "-"],
        input="\n".join(lines) + "\n",
        text=True,
        check=True,
    )


def python_paths() -> list[str]:
    """Where this Python and its packages lie: a host without the checkout still has them."""
    return sorted({sys.prefix, sys.base_prefix})


def make_key(path: Path) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "llmx-test-cluster", "-f", str(path)],
        check=True,
        stdin=subprocess.DEVNULL,
    )


def sshd_config(host: Host) -> str:
    """The server's configuration: keys only, nothing of the machine's own."""
    return (
        f"Port {host.ssh_port}\n"
        f"HostKey {host.directory / 'host_key'}\n"
        f"AuthorizedKeysFile {host.cluster.identity_file}.pub\n"
        "PermitRootLogin prohibit-password\nPasswordAuthentication no\nUsePAM no\n"
        "StrictModes no\nUseDNS no\nMaxStartups 100\nMaxSessions 100\n"
        f"PidFile {host.directory / 'sshd.pid'}\nSubsystem sftp internal-sftp\n"
    )


def ssh_config(hosts: Iterable[Host]) -> str:
    """A client's configuration: ``ssh -F FILE node-b`` from any host, and from outside."""
    return "\n".join(
        f"Host {host.name} {host.address}\n  HostName {host.address}\n  Port {host.ssh_port}\n"
        f"  User root\n  IdentityFile {host.cluster.identity_file}\n  IdentitiesOnly yes\n"
        "  BatchMode yes\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n"
        "  LogLevel ERROR\n"
        for host in hosts
    )


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
