"""Temporary directories, and programs that answer through one."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory below ``TMPDIR`` that is removed at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="llmx.tmp-") as name:
        yield Path(name)


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
