"""The status of a rank: ``ranks/rank-NNN.json``, kept fresh by a heartbeat thread.

Imported before torch, so it uses the standard library only. Shown by
``cat RUN_DIR/ranks/rank-000.json`` while a run is on.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
import traceback
from typing import Any

from llmx.checkpoint.manifest import CheckpointError
from llmx.errors import ConfigError, DataError, disk_is_full
from llmx.redact import redact
from llmx.run.rundir import RunDir, replacing

HEARTBEAT_S = 5.0


class RankStatus:
    """The status file of one rank. Thread-safe; every write replaces the file atomically."""

    def __init__(self, run_dir: RunDir, *, rank: int) -> None:
        self._path = run_dir.rank_status(rank)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._values: dict[str, Any] = {
            "rank": rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "state": "starting",
            "step": 0,
            "saved_step": None,
            "time": time.time(),
            "error": None,
        }
        self._thread: threading.Thread | None = None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._write()

    @property
    def state(self) -> str:
        return str(self._values["state"])

    def enter(self, state: str) -> None:
        """Change the state, at once on disk. A final state is never left."""
        with self._lock:
            if self._final():
                return
            self._values["state"] = state
            # On a full disk the heartbeat tries again; but to have finished must be on disk.
            with contextlib.suppress(*(() if state == "finished" else (OSError,))):
                self._write()

    def at_step(self, step: int) -> None:
        """Record the step; the heartbeat writes it."""
        self._values["step"] = step

    def saved(self, step: int) -> None:
        """Record the newest committed checkpoint; the heartbeat writes it."""
        self._values["saved_step"] = step

    def fail(self, error: BaseException) -> None:
        """Enter ``failed`` with the error as the contract wants it."""
        with self._lock:
            if self._final():
                return
            self._values["state"] = "failed"
            self._values["error"] = describe(error)
            with contextlib.suppress(OSError):  # the rank's log has it, too
                self._write()

    def start_heartbeat(self) -> None:
        """Refresh the file about every 5 s from a daemon thread."""
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def stop_heartbeat(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=HEARTBEAT_S)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            # A full disk must not kill the heartbeat: the loop will fail on it and report it.
            with self._lock, contextlib.suppress(OSError):
                self._write()

    def _final(self) -> bool:
        return self._values["state"] in ("finished", "failed", "interrupted")

    def _write(self) -> None:
        self._values["time"] = time.time()
        # Not write_json, which would make a run directory again that was moved away.
        with replacing(self._path) as stream:
            stream.write(json.dumps(self._values, indent=2).encode())


def describe(error: BaseException) -> dict[str, Any]:
    """The ``error`` entry of a status file."""
    return {
        "type": type(error).__name__,
        "message": redact(str(error)),
        "traceback": redact("".join(traceback.format_exception(error))),
        "category": category(error),
        # Where the error is one of a certain step, as of divergence.
        "step": getattr(error, "step", None),
        "time": time.time(),
    }


_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|CUBLAS_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
_COMMUNICATION = re.compile(
    r"\bnccl\b|\bgloo\b|connection (reset|refused|closed)|broken pipe|socket timeout"
    r"|timed out after|TCPStore|rendezvous|processgroup|connectFullMesh|wait timeout",
    re.IGNORECASE,
)


def category(error: BaseException) -> str:
    """One of ``oom nan comm data config disk_full crash``, from the type, else the message."""
    names = {cls.__name__ for cls in type(error).__mro__}
    text = str(error)
    if isinstance(error, FloatingPointError):
        return "nan"
    if disk_is_full(error):
        return "disk_full"
    if isinstance(error, DataError):
        return "data"
    if isinstance(error, ConfigError):
        return "config"
    if isinstance(error, CheckpointError):
        return "data"  # a restart would fail in the same way
    if "No space left on device" in text:
        return "disk_full"
    if isinstance(error, MemoryError) or "OutOfMemoryError" in names:
        return "oom"
    if isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(text):
        return "oom"
    if names & {"DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionError"}:
        return "comm"
    if isinstance(error, RuntimeError) and _COMMUNICATION.search(text):
        return "comm"
    return "crash"
