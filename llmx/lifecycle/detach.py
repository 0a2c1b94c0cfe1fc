"""``launch.detach=true``: the supervisor goes on in a session of its own, without the terminal.

python -m llmx experiment=demo launch.detach=true
python -m llmx attach RUN                     its console again (``llmx.observe.control``)
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
import time
from collections.abc import Callable

from llmx.errors import exit_code
from llmx.run.rundir import RunDir, read_mapping


def detach(run: RunDir, supervise: Callable[[], int]) -> int:
    """Run ``supervise`` in another process; returns as soon as that one holds the run, or with its
    exit code where it ends before that."""
    run.logs.mkdir(parents=True, exist_ok=True)
    earlier = run.console_log.stat().st_size if run.console_log.exists() else 0
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or both processes would print what is in it
    pid = os.fork()
    if pid == 0:
        os.setsid()  # a terminal that closes is not for it
        write_to_console_log(run)
        code = exit_code(supervise)
        sys.stdout.flush()
        os._exit(code)
    while read_mapping(run.supervisor_lock).get("pid") != pid:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            text = run.console_log.read_bytes()[earlier:].decode("utf-8", "replace")
            print(text, end="", file=sys.stderr)
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    where = shlex.quote(str(run.root))
    print(f"The run goes on as process {pid} on {socket.gethostname()}.")
    print(f"  its console:    python -m llmx attach {where}")
    print(f"  its state:      python -m llmx status {where}")
    print(f"  save and end:   python -m llmx stop {where}")
    return 0


def write_to_console_log(run: RunDir) -> None:
    """Send all output of this process to the console log, and read no input."""
    log = os.open(run.console_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
