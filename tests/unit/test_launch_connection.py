"""The line between supervisor and agent, where it is slow, cut, full or talked into; and what the
supervisor asks the agents before a launch and at its end."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmx.errors import ConfigError, LaunchError
from llmx.launch.agents import connection as connection_module
from llmx.launch.agents.connection import AGENT, BOOTSTRAP, AgentError, Connection
from llmx.launch.agents.mesh import (
    RENDEZVOUS,
    Fault,
    Mesh,
    Node,
    find_nodes,
    mesh_problems,
    probe_mesh,
)
from llmx.launch.agents.preflight import (
    check_busy,
    check_environments,
    take_over,
    uses_of_hosts,
)
from llmx.launch.agents.shutdown import shut_down
from llmx.launch.spec import LaunchSpec
from llmx.launch.supervision.console import Console, RunLog
from llmx.plan.types import HostPlan
from llmx.run.rundir import RunDir
from tests.agents import Rig, wait_until
from tests.launches import experiment, spec_of

SLOW_SAVE = "def save(*_): time.sleep(1); sys.exit(0)\nsignal.signal(signal.SIGUSR1, save)"
START_AGENT = shlex.join([sys.executable, "-I", "-S", "-c", BOOTSTRAP])
WORKER = "import signal; print(1, flush=True); signal.pause()"


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Rig]:
    with Rig(tmp_path) as made:
        yield made


def far(directory: Path, script: str) -> Connection:
    """As to another host: a script of a shell stands for ssh."""
    argv = ["sh", "-c", script]
    return Connection("far", (0,), argv, directory / "log", queue.Queue(), is_remote=True)


def spec_at(directory: Path, transport: str, *slots: int, **values: Any) -> LaunchSpec:
    return spec_of(experiment(transport, slots, "cpu"), run_dir=RunDir(directory), **values)


def test_only_a_second_stop_cuts_the_grace_short(agent: Rig) -> None:
    """A sign of life while the ranks save is none."""
    rank = agent.process(SLOW_SAVE, rank=0)
    stopped = agent.connection.send("stop", grace_s=20, save=True)
    agent.connection.ping()
    assert agent.connection.wait_for(stopped, timeout_s=20)["killed"] == 0
    assert rank.wait(timeout=5) == 0


def test_a_second_request_that_comes_at_once(agent: Rig) -> None:
    """Ctrl-C twice, before the agents have heard of the first: nobody waits out the grace."""
    rank = agent.process("signal.signal(signal.SIGUSR1, lambda *_: None)", rank=0)
    log, began = RunLog(agent.directory / "log", Console(io.StringIO())), time.monotonic()
    spec = spec_at(agent.directory, "local", 1)
    shut_down(spec, [agent.connection], log, requests=lambda: 2, grace_s=900, save=True)
    assert time.monotonic() - began < 300
    assert rank.wait(timeout=5) == -signal.SIGKILL
    assert log.path.read_text().endswith(" here: 1 process ended, 1 killed, 0 left\n")


def test_a_supervisor_that_dies_while_the_ranks_save_leaves_them_their_time(agent: Rig) -> None:
    rank = agent.process(SLOW_SAVE, rank=0)
    agent.connection.send("stop", grace_s=20, save=True)
    agent.connection.close(timeout_s=20)
    assert rank.wait(timeout=5) == 0


def test_the_main_thread_may_be_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It copies files for an hour, or waits for a terminal that Ctrl-S holds."""
    monkeypatch.setattr(connection_module, "HEARTBEAT_S", 0.1)
    with Rig(tmp_path, far(tmp_path, f"exec {START_AGENT}")) as rig:
        rig.handshake(orphan_timeout_s=0.5)
        # Fifteen replies take three times as long as the agent waits for a message.
        wait_until(lambda: len(rig.connection._clock_samples) >= 15, timeout_s=30)
        assert rig.ask("flush")["event"] == "flush"
        assert rig.connection.lost_at is None


def test_a_host_whose_disk_stands_still_is_not_lost(agent: Rig, tmp_path: Path) -> None:
    """Here it waits for a command of its own, which runs although no process is found: a job of
    Slurm outlives the machine that its srun ran on."""
    disk = tmp_path / "disk"
    waits = f"until [ -e {shlex.quote(str(disk))} ]; do sleep 0.05; done"
    agent.handshake(cancel_force=[["sh", "-c", waits]])
    busy = agent.connection.send("kill_leftovers", grace_s=0)
    asked = time.monotonic()
    agent.connection.ping()
    wait_until(lambda: agent.connection.last_message_at > asked, timeout_s=30)
    assert busy.empty()
    disk.touch()
    assert agent.connection.wait_for(busy, timeout_s=10)["ended"] == 0


@pytest.mark.parametrize(
    ("orphan_timeout_s", "end"), [(1.0, "unread"), (1.0, "silent"), (0, "dead")]
)
def test_an_agent_that_nobody_reads_ends_the_run(
    orphan_timeout_s: float, end: str, tmp_path: Path
) -> None:
    """As behind a cut cable: what it writes stays where it is, and the pipe is full soon. Nobody
    writes to it, or the supervisor is dead."""
    (tmp_path / "logs").mkdir()
    argv, pipe = [sys.executable, "-I", "-S", str(AGENT)], subprocess.PIPE
    process = subprocess.Popen(argv, stdin=pipe, stdout=pipe)
    env = {**os.environ, "LLMX_RUN_TOKEN": "unheard", "RANK": "0"}
    rank = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], env=env)
    hello = {"cmd": "handshake", "token": "unheard", "run_dir": str(tmp_path)}
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        for word in (
            {**hello, "orphan_timeout_s": orphan_timeout_s},
            {"cmd": "watch", "stream": True},
        ):
            process.stdin.write(json.dumps(word).encode() + b"\n")
            process.stdin.flush()
            process.stdout.readline()
        if end == "dead":
            process.stdin.close()
        elif end == "unread":
            (tmp_path / "logs/rank-000.log").write_bytes(b"x" * 500_000)
        assert rank.wait(timeout=20) == -signal.SIGUSR1
        assert process.wait(timeout=20) == 0
    finally:
        for started in (rank, process):
            started.kill()
            started.wait()


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[Rig]:
    """An agent on another host: what stands for ssh can be killed without it."""
    for name in ("logs", "ranks"):
        (tmp_path / name).mkdir()
    connection = far(tmp_path, f"cat | setsid {START_AGENT} | cat")
    connection.session = "one"
    with Rig(tmp_path, connection) as rig:
        rig.handshake(session="one", place="0", orphan_timeout_s=60)
        yield rig


def test_a_supervisor_that_comes_back_takes_the_ranks_over(broken: Rig, tmp_path: Path) -> None:
    """Its connection broke; a rank ended and a log grew meanwhile."""
    connection, log = broken.connection, tmp_path / "logs/rank-000.log"
    log.write_text("of an earlier attempt\n")

    def all_sent() -> bool:
        return connection.offsets["logs/rank-000.log"] == log.stat().st_size

    def write(text: str) -> None:
        with log.open("a") as stream:
            stream.write(text)

    connection.shared = False
    broken.ask("watch", stream=True)
    ranks = [broken.process(rank=rank) for rank in (0, 1)]
    wait_until(lambda: len(connection.ranks) == 2)
    write("one\n")
    wait_until(all_sent)
    connection.abort()
    wait_until(lambda: connection.lost_at)
    ranks[1].kill()
    ranks[1].wait()
    write("two\n")
    take_over(spec_at(tmp_path, "ssh", 2, token=broken.token), connection)
    wait_until(lambda: connection.ranks == {0: ranks[0].pid, 1: 0})
    wait_until(all_sent)
    assert ranks[0].poll() is None
    assert connection.ranks_ended is None
    sent = [message for _, message in list(connection.inbox.queue)]
    text = [base64.b64decode(m["data"]) for m in sent if m["event"] == "append"]
    assert text == [b"one\n", b"two\n"]
    agents = Path("/proc/net/unix").read_text().count(f"@llmx-agent-{broken.tag}-one-0-")
    assert agents == 1
    connection.close(timeout_s=20)  # with a bye
    assert ranks[0].wait(timeout=5) == -signal.SIGUSR1


def test_a_supervisor_that_comes_back_too_late(broken: Rig, tmp_path: Path) -> None:
    """The agent behind the broken connection says when and why it ended the ranks."""
    rank = broken.process(rank=0)
    broken.ask("watch")
    broken.handshake(session="one", place="0", orphan_timeout_s=1)
    wait_until(lambda: broken.connection.ranks)
    broken.connection.abort()
    assert rank.wait(timeout=20) == -signal.SIGUSR1
    take_over(spec_at(tmp_path, "ssh", 1, token=broken.token), broken.connection)
    assert broken.connection.ranks_ended is not None
    assert broken.connection.ranks_ended["silent_s"] >= 1
    wait_until(lambda: broken.connection.ranks == {0: 0})


def test_what_a_login_prints(tmp_path: Path) -> None:
    """A login file may print any bytes first; an account that must not log in says so there."""
    script = f"printf 'Welcome \\377\\n42\\nnull\\n[1]\\n'; exec {START_AGENT}"
    with Rig(tmp_path, far(tmp_path, script)) as rig:
        assert rig.handshake()["pid"]
    connection = far(tmp_path, "echo This account is currently not available.")
    connection.start(dict(os.environ))
    with pytest.raises(AgentError, match="This account is currently not available"):
        connection.request("handshake", timeout_s=10)
    connection.close(timeout_s=10)


def worker_of(agent: Rig, package: Path, run_dir: Path, **env: str) -> subprocess.Popen[bytes]:
    """A rank of another run, whose llmx is the package."""
    package.mkdir(parents=True)
    (package / "worker.py").write_text(WORKER)
    return agent.run([sys.executable, str(package / "worker.py"), str(run_dir)], **env)


def test_hosts_that_another_run_uses(agent: Rig, tmp_path: Path) -> None:
    """They are named with the run and its user, unless both are trials of one sweep."""
    sweep = tmp_path / "sweep"
    other_run, own_run = str(sweep / "1"), str(sweep / "0")
    places = {"LOCAL_RANK": "1", "LLMX_GPUS": "0,1:4,5", "CROSS_RANK": "1"}
    worker_of(agent, sweep / "llmx", sweep / "1", **places)
    agent.handshake(run_dir=own_run)
    (busy,) = [rank for rank in agent.ask("busy")["ranks"] if rank["run_dir"] == other_run]
    assert busy["device"] == "5"
    assert abs(busy["since"] - time.time()) < 60
    spec = spec_at(sweep / "0", "ssh", 1)
    agent.connection.hosts = (0,)
    with pytest.raises(LaunchError, match=rf"is busy with 1 rank of {other_run}, a run of \w+"):
        check_busy(spec, [agent.connection], is_trial=False)
    problems = ""
    try:
        check_busy(spec, [agent.connection], is_trial=True)
    except LaunchError as error:  # of tests that run beside this one
        problems = str(error)
    assert other_run not in problems
    check_busy(spec, [], is_trial=False)
    agent.handshake(run_dir=other_run)
    assert other_run not in [rank["run_dir"] for rank in agent.ask("busy")["ranks"]]
    spec.exp.launch.allow_busy = True
    check_busy(spec, [agent.connection], is_trial=False)


def test_runs_that_wait_for_a_host_start_in_their_order(agent: Rig, tmp_path: Path) -> None:
    """The first one starts when the other run has left; then, when its ranks are seen, the next."""
    other_run = str(tmp_path / "other")
    other = worker_of(agent, tmp_path / "llmx", tmp_path / "other")
    with Rig(tmp_path) as second:
        rigs = [agent, second]
        specs = [spec_at(tmp_path / name, "pdsh", 1) for name in ("one", "two")]
        for rig, spec in zip(rigs, specs, strict=True):
            rig.connection.hosts = (0,)
            rig.handshake(run_dir=str(spec.run_dir.root))

        queued = "node-a: 1 run queued before this one"

        def uses(at: int) -> list[str]:
            place = [rigs[at].connection]
            found = uses_of_hosts(specs[at], place, is_trial=False, queued_at=1000 + at)
            # Other tests may run beside this one.
            return [text.split(f" of {other_run}")[0] for text, run in found
                    if run in ("", other_run)]  # fmt: skip

        assert uses(0) == ["node-a: is busy with 1 rank"]
        assert uses(1) == ["node-a: is busy with 1 rank", queued]
        other.kill()
        other.wait()
        assert uses(0) == []
        assert uses(1) == [queued]
        agent.ask("watch")
        agent.process(rank=0)
        wait_until(lambda: uses(1) == [], timeout_s=10)


def test_the_way_to_the_place_where_ranks_meet(agent: Rig, tmp_path: Path) -> None:
    """Here the second host takes the address for that of another machine."""
    spec = spec_at(tmp_path, "ssh", 1, 1)
    nodes = {name: Node(name, "lo", "127.0.0.1") for name in ("node-a", "node-b")}
    with Rig(tmp_path / "far") as other:
        connections = [agent.connection, other.connection]
        for index, (connection, name) in enumerate(zip(connections, nodes, strict=True)):
            connection.name, connection.hosts = name, (index,)
        port = agent.ask("reserve_port")["port"]
        for address, reach, problem in (
            ("127.0.0.1", None, ""),
            ("::1", None, ""),
            ("127.0.0.256", None, "node-b: cannot connect to node-a at 127.0.0.256"),
            # Behind NAT: the first host meets at its own port, the others where it is forwarded.
            ("127.0.0.256", f"127.0.0.2:{port}", ""),
            ("127.0.0.256", "127.0.0.2:1", "node-b: cannot connect .* 127.0.0.2 port 1 "),
        ):
            spec.exp.hardware.reach = reach
            meeting = dataclasses.replace(spec.plan, master_addr=address)
            there = dataclasses.replace(spec, plan=meeting, port=port)
            found = probe_mesh(nodes, connections, port=port, rendezvous=there.rendezvous)
            assert re.search(problem or "^$", "\n".join(mesh_problems(found)))
        # Without a rendezvous, as in the middle of a run.
        pairs = probe_mesh(nodes, connections, port=0, rendezvous=spec.rendezvous)
        assert (pairs.faults, pairs.unmet) == ([], [])
        assert set(pairs.seconds) == {("node-a", "node-b"), ("node-b", "node-a")}
        peers = [["node-a", "127.0.0.1", port]]
        asked = other.connection.send("probe", peers=peers, token="-", size=1, timeout_s=4)
        reply = other.connection.wait_for(asked, timeout_s=10)
        assert reply["results"] == {"node-a": {"stage": "connect", "error": "ECONNREFUSED"}}


def test_a_build_that_nobody_finishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on this machine alone, where nothing else is asked."""
    lock = tmp_path / "py311_cpu/cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (0, 0))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    spec = spec_at(tmp_path, "local", 1, python=sys.executable)
    with Rig(tmp_path) as rig:
        assert check_environments(spec, [rig.connection]) == ()
        spec.exp.optim.kind = "cpu_adam"
        with pytest.raises(ConfigError, match=f"{lock}.*Remove the lock"):
            check_environments(spec, [rig.connection])


def mesh(*faults: tuple[str, str, str, str], hosts: str = "abc", mtu: int = 9000) -> Mesh:
    """``faults``: (source, target, stage, error); every other connection works."""
    nodes = {h: Node(h, "eth1", f"10.0.0.{n}", mtu) for n, h in enumerate(hosts, start=1)}
    failed = [Fault(s, t, nodes[t].address, 40000, stage, error) for s, t, stage, error in faults]
    pairs = {(s, t) for s in hosts for t in hosts if s != t} - {
        (f.source, f.target) for f in failed
    }
    works = dict.fromkeys(pairs | {(host, RENDEZVOUS) for host in hosts}, 0.001)
    return Mesh(nodes, failed, [], works)


def host(name: str, address: str, interface: str | None = None, *, here: bool = False) -> HostPlan:
    return HostPlan(name, address, 22, None, None, 1, "cpu", interface, here)


BLOCKED = [(source, "f", "connect", "ECONNREFUSED") for source in "abcde"]
LOST = [("a", "b", "send", "ETIMEDOUT"), ("b", "a", "receive", "ETIMEDOUT")]


@pytest.mark.parametrize(
    ("found", "patterns"),
    [
        (mesh(), []),
        (
            mesh(("b", "c", "connect", "ETIMEDOUT")),
            ["b -> c at 10.0.0.3 .eth1, port 40000.: .*no answer.. The other direction works",
             "A firewall between the hosts drops it.*from 32768 to 60999: allow all TCP between"],
        ),
        (mesh(("b", "a", "connect", "ETIMEDOUT")), ["b -> a .*rendezvous is open there", ""]),
        (
            mesh(*BLOCKED, hosts="abcdef"),
            ["a, b, c and 2 more hosts -> f at 10.0.0.6 ", "The host does listen there: a fire"],
        ),
        # A wrong MTU is told by what is lost.
        (
            mesh(*LOST, hosts="ab"),
            [".*one byte passes both ways, but 64 KiB sent there do not arrive",
             ".*64 KiB sent back do not arrive", ".*ip link set dev eth1 mtu 1500"],
        ),
        (mesh(*LOST, hosts="ab", mtu=1500), ["", "", ".*ip link set dev eth1 mtu 1400"]),
    ],
)  # fmt: skip
def test_who_does_not_reach_whom_and_why(found: Mesh, patterns: list[str]) -> None:
    """A firewall names both hosts, the direction and the ports; one cause is one line."""
    for problem, pattern in zip(mesh_problems(found), patterns, strict=True):
        assert re.match(pattern, problem, re.DOTALL)


def test_a_rendezvous_that_loses_large_packets_is_no_closed_port() -> None:
    lossy = mesh(("a", "b", "send", "ETIMEDOUT"), hosts="ab")
    alone = mesh_problems(lossy)
    lossy.unmet.append(Fault("b", RENDEZVOUS, "10.0.0.1", 29500, "send", "ETIMEDOUT"))
    assert mesh_problems(lossy) == alone
    lossy.faults.clear()  # launch.probe=false
    observation, cause = mesh_problems(lossy)
    assert observation.startswith("b -> a at 10.0.0.1 (eth1, port 29500): a connection opens")
    assert cause.startswith("Large packets are lost")


def test_an_interface_that_is_not_there(tmp_path: Path) -> None:
    """The agent of this machine lists those that are."""
    hosts = [host("a", "127.0.0.1", "lan7", here=True), host("b", "127.0.0.1")]
    with Rig(tmp_path) as rig:
        with pytest.raises(LaunchError, match=r"a: interface=lan7 is not there.*lo \(127.0.0.1\)"):
            find_nodes(hosts, [rig.connection])
        rig.connection.hosts = (1,)
        node = find_nodes(hosts, [rig.connection])["b"]
    assert (node.interface, node.address, node.ports[0] > 1023) == ("lo", "127.0.0.1", True)
