"""A host agent on this machine, with real processes and real signals."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llmx.launch.agents.agent import tag_of
from llmx.launch.agents.connection import LOCAL_AGENT, Connection


def wait_until(condition: Callable[[], Any], *, timeout_s: float = 60.0) -> Any:
    """The first true value of the condition."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)
    return value


def is_running(pid: int) -> bool:
    """Whether the process has not ended."""
    with contextlib.suppress(OSError):
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    return False


class Rig:
    """One agent, introduced to a run, and the processes that a test starts."""

    def __init__(
        self, directory: Path, connection: Connection | None = None, *, token: str | None = None
    ) -> None:
        self.token = token or secrets.token_hex(8)
        self.tag = tag_of(self.token)
        self.directory = directory
        self.started: list[subprocess.Popen[bytes]] = []
        log = directory / "agent.log"
        self.connection = connection or Connection(
            "here", (0,), LOCAL_AGENT, log, queue.Queue(), is_remote=False
        )
        self.connection.start(dict(os.environ))
        self.handshake()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close(timeout_s=20)
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()

    def ask(self, cmd: str, **values: Any) -> dict[str, Any]:
        """The agent's reply."""
        return self.connection.request(cmd, timeout_s=30, **values)

    def handshake(self, **values: Any) -> dict[str, Any]:
        """Introduce the agent (once more) to the run."""
        message = {"token": self.token, "run_dir": str(self.directory), "grace_s": 2.0, **values}
        return self.ask("handshake", **message)

    def process(
        self, code: str = "", *words: str, rank: int | None = None, own: bool = True
    ) -> subprocess.Popen[bytes]:
        """A process that is of the run (``own``) or of another one. It has run the code, and waits
        for signals."""
        head = "import os, signal, socket, subprocess, sys, time"
        tail = "print(1, flush=True)\nwhile True: signal.pause()"
        argv = [sys.executable, "-c", f"{head}\n{code}\n{tail}", *words]
        env = {} if rank is None else {"RANK": str(rank)}
        return self.run(argv, LLMX_RUN_TOKEN=self.token if own else "another", **env)

    def run(self, argv: Sequence[str], **env: str) -> subprocess.Popen[bytes]:
        """A process that has written its first line, a 1."""
        process = subprocess.Popen(
            argv, env={**os.environ, **env}, stdout=subprocess.PIPE, start_new_session=True
        )
        self.started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        return process

    def event(self, name: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """The next event of that name; others are dropped."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.01, deadline - time.monotonic())
            _, message = self.connection.inbox.get(timeout=left_s)
            if message["event"] == name:
                return message
