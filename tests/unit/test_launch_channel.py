"""The line between supervisor and agent, where it is slow, cut, full or talked into.

``pytest tests/unit/test_launch_channel.py``
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import queue
import secrets
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
from llmx.launch import fleet
from llmx.launch.agent import ProcessTable
from llmx.launch.ending import Ending
from llmx.launch.fleet import AGENT, AgentError, Channel
from llmx.launch.prepare import _knock, survey
from llmx.launch.spec import make_spec
from llmx.rundir import RunDir
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
    made.channel.close(timeout_s=20)
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
    agent.greet()
    rank = slow_rank(agent)
    stopped = agent.channel.post("stop", grace_s=20, save=True)
    agent.channel.ping()
    assert agent.channel.wait(stopped, timeout_s=20)["killed"] == 0
    assert rank.wait(timeout=5) == 0


def test_a_supervisor_that_dies_while_the_ranks_save_leaves_them_their_time(agent: Rig) -> None:
    agent.greet()
    rank = slow_rank(agent)
    agent.channel.post("stop", grace_s=20, save=True)
    agent.channel.close(timeout_s=20)
    assert rank.wait(timeout=5) == 0


def test_the_main_thread_may_be_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It copies files for an hour, or waits for a terminal that Ctrl-S holds."""
    monkeypatch.setattr(fleet, "KEEP_ALIVE_S", 0.1)
    inbox: queue.Queue[tuple[Channel, dict[str, Any]]] = queue.Queue()
    argv = [sys.executable, "-I", "-S", str(AGENT)]
    channel = Channel("far", (0,), argv, b"", tmp_path / "log", inbox, is_remote=True)
    channel.start(dict(os.environ))
    try:
        channel.ask("hello", token=secrets.token_hex(8), silence_s=0.5, timeout_s=10)
        # Fifteen answers take three times as long as the agent would wait for a word.
        wait_until(lambda: len(channel._clocks) >= 15, timeout_s=30)
        assert channel.ask("flush", timeout_s=10)["event"] == "flush"
        assert channel.lost_at is None
        assert time.monotonic() - channel.last_heard < 0.5
    finally:
        channel.close(timeout_s=10)


def test_a_host_whose_disk_stands_still_is_not_lost(agent: Rig) -> None:
    """Here it waits for a command of its own."""
    agent.greet(cancel_force=[["sh", "-c", "exec sleep 2"]])
    busy = agent.channel.post("clear", grace_s=0)
    asked = time.monotonic()
    agent.channel.ping()
    wait_until(lambda: agent.channel.last_heard > asked, timeout_s=1.5)
    assert busy.empty()
    agent.channel.wait(busy, timeout_s=10)


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
            {"cmd": "hello", "token": "unheard", "run_dir": str(tmp_path), "silence_s": 1.0},
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


def test_a_host_that_greets_in_json(tmp_path: Path) -> None:
    """What a login file prints comes first, and may be any bytes."""
    inbox: queue.Queue[tuple[Channel, dict[str, Any]]] = queue.Queue()
    script = f"printf 'Welcome \\377\\n42\\nnull\\n[1]\\n'; exec {sys.executable} -I -S {AGENT}"
    channel = Channel("far", (0,), ["sh", "-c", script], b"", tmp_path / "log", inbox, True)
    channel.start(dict(os.environ))
    try:
        assert channel.ask("hello", token=secrets.token_hex(8), timeout_s=10)["pid"]
    finally:
        channel.close(timeout_s=10)


def test_a_connection_that_breaks_before_the_agent_is_there() -> None:
    """The little Python that waits for the agent's source must not wait for ever, and busily."""
    for said in (b"", b"12", b"100\nimport"):
        argv = [sys.executable, "-I", "-S", "-c", fleet._BOOTSTRAP]
        assert subprocess.run(argv, input=said, timeout=10, check=False).returncode == 1


def test_a_clock_that_is_set_while_the_run_goes_on(tmp_path: Path) -> None:
    channel = Channel("far", (0,), [], b"", tmp_path / "log", queue.Queue(), is_remote=True)
    for _ in range(3):
        channel._measure({"sent": time.monotonic(), "time": time.time() + 100})
    assert channel.offset_s == pytest.approx(100, abs=0.1)
    for _ in range(fleet.EXCHANGES):
        channel._measure({"sent": time.monotonic() - 0.02, "time": time.time()})
    assert channel.offset_s == pytest.approx(0, abs=0.1)


def test_a_flood_in_a_log_does_not_hold_up_the_metrics(agent: Rig) -> None:
    """In a run directory whose name a glob would take for a pattern."""
    root = agent.directory / "lr=[1e-3]"
    (root / "logs").mkdir(parents=True)
    agent.greet(run_dir=str(root))
    agent.channel.ask("watch", stream=True, timeout_s=10)
    flood = os.urandom(1 << 16) * 40
    (root / "logs/rank-000.log").write_bytes(flood)
    (root / "metrics.jsonl").write_text("{}\n")
    assert len(agent.channel.ask("list", patterns=["logs/*"], timeout_s=10)["files"]) == 1
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
    agent.greet()
    agent.channel.ask("watch", stream=False, timeout_s=10)
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
    agent.greet(cancel_force=[["touch", str(note)]])
    assert agent.channel.ask("clear", grace_s=0, timeout_s=10)["ended"] == 0
    wait_until(note.exists)


def test_the_way_to_the_place_where_ranks_meet(agent: Rig, tmp_path: Path) -> None:
    """Here the second host takes the address for that of another machine."""
    spec = dataclasses.replace(spec_of(experiment("pdsh", (1, 1), "cpu")), port=0)
    far = Rig(tmp_path / "far")
    try:
        for index, rig in enumerate((agent, far)):
            rig.channel.name, rig.channel.hosts = f"node-{'ab'[index]}", (index,)
            rig.greet()
        port = agent.channel.ask("port", timeout_s=10)["port"]
        channels = [agent.channel, far.channel]
        for address, reached in (("127.0.0.1", True), ("::1", True), ("127.0.0.256", False)):
            plan = dataclasses.replace(spec.plan, master_addr=address)
            there = dataclasses.replace(spec, plan=plan, port=port)
            if reached:
                _knock(there, channels)
                continue
            with pytest.raises(LaunchError, match=f"node-b: cannot connect to node-a at {address}"):
                _knock(there, channels)
        with pytest.raises(AgentError, match="ConnectionRefusedError"):
            far.channel.ask("knock", to="127.0.0.1", port=port, timeout_s=20)
    finally:
        far.channel.close(timeout_s=10)


def test_a_build_that_nobody_finishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on this machine alone, where nothing else is asked."""
    lock = tmp_path / "py311_cpu/cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (0, 0))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    spec = dataclasses.replace(spec_of(experiment("local", (1,), "cpu")), python=sys.executable)
    assert survey(spec, []) == ()
    spec.exp.optim.kind = "cpu_adam"
    with pytest.raises(ConfigError, match=f"{lock}.*Remove the lock"):
        survey(spec, [])


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_way_to_a_host(agent: Rig, address: str) -> None:
    if ":" in address and not Path("/proc/net/if_inet6").read_text():
        pytest.skip("no IPv6 on this machine")
    agent.greet()
    found = agent.channel.ask("route", to=address, timeout_s=10)
    assert (found["address"], found["interface"]) == (address, "lo")


def test_a_token_that_half_the_host_has_among_its_arguments() -> None:
    """`--uid 0` must not make a process the run's: it would be ended with it."""
    with pytest.raises(ValueError, match="1 characters: at least 7"):
        ProcessTable("0")


def test_a_second_request_that_comes_at_once(agent: Rig) -> None:
    """Ctrl-C twice, before the agents have heard of the first: nobody waits out the grace."""
    agent.greet()
    code = "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: print(2, flush=True))\n"
    rank = agent.process(
        f"{code}print(1, flush=True)\nwhile True: signal.pause()", env={"RANK": "0"}
    )
    assert rank.stdout is not None
    assert rank.stdout.readline()
    said: list[str] = []
    spec = make_spec(Experiment(), plan(), RunDir(agent.directory), port=0)
    ending = Ending(spec, lost=(), asked=lambda: 2, log=said.append, warn=said.append)
    began = time.monotonic()
    ending.end([agent.channel], grace_s=60, launched=False, save=True)
    assert time.monotonic() - began < 30
    assert rank.wait(timeout=5) == -signal.SIGKILL
    assert said == ["here: 1 process ended, 1 killed, 0 left"]
