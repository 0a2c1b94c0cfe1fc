"""The line between supervisor and agent, where it is slow, cut, full or talked into.

``pytest tests/unit/test_launch_connection.py``
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import json
import os
import queue
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmx.config import Experiment
from llmx.errors import ConfigError, LaunchError
from llmx.launch.agents import connection as connection_module
from llmx.launch.agents.agent import ProcessTable, tag_of
from llmx.launch.agents.connection import AGENT, AgentError, Connection
from llmx.launch.agents.mesh import Node
from llmx.launch.agents.preflight import (
    check_busy,
    check_environments,
    check_network,
    take_over,
    uses_of_hosts,
)
from llmx.launch.agents.shutdown import shut_down
from llmx.launch.files import make_spec
from llmx.launch.supervision.console import Console, RunLog
from llmx.run.rundir import RunDir
from tests.tracked_run import plan
from tests.unit.test_launch_agent import Rig, wait_until
from tests.unit.test_launch_render import experiment, spec_of

SLOW_SAVE = (
    "import signal, sys, time\n"
    "def save(*_): time.sleep(1); sys.exit(0)\n"
    "signal.signal(signal.SIGUSR1, save)\n"
    "print(1, flush=True)\n"
    "while True: signal.pause()\n"
)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.connection.close(timeout_s=20)
    for process in made.started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


def slow_rank(agent: Rig) -> subprocess.Popen[Any]:
    rank = agent.process(SLOW_SAVE, env={"RANK": "0"})
    assert rank.stdout is not None
    assert rank.stdout.readline()
    return rank


def test_only_a_second_stop_cuts_the_grace_short(agent: Rig) -> None:
    """A sign of life while the ranks save is none."""
    agent.handshake()
    rank = slow_rank(agent)
    stopped = agent.connection.send("stop", grace_s=20, save=True)
    agent.connection.ping()
    assert agent.connection.wait_for(stopped, timeout_s=20)["killed"] == 0
    assert rank.wait(timeout=5) == 0


def test_a_supervisor_that_dies_while_the_ranks_save_leaves_them_their_time(agent: Rig) -> None:
    agent.handshake()
    rank = slow_rank(agent)
    agent.connection.send("stop", grace_s=20, save=True)
    agent.connection.close(timeout_s=20)
    assert rank.wait(timeout=5) == 0


def test_the_main_thread_may_be_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It copies files for an hour, or waits for a terminal that Ctrl-S holds."""
    monkeypatch.setattr(connection_module, "HEARTBEAT_S", 0.1)
    inbox: queue.Queue[tuple[Connection, dict[str, Any]]] = queue.Queue()
    argv = [sys.executable, "-I", "-S", "-c", connection_module.BOOTSTRAP]
    connection = Connection("far", (0,), argv, tmp_path / "log", inbox, is_remote=True)
    connection.start(dict(os.environ))
    try:
        connection.request(
            "handshake", token=secrets.token_hex(8), orphan_timeout_s=0.5, timeout_s=10
        )
        # Fifteen replies take three times as long as the agent waits for a message.
        wait_until(lambda: len(connection._clock_samples) >= 15, timeout_s=30)
        assert connection.request("flush", timeout_s=10)["event"] == "flush"
        assert connection.lost_at is None
    finally:
        connection.close(timeout_s=10)


def test_a_host_whose_disk_stands_still_is_not_lost(agent: Rig, tmp_path: Path) -> None:
    """Here it waits for a command of its own."""
    disk = tmp_path / "disk"
    waits = f"until [ -e {shlex.quote(str(disk))} ]; do sleep 0.05; done"
    agent.handshake(cancel_force=[["sh", "-c", waits]])
    busy = agent.connection.send("kill_leftovers", grace_s=0)
    asked = time.monotonic()
    agent.connection.ping()
    wait_until(lambda: agent.connection.last_message_at > asked, timeout_s=30)
    assert busy.empty()
    disk.touch()
    agent.connection.wait_for(busy, timeout_s=10)


def test_an_agent_that_nobody_reads_ends_the_run(tmp_path: Path) -> None:
    """As behind a cut cable: what it writes stays where it is, and the pipe is full soon."""
    (tmp_path / "logs").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(AGENT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    rank = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.pause()"],
        env={**os.environ, "LLMX_RUN_TOKEN": "unheard", "RANK": "0"},
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        words = [
            {
                "cmd": "handshake",
                "token": "unheard",
                "run_dir": str(tmp_path),
                "orphan_timeout_s": 1.0,
            },
            {"cmd": "watch", "stream": True},
        ]
        for word in words:
            process.stdin.write(json.dumps(word).encode() + b"\n")
            process.stdin.flush()
            process.stdout.readline()
        (tmp_path / "logs/rank-000.log").write_bytes(b"x" * 500_000)
        assert rank.wait(timeout=20) == -signal.SIGUSR1
        assert process.wait(timeout=20) == 0
    finally:
        for started in (rank, process):
            started.kill()
            started.wait()


def far_connection(directory: Path, token: str, **values: Any) -> Connection:
    """As to another host: what stands for ssh can be killed without the agent."""
    agent = shlex.join([sys.executable, "-I", "-S", "-c", connection_module.BOOTSTRAP])
    argv = ["sh", "-c", f"cat | setsid {agent} | cat"]
    connection = Connection("far", (0,), argv, directory / "log", queue.Queue(), is_remote=True)
    connection.session = "one"
    connection.start(dict(os.environ))
    message = {"token": token, "session": "one", "place": "0", "run_dir": str(directory)}
    connection.request("handshake", orphan_timeout_s=60, timeout_s=10, **message, **values)
    return connection


def test_a_supervisor_that_comes_back_takes_the_ranks_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection broke; a rank ended and a log grew meanwhile."""
    token = secrets.token_hex(8)
    (tmp_path / "logs").mkdir()
    (tmp_path / "ranks").mkdir()
    log = tmp_path / "logs/rank-000.log"
    log.write_text("of an earlier attempt\n")
    connection = far_connection(tmp_path, token)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", "import signal; signal.pause()"],
            env={**os.environ, "LLMX_RUN_TOKEN": token, "RANK": str(rank)},
        )
        for rank in (0, 1)
    ]
    exp = experiment("ssh", (2,), "cpu")
    spec = dataclasses.replace(spec_of(exp), token=token, run_dir=RunDir(tmp_path))
    connection.shared = False
    try:
        connection.request("watch", stream=True, timeout_s=10)
        wait_until(lambda: len(connection.ranks) == 2)
        with log.open("a") as stream:
            stream.write("one\n")
        wait_until(lambda: connection.offsets["logs/rank-000.log"] == log.stat().st_size)
        connection.abort()
        wait_until(lambda: connection.lost_at)
        ranks[1].kill()
        ranks[1].wait()
        with log.open("a") as stream:
            stream.write("two\n")
        take_over(spec, connection)
        wait_until(lambda: connection.ranks == {0: ranks[0].pid, 1: 0})
        wait_until(lambda: connection.offsets["logs/rank-000.log"] == log.stat().st_size)
        assert ranks[0].poll() is None
        assert connection.ranks_ended is None
        sent = [message for _, message in list(connection.inbox.queue)]
        text = [base64.b64decode(m["data"]) for m in sent if m["event"] == "append"]
        assert text == [b"one\n", b"two\n"]
        agents = Path("/proc/net/unix").read_text().count(f"@llmx-agent-{tag_of(token)}-one-0-")
        assert agents == 1
        connection.close(timeout_s=20)  # with a bye
        assert ranks[0].wait(timeout=5) == -signal.SIGUSR1
    finally:
        connection.close(timeout_s=10)
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_a_supervisor_that_comes_back_too_late(tmp_path: Path) -> None:
    """The agent behind the broken connection says when and why it ended the ranks."""
    token = secrets.token_hex(8)
    (tmp_path / "ranks").mkdir()
    connection = far_connection(tmp_path, token)
    rank = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.pause()"],
        env={**os.environ, "LLMX_RUN_TOKEN": token, "RANK": "0"},
    )
    spec = spec_of(experiment("ssh", (1,), "cpu"))
    spec = dataclasses.replace(spec, token=token, run_dir=RunDir(tmp_path))
    try:
        connection.request("watch", timeout_s=10)
        connection.request("handshake", token=token, session="one", place="0", timeout_s=10,
                           run_dir=str(tmp_path), orphan_timeout_s=1)  # fmt: skip
        wait_until(lambda: connection.ranks)
        connection.abort()
        assert rank.wait(timeout=20) == -signal.SIGUSR1
        take_over(spec, connection)
        assert connection.ranks_ended is not None
        assert connection.ranks_ended["silent_s"] >= 1
        wait_until(lambda: connection.ranks == {0: 0})
    finally:
        connection.close(timeout_s=10)
        rank.kill()
        rank.wait()


def test_hosts_that_another_run_uses(agent: Rig, tmp_path: Path) -> None:
    """They are named with the run and its user, unless both are trials of one sweep."""
    sweep = tmp_path / "sweep"
    package = sweep / "llmx"
    package.mkdir(parents=True)
    (package / "worker.py").write_text("import signal; print(1, flush=True); signal.pause()")
    other_run, own_run = str(sweep / "1"), str(sweep / "0")
    rank = subprocess.Popen(
        [sys.executable, str(package / "worker.py"), other_run],
        env={**os.environ, "LOCAL_RANK": "1", "LLMX_GPUS": "0,1:4,5", "CROSS_RANK": "1"},
        stdout=subprocess.PIPE,
    )
    agent.started.append(rank)
    assert rank.stdout is not None
    assert rank.stdout.readline()
    agent.handshake(run_dir=own_run)
    (busy,) = [
        entry
        for entry in agent.connection.request("busy", timeout_s=10)["ranks"]
        if entry["run_dir"] == other_run
    ]
    assert busy["device"] == "5"
    assert abs(busy["since"] - time.time()) < 60
    spec = dataclasses.replace(
        spec_of(experiment("ssh", (1,), "cpu")), run_dir=RunDir(Path(own_run))
    )
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
    mine = agent.connection.request("busy", timeout_s=10)["ranks"]
    assert other_run not in [entry["run_dir"] for entry in mine]
    spec.exp.launch.allow_busy = True
    check_busy(spec, [agent.connection], is_trial=False)


def test_runs_that_wait_for_a_host_start_in_their_order(agent: Rig, tmp_path: Path) -> None:
    """The first one starts when the other run has left; then, when its ranks are seen, the next."""
    package = tmp_path / "llmx"
    package.mkdir()
    (package / "worker.py").write_text("import signal; print(1, flush=True); signal.pause()")
    words, other_run = [sys.executable, str(package / "worker.py")], str(tmp_path / "other")
    other = subprocess.Popen([*words, other_run], stdout=subprocess.PIPE)
    agent.started.append(other)
    assert other.stdout is not None
    assert other.stdout.readline()
    second = Rig(tmp_path)
    try:
        for rig, name in ((agent, "one"), (second, "two")):
            rig.connection.hosts = (0,)
            rig.handshake(run_dir=str(tmp_path / name))
        specs = [
            dataclasses.replace(
                spec_of(experiment("pdsh", (1,), "cpu")), run_dir=RunDir(tmp_path / name)
            )
            for name in ("one", "two")
        ]

        def uses(at: int) -> list[tuple[str, int]]:
            rig = (agent, second)[at]
            found = uses_of_hosts(specs[at], [rig.connection], is_trial=False, queued_at=1000 + at)
            # Other tests may run beside this one.
            return [(u.run_dir, u.count) for u in found if not u.run_dir or u.run_dir == other_run]

        assert uses(0) == [(other_run, 1)]
        assert uses(1) == [(other_run, 1), ("", 1)]
        other.kill()
        other.wait()
        assert uses(0) == []
        assert uses(1) == [("", 1)]
        agent.connection.request("watch", timeout_s=10)
        agent.process("import signal; signal.pause()", env={"RANK": "0"})
        wait_until(lambda: uses(1) == [], timeout_s=10)
    finally:
        second.connection.close(timeout_s=20)


def test_a_host_that_greets_in_json(tmp_path: Path) -> None:
    """What a login file prints comes first, and may be any bytes."""
    inbox: queue.Queue[tuple[Connection, dict[str, Any]]] = queue.Queue()
    run = shlex.join([sys.executable, "-I", "-S", "-c", connection_module.BOOTSTRAP])
    argv = ["sh", "-c", f"printf 'Welcome \\377\\n42\\nnull\\n[1]\\n'; exec {run}"]
    connection = Connection("far", (0,), argv, tmp_path / "log", inbox, is_remote=True)
    connection.start(dict(os.environ))
    try:
        assert connection.request("handshake", token=secrets.token_hex(8), timeout_s=10)["pid"]
    finally:
        connection.close(timeout_s=10)


def test_a_connection_that_breaks_before_the_agent_is_there() -> None:
    """The little Python that waits for the agent's source must not wait for ever, and busily."""
    for said in (b"", b"12", b"100\nimport"):
        argv = [sys.executable, "-I", "-S", "-c", connection_module.BOOTSTRAP]
        assert subprocess.run(argv, input=said, timeout=10, check=False).returncode == 1


def test_a_flood_in_a_log_does_not_hold_up_the_metrics(agent: Rig) -> None:
    """In a run directory whose name a glob would take for a pattern."""
    root = agent.directory / "lr=[1e-3]"
    (root / "logs").mkdir(parents=True)
    agent.handshake(run_dir=str(root))
    agent.connection.request("watch", stream=True, timeout_s=10)
    flood = os.urandom(1 << 16) * 40
    (root / "logs/rank-000.log").write_bytes(flood)
    (root / "metrics.jsonl").write_text("{}\n")
    assert (
        len(agent.connection.request("list_files", patterns=["logs/*"], timeout_s=10)["files"]) == 1
    )
    paths, sent = [], b""
    while len(sent) < len(flood):
        message = agent.event("append")
        paths.append(message["path"])
        if message["path"] != "metrics.jsonl":
            assert message["offset"] == len(sent)
            sent += base64.b64decode(message["data"])
    assert sent == flood
    assert "metrics.jsonl" in paths[:-1]


def test_the_status_of_a_rank_elsewhere_stays(agent: Rig) -> None:
    """Hosts that share the run directory end one after the other."""
    ranks = agent.directory / "ranks"
    ranks.mkdir()
    agent.handshake()
    agent.connection.request("watch", stream=False, timeout_s=10)
    slow_rank(agent)
    agent.event("rank_start")
    here, elsewhere = ranks / ".rank-000.json.7.tmp", ranks / ".rank-001.json.7.tmp"
    here.touch()
    elsewhere.touch()
    agent.stop(grace_s=0)
    assert (here.exists(), elsewhere.exists()) == (False, True)


def test_a_job_without_processes_here_is_cancelled_too(agent: Rig) -> None:
    """A Slurm job outlives the machine that its srun ran on."""
    note = agent.directory / "cancelled"
    agent.handshake(cancel_force=[["touch", str(note)]])
    assert agent.connection.request("kill_leftovers", grace_s=0, timeout_s=10)["ended"] == 0
    wait_until(note.exists)


def test_the_way_to_the_place_where_ranks_meet(agent: Rig, tmp_path: Path) -> None:
    """Here the second host takes the address for that of another machine."""
    spec = dataclasses.replace(spec_of(experiment("ssh", (1, 1), "cpu")), port=0)
    far = Rig(tmp_path / "far")
    try:
        for index, rig in enumerate((agent, far)):
            rig.connection.name, rig.connection.hosts = f"node-{'ab'[index]}", (index,)
            rig.handshake()
        port = agent.connection.request("reserve_port", timeout_s=10)["port"]
        connections = [agent.connection, far.connection]
        nodes = {name: Node(name, "lo", "127.0.0.1") for name in ("node-a", "node-b")}
        for address, reached in (("127.0.0.1", True), ("::1", True), ("127.0.0.256", False)):
            plan = dataclasses.replace(spec.plan, master_addr=address)
            there = dataclasses.replace(spec, plan=plan, port=port)
            if reached:
                check_network(there, nodes, connections)
                continue
            with pytest.raises(LaunchError, match=f"node-b: cannot connect to node-a at {address}"):
                check_network(there, nodes, connections)
        # Behind NAT: the first host meets at its own port, the other ones where it is forwarded.
        plan = dataclasses.replace(spec.plan, master_addr="127.0.0.256")
        for reach, reached in ((f"127.0.0.2:{port}", True), ("127.0.0.2:1", False)):
            hardware = dataclasses.replace(spec.exp.hardware, reach=reach)
            exp = dataclasses.replace(spec.exp, hardware=hardware)
            there = dataclasses.replace(spec, exp=exp, plan=plan, port=port)
            if reached:
                check_network(there, nodes, connections)
                continue
            with pytest.raises(LaunchError, match="node-b: cannot connect .* 127.0.0.2 port 1 "):
                check_network(there, nodes, connections)
        peers = [["node-a", "127.0.0.1", port]]
        answers = far.connection.send("probe", peers=peers, token="-", size=1, timeout_s=4)
        reply = far.connection.wait_for(answers, timeout_s=10)
        assert reply["results"] == {"node-a": {"stage": "connect", "error": "ECONNREFUSED"}}
    finally:
        far.connection.close(timeout_s=10)


def test_a_build_that_nobody_finishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on this machine alone, where nothing else is asked."""
    lock = tmp_path / "py311_cpu/cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (0, 0))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    spec = dataclasses.replace(spec_of(experiment("local", (1,), "cpu")), python=sys.executable)
    assert check_environments(spec, []) == ()
    spec.exp.optim.kind = "cpu_adam"
    with pytest.raises(ConfigError, match=f"{lock}.*Remove the lock"):
        check_environments(spec, [])


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_way_to_a_host(agent: Rig, address: str) -> None:
    if ":" in address and not Path("/proc/net/if_inet6").read_text():
        pytest.skip("no IPv6 on this machine")
    agent.handshake()
    found = agent.connection.request("route", to=address, timeout_s=10)
    assert (found["address"], found["interface"]) == (address, "lo")


def test_a_token_that_half_the_host_has_among_its_arguments() -> None:
    """`--uid 0` must not make a process the run's: it would be ended with it."""
    with pytest.raises(ValueError, match="1 characters: at least 7"):
        ProcessTable("0")


def test_a_second_request_that_comes_at_once(agent: Rig) -> None:
    """Ctrl-C twice, before the agents have heard of the first: nobody waits out the grace."""
    agent.handshake()
    code = "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: print(2, flush=True))\n"
    rank = agent.process(
        f"{code}print(1, flush=True)\nwhile True: signal.pause()", env={"RANK": "0"}
    )
    assert rank.stdout is not None
    assert rank.stdout.readline()
    log = RunLog(agent.directory / "log", Console(io.StringIO()))
    spec = make_spec(Experiment(), plan(), RunDir(agent.directory), port=0)
    began = time.monotonic()
    shut_down(
        spec,
        [agent.connection],
        log,
        lost=(),
        launched=False,
        requests=lambda: 2,
        grace_s=900,
        save=True,
    )
    assert time.monotonic() - began < 300
    assert rank.wait(timeout=5) == -signal.SIGKILL
    assert log.path.read_text().endswith(" here: 1 process ended, 1 killed, 0 left\n")


def test_what_a_login_prints_says_why_it_ends(tmp_path: Path) -> None:
    """An account that must not log in says so on its standard output."""
    argv = ["sh", "-c", "echo This account is currently not available."]
    connection = Connection("far", (0,), argv, tmp_path / "log", queue.Queue(), is_remote=True)
    connection.start(dict(os.environ))
    try:
        with pytest.raises(AgentError, match="This account is currently not available"):
            connection.request("handshake", timeout_s=10)
    finally:
        connection.close(timeout_s=10)
