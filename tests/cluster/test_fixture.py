"""The pretend cluster is real: hosts are apart, and faults are felt."""

from __future__ import annotations

import os
import signal
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
Need = Callable[..., None]


def test_private_disks_are_private_and_a_hidden_checkout_leaves_python(
    make_cluster: Make, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "of-this-machine").touch()
    cluster = make_cluster(private_paths=[work], hidden={"node-b": [REPOSITORY]})
    for host in cluster.hosts:
        assert host.run(["ls", work]).stdout == ""
        host.run(["sh", "-c", f"hostname > {work}/name"])
        host.run(["sh", "-c", "hostname > /dev/shm/name"])
    for host in cluster.hosts:
        assert host.path(work / "name").read_text() == f"{host.name}\n"
        assert host.path("/dev/shm/name").read_text() == f"{host.name}\n"
    assert [path.name for path in work.iterdir()] == ["of-this-machine"]
    first, second = cluster.hosts
    assert first.run(["ls", REPOSITORY / "llmx"]).stdout
    assert second.run(["ls", REPOSITORY / "llmx"], check=False).returncode != 0
    second.run([sys.executable, "-c", "import numpy"])
    second.add_disk("/mnt", size_mib=1)  # the fixture's scripts are still found


def test_a_killed_host_comes_back_empty(make_cluster: Make, tmp_path: Path) -> None:
    cluster = make_cluster(private_paths=[tmp_path / "work"])
    first, second = cluster.hosts
    second.path(tmp_path / "work" / "file").touch()
    process = second.popen(["sleep", "1000"])
    wait_until(second.processes, timeout_s=10, what="sleep runs")
    second.kill()
    assert process.wait(timeout=10) == -signal.SIGKILL
    assert not _can_connect(first, second)
    second.boot()
    assert _can_connect(first, second)
    assert list(second.path(tmp_path / "work").iterdir()) == []


def test_a_line_is_cut_slow_or_short_until_it_is_not(make_cluster: Make) -> None:
    cluster = make_cluster()
    first, second = cluster.hosts
    second.cut()
    assert not _can_connect(first, second)
    second.restore()
    wait_until(lambda: _can_connect(first, second), timeout_s=20, what="the link is back")

    second.stop_sshd()
    assert "Connection refused" in _ssh(first, "node-b", "true", check=False).stderr
    second.start_sshd()
    _ssh(first, "node-b", "true")

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


def test_a_host_with_a_full_disk_and_little_of_a_core(make_cluster: Make, tmp_path: Path) -> None:
    host = make_cluster().first
    host.add_disk(tmp_path, size_mib=1)
    answer = host.run(["sh", "-c", f"head -c 2M /dev/zero > {tmp_path}/file"], check=False)
    assert "No space left on device" in answer.stderr
    assert host.path(tmp_path / "file").stat().st_size <= 2**20

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


def test_a_killed_session_leaves_no_process_and_no_network(tmp_path: Path) -> None:
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


def _ssh(here: Any, there: str, *words: str, check: bool = True) -> Any:
    return here.run(["ssh", "-F", here.cluster.ssh_config, there, *words], check=check)
