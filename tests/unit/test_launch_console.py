"""Reading a growing run directory, and what the user sees of it."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import pty
import re
import termios
from pathlib import Path
from typing import Any

import pytest

from llmx.launch.agents.agent import REPLACED, STREAMED
from llmx.launch.supervision.console import Console
from llmx.launch.supervision.finalize import is_llmx_error, restarts_line, shorten_traceback
from llmx.launch.supervision.tail import apply_update
from llmx.run.rundir import RunDir
from llmx.run.tail import LineTail
from tests import tracked_run

TRAIN: dict[str, Any] = {
    "kind": "train", "step": 10, "time": 100.0, "loss": 3.2, "lr": 1e-3, "grad_norm": 0.9,
    "tokens_per_s": 40960.4, "mfu": 0.312,
}  # fmt: skip


def test_only_whole_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    reader = LineTail(path)
    assert reader.read() == []
    data = "one\ntwö".encode()
    path.write_bytes(data[:-1])  # a character cut in two
    assert reader.read() == [b"one"]
    path.write_bytes(data + b" more\nthree")
    assert reader.read() == ["twö more".encode()]
    assert reader.read(final=True) == [b"three"]
    assert reader.read(final=True) == []


def test_a_flood_of_words_does_not_fill_the_memory(tmp_path: Path) -> None:
    """Neither more than can be shown, nor a line that never ends."""
    path = tmp_path / "log"
    reader = LineTail(path, max_bytes=20)
    path.write_bytes(b"first\n" + b"x" * 1000 + b"\nlast but one\nlast\n")
    assert reader.read()[-2:] == [b"last but one", b"last"]
    assert reader.read(final=True) == []
    path.write_bytes(b"")  # by somebody who needs the space
    assert reader.read() == []
    path.write_bytes(b"anew\n")
    assert reader.read() == [b"anew"]
    endless = LineTail(tmp_path / "bar", max_bytes=20)
    for lines in ([], [b"\r 10 %" * 6]):
        with (tmp_path / "bar").open("ab") as stream:
            stream.write(b"\r 10 %" * 3)
        assert endless.read() == lines


def update(run_dir: RunDir, event: str, path: str, data: bytes) -> None:
    encoded = base64.b64encode(data).decode()
    apply_update(run_dir, {"event": event, "path": path, "data": encoded})


def test_updates_of_private_disks(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for data in (b"one\n", b"two\n"):
        update(run_dir, "append", "logs/rank-001.log", data)
    assert run_dir.rank_log(1).read_text() == "one\ntwo\n"
    for path in (pattern.replace("*", "001") for pattern in (*STREAMED, *REPLACED)):
        for data in (b"{}", b'{"state": "x"}'):
            update(run_dir, "replace", path, data)
        assert json.loads((tmp_path / path).read_text()) == {"state": "x"}
    # A host cannot write anything else.
    for path in ("../x", "/etc/passwd", "logs/../../x", "ds_env", "logs/rank-1.log/../x"):
        with pytest.raises(ValueError, match="not a file that ranks write"):
            update(run_dir, "append", path, b"x")


def test_a_terminal_that_cannot_print_it() -> None:
    """As with LANG=en_US.ISO-8859-1: a question mark, and the run goes on."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    Console(stream).rank_line("question: 北京 …")
    stream.seek(0)
    assert stream.read() == "  question: ?? ?\n"


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_narrow_terminal_drops_fields_and_keeps_the_step(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a real terminal; messages beside the live line break between words."""
    monkeypatch.setenv("COLUMNS", str(columns))  # rich would ask the tests' own terminal
    reader, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, columns))
    with os.fdopen(terminal, "w") as stream:
        console = Console(stream)
        console.record({"kind": "start", "total_steps": 123456})
        for step in (10, 111111):
            record = {**TRAIN, "step": step, "time": float(step), "loss_mean": 3.3}
            console.record({**record, "idle_share": 0.2})
        console.print("145,774 tokens, of which 41,419 target tokens, and so on; longest 35")
        console.close()
    raw = b""
    with contextlib.suppress(OSError):  # EIO: nothing is left
        while part := os.read(reader, 1 << 16):
            raw += part
    os.close(reader)
    shown = raw.decode()
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split("[\r\n]+", shown)]
    last = [line for line in lines if line.startswith("step")][-1].rstrip()
    assert last.startswith("step 111111/123456 ")
    assert "…" not in last
    assert "loss 3.2" in last or columns == 40
    assert last.endswith("3:25:45")
    assert ("mfu" in last) == (columns == 200)
    assert all(len(line) <= columns for line in lines)
    message = " ".join("".join(f"{line}\n" for line in lines if "to" in line).split())
    assert "145,774 tokens, of which 41,419 target tokens," in message


def test_what_a_user_reads_of_restarts() -> None:
    assert restarts_line([{"decision": "finished", "outcome": "ok"}]) == ""
    hit = [
        {"decision": "restart", "outcome": "crash", "last_step": 57},
        {"decision": "restart", "outcome": "comm", "last_step": None},
    ]
    shown = "2 restarts: crash after step 57, comm before training (attempts.jsonl)"
    assert restarts_line(hit) == shown
    assert re.search("20 restarts: .*15 more", restarts_line(hit * 10))


def console_lines(*records: dict[str, Any], rank_lines: tuple[str, ...] = ()) -> list[str]:
    stream = io.StringIO()
    console = Console(stream)
    for line in rank_lines:
        console.rank_line(line)
    for record in records:
        console.record(record)
    console.close()
    return stream.getvalue().splitlines()


def test_plain_lines() -> None:
    lines = console_lines(
        {"kind": "start", "total_steps": 600, "metrics": tracked_run.DECLARED},
        {"kind": "eval", "step": 0, "loss": 6.5, "exact_match": None},
        {**TRAIN, "loss_mean": 3.2},  # an interval of one step has no other mean
        {**TRAIN, "step": 20, "time": 101.0, "loss": None, "mfu": None, "idle_share": 0.31},
        {**TRAIN, "step": 30, "time": 102.0, "idle_share": 0.02, "loss_mean": 3.3},
        {"kind": "eval", "step": 600, "loss": 1.1, "exact_match": 0.97},
        {"kind": "end", "step": 600},
    )
    assert lines == [
        "eval at step 0:  loss 6.5000",
        "step  10/600  loss 3.2000  lr 1.0e-03  grad 0.90  40,960 tok/s  mfu 31.2 %",
        "step  20/600  loss not finite  lr 1.0e-03  grad 0.90  40,960 tok/s  idle 31 %  left 0:58",
        "step  30/600  loss 3.2000  mean 3.3000  lr 1.0e-03  grad 0.90  40,960 tok/s  mfu 31.2 %  "
        "left 0:57",
        "eval at step 600:  loss 1.1000  exact match 97.0 %",
    ]


def test_a_pause_is_no_pace() -> None:
    stream = io.StringIO()
    console = Console(stream, total_steps=100)
    for step, time in ((1, 0.0), (2, 1.0), (3, 900.0), (4, 901.0)):
        if step == 3:
            console.forget_time_left()
        console.record({"kind": "train", "step": step, "time": time, "loss": 1.0})
    left = [line.partition("left ")[2] for line in stream.getvalue().splitlines()]
    assert left == ["", "1:38", "", "1:36"]


def test_rank_0_without_the_noise() -> None:
    """Nor the stacks of a hang; and a log does not steer the terminal."""
    lines = console_lines(
        rank_lines=(
            "[2026-01-01 10:00:00,123] [INFO] [comm.py:658:init_distributed] cdb=None",
            "[W101 10:00:00.1 socket.cpp:460] [c10d] waiting",
            "/opt/x.py:10: UserWarning: something",
            "  warnings.warn('something')",
            "step 10/600  loss 3.2",
            "",
            "what the model says",
            "Traceback (most recent call last):",
            '  File "x.py", line 1, in f',
            "ValueError: boom",
            "after it",
            "Thread 0x00007f01 (most recent call first):",
            '  File "/x/status.py", line 90 in _beat',
            "",
            "Current thread 0x00007f02 (most recent call first):",
            '  File "/x/loop.py", line 9 in train',
            "",
            "\x1b[92mgreen\x1b[0m, a row: \x1b]0;title\x07 \x9b2J",
        )
    )
    green = "  green, a row: \\x1b]0;title\\x07 \\x9b2J"
    assert lines == ["  what the model says", "  after it", green]


HEAD = "Traceback (most recent call last):\n"


def test_a_long_traceback_keeps_its_root() -> None:
    """Of a chain, the first error is the root; the last one often says little."""
    frames = "".join(f"  File {i}\n    call()\n" for i in range(40))
    link = "\n\nThe above exception was the direct cause of the following exception:\n\n"
    lines = shorten_traceback(
        f"{HEAD}{frames}ValueError: the root{link}{HEAD}{frames}ImportError: the end\n"
    )
    assert "ValueError: the root" in lines
    assert lines[-1] == "ImportError: the end"
    assert lines.count(HEAD.strip()) == 2
    assert len(lines) < 45


def test_an_error_written_for_the_user_needs_no_traceback() -> None:
    head = f'{HEAD}  File "a.py", line 1, in x\n'
    link = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
    record = (
        f"{head}json.decoder.JSONDecodeError: no{link}{head}llmx.data.source.records.RecordError"
    )
    assert is_llmx_error(f"{head}llmx.errors.ConfigError: seq_len=1\nmore lines")
    assert is_llmx_error(f"{record}: line 2")
    assert not is_llmx_error(f"{head}ValueError: llmx.errors.ConfigError: quoted")
    assert not is_llmx_error(f"{head}llmx.errors.DataError: x{link}{head}KeyError: 3")
