"""The supervisor's side of the agents: one channel a host, all of them together the fleet.

The agent on this machine always runs: it covers ``deepspeed``, ``pdsh``, ``mpirun`` and
``srun`` too. Other hosts get theirs over ``ssh -F RUN_DIR/ssh_config``, source and all, so
nothing needs to be installed there but a Python.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmx.launch.ssh import ssh_argv

AGENT = Path(__file__).with_name("agent.py")
# Reads the agent's source from stdin, by descriptor: what follows belongs to the agent.
_BOOTSTRAP = (
    "import os\n"
    "def take(k):\n"
    " d=os.read(0,k)\n"
    " return d or os._exit(1)\n"  # the connection broke
    "n=b''\n"
    "while not n.endswith(b'\\n'): n+=take(1)\n"
    "s=b''\n"
    "while len(s)<int(n): s+=take(int(n)-len(s))\n"
    "exec(compile(s,'llmx-agent','exec'),{'__name__':'__main__'})\n"
)
Message = dict[str, Any]
KEEP_ALIVE_S = 3.0
"""Between two signs of life to an agent of another host."""
EXCHANGES = 20
"""The clock of a host is measured by the quickest of so many: it may be set meanwhile."""


class AgentError(Exception):
    """The agent said no, or says nothing any more. ``str()`` is its word or ssh's."""


@dataclass
class Channel:
    """The agent of one host."""

    name: str
    """The host's, as in the hostfile; this machine's own agent is ``localhost`` where it is
    no host of the run."""
    hosts: tuple[int, ...]
    """Indices of the plan's hosts that it covers; empty for a control machine."""
    argv: list[str]
    source: bytes
    """Sent before the first command; empty where the agent is started from its file."""
    log: Path
    """What ssh said."""
    inbox: queue.Queue[tuple[Channel, Message]]
    is_remote: bool
    hello: Message = field(default_factory=dict)
    offset_s: float = 0.0
    """Clock of the host minus this one's."""
    shared: bool = True
    """Whether the host sees this machine's run directory."""
    session: str = ""
    """The same for all agents of one attempt, and no other's."""
    lost_at: float | None = None
    last_heard: float = 0.0
    _process: subprocess.Popen[bytes] | None = None
    _reader: threading.Thread | None = None
    _replies: dict[int, queue.Queue[Message]] = field(default_factory=dict)
    _ids: Iterable[int] = field(default_factory=lambda: itertools.count(1))
    _clocks: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=EXCHANGES))
    """Round trip and clock difference of the last exchanges, seconds."""
    _closing: threading.Event = field(default_factory=threading.Event)

    def start(self, env: dict[str, str]) -> None:
        """Start the agent in a session of its own: a Ctrl-C in the terminal is not for it."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        self.last_heard = time.monotonic()
        if self.source:
            self._write(f"{len(self.source)}\n".encode() + self.source)
        self._reader = threading.Thread(target=self._read, name=f"agent-{self.name}", daemon=True)
        self._reader.start()
        if self.is_remote:
            name = f"alive-{self.name}"
            threading.Thread(target=self._keep_alive, name=name, daemon=True).start()

    def renewed(self) -> Channel:
        """Another agent for the same host, not started yet."""
        again = Channel(
            self.name, self.hosts, self.argv, self.source, self.log, self.inbox, self.is_remote
        )
        again.shared, again.session = self.shared, self.session
        return again

    def post(self, cmd: str, **values: Any) -> queue.Queue[Message]:
        """Send one command; its answer arrives in the queue that is returned."""
        number = next(iter(self._ids))
        replies: queue.Queue[Message] = queue.Queue()
        self._replies[number] = replies
        self._write(json.dumps({"cmd": cmd, "id": number, **values}).encode() + b"\n")
        return replies

    def ask(self, cmd: str, *, timeout_s: float, **values: Any) -> Message:
        """Send one command and wait for its answer; AgentError where none comes."""
        return self.wait(self.post(cmd, **values), timeout_s=timeout_s)

    def wait(self, replies: queue.Queue[Message], *, timeout_s: float) -> Message:
        """The answer to a ``post``."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                reply = replies.get(timeout=max(0.0, min(0.1, deadline - time.monotonic())))
            except queue.Empty:
                if self.lost_at is not None:
                    raise AgentError(self.last_words() or "the connection closed") from None
                if time.monotonic() >= deadline:
                    raise AgentError(f"no answer within {timeout_s:.0f} s") from None
                continue
            if "error" in reply:
                raise AgentError(str(reply["error"]))
            return reply

    def ping(self) -> None:
        """Ask for a sign of life; the answer also measures the clock."""
        if self.lost_at is None:
            self.post("ping", sent=time.monotonic())

    def last_words(self) -> str:
        """The end of what ssh (or Python) said on its standard error."""
        try:
            return self.log.read_text(errors="replace")[-2000:].strip()
        except OSError:
            return ""

    def close(self, *, timeout_s: float) -> None:
        """Close the channel: an agent that is still there ends the run on its host, and ends."""
        if self._process is None:
            return
        self._closing.set()
        self.lost_at = self.lost_at or time.time()  # no news from now on
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it may be gone already
            self._process.stdin.close()
        try:
            self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._reader is not None:
            self._reader.join(timeout=1)
            if not self._reader.is_alive() and self._process.stdout is not None:
                self._process.stdout.close()

    def _keep_alive(self) -> None:
        """The agent ends the run when it hears nothing: it must not depend on what the main thread
        does, which may copy files for an hour, or wait for a terminal that Ctrl-S holds."""
        while not self._closing.wait(KEEP_ALIVE_S) and self.lost_at is None:
            self.ping()

    def _write(self, data: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except (OSError, ValueError):
            self._lose()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                continue  # a login banner; even "42" or "null" is JSON
            self.last_heard = time.monotonic()
            if message.get("event") == "ping":
                self._measure(message)
                self._replies.pop(message.get("id", 0), None)
            elif message.get("id") in self._replies:
                self._replies.pop(message["id"]).put(message)
            else:
                self.inbox.put((self, message))
        self._lose()

    def _measure(self, message: Message) -> None:
        """Take the clock difference of the quickest recent exchange."""
        round_trip_s = time.monotonic() - message["sent"]
        self._clocks.append((round_trip_s, message["time"] - (time.time() - round_trip_s / 2)))
        self.offset_s = min(self._clocks)[1]

    def _lose(self) -> None:
        if self.lost_at is None:
            self.lost_at = time.time()
            self.inbox.put((self, {"event": "lost"}))


def local_channel(
    name: str, hosts: tuple[int, ...], log: Path, inbox: queue.Queue[tuple[Channel, Message]]
) -> Channel:
    """The agent of this machine."""
    argv = [sys.executable, "-I", "-S", str(AGENT)]
    return Channel(name, hosts, argv, b"", log, inbox, is_remote=False)


def remote_channel(
    name: str,
    hosts: tuple[int, ...],
    log: Path,
    inbox: queue.Queue[tuple[Channel, Message]],
    *,
    ssh_config: Path,
    python: str,
) -> Channel:
    """The agent of another host, over ssh."""
    script = (
        f'for p in {shlex.quote(python)} python3; do command -v "$p" >/dev/null 2>&1 && '
        f'exec "$p" -I -S -u -c {shlex.quote(_BOOTSTRAP)}; done; '
        'echo "no python3 on this host" >&2; exit 127'
    )
    argv = ssh_argv(ssh_config, name, ["/bin/sh", "-c", script])
    return Channel(name, hosts, argv, AGENT.read_bytes(), log, inbox, is_remote=True)
