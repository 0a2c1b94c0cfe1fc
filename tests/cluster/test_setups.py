"""Set-ups that owners of clusters have, as in docs/cluster.md: each trains, or is refused in time
with the fix, before a rank starts. Those of transports and disks: the other files."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.host import make_key
from tests.cluster.launching import (
    hardware_of,
    nothing_left,
    rank_pids,
    start_llmx,
    write_option,
)
from tests.cluster.netns import INTERFACE, Cluster, Unsupported, wait_until

Make = Callable[..., Cluster]
Arguments = dict[str, Any]
LONGEST_REFUSAL_S = 20.0
LONG = ("task.steps=100000", "launch.max_restarts=0")
SMALL_NETWORK = ("model.config.hidden_size=256", "model.config.num_hidden_layers=8")
"""A checkpoint of it has no room on a disk of 1 MiB."""


@dataclass(frozen=True)
class Setup:
    """A set-up; ``{dir}`` in its words is a directory that the hosts share."""

    name: str
    refused: str = ""
    """A part of the message; empty: it trains."""
    prepare: Callable[[Cluster, Path], Arguments | None] | None = None
    """Changes the hosts; returns further arguments of ``start_llmx``."""
    start: Arguments = field(default_factory=dict)
    """The same, where no host is changed."""
    words: Sequence[str] = ()
    """Overrides of the run."""
    needs: Sequence[str] = ()
    """Transports whose programs must be there."""
    slots: Sequence[int] = (1, 1)
    private: bool = False
    """``{dir}/runs`` is a disk of its own on each host."""


def _on_far(**keys: Any) -> Arguments:
    return {"by_host": {"node-b": keys}}


def _script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def _far_python(directory: Path, text: str) -> Arguments:
    return _on_far(python=_script(directory / "python-b", f'{text} "$@"'))


def _failing_script(cluster: Cluster, directory: Path) -> Arguments:
    return _on_far(setup=_script(directory / "setup.sh", "no-such-module load cuda || exit 3"))


def _fingerprint(cluster: Cluster, directory: Path) -> Arguments:
    key = cluster["node-b"].directory / "host_key.pub"
    text = cluster.first.run(["ssh-keygen", "-lf", str(key)]).stdout
    return _on_far(fingerprint=text.split()[1])


def _on_names(cluster: Cluster, directory: Path) -> Arguments:
    return {"by_host": {host.name: {"address": host.name} for host in cluster.hosts}}


def _ipv6(cluster: Cluster, directory: Path) -> Arguments:
    addresses = {host.name: f"fd00:77::{host.ssh_port}" for host in cluster.hosts}
    for host in cluster.hosts:
        address = f"{addresses[host.name]}/64"
        host.run(["ip", "addr", "add", address, "dev", INTERFACE, "nodad"])
    return {"by_host": {name: {"address": address} for name, address in addresses.items()}}


def _jump_host(cluster: Cluster, directory: Path) -> Arguments:
    first, jump, far = cluster.hosts
    blocks = (
        f"Host {far.name}\n  Port {far.ssh_port}\n  ProxyJump jump\n",
        f"Host jump\n  HostName {jump.address}\n  Port {jump.ssh_port}\n",
        f"Host *\n  IdentityFile {cluster.identity_file}\n",
    )
    first.path(Path.home() / ".ssh/config").write_text("".join(blocks))
    ssh = ["to", far.address, "ipproto", "tcp", "dport", str(far.ssh_port)]
    first.run(["ip", "rule", "add", *ssh, "unreachable"])
    return {"by_host": {far.name: {"ssh_port": 22, "identity_file": None}}}


def _login_shell(cluster: Cluster, shell: str) -> None:
    passwd = cluster["node-b"].directory / "passwd"
    accounts = (line.split(":") for line in Path("/etc/passwd").read_text().splitlines())
    lines = [
        ":".join([*words[:6], shell if words[0] == "root" else words[6]]) for words in accounts
    ]
    passwd.write_text("\n".join(lines) + "\n")
    cluster["node-b"].bind(passwd, on="/etc/passwd")


def _fish(cluster: Cluster, directory: Path) -> None:
    if not (shell := shutil.which("fish")):
        raise Unsupported("needs fish")
    _login_shell(cluster, shell)


def _talkative_shell(cluster: Cluster, directory: Path) -> None:
    text = "echo Welcome to node-b\necho 'module: not found' >&2\nexec /bin/bash \"$@\""
    _login_shell(cluster, _script(directory / "shell", text))


def _small_limits(cluster: Cluster, directory: Path) -> None:
    cluster["node-b"].add_disk("/dev/shm", size_mib=1)
    text = 'ulimit -n 256\nulimit -l 64\nexec /bin/bash "$@"'
    _login_shell(cluster, _script(directory / "shell", text))


def _read_only(cluster: Cluster, path: Path) -> None:
    cluster["node-b"].run(["mount", "--bind", path, path])
    cluster["node-b"].run(["mount", "-o", "remount,bind,ro", path])


def _forwarded_port(cluster: Cluster, directory: Path) -> Arguments:
    first, port = cluster.first, 30846
    forward = f"{first.address}:{port}:{first.address}:29511"
    first.popen(["ssh", "-F", cluster.ssh_config, "-N", "-L", forward, first.name])
    wait_until(
        lambda: f":{port}" in first.run(["ss", "-Hltn"]).stdout, timeout_s=10, what="the forward"
    )
    first.adopt_daemons()
    return {"overrides": [f"hardware.reach={first.address}:{port}", "launch.master_port=29511"]}


def _other_torch(cluster: Cluster, directory: Path) -> Arguments:
    package = directory / "packages/torch-2.0.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.0.0\n")
    return _far_python(directory, f"PYTHONPATH={package.parent} exec {sys.executable}")


def _other_key(cluster: Cluster, directory: Path) -> Arguments:
    make_key(directory / "id_other")
    return _on_far(identity_file=str(directory / "id_other"))


def _changed_host_key(cluster: Cluster, directory: Path) -> None:
    host, key = cluster["node-b"], Path(f"{cluster.identity_file}.pub").read_text()
    known_hosts = cluster.first.path(Path.home() / ".ssh/known_hosts")
    known_hosts.write_text(f"[{host.address}]:{host.ssh_port} {key}")


def _same_address(cluster: Cluster, directory: Path) -> Arguments:
    return _on_far(address=cluster.first.address, ssh_port=cluster.first.ssh_port)


def _tunnel(cluster: Cluster, directory: Path) -> None:
    cluster.hosts[-1].limit_packets(1400)


def _tunnel_of_ranks(cluster: Cluster, directory: Path) -> None:
    """The launching machine knows what the way takes, the hosts do not."""
    route = [f"{cluster.hosts[-1].address}/32", "dev", INTERFACE, "mtu", "1400"]
    cluster.first.run(["ip", "route", "add", *route])
    _tunnel(cluster, directory)


def _small_disk(cluster: Cluster, directory: Path) -> Arguments:
    """The network is traced before: sizes follow from that, and the refusal is timed."""
    env = {"LLMX_TRACES": "on", "LLMX_CACHE": str(directory / "cache")}
    words = [*LONG, *SMALL_NETWORK, "dry_run=true"]
    start_llmx(cluster, directory, overrides=words, env=env, name="traced").wait(timeout_s=240)
    cluster["node-b"].add_disk(directory / "runs", size_mib=1)
    return {"env": env}


TRAINS = (
    Setup("hosts with 2, 1 and 1 devices", slots=(2, 1, 1)),
    Setup("the fingerprint of a host key", prepare=_fingerprint),
    Setup("a link of 100 Mbit/s", prepare=lambda c, _: c["node-b"].limit_bandwidth(100)),
    Setup("host names instead of addresses", prepare=_on_names),
    Setup("IPv6", prepare=_ipv6),
    Setup("port, key and jump host in ~/.ssh/config", prepare=_jump_host, slots=(1, 0, 1)),
    Setup("a login shell that prints", prepare=_talkative_shell),
    Setup("fish as the login shell", prepare=_fish),
    Setup("NAT with one forwarded port (reach)", prepare=_forwarded_port),
    Setup("256 open files, 64 KiB locked, 1 MiB of /dev/shm", prepare=_small_limits),
    Setup("a read-only home directory", prepare=lambda c, _: _read_only(c, Path.home())),
)
REFUSED = (
    Setup("no shared disk, without launch=rsync", "launch.sync=rsync",
          words=["run_dir={dir}/runs/x"], private=True),
    Setup("no sshd on a host", "ssh_port", lambda c, _: c["node-b"].stop_sshd()),
    Setup("a host without power", "node-b", lambda c, _: c["node-b"].kill()),
    Setup("a host key of another fingerprint", "instead of fingerprint=",
          start=_on_far(fingerprint=f"SHA256:{'x' * 43}")),
    Setup("a host key that has changed", "ssh-keygen -R", _changed_host_key),
    Setup("a key that a host does not accept", "ssh-copy-id", _other_key),
    Setup("an account that must not log in", "chsh -s",
          lambda c, _: _login_shell(c, "/usr/sbin/nologin")),
    Setup("a name that is not known", "/etc/hosts", start=_on_far(address="gpu-17.lan")),
    Setup("one address for two hosts", "List a host once", _same_address),
    Setup("a master_addr that no host has", "hardware.master_addr",
          words=["hardware.master_addr=10.99.0.1"]),
    Setup("an interface that is not there", "eth9", start={"interface": "eth9"}),
    Setup("a taken master_port", "is in use on node-a",
          lambda c, _: {"overrides": [f"launch.master_port={c.first.ssh_port}"]}),
    Setup("a full disk on one host", "of free disk space", _small_disk, needs=["rsync"],
          words=["launch=rsync", "run_dir={dir}/runs/x", *SMALL_NETWORK]),
    Setup("a run directory that is read-only on one host", "is not writable there", _read_only),
    Setup("rows that are not there on one host", "/opt/none/rows.json",
          start=_on_far(data="/opt/none/rows.json")),
    Setup("GPUs in the file, none on the hosts", "Run nvidia-smi there",
          start={"by_host": {name: {"device": "a100_80g"} for name in ("node-a", "node-b")}}),
    Setup("another torch on one host", "torch differs between hosts", _other_torch),
    Setup("a Python without packages", "Install the same packages",
          lambda _, directory: _far_python(directory, f"exec {sys.executable} -S")),
    Setup("no rsync on one host", "apt-get install rsync",
          lambda c, _: c["node-b"].bind("/dev/null", on=str(shutil.which("rsync"))),
          words=["launch=rsync", "run_dir={dir}/runs/x"], private=True, needs=["rsync"]),
    Setup("pdsh that is not installed", "apt-get install pdsh",
          lambda c, _: c.first.bind("/dev/null", on=str(shutil.which("pdsh"))),
          words=["launch.transport=pdsh"], needs=["pdsh"]),
    Setup("MPICH", "launch=external", words=["launch.transport=mpich"]),
    Setup("a Python that is not there", "/opt/none/python",
          start=_on_far(python="/opt/none/python")),
    Setup("a setup script that is not there", "/opt/none/setup.sh",
          start=_on_far(setup="/opt/none/setup.sh")),
    Setup("a setup script that fails", "setup", _failing_script),
    Setup("a container that does not run", "no-such-program",
          start=_on_far(enter=["no-such-program", "exec"])),
    Setup("a root that is not there", "/opt/none", start=_on_far(root="/opt/none")),
    Setup("keys of one host with pdsh", "launch.transport=ssh", words=["launch.transport=pdsh"],
          start=_on_far(env={"NCCL_IB_HCA": "mlx5_1"})),
    Setup("two processes of torchrun or srun", "launch=external",
          start={"env": {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node-a",
                         "MASTER_PORT": "29500", "LOCAL_RANK": "0"}}),
)  # fmt: skip
REFUSED_LATE = (
    Setup("a tunnel of 1400 bytes between hosts of 1500", "mtu 1400", _tunnel_of_ranks,
          slots=(0, 1, 1)),
    Setup("ssh through such a tunnel", "mtu 1400", _tunnel),
)  # fmt: skip
"""After a time-out of the network."""


@pytest.mark.parametrize(
    "setup",
    [
        *(pytest.param(setup, id=setup.name) for setup in REFUSED),
        *(
            pytest.param(setup, id=setup.name, marks=pytest.mark.nightly)
            for setup in (*REFUSED_LATE, *TRAINS)
        ),
    ],
)
def test_it_is_refused_with_the_fix_or_trains(
    setup: Setup,
    request: pytest.FixtureRequest,
    make_cluster: Make,
    need: Callable[..., None],
    tmp_path: Path,
) -> None:
    need(*setup.needs)
    runs = tmp_path / "runs"
    runs.mkdir()
    if setup.prepare or setup.private or len(setup.slots) > 2:
        private = [runs] if setup.private else []
        cluster = make_cluster(hosts=len(setup.slots), private_paths=private)
    else:
        cluster = request.getfixturevalue("cluster")
    more = {**setup.start, **((setup.prepare and setup.prepare(cluster, tmp_path)) or {})}
    words = [*LONG, *setup.words, *more.pop("overrides", ())]
    words = [word.replace("{dir}", str(tmp_path)) for word in words]
    run = start_llmx(cluster, tmp_path, slots=setup.slots, overrides=words, **more)
    if setup.refused:
        assert run.wait(timeout_s=LONGEST_REFUSAL_S) not in (0, 1), run.output()
        assert setup.refused in run.output()
    else:
        run.until_step(1, timeout_s=60)
        run.signal(signal.SIGTERM)  # a shell may have let it ignore SIGINT
        assert run.wait(timeout_s=60) == 130, run.output()
    nothing_left(cluster)


def test_a_doctor_of_healthy_hosts(cluster: Cluster, tmp_path: Path) -> None:
    option = write_option(tmp_path, "pair", hardware_of(cluster, (1, 1)))
    words = ["doctor", "hardware=pair", option, "--bandwidth"]
    done = cluster.first.run([sys.executable, "-m", "llmx", *words], cwd=str(tmp_path), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        "  ssh            node-a, node-b answer\n",
        "  network        lan0 (MTU 1500)\n",
        "  connections    2 of 2 work",
        "  all-reduce     2 ranks met in ",
        "ith hardware.network_gbit_per_s=",
        "✓ 2 hosts in",
    ):
        assert line in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["conf"]
    nothing_left(cluster, timeout_s=5)


def test_hosts_that_do_not_reach_each_other(make_cluster: Make, tmp_path: Path) -> None:
    """ssh works, and so does the rendezvous; the ranks would wait for hours in a broadcast."""
    cluster = make_cluster(hosts=3)
    _, near, far = cluster.hosts

    def refused(name: str) -> str:
        how = {"slots": (0, 1, 1), "overrides": ["launch.transport=ssh"], "name": name}
        run = start_llmx(cluster, tmp_path, **how)
        assert run.wait(timeout_s=60) == 4, run.output()
        assert not rank_pids(near)
        return run.out.read_text()

    far.block_high_ports()
    text = refused("firewall")
    assert f"node-b -> node-c at {far.address} (lan0, port " in text
    assert "no connection (no answer)" in text
    assert "The port of the rendezvous is open there, this one is not." in text
    assert "allow all TCP between the hosts" in text
    far.unblock_high_ports()
    for host in (near, far):
        host.set_mtu(9000)
    text = refused("mtu")
    assert "one byte passes both ways, but 64 KiB sent there do not arrive" in text
    assert "ip link set dev lan0 mtu 1500" in text
    nothing_left(cluster, timeout_s=5)


def test_ranks_that_never_start(cluster: Cluster, tmp_path: Path) -> None:
    """A start time-out names the ranks and their hosts. One host has a Python that hangs."""
    text = 'case "$*" in *llmx.worker*) exec sleep infinity;; esac\n'
    python = _far_python(tmp_path, f"{text}exec {sys.executable}")
    run = start_llmx(cluster, tmp_path, overrides=["launch.start_timeout_s=1", *LONG], **python)
    assert run.wait(timeout_s=60) == 1, run.output()
    assert "did not start within 1 s" in run.result()["cause"]
    assert "node-b" in run.result()["cause"]
    nothing_left(cluster, timeout_s=5)
