"""Runs one program inside a pretend host, as if it had been started there.

``python -I -S enter.py PID [--cgroups A:B] [--cwd DIR] [--terminal 1] -- PROGRAM ARGS`` joins the
namespaces of process PID. Signals sent to this process reach the program, its death by a signal
becomes ours, and a SIGKILL of this process kills the program: for the caller the two are one.
With ``--terminal`` the program keeps the terminal, whose signals it then gets by itself.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import kernel

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def main(argv: list[str]) -> int:
    split = argv.index("--")
    pid, options, program = int(argv[0]), argv[1:split], argv[split + 1 :]
    values = dict(zip(options[::2], options[1::2], strict=True))
    for group in filter(None, values.get("--cgroups", "").split(":")):
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    # Blocked until the handlers stand: a signal that comes early is delivered, not lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        kernel.join(pid)
    except FileNotFoundError:
        print(f"enter: the host with process {pid} has ended", file=sys.stderr)
        return 127
    child = os.fork()
    if child == 0:
        _become(program, values.get("--cwd", "/"), terminal="--terminal" in values)

    def forward(number: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    if "--terminal" in values:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return os.waitstatus_to_exitcode(status)


def _become(program: list[str], directory: str, *, terminal: bool) -> None:
    try:
        kernel.die_with_parent(0)
        # A session of its own: a Ctrl-C in pytest's terminal must not reach it twice.
        if not terminal:
            os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        # Python set it to ignored; a program expects the default.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.chdir(directory)
        os.execvp(program[0], program)
    except OSError as error:
        print(f"enter: {program[0]} in {directory}: {error}", file=sys.stderr)
    os._exit(127)


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
