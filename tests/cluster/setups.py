"""Set-ups that owners of clusters have, on the test cluster: each trains, or names the fix.

    sudo python -m tests.cluster.setups [--only WORDS] [--docs]    # test_setups.py: a part of them

Prints a row for each: the seconds to the first step, or to the message. ``--docs`` writes them
into docs/cluster.md. Exits with 1 if a set-up does something else, or a refusal takes 20 s.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.host import make_key
from tests.cluster.launching import REPOSITORY, nothing_left, start_llmx
from tests.cluster.netns import INTERFACE, Cluster, wait_until
from tests.cluster.requirements import Unsupported, missing
from tests.cluster.slurm import start_slurm

PAGE = REPOSITORY / "docs/cluster.md"
MARKS = ("<!-- setups: begin -->", "<!-- setups: end -->")
LONGEST_REFUSAL_S = 20.0
FIRST_STEP_S = 60.0
LONG = ("task.steps=100000", "launch.max_restarts=0")
SMALL_NETWORK = ("model.config.hidden_size=256", "model.config.num_hidden_layers=8")
"""A checkpoint of it has no room on a disk of 1 MiB."""
WRONG_KEY = f"SHA256:{'x' * 43}"

Prepare = Callable[[Cluster, Path], dict[str, Any]]
"""Changes the hosts; returns further arguments of ``start_llmx``."""


@dataclass(frozen=True)
class Setup:
    """A set-up; ``{dir}`` in its words is a directory that the hosts share."""

    name: str
    words: Sequence[str] = ()
    """Overrides of the run."""
    refused: str = ""
    """A part of the message; empty: it trains."""
    prepare: Prepare | None = None
    needs: Sequence[str] = ()
    """Transports whose programs must be there."""
    hosts: int = 2
    slots: Sequence[int] = (1, 1)
    private: bool = False
    """``{dir}/runs`` is a disk of its own on each host."""
    cluster: dict[str, Any] = field(default_factory=dict)
    """Further arguments of ``Cluster``."""
    start: dict[str, Any] = field(default_factory=dict)
    """Further arguments of ``start_llmx``."""


def _script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def _on_far(**keys: Any) -> dict[str, Any]:
    return {"by_host": {"node-b": keys}}


def _other_python(cluster: Cluster, directory: Path) -> dict[str, Any]:
    program = _script(directory / "python-b", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    return _on_far(python=program)


def _setup_script(cluster: Cluster, directory: Path) -> dict[str, Any]:
    return _on_far(setup=_script(directory / "setup.sh", "export NCCL_IB_HCA=mlx5_1\n"))


def _failing_script(cluster: Cluster, directory: Path) -> dict[str, Any]:
    return _on_far(setup=_script(directory / "setup.sh", "no-such-module load cuda || exit 3\n"))


def _fingerprint(cluster: Cluster, directory: Path) -> dict[str, Any]:
    host = cluster["node-b"]
    key = host.directory / "host_key.pub"
    text = cluster.first.run(["ssh-keygen", "-lf", str(key)]).stdout
    return _on_far(fingerprint=text.split()[1])


def _swapped_interfaces(cluster: Cluster, directory: Path) -> dict[str, Any]:
    for change in (["down"], ["name", "ib7"], ["up"]):
        device = "lan0" if change[-1] != "up" else "ib7"
        cluster["node-b"].run(["ip", "link", "set", device, *change])
    return {"interface": None}


def _slurm(cluster: Cluster, directory: Path) -> dict[str, Any]:
    start_slurm(cluster)
    return {}


def _allocation(cluster: Cluster, directory: Path) -> dict[str, Any]:
    start_slurm(cluster)
    cluster.first.run(["salloc", "--no-shell", "-N2", "-n2"])
    (job,) = cluster.first.run(["squeue", "-ho", "%A"]).stdout.split()
    return {"env": {"SLURM_JOB_ID": job, "SLURM_JOBID": job}}


def _ended_allocation(cluster: Cluster, directory: Path) -> dict[str, Any]:
    arguments = _allocation(cluster, directory)
    cluster.first.run(["scancel", arguments["env"]["SLURM_JOB_ID"]])
    return arguments


def _on_names(cluster: Cluster, directory: Path) -> dict[str, Any]:
    return {"by_host": {host.name: {"address": host.name} for host in cluster.hosts}}


def _ipv6(cluster: Cluster, directory: Path) -> dict[str, Any]:
    addresses = {host.name: f"fd00:77::{host.ssh_port}" for host in cluster.hosts}
    for host in cluster.hosts:
        address = f"{addresses[host.name]}/64"
        host.run(["ip", "addr", "add", address, "dev", INTERFACE, "nodad"])
    return {"by_host": {name: {"address": address} for name, address in addresses.items()}}


def _jump_host(cluster: Cluster, directory: Path) -> dict[str, Any]:
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


def _login_shell(cluster: Cluster, shell: str) -> dict[str, Any]:
    passwd = cluster["node-b"].directory / "passwd"
    accounts = (line.split(":") for line in Path("/etc/passwd").read_text().splitlines())
    lines = [
        ":".join([*words[:6], shell if words[0] == "root" else words[6]]) for words in accounts
    ]
    passwd.write_text("\n".join(lines) + "\n")
    cluster["node-b"].bind(passwd, on="/etc/passwd")
    return {}


def _fish(cluster: Cluster, directory: Path) -> dict[str, Any]:
    if not (shell := shutil.which("fish")):
        raise Unsupported("needs fish")
    return _login_shell(cluster, shell)


def _talkative_shell(cluster: Cluster, directory: Path) -> dict[str, Any]:
    text = "echo Welcome to node-b\necho 'module: not found' >&2\nexec /bin/bash \"$@\"\n"
    return _login_shell(cluster, _script(directory / "shell", f"#!/bin/sh\n{text}"))


def _small_limits(cluster: Cluster, directory: Path) -> dict[str, Any]:
    text = 'ulimit -n 256\nulimit -l 64\nexec /bin/bash "$@"\n'
    cluster["node-b"].add_disk("/dev/shm", size_mib=1)
    return _login_shell(cluster, _script(directory / "shell", f"#!/bin/sh\n{text}"))


def _nologin(cluster: Cluster, directory: Path) -> dict[str, Any]:
    return _login_shell(cluster, "/usr/sbin/nologin")


def _read_only(cluster: Cluster, path: Path) -> dict[str, Any]:
    cluster["node-b"].run(["mount", "--bind", path, path])
    cluster["node-b"].run(["mount", "-o", "remount,bind,ro", path])
    return {}


def _read_only_home(cluster: Cluster, directory: Path) -> dict[str, Any]:
    return _read_only(cluster, Path.home())


def _forwarded_port(cluster: Cluster, directory: Path) -> dict[str, Any]:
    first, port = cluster.first, 30846
    forward = f"{first.address}:{port}:{first.address}:29511"
    first.popen(["ssh", "-F", cluster.ssh_config, "-N", "-L", forward, first.name])
    wait_until(
        lambda: f":{port}" in first.run(["ss", "-Hltn"]).stdout, timeout_s=10, what="the forward"
    )
    first.adopt_daemons()
    words = [f"hardware.reach={first.address}:{port}", "launch.master_port=29511"]
    return {"overrides": words}


def _other_torch(cluster: Cluster, directory: Path) -> dict[str, Any]:
    package = directory / "packages/torch-2.0.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.0.0\n")
    text = f'PYTHONPATH={package.parent} exec {sys.executable} "$@"\n'
    return _on_far(python=_script(directory / "python-b", f"#!/bin/sh\n{text}"))


def _bare_python(cluster: Cluster, directory: Path) -> dict[str, Any]:
    text = f'#!/bin/sh\nexec {sys.executable} -S "$@"\n'
    return _on_far(python=_script(directory / "python-b", text))


def _no_rsync(cluster: Cluster, directory: Path) -> dict[str, Any]:
    cluster["node-b"].bind("/dev/null", on=str(shutil.which("rsync")))
    return {}


def _no_pdsh(cluster: Cluster, directory: Path) -> dict[str, Any]:
    cluster.first.bind("/dev/null", on=str(shutil.which("pdsh")))
    return {}


def _other_key(cluster: Cluster, directory: Path) -> dict[str, Any]:
    make_key(directory / "id_other")
    return _on_far(identity_file=str(directory / "id_other"))


def _changed_host_key(cluster: Cluster, directory: Path) -> dict[str, Any]:
    host, key = cluster["node-b"], Path(f"{cluster.identity_file}.pub").read_text()
    known_hosts = cluster.first.path(Path.home() / ".ssh/known_hosts")
    known_hosts.write_text(f"[{host.address}]:{host.ssh_port} {key}")
    return {}


def _closed_ssh(cluster: Cluster, directory: Path) -> dict[str, Any]:
    host = cluster.hosts[-1]
    ssh = ["ipproto", "tcp", "sport", str(host.ssh_port)]
    host.run(["ip", "rule", "add", *ssh, "blackhole"])
    return {}


def _same_address(cluster: Cluster, directory: Path) -> dict[str, Any]:
    return _on_far(address=cluster.first.address, ssh_port=cluster.first.ssh_port)


def _tunnel(cluster: Cluster, directory: Path) -> dict[str, Any]:
    cluster.hosts[-1].limit_packets(1400)
    return {}


def _tunnel_of_ranks(cluster: Cluster, directory: Path) -> dict[str, Any]:
    # The launching machine knows what the way takes, the hosts do not.
    route = [f"{cluster.hosts[-1].address}/32", "dev", INTERFACE, "mtu", "1400"]
    cluster.first.run(["ip", "route", "add", *route])
    return _tunnel(cluster, directory)


def _firewall(cluster: Cluster, directory: Path) -> dict[str, Any]:
    cluster["node-b"].block_high_ports()
    return {}


def _jumbo_frames(cluster: Cluster, directory: Path) -> dict[str, Any]:
    for host in cluster.hosts[1:]:
        host.set_mtu(9000)
    return {}


def _no_sshd(cluster: Cluster, directory: Path) -> dict[str, Any]:
    cluster["node-b"].stop_sshd()
    return {}


def _dead_host(cluster: Cluster, directory: Path) -> dict[str, Any]:
    cluster["node-b"].kill()
    return {}


def _small_disk(cluster: Cluster, directory: Path) -> dict[str, Any]:
    """The network is traced before: sizes follow from that, and the refusal is timed."""
    env = {"LLMX_TRACES": "on", "LLMX_CACHE": str(directory / "cache")}
    words = [*LONG, *SMALL_NETWORK, "dry_run=true"]
    start_llmx(cluster, directory, overrides=words, env=env, name="traced").wait(timeout_s=240)
    cluster["node-b"].add_disk(directory / "runs", size_mib=1)
    return {"env": env}


def _slow_link(cluster: Cluster, directory: Path) -> dict[str, Any]:
    cluster["node-b"].limit_bandwidth(100)
    return {}


def _busy(cluster: Cluster, directory: Path) -> dict[str, Any]:
    start_llmx(cluster, directory, overrides=LONG, name="other").until_step(1)
    return {}


def _taken_port(cluster: Cluster, directory: Path) -> dict[str, Any]:
    return {"overrides": [f"launch.master_port={cluster.first.ssh_port}"]}


SETUPS = (
    Setup("one host", hosts=1, slots=(2,)),
    Setup("two hosts, a shared disk"),
    Setup("hosts with 2, 1 and 1 devices", hosts=3, slots=(2, 1, 1)),
    Setup("started from a login node without devices", hosts=3, slots=(0, 1, 1)),
    Setup("rank 0 on the other host", start={"reverse": True}),
    Setup("no shared disk", ("launch=rsync", "run_dir={dir}/runs/x"), private=True,
          needs=("rsync",)),
    Setup("no shared disk, no code on the other host", ("launch=rsync", "run_dir={dir}/runs/x"),
          private=True, needs=("rsync",), cluster={"hidden": {"node-b": [REPOSITORY]}}),
    Setup("pdsh", ("launch.transport=pdsh",), needs=("pdsh",)),
    Setup("Open MPI", ("launch.transport=openmpi",), needs=("openmpi",)),
    Setup("Slurm", ("launch=slurm",), needs=("slurm",), prepare=_slurm),
    Setup("Slurm: inside an allocation", ("hardware=slurm", "hardware.device=cpu"),
          needs=("slurm",), prepare=_allocation),
    Setup("host names that resolve to 127.0.1.1", cluster={"loopback_names": True}),
    Setup("interfaces of different names, none given", prepare=_swapped_interfaces),
    Setup("another Python on one host", prepare=_other_python),
    Setup("a setup script on one host", prepare=_setup_script),
    Setup("a variable for one host", start=_on_far(env={"NCCL_IB_HCA": "mlx5_1"})),
    Setup("the fingerprint of a host key", prepare=_fingerprint),
    Setup("a link of 100 Mbit/s", prepare=_slow_link),
    Setup("host names instead of addresses", prepare=_on_names),
    Setup("IPv6", prepare=_ipv6),
    Setup("port, key and jump host in ~/.ssh/config", prepare=_jump_host, hosts=3,
          slots=(1, 0, 1)),
    Setup("a login shell that prints", prepare=_talkative_shell),
    Setup("fish as the login shell", prepare=_fish),
    Setup("ranks behind enter", start=_on_far(enter=["nsenter", "-t", "1", "-m", "--"])),
    Setup("NAT with one forwarded port (reach)", prepare=_forwarded_port),
    Setup("256 open files, 64 KiB locked, 1 MiB of /dev/shm", prepare=_small_limits),
    Setup("a read-only home directory", prepare=_read_only_home),
    Setup("no shared disk, without launch=rsync", ("run_dir={dir}/runs/x",),
          "launch.sync=rsync", private=True),
    Setup("a firewall between the hosts", refused="allow all TCP between the hosts",
          prepare=_firewall),
    Setup("MTU 9000 through a switch of 1500", refused="mtu 1500", prepare=_jumbo_frames,
          hosts=3, slots=(0, 1, 1)),
    Setup("a tunnel of 1400 bytes between hosts of 1500", refused="mtu 1400",
          prepare=_tunnel_of_ranks, hosts=3, slots=(0, 1, 1)),
    Setup("ssh through such a tunnel", refused="mtu 1400", prepare=_tunnel),
    Setup("a firewall before ssh, on one of three hosts", refused="a firewall lets port",
          prepare=_closed_ssh, hosts=3, slots=(1, 1, 1)),
    Setup("no sshd on a host", refused="ssh_port", prepare=_no_sshd),
    Setup("a host without power", refused="node-b", prepare=_dead_host),
    Setup("a host key of another fingerprint", refused="instead of fingerprint=",
          start=_on_far(fingerprint=WRONG_KEY)),
    Setup("a host key that has changed", refused="ssh-keygen -R", prepare=_changed_host_key),
    Setup("a key that a host does not accept", refused="ssh-copy-id", prepare=_other_key),
    Setup("an account that must not log in", refused="chsh -s", prepare=_nologin),
    Setup("a name that is not known", refused="/etc/hosts", start=_on_far(address="gpu-17.lan")),
    Setup("one address for two hosts", refused="List a host once", prepare=_same_address),
    Setup("localhost beside another host", refused="as localhost",
          start=_on_far(address="localhost")),
    Setup("a master_addr that no host has", ("hardware.master_addr=10.99.0.1",),
          "hardware.master_addr"),
    Setup("an interface that is not there", refused="eth9", start={"interface": "eth9"}),
    Setup("a taken master_port", refused="is in use on node-a", prepare=_taken_port),
    Setup("a full disk on one host",
          ("launch=rsync", "run_dir={dir}/runs/x", *SMALL_NETWORK),
          "of free disk space", prepare=_small_disk, needs=("rsync",)),
    Setup("a run directory that is read-only on one host", refused="is not writable there",
          prepare=_read_only),
    Setup("rows that are not there on one host", refused="/opt/none/rows.json",
          start=_on_far(data="/opt/none/rows.json")),
    Setup("GPUs in the file, none on the hosts", refused="Run nvidia-smi there",
          start={"by_host": {"node-a": {"device": "a100_80g"}, "node-b": {"device": "a100_80g"}}}),
    Setup("another torch on one host", refused="torch differs between hosts",
          prepare=_other_torch),
    Setup("a Python without packages", refused="Install the same packages", prepare=_bare_python),
    Setup("no rsync on one host", ("launch=rsync", "run_dir={dir}/runs/x"),
          "apt-get install rsync", prepare=_no_rsync, private=True, needs=("rsync",)),
    Setup("pdsh that is not installed", ("launch.transport=pdsh",), "apt-get install pdsh",
          prepare=_no_pdsh, needs=("pdsh",)),
    Setup("MPICH", ("launch.transport=mpich",), "launch=external"),
    Setup("a Python that is not there", refused="/opt/none/python",
          start=_on_far(python="/opt/none/python")),
    Setup("a setup script that is not there", refused="/opt/none/setup.sh",
          start=_on_far(setup="/opt/none/setup.sh")),
    Setup("a setup script that fails", refused="setup", prepare=_failing_script),
    Setup("a container that does not run", refused="no-such-program",
          start=_on_far(enter=["no-such-program", "exec"])),
    Setup("a root that is not there", refused="/opt/none", start=_on_far(root="/opt/none")),
    Setup("keys of one host with pdsh", ("launch.transport=pdsh",), "launch.transport=ssh",
          start=_on_far(env={"NCCL_IB_HCA": "mlx5_1"})),
    Setup("hosts that are busy with another run", refused="launch.allow_busy=true",
          prepare=_busy),
    Setup("two processes of torchrun or srun", refused="launch=external",
          start={"env": {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node-a",
                         "MASTER_PORT": "29500", "LOCAL_RANK": "0"}}),
    Setup("Slurm: an allocation that has ended", ("hardware=slurm", "hardware.device=cpu"),
          "SLURM_JOB_ID", needs=("slurm",), prepare=_ended_allocation),
    Setup("Slurm: hosts of unequal size", ("launch=slurm",), "same number of slots",
          slots=(2, 1)),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What a set-up did."""

    setup: Setup
    seconds: float
    problem: str = ""

    @property
    def outcome(self) -> str:
        return "refused" if self.setup.refused else "trains"


def try_setup(setup: Setup, directory: Path) -> Row:
    """Start it, and end it at its first step; ``Unsupported`` where this machine cannot."""
    if reason := missing(*setup.needs):
        raise Unsupported(reason)
    runs = directory / "runs"
    runs.mkdir()
    private = [runs] if setup.private else []
    with Cluster(hosts=setup.hosts, private_paths=private, **setup.cluster) as cluster:
        arguments = setup.prepare(cluster, directory) if setup.prepare else {}
        words = [*LONG, *setup.words, *arguments.pop("overrides", ())]
        began = time.monotonic()
        run = start_llmx(
            cluster,
            directory,
            slots=setup.slots,
            overrides=[word.format(dir=directory) for word in words],
            **{**setup.start, **arguments},
        )
        try:
            problem = _refusal(setup, run) if setup.refused else _training(run)
            seconds = time.monotonic() - began
            if setup.refused and not problem and seconds > LONGEST_REFUSAL_S:
                problem = f"refused after {seconds:.0f} s"
            return Row(setup, seconds, problem)
        finally:
            if not setup.refused and run.process.poll() is None:
                run.signal(signal.SIGTERM)  # a shell may have let it ignore SIGINT
                run.wait(timeout_s=60)
            if setup.prepare is not _busy:
                nothing_left(cluster)


def _training(run: Any) -> str:
    try:
        run.until_step(1, timeout_s=FIRST_STEP_S)
    except (AssertionError, TimeoutError) as error:
        return f"{error}\n{run.output()[-2000:]}"
    return ""


def _refusal(setup: Setup, run: Any) -> str:
    try:
        code = run.wait(timeout_s=FIRST_STEP_S)
    except AssertionError as error:
        return str(error)[-2000:]
    text = run.output()
    if code in (0, 1) or setup.refused not in text:
        return f"exit code {code}, without {setup.refused!r}:\n{text[-2000:]}"
    return ""


def table(rows: Sequence[Row]) -> str:
    """In Markdown."""
    lines = ["| set-up | keys | outcome | seconds |", "|---|---|---|---:|"]
    for row in rows:
        keys = " ".join(f"`{word}`" for word in row.setup.words if "{dir}" not in word)
        lines.append(f"| {row.setup.name} | {keys} | {row.outcome} | {row.seconds:.0f} |")
    return "\n".join(lines)


def main() -> int:
    """0 where every set-up does what it should."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.setups", description=__doc__)
    parser.add_argument("--only", default="", help="set-ups whose name contains this")
    parser.add_argument("--docs", action="store_true", help="write the table into its page")
    options = parser.parse_args()
    rows: list[Row] = []
    for setup in SETUPS:
        if options.only not in setup.name:
            continue
        directory = Path(tempfile.mkdtemp(prefix="llmx-setup-"))
        try:
            row = try_setup(setup, directory)
        except Unsupported as reason:
            print(f"skipped: {setup.name}: {reason}", flush=True)
            continue
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        rows.append(row)
        print(f"{row.seconds:6.1f} s  {row.outcome:<8} {setup.name}", flush=True)
        if row.problem:
            print(f"FAILED: {row.problem}", flush=True)
    if options.docs:
        before, _, rest = PAGE.read_text().partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        PAGE.write_text(f"{before}{MARKS[0]}\n{table(rows)}\n{MARKS[1]}{after}")
        print(f"written: {PAGE}")
    failed = [row.setup.name for row in rows if row.problem]
    print(f"{len(rows)} set-ups, {len(failed)} failed{': ' if failed else ''}{', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
