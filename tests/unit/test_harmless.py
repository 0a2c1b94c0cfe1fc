"""Names and fields in somebody else's run directory do not steer the terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.text import Text

from llmx.__main__ import main as llmx
from llmx.cli.main import run_here
from llmx.launch.supervision.console import Console
from llmx.observe.report.screen import open_console
from llmx.run.rundir import RunDir, no_run, read_json, write_json
from tests import tracked_run

EVIL = "\x1b]0;mine\x07\x1b[2J\x9b31m\u202e"


def is_harmless(text: str) -> bool:
    return all(letter.isprintable() for letter in text if letter not in "\n\t")


@pytest.fixture
def evil(tmp_path: Path) -> RunDir:
    """A finished run in which every text of every file is hostile."""
    run = tracked_run.write_start(tmp_path / "run")
    records = [{**line, f"m{EVIL}": 1.0} for line in tracked_run.lines()]
    records[0]["metrics"] = {f"m{EVIL}": {"title": EVIL, "unit": EVIL}}
    tracked_run.append(run, records)
    failed = {"cause": EVIL, "fix": EVIL, "host": EVIL, "failed_rank": 0, "traceback": EVIL}
    write_json(run.result, tracked_run.result("crash", **failed, warnings=[EVIL]))
    provenance = read_json(run.provenance)
    write_json(run.provenance, {**provenance, "packages": {"torch": EVIL}, "argv": [EVIL]})
    text = run.config.read_text().splitlines()
    named = [f"name: {json.dumps(EVIL)}" if line.startswith("name:") else line for line in text]
    run.config.write_text("\n".join(named))
    return run


def test_no_command_passes_them_on(
    evil: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tracked_run.write_start(tmp_path / "other")
    tracked_run.append(other, tracked_run.lines())
    mine, theirs = str(other.root), str(evil.root)
    for command, *places in (
        ("status", theirs), ("status", str(tmp_path)), ("watch", theirs), ("report", theirs),
        ("compare", theirs, mine),
    ):  # fmt: skip
        code = llmx([command, *places]) if command == "status" else run_here(command, places)
        assert code in (0, 1, 2)  # compare refuses the name of the run
        shown = capsys.readouterr()
        assert shown.out + shown.err, command
        assert is_harmless(shown.out + shown.err), repr(shown)


def test_a_table_on_a_terminal_keeps_its_own_colours() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    open_console(stream, width=60).print(Text(f"a{EVIL}b", style="red"))
    assert "a\\x1b]0;mine" in stream.getvalue()
    assert "\x1b[31m" in stream.getvalue()
    assert "\x1b]" not in stream.getvalue()
    assert "\x9b" not in stream.getvalue()


def test_the_console_of_a_run() -> None:
    stream = io.StringIO()
    console = Console(stream, total_steps=10)
    console.rank_line(f"hello {EVIL}")
    console.print(EVIL)
    console.record({"kind": "eval", "step": 1, "loss": 1.0, f"m{EVIL}": 2.0})
    assert is_harmless(stream.getvalue())


def test_a_dangling_link_is_named_as_one(tmp_path: Path) -> None:
    (mine := tmp_path / "mine").symlink_to(gone := tmp_path / "gone")
    assert no_run(mine).startswith(f"broken link: {mine} points to {gone}.")
