"""Slurm on a test cluster: munged and slurmd on each host, slurmctld on the first.

    start_slurm(cluster)
    cluster.first.run(["srun", "-N2", "-n2", "hostname"])

Every host gets a private ``/etc/slurm`` with the same ``slurm.conf``, so that ``srun``,
``sinfo`` and ``scancel`` need no variable. Nodes have a ``gpu`` gres on two harmless device
files, because launchers ask for ``--gpus-per-node``.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from tests.cluster.netns import Cluster, Host, wait_until

_GRES_FILES = "/dev/tty[0-1]"


def start_slurm(cluster: Cluster, *, slots: int = 2, timeout_s: float = 30.0) -> None:
    """Start the daemons and wait until every node is idle; ``slots``: CPUs a node offers."""
    directory = cluster.directory / "slurm"
    etc, state = directory / "etc", directory / "state"
    etc.mkdir(parents=True)
    state.mkdir()
    (etc / "slurm.conf").write_text(_slurm_conf(cluster, state=state, slots=slots))
    (etc / "gres.conf").write_text(f"Name=gpu File={_GRES_FILES}\n")
    key = directory / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    for host in cluster.hosts:
        _start_munge(host, key=key)
        cgroup = host.directory / "cgroup"
        cgroup.mkdir()
        host.bind(etc, on="/etc/slurm")
        # One file a host: the control groups of each are its own.
        conf = host.directory / "cgroup.conf"
        conf.write_text(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={cgroup}\nCgroupAutomount=no\n")
        (etc / "cgroup.conf").touch()
        host.bind(conf, on="/etc/slurm/cgroup.conf")
    cluster.first.run(["slurmctld", "-c"])
    for host in cluster.hosts:
        host.run(["slurmd", "-N", host.name])

    def idle() -> bool:
        nodes = cluster.first.run(["sinfo", "-hN", "-o", "%N %t"], check=False).stdout
        return nodes.split().count("idle") == len(cluster.hosts)

    try:
        wait_until(idle, timeout_s=timeout_s, what="every Slurm node is idle")
    except TimeoutError as error:
        raise TimeoutError(f"{error}\n{logs(cluster)}") from None
    for host in cluster.hosts:
        host.adopt_daemons()


def logs(cluster: Cluster, *, lines: int = 20) -> str:
    """The last lines of all daemons' logs, for a failure's message."""
    parts = []
    for path in sorted((cluster.directory / "slurm" / "state").glob("*.log")):
        tail = path.read_text(errors="replace").splitlines()[-lines:]
        parts.append("\n".join([f"== {path.name}", *tail]))
    return "\n".join(parts)


def _start_munge(host: Host, *, key: Path) -> None:
    run = host.path("/run/munge")
    run.mkdir(mode=0o755)
    directory = host.directory / "munge"
    directory.mkdir(mode=0o700)
    files = ["--key-file", key, "--log-file", directory / "log", "--seed-file", directory / "seed"]
    host.run(["munged", "--force", *files])
    wait_until((run / "munge.socket.2").exists, timeout_s=10, what=f"munged on {host.name}")


def _slurm_conf(cluster: Cluster, *, state: Path, slots: int) -> str:
    first = cluster.first
    nodes = "".join(
        f"NodeName={host.name} NodeHostname={host.name} NodeAddr={host.address} "
        f"CPUs={slots} Gres=gpu:2 State=UNKNOWN\n"
        for host in cluster.hosts
    )
    user = "root" if os.geteuid() == 0 else os.environ["USER"]
    return (
        "ClusterName=llmxtest\n"
        f"SlurmctldHost={first.name}({first.address})\n"
        f"SlurmUser={user}\nSlurmdUser={user}\n"
        "AuthType=auth/munge\nCredType=cred/munge\n"
        # No systemd, no control groups: processes are found by their parents.
        "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none\n"
        "JobAcctGatherType=jobacct_gather/none\nAccountingStorageType=accounting_storage/none\n"
        "SelectType=select/cons_tres\nSelectTypeParameters=CR_CPU\nGresTypes=gpu\n"
        # A pretend node may claim more CPUs than this machine has.
        "SlurmdParameters=config_overrides\n"
        "ReturnToService=2\nSlurmdTimeout=30\nInactiveLimit=0\nKillWait=5\nMinJobAge=60\n"
        "SchedulerType=sched/builtin\nSchedulerParameters=batch_sched_delay=0\n"
        f"StateSaveLocation={state}\n"
        f"SlurmdSpoolDir={state}/spool-%n\n"
        # Private to the host; the hosts share /tmp.
        "TmpFS=/run\n"
        "SlurmctldPidFile=/run/slurmctld.pid\nSlurmdPidFile=/run/slurmd.pid\n"
        f"SlurmctldLogFile={state}/slurmctld.log\nSlurmdLogFile={state}/slurmd-%n.log\n"
        f"{nodes}"
        "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES\n"
    )
