"""The pretend cluster is real: hosts are apart, and faults are felt.

``pytest tests/cluster/test_fixture.py``
"""

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
from tests.cluster.netns import Cluster, wait_until
from tests.cluster.requirements import Unsupported
from tests.cluster.slurm import start_slurm

pytestmark = pytest.mark.nightly

REPOSITORY = Path(__file__).resolve().parents[2]
Make = Callable[..., Cluster]
Need = Callable[..., None]


def test_hosts_have_names_and_reach_each_other_by_ssh(cluster: Cluster) -> None:
    ports = set()
    for host in cluster.hosts:
        assert host.run(["hostname"]).stdout.strip() == host.name
        assert host.ssh_port != 22
        ports.add(host.ssh_port)
        for other in cluster.hosts:
            answer = host.run(["ssh", "-F", cluster.ssh_config, other.name, "hostname"])
            assert answer.stdout.strip() == other.name
    assert len(ports) == len(cluster.hosts)


def test_ssh_on_port_22_is_refused(cluster: Cluster) -> None:
    answer = cluster.run("node-a", ["ssh", "-p", "22", "node-b", "true"], check=False)
    assert answer.returncode == 255
    assert "Connection refused" in answer.stderr


def test_private_disks_are_private(make_cluster: Make, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "of-this-machine").touch()
    cluster = make_cluster(private_paths=[work])
    for host in cluster.hosts:
        assert host.run(["ls", work]).stdout == ""
        host.run(["sh", "-c", f"hostname > {work}/name"])
        host.run(["sh", "-c", "hostname > /dev/shm/name"])
    for host in cluster.hosts:
        assert host.path(work / "name").read_text() == f"{host.name}\n"
        assert host.path("/dev/shm/name").read_text() == f"{host.name}\n"
    assert [path.name for path in work.iterdir()] == ["of-this-machine"]


def test_a_hidden_checkout_leaves_python(make_cluster: Make) -> None:
    cluster = make_cluster(hidden={"node-b": [REPOSITORY]})
    there = [sys.executable, "-c", "import numpy"]
    assert cluster.run("node-a", ["ls", REPOSITORY / "llmx"]).stdout
    assert cluster.run("node-b", ["ls", REPOSITORY / "llmx"], check=False).returncode != 0
    cluster.run("node-b", there)
    cluster["node-b"].add_disk("/mnt", size_mib=1)  # the fixture's scripts are still found


def test_signals_and_exit_codes_pass_through(cluster: Cluster) -> None:
    host = cluster.first
    assert host.run(["sh", "-c", "exit 7"], check=False).returncode == 7
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        process = host.popen(["sleep", "1000"])
        wait_until(host.processes, timeout_s=10, what="sleep runs")
        process.send_signal(number)
        assert process.wait(timeout=10) == -number
        wait_until(lambda: not host.processes(), timeout_s=10, what="sleep has ended")


def test_a_cut_host_is_silent_until_restored(make_cluster: Make) -> None:
    cluster = make_cluster()
    first, second = cluster.hosts
    second.cut()
    assert not _can_connect(first, second)
    second.restore()
    wait_until(lambda: _can_connect(first, second), timeout_s=20, what="the link is back")


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


def test_sshd_stops_and_starts(make_cluster: Make) -> None:
    cluster = make_cluster()
    first, second = cluster.hosts
    second.stop_sshd()
    answer = first.run(["ssh", "-F", cluster.ssh_config, "node-b", "true"], check=False)
    assert "Connection refused" in answer.stderr
    second.start_sshd()
    first.run(["ssh", "-F", cluster.ssh_config, "node-b", "true"])


def test_bandwidth_is_limited_in_both_directions(make_cluster: Make) -> None:
    cluster = make_cluster()
    first, second = cluster.hosts
    second.limit_bandwidth(40)
    mebibytes = 4
    for command in (
        f"head -c {mebibytes}M /dev/zero | ssh -F {cluster.ssh_config} node-b 'cat > /dev/null'",
        f"ssh -F {cluster.ssh_config} node-b 'head -c {mebibytes}M /dev/zero' > /dev/null",
    ):
        started = time.monotonic()
        first.run(["sh", "-c", command])
        # 4 MiB at 40 Mbit/s take 0.84 s; without the limit a tenth of it.
        assert time.monotonic() - started > 0.7
    second.limit_bandwidth(None)


def test_long_packets_are_lost_and_short_ones_pass(make_cluster: Make) -> None:
    cluster = make_cluster()
    first, second = cluster.hosts
    long_word = f"head -c 20000 /dev/zero | ssh -F {cluster.ssh_config} node-b 'wc -c'"
    second.limit_packets(500)
    assert _can_connect(first, second)
    assert first.run(["timeout", "1", "sh", "-c", long_word], check=False).returncode == 124
    second.limit_packets(None)
    assert first.run(["sh", "-c", long_word]).stdout == "20000\n"


def test_a_full_disk(make_cluster: Make, tmp_path: Path) -> None:
    host = make_cluster().first
    host.add_disk(tmp_path, size_mib=1)
    answer = host.run(["sh", "-c", f"head -c 2M /dev/zero > {tmp_path}/file"], check=False)
    assert "No space left on device" in answer.stderr
    assert host.path(tmp_path / "file").stat().st_size <= 2**20


def test_a_cpu_quota_holds_for_old_and_new_programs(make_cluster: Make) -> None:
    host = make_cluster().first
    host.limit_cpu(0.2)
    spin = "import time; e = time.monotonic() + 1\nwhile time.monotonic() < e: pass\n"
    code = f"{spin}print(time.process_time())"
    used_s = float(host.run([sys.executable, "-S", "-c", code]).stdout)
    assert used_s < 0.45


def test_a_host_on_one_core(make_cluster: Make) -> None:
    host = make_cluster().first
    all_cores = os.sched_getaffinity(0)
    last = max(all_cores)
    host.pin_to_core(last)
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    assert host.run([sys.executable, "-S", "-c", code]).stdout.strip() == f"[{last}]"
    ssh = ["ssh", "-F", host.cluster.ssh_config, host.name, sys.executable, "-S", "-c"]
    assert host.run([*ssh, f"'{code}'"]).stdout.strip() == f"[{last}]"
    host.pin_to_core(None)
    assert host.run([sys.executable, "-S", "-c", code]).stdout.strip() == f"{sorted(all_cores)}"


def test_latency(make_cluster: Make) -> None:
    cluster = make_cluster()
    cluster["node-b"].add_latency(100)
    started = time.monotonic()
    cluster.run("node-a", ["ssh", "-F", cluster.ssh_config, "node-b", "true"])
    assert time.monotonic() - started > 0.5


def test_the_machine_itself_can_join(make_cluster: Make) -> None:
    cluster = make_cluster(connect_root=True)
    answer = subprocess.run(
        ["ssh", "-F", cluster.ssh_config, "node-b", "hostname; echo $SSH_CLIENT"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.split()[:2] == ["node-b", cluster.root_address]


def test_two_clusters_at_once_do_not_meet(make_cluster: Make) -> None:
    one, two = make_cluster(), make_cluster()
    one["node-b"].kill()
    two.run("node-a", ["ssh", "-F", two.ssh_config, "node-b", "true"])
    wrong_key = two.run("node-a", ["ssh", "-F", one.ssh_config, "node-b", "true"], check=False)
    assert "Permission denied" in wrong_key.stderr


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


def test_slurm_starts_tasks_through_pmix(make_cluster: Make, need: Need) -> None:
    need("slurm")
    cluster = make_cluster()
    start_slurm(cluster)
    offered = cluster.run("node-a", ["srun", "--mpi=list"]).stdout
    if "pmix" not in offered:
        raise Unsupported("this Slurm was built without PMIx")
    names = cluster.run("node-a", ["srun", "--mpi=pmix", "-N2", "-n2", "hostname"]).stdout
    assert sorted(names.split()) == ["node-a", "node-b"]


def _can_connect(here: Any, there: Any) -> bool:
    command = f"exec 3<>/dev/tcp/{there.address}/{there.ssh_port}"
    return here.run(["timeout", "1", "bash", "-c", command], check=False).returncode == 0
