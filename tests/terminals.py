"""A program on a terminal of its own, as a person sees it and types into it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest


class Terminal:
    """A program behind a pseudo-terminal, which it controls."""

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path | None = None
    ) -> None:
        self.screen, end = pty.openpty()
        self.process = subprocess.Popen(
            argv, stdin=end, stdout=end, stderr=end, env=env, cwd=cwd, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(end)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.screen, text.encode())

    def shows(self, timeout_s: float) -> bool:
        """Whether something is printed within a time, which ``seen`` has then."""
        if not select.select([self.screen], [], [], timeout_s)[0]:
            return False
        try:
            self.seen += os.read(self.screen, 65536).decode(errors="replace")
        except OSError:
            return False  # it has ended
        return True

    def wait_for(self, pattern: str, *, timeout_s: float = 120.0) -> str:
        """What came until ``pattern`` did, from where the last look ended."""
        until = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.seen, re.MULTILINE)):
            if not self.shows(max(0.0, until - time.monotonic())):
                pytest.fail(f"{pattern!r} never came; the terminal shows {self.seen!r}")
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text

    def end(self, *, timeout_s: float = 60.0) -> int:
        """Its exit code, when it has ended."""
        code = self.process.wait(timeout_s)
        os.close(self.screen)
        return code

    def kill(self) -> None:
        """End it, where it has not ended."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.end()
