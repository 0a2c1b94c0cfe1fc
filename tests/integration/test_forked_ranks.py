"""No rank outlives the tests that started it: ``pytest -m deepspeed
tests/integration/test_forked_ranks.py``."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.deepspeed, pytest.mark.nightly]

TESTS = """
import subprocess, sys
from tests.forked_ranks import Server

server = Server()
command = [str(server.deepspeed), "--num_gpus", "2", "--master_port", "1", *sys.argv[1:]]
subprocess.run(command, check=True)
"""
SPINNING_RANK = """
import os, pathlib, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
while True:
    pass
"""


def test_a_spinning_rank_ends_when_its_tests_are_killed(tmp_path: Path) -> None:
    (tmp_path / "spin.py").write_text(SPINNING_RANK)
    (tmp_path / "pids").mkdir()
    command = [sys.executable, "-c", TESTS, str(tmp_path / "spin.py"), str(tmp_path / "pids")]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root) as tests:
        try:
            until(lambda: [path.read_text() for path in (tmp_path / "pids").iterdir()], 2)
        finally:
            tests.kill()
    pids = [int(path.read_text()) for path in (tmp_path / "pids").iterdir()]
    until(lambda: [pid for pid in pids if runs(pid)], 0)


def until(items: Callable[[], Sequence[object]], count: int) -> None:
    """Wait until the function gives ``count`` items that are not empty."""
    deadline = time.monotonic() + 300
    while len([item for item in items() if item]) != count:
        assert time.monotonic() < deadline, f"not {count} after 300 s"
        time.sleep(0.05)


def runs(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
