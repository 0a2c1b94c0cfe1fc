"""What the supervisor takes for a failure, and what not.

``pytest tests/unit/test_launch_watch.py``
"""

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

from llmx.launch import attempt as attempt_module
from llmx.launch import watch as watch_module
from llmx.launch.attempt import Attempt, Voice
from llmx.launch.console import Console
from llmx.launch.fleet import Channel, Message
from llmx.launch.signals import Asked
from llmx.launch.watch import AWAY_S, Watch
from llmx.rundir import RunDir
from tests.unit.test_launch_agent import wait_until
from tests.unit.test_launch_render import experiment, spec_of


class Rig:
    """A watch over a run of two hosts, whose agents say what the test makes them say."""

    def __init__(self, directory: Path, **launch: object) -> None:
        self.run_dir, self.said = RunDir(directory), io.StringIO()
        self.run_dir.logs.mkdir()
        exp = experiment("pdsh", (1, 1), "cpu", **launch)
        exp.run_dir = str(directory)
        self.spec = dataclasses.replace(spec_of(exp), run_dir=self.run_dir)
        self.inbox: queue.Queue[tuple[Channel, Message]] = queue.Queue()
        self.log: list[str] = []
        self.channels = [
            Channel(name, (index,), ["cat"], b"", directory / "log", self.inbox, is_remote=True)
            for index, name in enumerate(("node-a", "node-b"))
        ]
        for channel in self.channels:
            channel.start({"PATH": "/usr/bin:/bin"})
        self.console = Console(self.said)
        self.watch = Watch(self.spec, self.channels, self.inbox, self.console, self.log.append)

    def over(self) -> bool:
        self.watch.tick()
        return self.watch.is_over(None)

    def close(self) -> None:
        for channel in self.channels:
            channel.close(timeout_s=2)


@pytest.fixture
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(tmp_path, **getattr(request, "param", {}))
    yield made
    made.close()


@pytest.mark.parametrize("rig", [{"start_timeout_s": 0.05}], indirect=True)
def test_the_queue_of_slurm_is_no_failure_to_start(rig: Rig) -> None:
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
    assert rig.watch.evidence.start_timeout_s == 0.05


@pytest.mark.parametrize("rig", [{"heartbeat_timeout_s": 60.0}], indirect=True)
def test_a_supervisor_that_stood_still_has_lost_nobody(rig: Rig) -> None:
    """Stopped and continued, it finds old words only, and hears the new ones a moment later."""
    for channel in rig.channels:
        channel.last_heard -= 100
    rig.watch._looked -= 2 * AWAY_S
    assert not rig.over()
    assert rig.watch.failed_at is None
    rig.watch._awake -= 100
    assert not rig.over()
    assert rig.watch.failed_at is not None
    assert rig.log[0] == "node-a is lost"


def test_a_death_is_seen_whatever_the_clock_there_says(rig: Rig) -> None:
    """The clock of the host was set an hour ahead while the run went on."""
    gone = {"event": "rank_exit", "rank": 1, "pid": 7, "time": time.time() + 3600}
    rig.inbox.put((rig.channels[1], gone))
    rig.over()
    rig.watch._gone_at[1] -= 5
    rig.over()
    assert "rank 1 exited without an error message" in rig.log


def test_a_flood_of_messages_leaves_time_for_the_rest(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "TAKE_S", 0.0)
    data = base64.b64encode(b"line\n").decode()
    message = {"event": "append", "path": "logs/rank-001.log", "offset": 0, "data": data}
    for _ in range(100):
        rig.inbox.put((rig.channels[1], message))
    rig.watch.tick()
    assert rig.inbox.qsize() >= 99
    rig.watch.tick(final=True)
    assert rig.run_dir.rank_log(1).read_text() == 100 * "line\n"


def test_what_agents_sent_last_comes_before_whole_copies(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the last lines of the metrics would stand there twice."""
    data = base64.b64encode(b'{"kind": "end"}\n').decode()
    message = {"event": "append", "path": "metrics.jsonl", "offset": 0, "data": data}
    copied: list[str] = []

    class Ending:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def end(self, channels: list[Channel], **_: Any) -> list[Channel]:
            rig.inbox.put((channels[0], message))
            return channels

        def bring_back(self, channels: list[Channel]) -> None:
            copied.append(rig.run_dir.metrics.read_text())

    monkeypatch.setattr(attempt_module, "Ending", Ending)
    nothing = lambda *_: None  # noqa: E731
    voice = Voice(rig.console, nothing, nothing, nothing, nothing)
    attempt = Attempt(rig.spec, voice, Asked(), again=False, before=nothing, on_start=nothing)
    attempt.watch, attempt.channels = rig.watch, rig.channels
    attempt.runner = subprocess.Popen(["true"])
    attempt._end_processes(0)
    rig.watch.tick(final=True)
    assert copied == ['{"kind": "end"}\n'] == [rig.run_dir.metrics.read_text()]
