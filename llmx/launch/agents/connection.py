"""The connections of the supervisor to the agents, one for each host: JSON lines, over ssh.

This machine always has an agent: it also monitors ``deepspeed``, ``pdsh``, ``mpirun`` and ``srun``.
On other hosts it is started over ``ssh -F RUN_DIR/ssh_config``, which sends its source, so a host
needs a Python and nothing else.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from llmx.hardware import survey
from llmx.launch.ssh_config import ssh_argv
from llmx.launch.supervision.tail import tail_text

AGENT = Path(__file__).with_name("agent.py")
AGENT_SOURCE = AGENT.read_bytes()
"""Read once: an update of llmx while a run continues must not mix two versions of the protocol."""
# Reads the source from stdin, and no byte more: what follows is for the program.
BOOTSTRAP = (
    "import os\n"
    "def take(k):\n"
    " d=os.read(0,k)\n"
    " return d or os._exit(1)\n"  # the connection broke
    "n=b''\n"
    "while not n.endswith(b'\\n'): n+=take(1)\n"
    "s=b''\n"
    "while len(s)<int(n): s+=take(int(n)-len(s))\n"
    "exec(compile(s,'llmx-remote','exec'),{'__name__':'__main__'})\n"
)
"""What ``python -c`` gets on the command line. Its input stays open for what the program reads."""
LOCAL_AGENT = [sys.executable, "-I", "-S", "-c", BOOTSTRAP]
"""The command of the agent of this machine."""
Message = dict[str, Any]
HEARTBEAT_S = 3.0
"""Seconds between two pings to the agent of another host."""
RELAY = """cat; echo '{"cmd": "bye"}'"""
"""The process between this one and ssh. It tells the agent that this one has ended, however that
happened: a connection that only breaks looks the same there otherwise."""
SSH_OPTIONS = ("-oServerAliveInterval=4", "-oServerAliveCountMax=3")
"""Also limit the exchange of keys, which ConnectTimeout does not: its packets are large, and may be
lost on the way. Of an agent that runs, the pings show earlier that it is silent."""
CLOCK_SAMPLES = 20
"""The clock of a host is measured by the quickest of the last so many pings: it may be set."""


def survey_source() -> str:
    """The source of the survey (``llmx/hardware/survey.py``)."""
    return Path(survey.__file__).read_text(encoding="utf-8")


class AgentError(Exception):
    """The agent replied with an error, or not at all. ``str()`` is its message or that of ssh."""


@dataclass
class Connection:
    """The connection to the agent of one host."""

    name: str
    """Name of the host, as in the hostfile; ``this machine`` where that is no host of the run."""
    hosts: tuple[int, ...]
    """Indices of the plan's hosts; empty for a machine without ranks."""
    argv: list[str]
    log: Path
    """The stderr of ssh."""
    inbox: queue.Queue[tuple[Connection, Message]]
    is_remote: bool
    host_info: Message = field(default_factory=dict)
    """The reply to the handshake: facts of the host."""
    clock_offset_s: float = 0.0
    """Clock of the host minus the clock of this machine."""
    shared: bool = True
    """Whether the host shares the run directory with this machine."""
    statuses: list[int] = field(default_factory=list)
    """Ranks whose statuses the agent sends."""
    session: str = ""
    """An id of the attempt, the same for all its agents."""
    lost_at: float | None = None
    last_message_at: float = 0.0
    ranks: dict[int, int] = field(default_factory=dict)
    """Rank -> its process there, as the agent reported it; 0: it has exited."""
    offsets: dict[str, int] = field(default_factory=dict)
    """How much of each streamed file the agent has sent."""
    ranks_ended: Message | None = None
    """When and why the agent ended the ranks by itself."""
    _process: subprocess.Popen[bytes] | None = None
    _relay: subprocess.Popen[bytes] | None = None
    _heartbeats: threading.Thread | None = None
    _reader: threading.Thread | None = None
    _replies: dict[int, queue.Queue[Message]] = field(default_factory=dict)
    _ids: Iterable[int] = field(default_factory=lambda: itertools.count(1))
    _clock_samples: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=CLOCK_SAMPLES)
    )
    """Round trip and clock difference of the last pings, seconds."""
    _log_start: int = 0
    """Bytes of the log that are of earlier connections to the host."""
    _printed: deque[str] = field(default_factory=lambda: deque(maxlen=10))
    """Lines that are no messages: a login banner, or why an account must not log in."""
    _closing: threading.Event = field(default_factory=threading.Event)

    def start(self, env: dict[str, str]) -> None:
        """Start the agent, in a session of its own: Ctrl-C in the terminal is not for it."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        pipe, relay = subprocess.PIPE, None

        def start(argv: list[str], stdin: Any, stderr: Any) -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                argv, stdin=stdin, stdout=pipe, stderr=stderr, env=env, start_new_session=True
            )

        if self.is_remote:
            relay = start(["/bin/sh", "-c", RELAY], pipe, subprocess.DEVNULL)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            process = start(self.argv, pipe if relay is None else relay.stdout, log)
        if relay is not None and relay.stdout is not None:
            relay.stdout.close()  # ssh has it
        stdin = (relay or process).stdin
        assert stdin is not None
        with contextlib.suppress(OSError):  # the reader will see why
            # Before anything that another thread sends.
            stdin.write(f"{len(AGENT_SOURCE)}\n".encode() + AGENT_SOURCE)
            stdin.flush()
        self._relay, self._process = relay, process
        self.last_message_at = self.last_message_at or time.monotonic()
        self._reader = threading.Thread(
            target=self._read, args=(process,), name=f"agent-{self.name}", daemon=True
        )
        self._reader.start()
        if self.is_remote and self._heartbeats is None:
            name = f"alive-{self.name}"
            self._heartbeats = threading.Thread(
                target=self._send_heartbeats, name=name, daemon=True
            )
            self._heartbeats.start()

    def renew(self, env: dict[str, str]) -> None:
        """Start a new agent on the same host. What the one before it has sent is received first;
        it gets no ``bye``, so it does not end the ranks."""
        self._kill()
        for number in list(self._replies):
            self._replies.pop(number).put({"error": "the connection was made anew"})
        self.lost_at = None
        self.start(env)

    def send(self, cmd: str, **values: Any) -> queue.Queue[Message]:
        """Send one command; its reply arrives in the queue that is returned."""
        number = next(iter(self._ids))
        replies: queue.Queue[Message] = queue.Queue()
        self._replies[number] = replies
        self._write(json.dumps({"cmd": cmd, "id": number, **values}).encode() + b"\n")
        return replies

    def request(self, cmd: str, *, timeout_s: float, **values: Any) -> Message:
        """Send one command and wait for its reply; AgentError where none arrives."""
        return self.wait_for(self.send(cmd, **values), timeout_s=timeout_s)

    def wait_for(self, replies: queue.Queue[Message], *, timeout_s: float) -> Message:
        """The reply to a command that was sent."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                reply = replies.get(timeout=max(0.0, min(0.1, deadline - time.monotonic())))
            except queue.Empty:
                if self.lost_at is not None:
                    # The end of the stderr of ssh (or of Python), of this connection only.
                    errors = tail_text(self.log, start=self._log_start, max_bytes=2000).strip()
                    printed = errors or "\n".join(self._printed)[-2000:].strip()
                    raise AgentError(printed or "the connection closed") from None
                if time.monotonic() >= deadline:
                    raise AgentError(f"no reply within {timeout_s:.0f} s") from None
                continue
            if "error" in reply:
                raise AgentError(str(reply["error"]))
            return reply

    def ping(self) -> None:
        """Ask whether the agent is alive; the reply also measures its clock."""
        if self.lost_at is None:
            self.send("ping", sent=time.monotonic())

    def close(self, *, timeout_s: float) -> None:
        """Close the connection: an agent that still runs ends the run on its host, and exits."""
        if self._process is None:
            return
        self._closing.set()
        self.lost_at = self.lost_at or time.time()  # no events from now on
        stdin = self._stdin()
        assert stdin is not None
        with contextlib.suppress(OSError):  # it may have exited already
            stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=timeout_s)
        self._kill()

    def abort(self) -> None:
        """Break the connection, so that nothing waits for it; the agent keeps the ranks."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _kill(self) -> None:
        """End ssh, then its relay: that one must not say ``bye`` for it."""
        assert self._process is not None
        for process in (self._process, self._relay):
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if process.stdin is not None:
                    with contextlib.suppress(OSError):
                        process.stdin.close()
        if self._reader is not None:
            self._reader.join(timeout=1)
            if not self._reader.is_alive() and self._process.stdout is not None:
                self._process.stdout.close()

    def _stdin(self) -> IO[bytes] | None:
        process = self._relay or self._process
        return process.stdin if process is not None else None

    def _send_heartbeats(self) -> None:
        """An agent without messages ends the run, so they must not depend on the main thread, which
        may copy files for an hour, or be blocked by a terminal that Ctrl-S stopped."""
        while not self._closing.wait(HEARTBEAT_S):
            self.ping()

    def _write(self, data: bytes) -> None:
        stdin = self._stdin()
        assert stdin is not None
        try:
            stdin.write(data)
            stdin.flush()
        except (OSError, ValueError):
            self._mark_lost()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self._printed.append(line.decode(errors="replace").rstrip())
                continue  # "42" and "null" are JSON, too
            self.last_message_at = time.monotonic()
            self._remember(message)
            if message.get("event") == "ping":
                self._measure_clock(message)
                self._replies.pop(message.get("id", 0), None)
            elif message.get("id") in self._replies:
                self._replies.pop(message["id"]).put(message)
            else:
                self.inbox.put((self, message))
        if process is self._process:
            self._mark_lost()

    def _remember(self, message: Message) -> None:
        """Keep what an agent that takes over has to know."""
        match message.get("event"):
            case "rank_start":
                self.ranks[message["rank"]] = message["pid"]
            case "rank_exit":
                self.ranks[message["rank"]] = 0
            case "watch":
                self.offsets = dict(message.get("offsets", {}))
            case "append":
                self.offsets[message["path"]] = message["offset"] + message["bytes"]
            case "replace":
                self.offsets[message["path"]] = message["bytes"]
            case "ranks_ended":
                self.ranks_ended = message

    def _measure_clock(self, message: Message) -> None:
        """Take the clock difference of the quickest recent ping."""
        round_trip_s = time.monotonic() - message["sent"]
        self._clock_samples.append(
            (round_trip_s, message["time"] - (time.time() - round_trip_s / 2))
        )
        self.clock_offset_s = min(self._clock_samples)[1]

    def _mark_lost(self) -> None:
        if self.lost_at is None:
            self.lost_at = time.time()
            self.inbox.put((self, {"event": "lost"}))


def agent_argv(
    host: str, *, ssh_config: Path | None, python: str, enter: Sequence[str] = ()
) -> list[str]:
    """The command of an agent that is not of this machine itself, over ssh (``ssh_config=None``: on
    this machine, in another container). ``enter``: the command that enters it."""
    script = (
        f'for p in {shlex.quote(python)} python3; do command -v "$p" >/dev/null 2>&1 && '
        f'exec "$p" -I -S -u -c {shlex.quote(BOOTSTRAP)}; done; '
        'echo "no python3 on this host" >&2; exit 127'
    )
    argv = [*enter, "/bin/sh", "-c", script]
    if ssh_config is None:
        return argv
    ssh, *words = ssh_argv(ssh_config, host, argv)
    return [ssh, *SSH_OPTIONS, *words]


def request_all(
    connections: Iterable[Connection],
    cmd: str,
    *,
    timeout_s: float,
    message: Callable[[Connection], Message] = lambda connection: {},
) -> Iterator[tuple[Connection, Message | AgentError]]:
    """Send a command to all agents, then yield their replies in order. ``message``: its values."""
    pending = [(agent, agent.send(cmd, **message(agent))) for agent in connections]
    for connection, replies in pending:
        try:
            yield connection, connection.wait_for(replies, timeout_s=timeout_s)
        except AgentError as error:
            yield connection, error
