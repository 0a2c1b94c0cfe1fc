"""The host agent on this machine, with real processes and real signals.

``pytest tests/unit/test_launch_agent.py``
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import secrets
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmx.launch.agents.agent import tag_of, tree_stamp
from llmx.launch.agents.connection import AGENT, AgentError, Connection, local_connection

PAUSE = "import signal; signal.pause()"
STUBBORN = (
    "import signal\nfor name in ('TERM', 'INT', 'USR1'): "
    "signal.signal(getattr(signal, 'SIG' + name), signal.SIG_IGN)\nprint(1, flush=True);"
    "signal.pause()"
)


BIND = (
    "import signal, socket, sys\n"
    "name = socket.socket(socket.AF_UNIX); name.bind(chr(0) + sys.argv[1]); name.listen()\n"
    "print(1, flush=True); signal.pause()\n"
)
"""Binds a name, as any user can."""


def wait_until(condition: Callable[[], Any], *, timeout_s: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)
    return value


class Rig:
    """One agent, introduced to a run, and the processes that a test starts."""

    def __init__(self, directory: Path) -> None:
        self.token = secrets.token_hex(8)
        self.tag = tag_of(self.token)
        self.directory = directory
        self.inbox: queue.Queue[tuple[Connection, dict[str, Any]]] = queue.Queue()
        self.connection = local_connection("here", (0,), directory / "agent.log", self.inbox)
        self.connection.start(dict(os.environ))
        self.host_info: dict[str, Any] = {}
        self.started: list[subprocess.Popen[Any]] = []

    def handshake(self, **values: Any) -> dict[str, Any]:
        message = {"token": self.token, "run_dir": str(self.directory), "grace_s": 2.0, **values}
        return self.connection.request("handshake", timeout_s=10, **message)

    def process(
        self, code: str = PAUSE, *words: str, env: dict[str, str] | None = None, own: bool = True
    ) -> subprocess.Popen[Any]:
        """A process that is of the run (``own``) or of another one."""
        token = self.token if own else "another"
        process = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            env={**os.environ, "LLMX_RUN_TOKEN": token, **(env or {})},
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def stop(self, grace_s: float = 2.0) -> dict[str, Any]:
        return self.connection.request("stop", grace_s=grace_s, timeout_s=30)

    def event(self, name: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """The next event of that name; others are dropped."""
        deadline = time.monotonic() + timeout_s
        while True:
            _, message = self.inbox.get(timeout=max(0.01, deadline - time.monotonic()))
            if message["event"] == name:
                return message


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.connection.close(timeout_s=20)
    for process in made.started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


def test_stop_ends_this_run_only(rig: Rig) -> None:
    rig.handshake()
    ready = f"print(1, flush=True); {PAUSE}"
    mine = [rig.process(ready), rig.process(ready, env={"RANK": "0"})]
    for process in mine:
        assert process.stdout is not None
        assert process.stdout.readline()
    other = rig.process(own=False)
    counts = rig.stop()
    assert (counts["ended"], counts["left"]) == (2, 0)
    assert [process.wait(timeout=5) for process in mine] == [-signal.SIGTERM, -signal.SIGINT]
    assert other.poll() is None


def test_ranks_may_save_before_they_leave(rig: Rig) -> None:
    """They get SIGUSR1, and their children, which inherit the rank's number, get nothing."""
    rig.handshake()
    child = (
        "import os, signal, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {PAUSE!r}])\n"
        "def save(*_): print('child', child.poll(), flush=True); child.kill(); sys.exit()\n"
        "signal.signal(signal.SIGUSR1, save)\n"
        "print(1, flush=True)\n"
        "while True: signal.pause()\n"
    )
    rank = rig.process(child, env={"RANK": "0"})
    assert rank.stdout is not None
    assert rank.stdout.readline()
    assert rig.connection.request("stop", grace_s=10, save=True, timeout_s=30)["left"] == 0
    assert rank.stdout.read() == b"child None\n"
    assert rank.wait(timeout=5) == 0


def test_a_signal_goes_to_ranks_alone(rig: Rig) -> None:
    rig.handshake()
    rank, launcher, other = (
        rig.process(env={"RANK": "3"}),
        rig.process(),
        rig.process(env={"RANK": "4"}),
    )
    answer = rig.connection.request("signal", name="USR2", ranks=[3], timeout_s=10)
    assert answer["ranks"] == [3]
    assert rank.wait(timeout=5) == -signal.SIGUSR2
    assert launcher.poll() is None
    assert other.poll() is None


def test_leftovers_of_an_earlier_attempt_are_cleared(rig: Rig) -> None:
    rig.handshake()
    left = [rig.process(), rig.process(STUBBORN, env={"RANK": "0"})]
    other = rig.process(own=False)
    assert left[1].stdout is not None
    assert left[1].stdout.readline()
    counts = rig.connection.request("kill_leftovers", grace_s=2, timeout_s=20)
    assert (counts["ended"], counts["left"]) == (2, 0)
    assert [process.wait(timeout=5) for process in left] == [-signal.SIGTERM, -signal.SIGKILL]
    assert other.poll() is None
    assert (
        rig.connection.request("kill_leftovers", grace_s=5, timeout_s=20)["ended"] == 0
    )  # and it goes on after that


def test_a_rewritten_file_is_sent_whole(rig: Rig) -> None:
    """Rank 0 cuts its metrics back where a run goes on from a checkpoint."""
    metrics = rig.directory / "metrics.jsonl"
    metrics.write_text("of an earlier attempt\n")
    rig.handshake()
    rig.connection.request("watch", stream=True, timeout_s=10)
    with metrics.open("a") as stream:
        stream.write("one\n")
    assert base64.b64decode(rig.event("append")["data"]) == b"one\n"
    shorter = rig.directory / "shorter"
    shorter.write_text("of an\n")
    os.replace(shorter, metrics)
    assert base64.b64decode(rig.event("replace")["data"]) == b"of an\n"
    with metrics.open("a") as stream:
        stream.write("two\n")
    message = rig.event("append")
    assert (message["offset"], base64.b64decode(message["data"])) == (6, b"two\n")


def test_a_second_word_cuts_the_grace_short(rig: Rig) -> None:
    rig.handshake()
    stubborn = rig.process(STUBBORN, env={"RANK": "0"})
    assert stubborn.stdout is not None
    assert stubborn.stdout.readline()
    first = rig.connection.send("stop", grace_s=3600)
    rig.connection.send("stop", grace_s=0)
    assert rig.connection.wait_for(first, timeout_s=120)["left"] == 0
    assert stubborn.wait(timeout=5) == -signal.SIGKILL


def test_ranks_are_asked_before_their_launcher(rig: Rig) -> None:
    """A launcher that is ended first would kill its ranks before they have saved anything."""
    rig.handshake()
    note = rig.directory / "note"
    code = (
        "import signal, sys, time\n"
        f"def end(*_): open({str(note)!r}, 'a').write(sys.argv[1]); sys.exit()\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "signal.signal(signal.SIGINT, end)\n"
        "print(1, flush=True)\n"
        "while True: signal.pause()\n"
    )
    for name, env in (("launcher ", {}), ("rank ", {"RANK": "0"})):
        process = rig.process(code, name, env=env)
        assert process.stdout is not None
        assert process.stdout.readline()
    rig.stop(grace_s=5)
    assert note.read_text() == "rank launcher "


def test_the_runner_of_deepspeed_is_never_asked(rig: Rig) -> None:
    """Its handler of SIGTERM would run `pkill -f` on everybody's launches."""
    rig.handshake()
    runner = rig.process(PAUSE, "deepspeed.launcher.runner")
    assert rig.stop(grace_s=2)["left"] == 0
    assert runner.wait(timeout=5) == -signal.SIGKILL


@pytest.mark.parametrize("end", ["close", "kill the pipe's writer"])
def test_a_dead_supervisor_ends_the_run(end: str, tmp_path: Path) -> None:
    """Here the supervisor is a process of its own, killed outright."""
    token = secrets.token_hex(8)
    hello = json.dumps({"cmd": "handshake", "id": 1, "token": token, "grace_s": 1})
    supervisor_code = (
        "import subprocess, sys, signal\n"
        f"argv = [sys.executable, '-I', '-S', {str(AGENT)!r}]\n"
        "agent = subprocess.Popen(argv, stdin=-1, stdout=-1, start_new_session=True)\n"
        f"agent.stdin.write({hello!r}.encode() + b'\\n'); agent.stdin.flush()\n"
        "agent.stdout.readline(); print(agent.pid, flush=True)\n"
        "sys.stdin.readline(); agent.stdin.close(); agent.wait()\n"
    )
    supervisor = subprocess.Popen(
        [sys.executable, "-c", supervisor_code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    rank = subprocess.Popen(
        [sys.executable, "-c", PAUSE], env={**os.environ, "LLMX_RUN_TOKEN": token, "RANK": "0"}
    )
    try:
        assert supervisor.stdout is not None
        assert supervisor.stdin is not None
        agent_pid = int(supervisor.stdout.readline())
        if end == "close":
            supervisor.stdin.close()
        else:
            supervisor.kill()
        assert rank.wait(timeout=20) == -signal.SIGUSR1
        supervisor.wait(timeout=20)
        wait_until(lambda: not _running(agent_pid))
    finally:
        rank.kill()
        rank.wait()
        supervisor.kill()
        supervisor.wait()


def _running(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_silence_ends_the_run(rig: Rig) -> None:
    rig.handshake(orphan_timeout_s=1.0)
    rank = rig.process(env={"RANK": "0"})
    assert rank.wait(timeout=20) == -signal.SIGUSR1
    wait_until(lambda: rig.connection.lost_at)


def test_what_a_run_leaves_in_dev_shm(rig: Rig) -> None:
    rig.handshake()
    port = rig.connection.request("reserve_port", want=0, timeout_s=10)["port"]
    base = f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1"
    mine, other = Path(f"{base}_{port}_0"), Path(f"{base}_{port + 1}_llmx-test")
    mine.touch()
    other.touch()
    try:
        rig.stop()
        assert not mine.exists()
        assert other.exists()
    finally:
        mine.unlink(missing_ok=True)
        other.unlink(missing_ok=True)


def test_ports_are_free_and_reserved(rig: Rig, tmp_path: Path) -> None:
    rig.handshake()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        assert rig.connection.request("reserve_port", want=taken, timeout_s=10)["port"] == 0
    port = rig.connection.request("reserve_port", want=0, timeout_s=10)["port"]
    assert 20000 <= port < 32768
    second = Rig(tmp_path / "second")
    try:
        second.handshake()
        assert second.connection.request("reserve_port", want=port, timeout_s=10)["port"] == 0
    finally:
        second.connection.close(timeout_s=10)


def test_ranks_are_reported(rig: Rig) -> None:
    rig.handshake()
    rig.connection.request("watch", stream=False, timeout_s=10)
    code = (
        "import subprocess, sys, signal\n"
        "subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print(1, flush=True); signal.pause()\n"
    )
    rank = rig.process(code, env={"RANK": "3"})
    assert rank.stdout is not None
    assert rank.stdout.readline()
    started = rig.event("rank_start")
    assert (started["rank"], started["pid"]) == (3, rank.pid)
    before = time.time()
    rank.kill()
    rank.wait()
    ended = rig.event("rank_exit")
    assert (ended["rank"], ended["pid"]) == (3, rank.pid)
    assert before - 1 < ended["time"] < time.time() + 1
    assert rig.stop()["ended"] == 1  # its child


def start_message(code: str, *ranks: int) -> dict[str, Any]:
    """Ranks that run a line of Python."""
    return {
        "argv": [sys.executable, "-c", code],
        "env": {"PATH": os.environ["PATH"], "ODD": "two $words"},
        "inherit": False,
        "first": {"PATH": "/my/bin"},
        "fixed": ["FIXED"],
        "ranks": {rank: {"RANK": str(rank)} for rank in ranks},
    }


def test_ranks_that_the_agent_starts(rig: Rig) -> None:
    """Its children: with the signals and the environment of any process, their codes known."""
    rig.handshake()
    rig.connection.request("watch", timeout_s=5)
    code = (
        "import os, signal, sys; rank = os.environ['RANK']\n"
        "kinds = [signal.getsignal(getattr(signal, 'SIG' + n)) for n in ('QUIT', 'TERM', 'HUP')]\n"
        "print(sorted(set(os.environ) - {'LC_CTYPE'}), os.environ['ODD'], set(kinds), flush=True)\n"
        "signal.getsignal(signal.SIGINT) is signal.default_int_handler or sys.exit(9)\n"
        "os.kill(os.getpid(), 9) if rank == '1' else sys.exit(int(rank))"
    )
    rig.connection.request("start", **start_message(code, 1, 2), timeout_s=10)
    codes = {event["rank"]: event["code"] for event in (rig.event("rank_exit") for _ in range(2))}
    assert codes == {1: -signal.SIGKILL, 2: 2}
    for rank in (1, 2):
        assert (rig.directory / f"logs/rank-{rank:03d}.log").read_text() == (
            "['ODD', 'PATH', 'RANK'] two $words {<Handlers.SIG_DFL: 0>}\n"
        )


def test_a_setup_script(rig: Rig) -> None:
    """What it exports wins, but for what the config sets; the own Python stays first in PATH."""
    script = rig.directory / "my setup; false"
    script.write_text("echo welcome\nexport PATH=/opt/x:$PATH A='two $words' FIXED=1\nB=2\n")
    assert rig.handshake(setup=str(script))["setup_error"] == ""
    rig.connection.request("watch", timeout_s=5)
    code = "import os; print(*(os.environ.get(n) for n in ('PATH', 'A', 'FIXED', 'B')), sep='|')"
    message = start_message(code, 0)
    message["env"] |= {"A": "here", "FIXED": "by config"}
    rig.connection.request("start", **message, timeout_s=10)
    assert rig.event("rank_exit")["code"] == 0
    log = (rig.directory / "logs/rank-000.log").read_text()
    assert log == f"/my/bin:/opt/x:{os.environ['PATH']}|two $words|by config|None\n"


@pytest.mark.parametrize(
    ("text", "error"),
    [("return 3", "exit code 3"), ("export X=$(", "exit code"), (None, "No such")],
)
def test_a_setup_script_that_fails(rig: Rig, text: str | None, error: str) -> None:
    script = rig.directory / "setup.sh"
    if text is not None:
        script.write_text(f"{text}\n")
    assert error in rig.handshake(setup=str(script))["setup_error"]


def test_a_rank_that_cannot_be_started(rig: Rig) -> None:
    rig.handshake()
    message = {**start_message("", 0), "argv": ["/no/python"]}
    with pytest.raises(AgentError, match="No such file or directory: '/no/python'"):
        rig.connection.request("start", **message, timeout_s=10)


def test_files_of_a_private_disk_are_streamed(rig: Rig) -> None:
    (rig.directory / "logs").mkdir()
    (rig.directory / "ranks").mkdir()
    log, status = rig.directory / "logs/rank-001.log", rig.directory / "ranks/rank-001.json"
    log.write_text("of an earlier attempt\n")
    status.write_text("{}")
    rig.handshake()
    rig.connection.request("watch", stream=True, timeout_s=10)
    assert not status.exists()
    big = "x" * 200_000
    with log.open("a") as stream:
        stream.write(f"first\n{big}\n")
    text = b""
    while not text.endswith(b"x\n"):
        text += base64.b64decode(rig.event("append")["data"])
    assert text.decode() == f"first\n{big}\n"
    (rig.directory / "ranks/tmp").write_text('{"state": "training"}')
    (rig.directory / "ranks/tmp").replace(status)
    message = rig.event("replace")
    assert message["path"] == "ranks/rank-001.json"
    assert json.loads(base64.b64decode(message["data"])) == {"state": "training"}
    with log.open("a") as stream:
        stream.write("last words\n")
    rig.connection.request("flush", timeout_s=10)
    assert base64.b64decode(rig.event("append")["data"]) == b"last words\n"


def test_hello_looks_around(rig: Rig) -> None:
    (rig.directory / ".nonce").touch()
    answer = rig.handshake(
        nonce=".nonce", code="/nonexistent.py", python=sys.executable, modules=["json", "no_such"]
    )
    assert answer["sees_run_dir"] is True
    assert answer["sees_code"] is False
    assert answer["python"]["missing"] == ["no_such"]
    assert answer["host"] == socket.gethostname()
    missing = rig.handshake(python="/nonexistent/python")
    assert "error" in missing["python"]
    assert missing["sees_run_dir"] is False


def test_errors_come_back(rig: Rig) -> None:
    rig.handshake()
    with pytest.raises(AgentError, match="NotADirectoryError|FileExistsError"):
        rig.connection.request("mkdir", paths=["/dev/null/x"], timeout_s=10)


def test_an_agent_that_died_is_noticed(rig: Rig) -> None:
    rig.handshake()
    pid = rig.connection.request("handshake", token=rig.token, timeout_s=10)["pid"]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(AgentError):
        rig.connection.request("flush", timeout_s=10)


def test_an_agent_of_an_earlier_attempt_does_not_end_the_next(rig: Rig) -> None:
    """It may notice only now that its supervisor is gone, when the next attempt runs already."""
    old_pid = rig.handshake(session="one")["pid"]
    later, sibling = (
        local_connection(name, (0,), rig.directory / f"{name}.log", queue.Queue())
        for name in ("later", "sibling")
    )
    try:
        for connection in (later, sibling):
            connection.start(dict(os.environ))
            connection.request("handshake", timeout_s=10, token=rig.token, session="two")
        assert later.request("kill_leftovers", grace_s=1, timeout_s=10)["left"] == 0
        wait_until(lambda: not _running(old_pid))
        rank = rig.process()
        rig.connection.close(timeout_s=5)
        assert sibling.request("list_files", patterns=[], timeout_s=10)["files"] == {}, (
            "of this attempt"
        )
        assert rank.poll() is None
        assert later.request("stop", grace_s=1, timeout_s=20)["ended"] == 1
        assert rank.wait(timeout=10) != 0
    finally:
        later.close(timeout_s=5)
        sibling.close(timeout_s=5)


@pytest.mark.skipif(os.getuid() != 0, reason="needs a second user")
def test_processes_of_another_user_are_none_of_the_run(rig: Rig) -> None:
    """With the token in their environment and on their command line, and with an agent's name."""
    drop = "import os, signal, socket, sys; os.setuid(65534); "
    foreign = [
        rig.process(f"{drop} print(1, flush=True); {PAUSE}", rig.tag, env={"RANK": "0"}),
        rig.process(drop + BIND, f"llmx-agent-{rig.tag}-zero-0-1", "llmx-remote"),
    ]
    for process in foreign:
        assert process.stdout is not None
        assert process.stdout.readline()
    rig.handshake(session="one")
    rig.connection.request("watch", stream=False, timeout_s=10)
    rank = rig.process(env={"RANK": "1"})
    assert rig.event("rank_start")["rank"] == 1
    assert rig.connection.request("kill_leftovers", grace_s=1, timeout_s=20)["ended"] == 1
    assert rank.wait(timeout=5) != 0
    assert [process.poll() for process in foreign] == [None, None]


def test_only_an_agent_is_ended_as_one(rig: Rig) -> None:
    """Another program of this user that has bound an agent's name."""
    rig.handshake(session="one")
    other = rig.process(BIND, f"llmx-agent-{rig.tag}-zero-0-1", own=False)
    assert other.stdout is not None
    assert other.stdout.readline()
    assert rig.connection.request("kill_leftovers", grace_s=1, timeout_s=20)["ended"] == 0
    assert other.poll() is None


def test_the_token_is_for_a_shell_that_pdsh_starts(rig: Rig) -> None:
    """The shell has the token only in its variables; it is known by the tag on its command line."""
    rig.handshake()
    rig.connection.request("watch", stream=False, timeout_s=10)
    path = rig.directory / f".token-{os.getuid()}"
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == (rig.token, 0o600)
    line = f'export LLMX_RUN_TOKEN="$(: {rig.tag}; cat {path})"; echo $LLMX_RUN_TOKEN; sleep 60; :'
    with subprocess.Popen(["sh", "-c", line], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == f"{rig.token}\n"
        assert rig.stop(grace_s=1)["ended"] == 2


def test_small_files_and_what_lies_there(tmp_path: Path) -> None:
    """How a run's own files come to a host that has a disk of its own."""
    rig = Rig(tmp_path)
    try:
        there = tmp_path / "runs/one"
        files = {"config.yaml": base64.b64encode(b"seed: 1\n").decode()}
        rig.connection.request("put", timeout_s=10, path=str(there), files=files)
        assert [path.name for path in there.iterdir()] == ["config.yaml"]
        assert (there / "config.yaml").read_text() == "seed: 1\n"
        paths = [(str(there), ["*.pyc"]), (str(tmp_path / "nothing"), [])]
        reply = rig.connection.request("stamp", timeout_s=10, paths=paths)["stamps"]
        assert reply == {str(there): tree_stamp(str(there), ["*.pyc"]), paths[1][0]: None}
    finally:
        rig.connection.close(timeout_s=10)


def test_a_run_directory_that_cannot_be_written(rig: Rig) -> None:
    """/proc takes no file of anybody."""
    assert rig.handshake(run_dir=str(rig.directory / "new"))["cannot_write"] == ""
    assert rig.handshake(run_dir="/proc/run")["cannot_write"].startswith("/proc: ")
    assert list(rig.directory.glob(".llmx-*")) == []
