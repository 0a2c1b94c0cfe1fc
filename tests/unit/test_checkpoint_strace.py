"""The commit protocol of a real process, with faults that the kernel gives it (``strace``)."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint_saves import restart, save, tree

CASES = [
    *[(call, "signal=KILL") for call in
      ("openat", "write", "fallocate", "fsync", "rename", "mkdir", "unlink", "rmdir")],
    *[(call, "error=ENOSPC") for call in ("openat", "write", "fallocate", "mkdir")],
    *[(call, "error=EIO") for call in ("write", "fsync", "rename", "unlink")],
]  # fmt: skip
"""All that ``llmx.checkpoint.disk`` comes down to (directories are opened, too)."""
LEAST = {"openat": 16, "write": 7, "fallocate": 1, "fsync": 9, "rename": 3, "mkdir": 2,
         "unlink": 4, "rmdir": 2}  # fmt: skip
"""Calls of one save: fewer, and the test does not see what it should."""


class Saver:
    """``tests.programs.commit_save``: one process that forks a child for each save."""

    def __init__(self) -> None:
        self._program = subprocess.Popen(
            [sys.executable, "-m", "tests.programs.commit_save"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def save(self, checkpoints: Path, step: int, *, inject: str) -> tuple[int, bool]:
        """How the child ended (0 committed, 1 given up, negative: killed), whether it was hit."""
        assert self._program.stdin
        self._program.stdin.write(f"{checkpoints} {step}\n")
        self._program.stdin.flush()
        child, log = self._line(), checkpoints.parent / "strace.log"
        call = inject.split(":")[0]
        tracer = subprocess.Popen(
            ["strace", "-p", str(child), "-e", f"trace={call}", "-e", f"inject={inject}",
             "-o", str(log)],
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert tracer.stderr
        said = tracer.stderr.readline()
        os.kill(child, signal.SIGCONT if "attached" in said else signal.SIGKILL)
        code = self._line()
        tracer.communicate(timeout=60)
        if "attached" not in said:
            pytest.skip(f"strace may not trace here: {said.strip()}")
        return code, code < 0 or "(INJECTED)" in log.read_text()

    def _line(self) -> int:
        assert self._program.stdout
        return int(self._program.stdout.readline())

    def close(self) -> None:
        self._program.communicate(timeout=60)


@pytest.fixture(scope="module")
def saver() -> Iterator[Saver]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed (scripts/install-system-packages.sh)")
    program = Saver()
    yield program
    program.close()


@pytest.mark.parametrize(("call", "fault"), CASES)
def test_a_real_process_loses_nothing(memory: Path, saver: Saver, call: str, fault: str) -> None:
    for number in itertools.count(1):
        checkpoints = memory / str(number) / "checkpoints"
        assert save([checkpoints], 1)
        code, was_hit = saver.save(checkpoints, 2, inject=f"{call}:{fault}:when={number}")
        if not was_hit:
            assert code == 0
            break
        context = (number, code, tree(checkpoints))
        assert code in ((-signal.SIGKILL,) if fault == "signal=KILL" else (0, 1)), context
        chosen = restart([checkpoints])
        assert chosen in {0: (2,), 1: (1,)}.get(code, (1, 2)), context
        assert save([checkpoints], 3), context
        assert restart([checkpoints]) == 3, context
    assert number > LEAST[call]
