"""What the supervisor takes for a failure, and what not."""

from __future__ import annotations

import base64
import dataclasses
import io
import queue
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmx.errors import LaunchError
from llmx.launch.agents import preflight as preflight_module
from llmx.launch.agents.connection import Connection, Message
from llmx.launch.supervision import attempt as attempt_module
from llmx.launch.supervision import monitor as watch_module
from llmx.launch.supervision import progress as hang_module
from llmx.launch.supervision.attempt import Attempt
from llmx.launch.supervision.classify import classify
from llmx.launch.supervision.console import Console, RunLog
from llmx.launch.supervision.journal import Journal
from llmx.launch.supervision.monitor import SUSPENDED_S, RankMonitor
from llmx.launch.supervision.progress import Progress, waiting_places
from llmx.launch.supervision.signals import ShutdownRequest
from llmx.run.rundir import RunDir, read_json, write_json
from llmx.train.status import RankStatus
from tests.agents import wait_until
from tests.launches import experiment, spec_of


class Rig:
    """The monitor of a run of two hosts, whose agents say what the test makes them say."""

    def __init__(self, directory: Path, **launch: object) -> None:
        self.run_dir, self.said = RunDir(directory), io.StringIO()
        self.run_dir.logs.mkdir()
        self.run_dir.ranks.mkdir()
        self.spec = spec_of(experiment("pdsh", (1, 1), "cpu", **launch), run_dir=self.run_dir)
        self.inbox: queue.Queue[tuple[Connection, Message]] = queue.Queue()
        self.connections = [
            Connection(name, (index,), ["cat"], directory / "log", self.inbox, is_remote=True)
            for index, name in enumerate(("node-a", "node-b"))
        ]
        for connection in self.connections:
            connection.start({"PATH": "/usr/bin:/bin"})
        self.log = RunLog(self.run_dir.supervisor_log, Console(self.said))
        self.monitor = RankMonitor(self.spec, self.connections, self.inbox, self.log)

    def over(self) -> bool:
        self.monitor.poll()
        return self.monitor.is_over(None)

    def says(self, rank: int, state: str, **values: Any) -> None:
        """Its agent sends the status that the rank wrote."""
        status = {"rank": rank, "state": state, "time": time.time(), **values}
        message = {"event": "status", "rank": rank, "status": status}
        self.inbox.put((self.connections[rank], message))

    def exits(self, rank: int, **values: Any) -> None:
        """Its agent reports its end."""
        gone = {"event": "rank_exit", "rank": rank, "pid": 7, "time": time.time(), **values}
        self.inbox.put((self.connections[rank], gone))

    def appends(self, rank: int, path: str, text: str) -> None:
        """Its agent sends what was written to a file."""
        data = base64.b64encode(text.encode()).decode()
        message = {"event": "append", "path": path, "offset": 0, "data": data}
        self.inbox.put((self.connections[rank], message))

    def logged(self) -> list[str]:
        """The lines of the log, without their times."""
        text = self.run_dir.supervisor_log.read_text()
        return [line.split(" ", 1)[1] for line in text.splitlines()]

    def close(self) -> None:
        for connection in self.connections:
            connection.close(timeout_s=2)


@pytest.fixture
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(tmp_path, **getattr(request, "param", {}))
    yield made
    made.close()


@pytest.mark.parametrize("rig", [{"start_timeout_s": 0.05}], indirect=True)
def test_the_queue_of_slurm_is_no_failure_to_start(rig: Rig) -> None:
    rig.monitor.plan = dataclasses.replace(rig.monitor.plan, transport="slurm")
    launcher = rig.run_dir.launcher_log
    launcher.write_text("srun: job 7 queued and waiting for resources\n")
    for _ in range(3):
        assert not rig.over()
    with launcher.open("a") as stream:
        stream.write("srun: job 7 has been allocated resources\n")
    assert not rig.over()
    assert rig.said.getvalue().splitlines() == [
        "srun: job 7 queued and waiting for resources",
        "srun: job 7 has been allocated resources",
    ]
    wait_until(rig.over, timeout_s=10)
    assert rig.monitor.evidence.start_timeout_s == 0.05


@pytest.mark.parametrize(
    "rig", [{"heartbeat_timeout_s": 60.0, "orphan_timeout_s": 60.0}], indirect=True
)
def test_a_supervisor_that_stood_still_has_lost_nobody(rig: Rig) -> None:
    """Stopped and continued, it finds old words only, and hears the new ones a moment later."""
    for connection in rig.connections:
        connection.last_message_at -= 100
    rig.monitor._polled_at -= 2 * SUSPENDED_S
    assert not rig.over()
    assert rig.monitor.failed_at is None
    rig.monitor._resumed_at -= 100
    assert not rig.over()
    assert rig.monitor.failed_at is not None
    assert rig.logged()[0] == "node-a is lost"


def test_hosts_that_are_all_silent_are_given_the_time_of_their_agents(rig: Rig) -> None:
    """Then this machine is cut off, and the ranks go on; a single silent host is lost sooner."""
    launch = rig.spec.exp.launch
    now = time.monotonic()
    for connection in rig.connections:
        connection.argv = ["false"]
        connection.abort()
        connection.last_message_at = now - launch.heartbeat_timeout_s - 1
    rig.monitor._resumed_at = now - 1000
    assert rig.monitor._find_lost_host(now) == ""
    rig.connections[0].last_message_at = now
    assert rig.monitor._find_lost_host(now) == "node-b is lost"
    for connection in rig.connections:
        connection.last_message_at = now - launch.orphan_timeout_s - 1
    assert rig.monitor._find_lost_host(now) == "node-a is lost"
    rig.monitor.end_renewals()


def test_ranks_go_on_without_their_launcher(rig: Rig) -> None:
    """Its connection broke, and the agents see the ranks."""
    for rank, connection in enumerate(rig.connections):
        connection.ranks[rank] = 100 + rank
    rig.monitor.poll()
    assert not rig.monitor.is_over(255)
    assert rig.monitor.evidence.runner_code is None
    rig.connections[1].ranks[1] = 0
    rig.monitor.is_over(255)
    assert rig.monitor.evidence.runner_code == 255


def test_statuses_are_of_this_attempt_and_each_is_sent_by_one_agent(rig: Rig) -> None:
    """That of a rank on a host without an agent by the one of this machine."""
    write_json(rig.run_dir.rank_status(0), {"state": "failed"})
    rig.connections.pop().close(timeout_s=2)
    rig.monitor.start()
    assert list(rig.run_dir.ranks.iterdir()) == []
    assert rig.connections[0].statuses == [0, 1]


def test_an_agent_that_ended_the_ranks_by_itself(rig: Rig) -> None:
    """A rank that it asked to save and exit says `interrupted`, as after any SIGUSR1."""
    now = time.time()
    rig.connections[1].ranks_ended = {"time": now - 20, "silent_s": 301.0, "signal": ""}
    for rank in (0, 1):
        rig.says(rank, "interrupted", time=now - 15)
    assert not rig.over()
    assert rig.monitor.failed_at is not None
    rig.monitor.failed_at -= watch_module.ALL_REPORTED_S
    rig.connections[0].last_message_at = rig.monitor.failed_at + 1
    assert rig.over()
    assert not rig.monitor.evidence.lost_hosts, "its agent has exited, the host is up"
    rig.monitor.read_logs()
    outcome = classify(rig.monitor.evidence, rig.monitor.plan)
    assert (outcome.kind, outcome.host, outcome.rank) == ("orphaned", "node-b", None)
    assert "heard nothing of the supervisor for 301 s" in outcome.cause


def test_a_death_is_seen_whatever_the_clock_there_says(rig: Rig) -> None:
    """The clock of the host was set an hour ahead while the run went on."""
    rig.exits(1, time=time.time() + 3600)
    rig.over()
    assert "rank 1 exited without an error message" in rig.logged()


def test_nobody_waits_for_a_launcher_whose_ranks_have_left(rig: Rig) -> None:
    """DeepSpeed's looks for their end once a second, and then takes its time."""
    for rank in (0, 1):
        assert not rig.over()
        rig.says(rank, "finished")
    assert not rig.over()
    for rank in (0, 1):
        assert not rig.over()
        rig.exits(rank)
    assert rig.over()
    assert rig.monitor.all_left


@pytest.fixture
def stacks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NOTICE_STACKS_S", "STACKS_S", "UNSAFE_STACKS_S"):
        monkeypatch.setattr(watch_module, name, 0.0)
    monkeypatch.setattr(hang_module, "REST_S", 0.0)


@pytest.mark.usefixtures("stacks_at_once")
@pytest.mark.parametrize("rig", [{"loading_timeout_s": 100.0}], indirect=True)
def test_ranks_that_load_without_progress(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The console says where they wait; a line in any log is progress; then the attempt ends."""
    monkeypatch.setattr(watch_module, "SIZES_S", 0.0)
    for rank in (0, 1):
        rig.says(rank, "loading", step=0)

    def wait_s(seconds: float) -> bool:
        rig.monitor.progress._progress_at -= seconds
        return rig.over()

    assert not rig.over()
    assert not wait_s(61)
    head, places = rig.said.getvalue().splitlines()
    assert head == (
        "no progress for 61 s before the first step; the attempt ends after 100 s "
        "(launch.loading_timeout_s). Ranks are in:"
    )
    assert places.startswith("  ranks 0 (node-a), 1 (node-b): no answer")
    assert not wait_s(30)
    assert len(rig.said.getvalue().splitlines()) == 2
    rig.run_dir.rank_log(1).write_text("Loading weights: 7 of 900\n")
    assert not rig.over()
    assert not wait_s(50)
    assert wait_s(51)
    assert rig.monitor.evidence.hang is not None
    outcome = classify(rig.monitor.evidence, rig.spec.plan)
    assert outcome.kind == "hang"
    assert "for 101 s before the first step (launch.loading_timeout_s)" in outcome.cause


@pytest.mark.usefixtures("stacks_at_once")
def test_a_step_that_does_not_end(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The console says so and who is waited for; from a minute on the network is probed."""
    no_way = "a -> b: no connection\nA firewall drops it."
    monkeypatch.setattr(watch_module, "network_problem", lambda *_: no_way)
    monitor = rig.monitor
    for rank, step in enumerate((7, 6)):
        rig.says(rank, "training", step=step)
    assert not rig.over()
    monitor.progress.add_step_time(0.03, time.monotonic())

    def wait_s(seconds: float) -> list[str]:
        before = len(rig.said.getvalue().splitlines())
        monitor.progress._progress_at -= seconds
        assert not rig.over()
        if monitor._probe.ident:
            monitor._probe.join()
            assert not rig.over()
        return rig.said.getvalue().splitlines()[before:]

    assert wait_s(19) == []
    behind = "waiting for node-b (rank 1: it is at step 6, others are at step 7)"
    assert wait_s(2) == [f"no step for 21 s (usually 0.03 s); {behind}"]
    assert wait_s(9) == []
    assert monitor.stall == f"no step for 30 s (usually 0.03 s); {behind}"
    first, *probed = wait_s(31)
    assert first == f"no step for 1 min 1 s (usually 0.03 s); {behind}"
    assert probed == ["a -> b: no connection", "A firewall drops it."]
    assert monitor.stall.endswith("; waiting for a -> b: no connection")
    failure = monitor._hang_failure(601.0)
    assert (failure.kind, failure.fix) == ("comm", "A firewall drops it.")
    assert failure.cause.endswith("for 601 s after step 6: a -> b: no connection")
    rig.says(1, "training", step=8)
    assert wait_s(0) == ["training goes on"]
    assert (monitor.stall, monitor._network) == ("", ())


@pytest.mark.parametrize("meanwhile", ["nothing", "closed", "made anew", "training goes on"])
def test_an_agent_that_does_not_answer_a_probe_is_no_fault_of_the_network(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """Nor does a probe that ends after the stall, or after the attempt, say anything."""
    monitor, connection = rig.monitor, rig.connections[1]

    def no_way(*_: Any) -> None:
        match meanwhile:
            case "closed":
                connection.lost_at = time.time()
            case "made anew":
                monitor._renewals["node-b"] = watch_module.Renewal(rig.spec, connection, rig.log)
            case "training goes on":
                monitor.stall = ""
        raise LaunchError("node-b: no connection")

    monkeypatch.setattr(preflight_module, "find_nodes", no_way)
    monitor.stall = "no step for 61 s"
    monitor._probe_network()
    problems = ["node-b: no connection"] if meanwhile == "nothing" else []
    assert list(monitor._network) == rig.said.getvalue().splitlines() == problems


def test_a_host_that_refuses_again_and_again_is_logged_once(rig: Rig) -> None:
    connection = rig.connections[0]
    connection.argv = ["sh", "-c", "echo a word of ssh >&2"]
    renewal = watch_module.Renewal(rig.spec, connection, rig.log)
    renewal.start()
    wait_until(lambda: connection.log.read_text().count("word") > 2)
    renewal.end()
    assert rig.logged() == ["node-a: cannot be connected anew: a word of ssh"]


def test_at_a_restart_a_network_that_is_down_is_waited_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, shutdown, states = Journal(rig.run_dir), ShutdownRequest(), []
    shutdown.event.set()  # no pause
    found = [f"a -> b, port {port}: no connection.\nA firewall." for port in range(3)]

    def problem(*_: Any) -> str:
        states.append((read_json(rig.run_dir.supervisor) or {}).get("why"))
        return found[len(states) - 1] if len(states) <= len(found) else ""

    monkeypatch.setattr(attempt_module, "network_problem", problem)
    restart = Attempt(
        rig.spec, rig.log, journal, shutdown,
        number=2, is_restart=True, on_start=lambda: None,
    )  # fmt: skip
    journal.state("preparing", attempt=2)
    restart._wait_for_network(rig.spec)
    why = "waiting for the network between the hosts: a -> b, port {}: no connection"
    assert rig.said.getvalue() == f"{why.format(0)}; giving up in 30:00\nA firewall.\n"
    assert states == ["", *map(why.format, range(3))]
    assert read_json(rig.run_dir.supervisor)["state"] == "preparing"
    rig.spec.exp.launch.host_wait_s = 0.0
    states.clear()
    restart._wait_for_network(rig.spec)
    assert len(states) == 1


def test_loading_has_no_limit_while_a_host_is_out_of_sight() -> None:
    progress = Progress(loading_timeout_s=100.0)
    progress.update({0: {"state": "loading"}}, 0.0)
    progress.pause(60.0)
    assert (progress.overdue_s(150.0), progress.stuck_s(150.0)) == (90.0, None)
    assert progress.stuck_s(161.0) == 101.0


def test_the_places_where_ranks_wait() -> None:
    def stack(*frames: str) -> str:
        return "\n".join(["Thread 0x1 (most recent call first):", *(f"  {f}" for f in frames), ""])

    called = 'File "/x/llmx/train/engine/build.py", line 20 in build_engine'
    library = 'File "/v/site-packages/torch/distributed/c10d.py", line 7 in broadcast'
    waiting = stack(library, called)
    reading = stack('File "/x/llmx/models/load.py", line 3 in tensor')
    logs = {0: waiting, 1: reading, 2: waiting}
    assert waiting_places(logs, {rank: f"h{rank}" for rank in range(4)}) == [
        "ranks 0 (h0), 2 (h2): broadcast (torch/distributed/c10d.py:7), called from build_engine "
        "(llmx/train/engine/build.py:20)",
        "rank 1 (h1): tensor (llmx/models/load.py:3)",
        "rank 3 (h3): no answer: its process is stopped, or blocked in the kernel",
    ]


def test_a_flood_of_messages_leaves_time_for_the_rest(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "MESSAGES_S", 0.0)
    for _ in range(100):
        rig.appends(1, "logs/rank-001.log", "line\n")
    rig.monitor.poll()
    assert rig.inbox.qsize() >= 99
    rig.monitor.poll(final=True)
    assert rig.run_dir.rank_log(1).read_text() == 100 * "line\n"


def test_what_agents_sent_last_comes_before_whole_copies(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the last lines of the metrics would stand there twice."""
    copied: list[str] = []

    def shut_down(_: Any, connections: list[Connection], *__: Any, **___: Any) -> list[Connection]:
        rig.appends(0, "metrics.jsonl", '{"kind": "end"}\n')
        return connections

    def pull_outputs(*_: Any) -> None:
        copied.append(rig.run_dir.metrics.read_text())

    monkeypatch.setattr(attempt_module, "shut_down", shut_down)
    monkeypatch.setattr(attempt_module, "pull_outputs", pull_outputs)
    attempt = Attempt(
        rig.spec, rig.log, Journal(rig.run_dir), ShutdownRequest(),
        number=1, is_restart=False, on_start=lambda: None,
    )  # fmt: skip
    attempt.monitor, attempt.connections = rig.monitor, rig.connections
    attempt.launched, attempt.runner = True, subprocess.Popen(["true"])
    attempt._shut_down()
    rig.monitor.poll(final=True)
    assert copied == ['{"kind": "end"}\n'] == [rig.run_dir.metrics.read_text()]


def test_the_heartbeat_of_a_rank_does_not_make_its_run_directory_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    status = RankStatus(run, rank=0)
    run.root.rename(tmp_path / "moved")
    status.enter("training")
    assert not run.root.exists()
