"""What the cluster tests need of a machine, and a sentence for what is missing.

``python -m tests.cluster check`` prints it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

INSTALL = "run scripts/install-system-packages.sh"
PROGRAMS = {
    "ip": "iproute2",
    "ss": "iproute2",
    "nsenter": "util-linux",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "/usr/sbin/sshd": "openssh-server",
}
TRANSPORTS = {
    "ssh": {},
    "pdsh": {"pdsh": "pdsh"},
    "rsync": {"rsync": "rsync"},
    "openmpi": {"mpirun": "openmpi-bin"},
    "slurm": {
        "srun": "slurm-client",
        "slurmctld": "slurmctld",
        "slurmd": "slurmd",
        "munged": "munge",
    },
}


class Unsupported(RuntimeError):
    """This machine cannot do what a test asks of its cluster; the message says why."""


@lru_cache
def missing(*transports: str) -> str:
    """Why no cluster can be made here (with these transports); empty when one can."""
    if sys.platform != "linux":
        return f"needs Linux namespaces, this is {sys.platform}"
    if os.geteuid() != 0:
        return "needs root (to make network namespaces)"
    programs = dict(PROGRAMS)
    for transport in transports:
        programs |= TRANSPORTS[transport]
    search = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = {
        name: package for name, package in programs.items() if not shutil.which(name, path=search)
    }
    if absent:
        return f"needs {', '.join(absent)} ({INSTALL})"
    return _namespaces()


def _namespaces() -> str:
    init = Path(__file__).with_name("host_init.py")
    spec = (
        '{"name": "probe", "namespaces": ["net", "uts", "ipc", "pid", "mnt"],'
        ' "mounts": [{"sysfs": "/sys"}]}'
    )
    probe = subprocess.run(
        [sys.executable, "-I", "-S", str(init), spec],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if probe.returncode != 0 or not probe.stdout:
        last = (probe.stderr.strip().splitlines() or ["no reason given"])[-1]
        return f"needs namespaces and mounts, CAP_SYS_ADMIN and CAP_NET_ADMIN ({last})"
    devices = "ip link add dev b0 type bridge && ip link add dev v0 type veth"
    words = ["unshare", "--net", "sh", "-c", devices]
    bridge = subprocess.run(words, capture_output=True, text=True)
    if bridge.returncode != 0:
        return f"needs bridge and veth devices in the kernel ({bridge.stderr.strip()})"
    return ""
