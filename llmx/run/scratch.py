"""Temporary directories, and programs that answer through one.

A directory of a command that was killed is removed by a later command.

Tried by ``python -m pytest tests/unit/test_replacing.py``.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PREFIX = "llmx.tmp-"
LEFT_AFTER_S = 3600.0
"""A directory gets its lock just after it is made; younger ones are let be."""


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory below ``TMPDIR`` that is removed at the end of the block."""
    _remove_left(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Path(name)
        finally:
            os.close(descriptor)


PACKAGES = ("torch", "transformers")


def ask(program: str, request: str, *, timeout_s: float, python_path: Sequence[str] = ()) -> Any:
    """The JSON that ``python -m program FILE ANSWER`` writes to ANSWER, with ``request`` in FILE;
    what it had written by then, if it failed or took longer. None where there is nothing, or where
    torch or transformers are not installed.

    This process stays light: what needs these packages runs in one of its own.
    """
    if not all(map(importlib.util.find_spec, PACKAGES)):
        return None
    with scratch_directory() as directory:
        file, answer = directory / "request", directory / "answer.json"
        file.write_text(request, encoding="utf-8")
        paths = [*python_path, os.environ.get("PYTHONPATH", "")]
        # No GPU is touched before the launch, and nothing is downloaded.
        environment = {
            **os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }  # fmt: skip
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                [sys.executable, "-m", program, str(file), str(answer)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=timeout_s,
                check=True,
            )
        try:
            return json.loads(answer.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None


def _remove_left(root: Path) -> None:
    """Remove this user's old directories that no process holds."""
    for path in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < LEFT_AFTER_S:
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(descriptor)
