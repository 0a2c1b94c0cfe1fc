"""Commands that run one after another.

``pytest tests/unit/test_queue.py``
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmx.cli.queue import Entry, read_entries, table
from llmx.errors import ConfigError
from tests.unit.test_launch_agent import wait_until


def test_the_lines_of_a_queue() -> None:
    text = """
    # tonight
    python -m llmx zero=stage2 'data.path=/a b'   # the first
    resume /runs/one launch.allow_busy=true
    sweep resume outputs/x
    eval /runs/one
    """
    assert [entry.words for entry in read_entries(text, source="f")] == [
        ["zero=stage2", "data.path=/a b", "launch.queue=true"],
        ["resume", "/runs/one", "launch.allow_busy=true"],
        ["sweep", "resume", "outputs/x"],
        ["eval", "/runs/one"],
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n\n", "f: no commands"),
        ("plan\nzero='stage2", "f, line 2: No closing quotation"),
        ("plan\nqueue f", "f, line 2: queue in a queue"),
        ("reusme /runs/one", "f, line 1: .*resume"),
    ],
)
def test_a_line_that_is_no_command(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_entries(text, source="f")


def test_the_table_of_outcomes() -> None:
    entries = [Entry(["zero=stage2"], 0, 3723), Entry(["plan"], -9, 1), Entry(["resume", "a b"])]
    assert table(entries) == [
        "   outcome            time     command",
        "1  ok                 1:02:03  zero=stage2",
        "2  killed by SIGKILL  0:01     plan",
        "3  not started        -        resume 'a b'",
    ]


def test_a_failure_does_not_stop_the_others(tmp_path: Path) -> None:
    """Unless it is asked for."""
    (tmp_path / "f").write_text("explain no-such-log\nhelp launch.queue\n")
    codes = {}
    for flags in ((), ("--stop",)):
        words = [sys.executable, "-m", "llmx", "queue", "f", *flags]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        codes[flags] = [line.split("  ")[1] for line in done.stdout.splitlines()[-2:]]
        assert done.returncode == 1, done.stdout + done.stderr
    assert codes == {(): ["refused", "ok"], ("--stop",): ["refused", "not started"]}


def test_a_queue_that_goes_on_without_the_terminal_and_is_ended(tmp_path: Path) -> None:
    fifo = tmp_path / "x"
    os.mkfifo(fifo)
    (tmp_path / "f").write_text(f"explain {fifo}\nhelp launch.queue\n")
    words = [sys.executable, "-m", "llmx", "queue", "f", "--detach"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    pid = int(re.search(r"process (\d+)", done.stdout)[1])  # type: ignore[index]
    with fifo.open("w"):  # as soon as the first command reads it
        os.kill(pid, signal.SIGTERM)
        log = tmp_path / "f.log"
        wait_until(lambda: "help launch.queue" in log.read_text())
    first, second = log.read_text().splitlines()[-2:]
    assert first.startswith("1  killed by SIGTERM")
    assert second.startswith("2  not started")
