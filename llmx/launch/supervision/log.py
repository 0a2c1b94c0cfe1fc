"""The messages of a supervisor: on the console and in ``logs/supervisor.log``."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from llmx.launch.supervision.console import Console
from llmx.redact import redact


class RunLog:
    """Three levels, as in ``logging``: ``debug`` goes to the file alone, ``info`` also to the
    console, and ``warning`` also into ``result.json``."""

    def __init__(self, path: Path, console: Console, warnings: list[str] | None = None) -> None:
        self.path, self.console = path, console
        self.warnings = [] if warnings is None else warnings

    def debug(self, text: str) -> None:
        with (
            contextlib.suppress(OSError),  # a full disk
            self.path.open("a", encoding="utf-8") as stream,
        ):
            stream.write(f"{time.strftime('%H:%M:%S')} {redact(text)}\n")

    def info(self, text: str) -> None:
        self.console.print(redact(text))
        self.debug(text)

    def warning(self, text: str) -> None:
        self.warnings.append(redact(text))
        self.info(f"warning: {text}")
