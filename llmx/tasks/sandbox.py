"""Runs Python code that a model has written, in a sandbox of ``bubblewrap``.

    passes("def add(a, b): return a + b", "assert add(1, 2) == 3", limit_s=5)     # True

The code sees the system's programs and libraries and the packages of this Python, read-only, and an
empty ``/tmp`` of its own: no other file, no process of the host, no network, none of the
environment's variables. Time, memory, processes and files are limited, and everything that it
started ends with it. Tried by ``python -m pytest tests/unit/test_tasks_sandbox.py``.
"""

from __future__ import annotations

import functools
import json
import math
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import IO

from llmx.errors import ConfigError

PROGRAM = "bwrap"
MEMORY_BYTES = 2**30
"""Of one process."""
PROCESSES = 16
"""And threads, at the same time."""
FILE_BYTES = 2**24
TMP_BYTES = 2**26
"""Of all files in ``/tmp``."""
START_LIMIT_S = 60.0

_START = """
import json, os, resource, sys, types
def run():
    request = json.load(sys.stdin)
    if request["uid"] is not None:
        os.setgroups([]); os.setgid(request["uid"]); os.setuid(request["uid"])
    for name, value in request["limits"].items():
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
    program, proof = request["code"] + "\\n" + request["tests"], request["proof"].encode()
    answer, null, write, leave = os.dup(1), os.open(os.devnull, os.O_RDWR), os.write, os._exit
    for number in range(3):
        os.dup2(null, number)
    write(answer, b"started ")
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(program, "program.py", "exec"), vars(main))
    write(answer, proof)
    leave(0)
run()
"""
"""Runs in the sandbox. Only a program that gets to the end of the tests gives the proof:
``exit(0)`` before them does not."""

_PROBE = f"""
import os, socket, time
assert [name for _, name in socket.if_nameindex()] == ["lo"]
try:
    for _ in range({PROCESSES}):
        if not os.fork():
            time.sleep({START_LIMIT_S})
            os._exit(0)
except OSError:
    pass
else:
    raise AssertionError("no limit of processes")
"""


class SandboxError(Exception):
    """A program could not be started, so nothing is known about it."""


def passes(code: str, tests: str, *, limit_s: float) -> bool:
    """Whether ``code``, followed by ``tests``, runs to its end within ``limit_s`` seconds.

    Raises SandboxError where it cannot be started.
    """
    return _passes(_usable(), code, tests, limit_s=limit_s)


def check() -> None:
    """Raise ConfigError where this process cannot start a sandbox, or one whose limits hold."""
    try:
        _usable()
    except SandboxError as error:
        raise ConfigError(
            f"task.options.rewards has code, which runs in a sandbox of bubblewrap, and none can "
            f"be started on {socket.gethostname()}: {error}. Install it (apt install bubblewrap) "
            "and let it make namespaces (Ubuntu 24.04: sysctl -w "
            "kernel.apparmor_restrict_unprivileged_userns=0; Docker: --privileged), or remove code "
            "from task.options.rewards."
        ) from error


@functools.cache
def _usable() -> bool:
    """Whether sandboxes are made with root's rights, which are given up inside, or in a user
    namespace. The first that works: a container may allow one of them."""
    problems = []
    for as_root in [True, False] if os.geteuid() == 0 else [False]:
        try:
            if _passes(as_root, _PROBE, "", limit_s=START_LIMIT_S):
                return as_root
            # Root in a user namespace without other users: the kernel counts no processes of root.
            problems.append("the number of its processes cannot be limited for this user")
        except SandboxError as error:
            problems.append(str(error))
    raise SandboxError("; ".join(problems))


def _passes(as_root: bool, code: str, tests: str, *, limit_s: float) -> bool:
    if shutil.which(PROGRAM) is None:
        raise SandboxError(f"{PROGRAM} is not installed")
    proof = secrets.token_hex(16)
    request = {
        "code": code,
        "tests": tests,
        "proof": proof,
        "uid": _unused_uid() if as_root else None,
        "limits": {
            "AS": MEMORY_BYTES,
            "NPROC": PROCESSES,
            "FSIZE": FILE_BYTES,
            "CPU": math.ceil(limit_s),
            "CORE": 0,
        },
    }
    deadline = time.monotonic() + limit_s
    with tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as errors:
        file.write(json.dumps(request).encode())
        file.seek(0)
        process = subprocess.Popen(
            _command(as_root), stdin=file, stdout=subprocess.PIPE, stderr=errors, env=_environment()
        )
        assert process.stdout is not None
        try:
            answer = _read(process.stdout, deadline=deadline, limit=len("started ") + len(proof))
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        if not answer.startswith("started "):
            errors.seek(0)
            text = errors.read(2000).decode(errors="replace").strip()
            raise SandboxError(text or f"the sandbox did not start within {limit_s:g} s")
    return answer == f"started {proof}"


def _read(stream: IO[bytes], *, deadline: float, limit: int) -> str:
    """What is written until the last process has ended, the deadline, or more than ``limit``
    bytes."""
    content = b""
    while len(content) <= limit and (seconds := deadline - time.monotonic()) > 0:
        if not select.select([stream], [], [], seconds)[0]:
            break
        part = os.read(stream.fileno(), limit + 1)
        if not part:
            break
        content += part
    return content.decode(errors="replace")


def _command(as_root: bool) -> list[str]:
    """The command of a sandbox. Where memory is short, its processes are ended first."""
    shell = 'echo 1000 > /proc/self/oom_score_adj; exec "$@"'
    rights = ["--cap-drop", "ALL"]
    if as_root:
        rights += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        rights += ["--unshare-user"]
    names = ("pid", "net", "ipc", "uts", "cgroup-try")
    return [
        *("sh", "-c", shell, "sh", PROGRAM, "--die-with-parent", "--new-session", *rights),
        *(f"--unshare-{name}" for name in names),
        *_files(),
        *("--dev", "/dev", "--perms", "1777", *_size(), "--tmpfs", "/tmp"),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"),
        *(_python(), "-s", "-c", _START),
    ]


@functools.cache
def _size() -> tuple[str, ...]:
    """The limit of ``/tmp``, from bubblewrap 0.7 on. Before, each file has one."""
    words = subprocess.run([PROGRAM, "--help"], capture_output=True, text=True).stdout
    return ("--size", str(TMP_BYTES)) if "--size" in words else ()


def _python() -> str:
    return os.path.realpath(sys.executable)


def _packages() -> list[str]:
    return sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


@functools.cache
def _files() -> tuple[str, ...]:
    """What of the host's files is seen inside."""
    words = ["--ro-bind", "/usr", "/usr"]
    for path in map(Path, ("/bin", "/sbin", "/lib", "/lib32", "/lib64")):
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), str(path)]
        else:
            words += ["--ro-bind-try", str(path), str(path)]
    python = Path(_python())
    libraries = [python.parent.parent / name for name in ("lib", "lib64")]
    system = ["/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"]
    packages = map(Path, _packages())
    for path in (*map(Path, system), python, *libraries, *packages):
        if path.exists() and not path.is_relative_to("/usr"):
            # Directories that a bind makes are closed to other users, and may be below /root.
            words += ["--dir", str(path.parent), "--ro-bind", str(path), str(path)]
    return tuple(words)


def _environment() -> dict[str, str]:
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONPATH": os.pathsep.join(_packages()),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",  # the order of a set does not decide a reward
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _unused_uid() -> int:
    """A user that no other sandbox of this host has, since the kernel counts processes by user."""
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    last = max(int(first) + int(count) for first, _, count in ranges) - 2
    if last < 2**15:
        raise SandboxError("this user namespace has no other users (/proc/self/uid_map)")
    return last - os.getpid() % (last // 2)
