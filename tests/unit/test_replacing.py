"""The one writer of files: what it replaces, and what it only writes to."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from llmx.run.rundir import is_stream, replacing, write_text


@pytest.fixture
def null_device(tmp_path: Path) -> Path:
    """A character device of our own that takes everything, as /dev/null does."""
    path = tmp_path / "null"
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        path.write_bytes(b"x")
    except OSError as error:
        pytest.skip(f"no device can be made here: {error}")
    return path


def test_a_device_is_written_to_and_stays(null_device: Path) -> None:
    write_text(null_device, "hello\n")
    assert stat.S_ISCHR(null_device.lstat().st_mode)
    assert list(null_device.parent.iterdir()) == [null_device]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=write_text, args=(path, "hello\n"))
    writer.start()
    assert path.read_text() == "hello\n"
    writer.join()
    assert stat.S_ISFIFO(path.lstat().st_mode)


@pytest.mark.parametrize("to_file", [False, True])
def test_dev_stdout_is_where_the_command_prints(tmp_path: Path, to_file: bool) -> None:
    program = (
        "from pathlib import Path; from llmx.run.rundir import write_text; print('first');"
        "write_text(Path('/dev/stdout'), 'second\\n'); print('third')"
    )
    words = [sys.executable, "-c", program]
    out = tmp_path / "out"
    if to_file:
        with out.open("wb") as stream:
            subprocess.run(words, stdout=stream, check=True)
        shown = out.read_text()
    else:
        shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert shown == "first\nsecond\nthird\n"


def test_a_link_is_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "deep" / "target", tmp_path / "link"
    target.parent.mkdir()
    link.symlink_to(target)
    for text in ("new", "newer"):
        write_text(link, text)
        assert link.is_symlink()
        assert target.read_text() == text
    assert list(target.parent.iterdir()) == [target]


def test_a_file_with_the_name_of_the_temporary_one_is_not_written_to(tmp_path: Path) -> None:
    """Another user may have made it, to read what is written."""
    path, theirs = tmp_path / "file", tmp_path / f".file.{os.getpid()}.tmp"
    theirs.touch(mode=0o666)
    with theirs.open("rb") as stream:
        write_text(path, "new", mode=0o600)
        assert stream.read() == b""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_error_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(TypeError), replacing(path) as stream:
        stream.writelines([b"half", None])
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path, "x")
    assert not is_stream(tmp_path)
    assert not is_stream(tmp_path / "new")
