"""No rank outlives the tests that started it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cluster.host import wait_until

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

    def pids() -> list[int]:
        texts = [path.read_text() for path in (tmp_path / "pids").iterdir()]
        return [int(text) for text in texts if text]

    with subprocess.Popen(command, cwd=root) as tests:
        try:
            wait_until(lambda: len(pids()) == 2, timeout_s=300, what="two ranks")
        finally:
            tests.kill()
    wait_until(lambda: not any(map(runs, pids())), timeout_s=300, what="their end")


def runs(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
