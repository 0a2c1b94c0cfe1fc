"""What the supervisor writes about itself where the disk of the run directory is full."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmx.launch.supervision.journal import Journal, append_line, read_attempts
from llmx.run.rundir import RunDir, read_json


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    """A file system of 64 KiB; root only."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(directory)]
    made = subprocess.run(mount, capture_output=True)
    if made.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.decode().strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while stream.write(bytes(4096)):
            continue


def test_a_full_disk_hides_neither_the_state_nor_an_attempt(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        run_dir = RunDir(disk)
        journal = Journal(run_dir)
        journal.state("running", attempt=1)
        fill(disk)
        with pytest.raises(OSError, match="No space left"):
            (disk / "one-more").write_text("text")
        journal.add_attempt({"attempt": 1, "outcome": "disk_full"})
        journal.state("waiting", attempt=1, why="a disk was full, ünd more words than before")
        state = read_json(run_dir.supervisor)
        assert (state["state"], state["why"][-6:]) == ("waiting", "before")
        journal.state("waiting", attempt=1)
        assert read_json(run_dir.supervisor)["why"] == "", "shorter than before"
        assert read_attempts(run_dir) == []
        assert journal.restarts == 0
        assert len(journal.attempts) == 1
        (disk / "filler").unlink()
        journal.state("preparing", attempt=2)
        journal.add_attempt({"attempt": 2, "outcome": "ok"})
        assert [line["attempt"] for line in read_attempts(run_dir)] == [1, 2]
        assert read_json(run_dir.supervisor)["state"] == "preparing"


def test_a_line_is_appended_whole_or_not_at_all(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        path = disk / "lines.jsonl"
        path.write_text('{"n": 0}\n{"torn')
        fill(disk)
        with pytest.raises(OSError, match="No space left"):
            append_line(path, {"n": 1, "long": "x" * 5000})
        assert path.read_text() == '{"n": 0}\n{"torn'
        append_line(path, {"n": 2})  # there is room in its last block
        assert json.loads(path.read_text().splitlines()[-1]) == {"n": 2}
