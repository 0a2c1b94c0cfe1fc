"""Faults of the pretend cluster are felt, where no other test shows it; nothing of it is left."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import leftovers
from tests.cluster.launching import REPOSITORY
from tests.cluster.netns import Cluster, wait_until

pytestmark = pytest.mark.nightly

Make = Callable[..., Cluster]


def test_a_line_is_slow_or_short_until_it_is_not(make_cluster: Make) -> None:
    cluster = make_cluster()
    first, second = cluster.hosts
    second.limit_bandwidth(40)
    ssh = f"ssh -F {cluster.ssh_config} node-b"
    for command in (
        f"head -c 4M /dev/zero | {ssh} 'cat > /dev/null'",
        f"{ssh} 'head -c 4M /dev/zero' > /dev/null",
    ):
        started = time.monotonic()
        first.run(["sh", "-c", command])
        # 4 MiB at 40 Mbit/s take 0.84 s; without the limit a tenth of it.
        assert time.monotonic() - started > 0.7
    second.limit_bandwidth(None)

    long_word = f"head -c 20000 /dev/zero | {ssh} 'wc -c'"
    second.limit_packets(500)
    assert _can_connect(first, second)
    assert first.run(["timeout", "1", "sh", "-c", long_word], check=False).returncode == 124
    second.limit_packets(None)
    assert first.run(["sh", "-c", long_word]).stdout == "20000\n"


def test_a_host_with_little_of_a_core(make_cluster: Make) -> None:
    host = make_cluster().first
    python = [sys.executable, "-S", "-c"]
    cores = "import os; print(sorted(os.sched_getaffinity(0)))"
    all_cores = os.sched_getaffinity(0)
    last = max(all_cores)
    host.pin_to_core(last)
    assert host.run([*python, cores]).stdout.strip() == f"[{last}]"
    assert _ssh(host, host.name, *python, f"'{cores}'").stdout.strip() == f"[{last}]"
    host.pin_to_core(None)
    assert host.run([*python, cores]).stdout.strip() == f"{sorted(all_cores)}"

    host.limit_cpu(0.2)
    spin = "import time; e = time.monotonic() + 1\nwhile time.monotonic() < e: pass\n"
    assert float(host.run([*python, f"{spin}print(time.process_time())"]).stdout) < 0.45


def test_a_killed_session_leaves_no_process_and_no_network() -> None:
    program = textwrap.dedent("""
        import sys
        from tests.cluster.netns import Cluster
        cluster = Cluster(hosts=2)
        cluster.first.popen(["sleep", "1000"])
        cluster.first.limit_cpu(1) if sys.argv[1] == "quota" else None
        print(cluster.directory, *(host.pid for host in cluster.hosts), flush=True)
        sys.stdin.read()
    """)
    session = subprocess.Popen(
        [sys.executable, "-c", program, "quota" if leftovers.CPU_GROUPS.is_dir() else "plain"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    assert session.stdout is not None
    name, *pids = session.stdout.readline().split()
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    session.kill()
    session.communicate()
    wait_until(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids),
        timeout_s=10,
        what="the hosts of the killed session have ended",
    )
    assert Path(name).exists()
    leftovers.sweep()
    assert not Path(name).exists()
    wait_until(
        lambda: (
            leftovers.sweep() == [] and not list(leftovers.CPU_GROUPS.glob(f"{Path(name).name}*"))
        ),
        timeout_s=10,
        what="its control groups are gone",
    )


def _can_connect(here: Any, there: Any) -> bool:
    command = f"exec 3<>/dev/tcp/{there.address}/{there.ssh_port}"
    return here.run(["timeout", "1", "bash", "-c", command], check=False).returncode == 0


def _ssh(here: Any, there: str, *words: str) -> Any:
    return here.run(["ssh", "-F", here.cluster.ssh_config, there, *words])
