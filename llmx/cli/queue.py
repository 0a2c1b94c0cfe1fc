"""``python -m llmx queue FILE|-``: several commands one after another, without a scheduler.

A line of the file is what follows ``python -m llmx``. Each run waits until other runs have left its
hosts (``launch.queue=true``).
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmx.cli.arguments import split_command
from llmx.cli.commands import COMMANDS
from llmx.errors import INTERRUPTED, ConfigError, LlmxError
from llmx.text import clock, plural

PREFIX = ["python", "-m", "llmx"]
QUEUED = ("train", "resume", "reproduce", "sweep", "tune")
"""Commands that start ranks, and take overrides."""
OUTCOMES = {0: "ok", 1: "failed", 2: "refused", 3: "data", 4: "not started", 5: "checkpoint"}
"""By exit code."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Entry:
    """A command of the queue."""

    words: list[str]
    code: int | None = None
    """Its exit code; None where it was not started."""
    seconds: float = 0.0

    @property
    def outcome(self) -> str:
        if self.code is None:
            return "not started"
        if self.code < 0:
            return f"killed by {signal.Signals(-self.code).name}"
        return "interrupted" if self.code == INTERRUPTED else OUTCOMES.get(self.code, "failed")


def read_entries(text: str, *, source: str) -> list[Entry]:
    """The commands of a file; ConfigError with the line of one that cannot be a command."""
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
            if words[:3] == PREFIX:
                words = words[3:]
            elif not words:
                continue
            name, _ = split_command(words, tuple(COMMANDS))
        except (LlmxError, ValueError) as error:  # an open quote
            raise ConfigError(f"{source}, line {number}: {error}") from None
        if name == "queue":
            raise ConfigError(f"{source}, line {number}: queue in a queue. Write its lines here.")
        decided = any(word.startswith(("launch.queue=", "launch.allow_busy=")) for word in words)
        if name in QUEUED and not decided and words[:2] != ["sweep", "resume"]:
            words.append("launch.queue=true")
        entries.append(Entry(words))
    if not entries:
        raise ConfigError(
            f"{source}: no commands. Write one per line, e.g.: zero=stage2 task.steps=9"
        )
    return entries


def run(options: argparse.Namespace) -> int:
    """Run the commands; 0 where all of them went well."""
    is_stdin = str(options.file) == "-"
    try:
        text = sys.stdin.read() if is_stdin else Path(options.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{options.file}: cannot be read ({error}).") from None
    entries = read_entries(text, source="stdin" if is_stdin else str(options.file))
    if options.detach:
        return _detach(text, options, len(entries))
    stopped = run_all(entries, stop_at_failure=options.stop)
    print("\n".join(table(entries)))
    return INTERRUPTED if stopped else int(any(entry.code for entry in entries))


def _detach(text: str, options: argparse.Namespace, count: int) -> int:
    """The same command in a session of its own, with the lines on its stdin."""
    log = Path(f"{'queue' if str(options.file) == '-' else options.file}.log").absolute()
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, *PREFIX[1:], "queue", "-", *(["--stop"] if options.stop else [])],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(text.encode())
    print(f"The queue of {plural(count, 'command')} goes on as process {process.pid}.")
    print(f"  its console:  tail -f {shlex.quote(str(log))}")
    print(f"  end it:       kill {process.pid}  (the run that is on saves a checkpoint)")
    return 0


def run_all(entries: Sequence[Entry], *, stop_at_failure: bool) -> bool:
    """One after another; whether a signal ended the queue."""
    process: subprocess.Popen[bytes] | None = None
    stopped = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopped
        stopped = True
        if process is not None:
            process.send_signal(number)  # a run saves a checkpoint and ends

    saved = {
        number: signal.signal(number, stop)
        for number in STOP_SIGNALS
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        for number, entry in enumerate(entries, 1):
            print(f"[{number}/{len(entries)}] {shlex.join(entry.words)}", flush=True)
            began = time.monotonic()
            # A session of its own: Ctrl-C in the terminal is passed on once.
            process = subprocess.Popen(
                [sys.executable, *PREFIX[1:], *entry.words],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            entry.code = process.wait()
            entry.seconds = time.monotonic() - began
            if stopped or (entry.code and stop_at_failure):
                break
    finally:
        for number, handler in saved.items():
            signal.signal(number, handler)
    return stopped


def table(entries: Sequence[Entry]) -> list[str]:
    """A line for each command: its outcome, how long it took, its words."""
    rows = [("", "outcome", "time", "command")]
    for number, entry in enumerate(entries, 1):
        took = "-" if entry.code is None else clock(entry.seconds)
        rows.append((str(number), entry.outcome, took, shlex.join(entry.words)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        "  ".join([*(f"{text:<{width}}" for text, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    ]
