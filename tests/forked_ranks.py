"""Many runs of real ranks at little cost: see ``tests/programs/ranks.py``.

    ranks.start(run_dir).finish()             the ranks of a run directory, nothing around them
    launch("tests.programs.state", ...)       a program of the tests, as ``deepspeed`` starts it
    f"launch.python={server.python}"          for ``python -m llmx``: the whole command, whose
                                              launcher is the stand-in for ``deepspeed``
    [server.python, "-m", "llmx", ...]        the same for commands that start others

What starts ranks, waits for them and ends them is tested with the real ``deepspeed``
(``test_launch_local``, ``test_restart``, ``tests/cluster``).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmx.run.rundir import RunDir, read_json
from tests.rundirs import free_port, launched, logs, rank_environment


class Ranks:
    """The ranks of one run that was started."""

    def __init__(self, server: Server, run_dirs: list[RunDir], pids: list[int]) -> None:
        self._server = server
        self.dirs = run_dirs
        self.pids = pids

    @property
    def dir(self) -> RunDir:
        """Of rank 0."""
        return self.dirs[0]

    def status(self, rank: int) -> dict[str, Any]:
        return dict(read_json(self.dirs[rank].rank_status(rank)))

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.pids[rank], number)

    def until(self, condition: Callable[[], Any], *, timeout_s: float = 400.0) -> Any:
        """Wait for a condition while the ranks run."""
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < deadline, logs(self.dir)
            time.sleep(0.005)
        return value

    def wait(self, *, timeout_s: float = 600.0) -> list[int]:
        """Exit codes; negative: ended by that signal."""
        codes = self._server.ask({"wait": self.pids}, timeout_s=timeout_s)["codes"]
        self._server.forget(self.pids)
        return list(codes)

    def finish(self) -> RunDir:
        """Wait; every rank must have ended well."""
        codes = self.wait()
        assert codes == [0] * len(self.pids), logs(self.dir)
        return self.dir


class Server:
    """The process that forks, and a directory with a ``python`` and a ``deepspeed`` beside it."""

    def __init__(self, module: str = "tests.programs.ranks") -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="llmx-ranks-"))
        self.python, self.deepspeed = shadow(self.directory)
        place = self.directory / "socket"
        words = [sys.executable, "-S", "-E", str(CLIENT), str(place)]
        self.deepspeed.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        self.deepspeed.chmod(0o755)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(place)],
            # The ranks have an environment each, in the place of this one.
            env=rank_environment(ROOM_FOR_ANOTHER="x" * 16384),
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._started: list[int] = []
        assert self._read(timeout_s=900) == {"ready": True}

    def start(self, *run_dirs: RunDir, ranks: int = 2, **env: str) -> Ranks:
        """Start a run: ``ranks`` of one directory, or one rank for each of several."""
        dirs = list(run_dirs) if len(run_dirs) > 1 else [run_dirs[0]] * ranks
        asked = {"start": [str(each.root) for each in dirs], "port": free_port(), "env": env}
        pids = self.ask(asked, timeout_s=240)["pids"]
        self._started += pids
        return Ranks(self, dirs, pids)

    def forget(self, pids: list[int]) -> None:
        """They are gone, and their numbers may be given to others."""
        self._started = [pid for pid in self._started if pid not in pids]

    def ask(self, asked: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._read(timeout_s=timeout_s)

    def _read(self, *, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        assert ready, f"no answer after {timeout_s} s"
        return dict(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End it and whatever it started."""
        for pid in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.communicate()
        shutil.rmtree(self.directory, ignore_errors=True)


def shadow(directory: Path) -> tuple[Path, Path]:
    """An environment with all of this one, but its ``deepspeed``: its Python, and the path of that.

    What this Python starts (a sweep's trials, ``benchmarks/gpu``) is found beside it, too.
    """
    here, programs = Path(sys.prefix), directory / "bin"
    programs.mkdir()
    shutil.copy(here / "pyvenv.cfg", directory)
    (directory / "lib").symlink_to(here / "lib")
    (programs / "python").symlink_to(Path(sys.executable).resolve())
    return programs / "python", programs / "deepspeed"


CLIENT = Path(__file__).parent / "programs" / "deepspeed_client.py"


@functools.cache
def shared() -> Server:
    """The one of this process of pytest."""
    made = Server()
    atexit.register(made.close)
    return made


def launch(
    target: str, *arguments: str, ranks: int, timeout_s: float = 900.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """``tests.rundirs.launch``, forked."""
    return launched(
        str(shared().deepspeed), target, *arguments, ranks=ranks, timeout_s=timeout_s, **environment
    )
