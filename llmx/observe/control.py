"""``attach`` and ``stop``: the console of a run that goes on elsewhere, and its end.

    python -m llmx attach RUN                 what it printed last, and what it prints from now on
    python -m llmx stop user@host:RUN         a checkpoint, then the end; waits for it

Both act where the supervisor is. Over ssh this file is sent there, so it is one file of the
standard library alone; the program there ends when the connection does.
"""

# os instead of pathlib: its import would be a third of the start on a far host.
# ruff: noqa: PTH110, PTH111, PTH116, PTH118, PTH123, PTH202
from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

POLL_S = 0.3
SHOWN_BYTES = 8192
"""Of what the run has printed so far."""


def attach(options: argparse.Namespace) -> int:
    """Show the console of a run until it ends; returns the exit code of the run."""
    return _run("attach", options, after_ctrl_c="The run goes on.")


def stop(options: argparse.Namespace) -> int:
    """End a run with a checkpoint and wait for it; 0 where it ended so, or finished before."""
    return _run("stop", options, after_ctrl_c="The run still saves a checkpoint and ends.")


def _run(command: str, options: argparse.Namespace, *, after_ctrl_c: str) -> int:
    from llmx.observe.status.remote import parse_location, run_there

    ssh_config = None if options.ssh_config is None else str(options.ssh_config)
    location = parse_location(options.location, ssh_config=ssh_config)
    try:
        if location.host:
            return run_there(location, sys.modules[__name__], [command, location.path])
        return main([command, location.path])
    except KeyboardInterrupt:
        print(f"\n{after_ctrl_c}", file=sys.stderr)
        raise


def main(words: list[str]) -> int:
    """``attach PATH`` or ``stop PATH`` on this machine."""
    command, path = words
    root = os.path.abspath(os.path.expanduser(path))
    if not os.path.exists(os.path.join(root, "config.yaml")):
        return _refuse(f"{path} is not a run directory. `python -m llmx status` lists the runs.")
    holder = _json(root, "supervisor.lock")
    here = socket.gethostname()
    if holder.get("host") not in (None, here):
        location = f"USER@{holder['host']}:{root}"
        return _refuse(
            f"{path}: its supervisor is on {holder['host']}, and this is {here}. Use: "
            f"python -m llmx {command} {location}"
        )
    if not _is_held(root) or "pid" not in holder:
        outcome = _json(root, "result.json").get("outcome")
        state = f"it has ended ({outcome})" if outcome else "no supervisor of it is running"
        return _refuse(
            f"{path} is not running: {state}. To resume it: python -m llmx resume {path}"
        )
    if command == "attach":
        return _attach(root)
    if not holds_lock(root, holder["pid"]):
        return _refuse(
            f"{path}: process {holder['pid']} of its supervisor.lock does not hold that lock here, "
            "so it may be any other process, and was not ended. Whoever started the run can end it "
            "(Ctrl-C in its terminal, or `kill` of its supervisor)."
        )
    return _stop(root, int(holder["pid"]))


def _attach(root: str) -> int:
    log = os.path.join(root, "logs", "console.log")
    if not os.path.exists(log):
        return _refuse(
            f"{root}: the run prints into the terminal that it was started in. "
            "`python -m llmx watch` shows it; launch.detach=true starts a run to attach to."
        )
    with open(log, "rb") as stream:
        stream.seek(max(0, os.path.getsize(log) - SHOWN_BYTES))
        if stream.tell():
            stream.readline()  # the rest of a line
        while True:
            alive = _is_held(root)
            sys.stdout.write(stream.read().decode("utf-8", "replace"))
            sys.stdout.flush()
            if not alive:
                return int(_json(root, "result.json").get("exit_code", 1))
            _pause()


def _stop(root: str, pid: int) -> int:
    os.kill(pid, signal.SIGTERM)
    print(f"process {pid} saves a checkpoint and ends ...", flush=True)
    while _is_held(root):
        _pause()
    result = _json(root, "result.json")
    print(f"{result.get('outcome', 'ended without a result')}: {result.get('cause', '')}")
    if result.get("fix"):
        print(result["fix"])
    return 0 if result.get("outcome") in ("interrupted", "ok") else 1


def _pause() -> None:
    """Wait a moment; over ssh, the end of stdin is the end of the connection."""
    if "llmx" in sys.modules:  # on this machine
        time.sleep(POLL_S)
    elif select.select([0], [], [], POLL_S)[0] and not os.read(0, 1):
        sys.exit(1)


def _is_held(root: str) -> bool:
    """Whether a supervisor of the run lives: it holds the lock."""
    with (
        contextlib.suppress(FileNotFoundError),
        open(os.path.join(root, "supervisor.lock")) as lock,
    ):
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def holds_lock(root: str, pid: object) -> bool:
    """Whether the kernel says that this process holds the lock of the run. Its file alone could
    name any process: the directory may be somebody else's."""
    inode = os.stat(os.path.join(root, "supervisor.lock")).st_ino
    with open("/proc/locks", encoding="ascii") as file:  # 1: FLOCK ADVISORY WRITE PID x:y:INODE ...
        locks = [line.split() for line in file]
    return any(
        words[1] == "FLOCK" and words[4] == str(pid) and words[5].endswith(f":{inode}")
        for words in locks
        if len(words) > 5
    )


def _json(root: str, name: str) -> dict[str, Any]:
    try:
        with open(os.path.join(root, name), encoding="utf-8") as file:
            values = json.load(file)
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _refuse(message: str) -> int:
    print(f"llmx: {message}", file=sys.stderr)
    return 2
