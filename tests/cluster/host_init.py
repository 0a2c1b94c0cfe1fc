"""Process 1 of a pretend host: makes its namespaces and mounts, then only reaps and waits.

``python -I -S host_init.py SPEC_JSON < PIPE`` prints one line, ``{"pid": N}`` (N as seen from
outside), and lives until the pipe closes. When it ends, the kernel ends every process of the
host and takes its network away: nothing can be left behind, even when pytest is killed.

The spec: ``name``, ``namespaces``, and ``mounts``, a list done in order:
``{"tmpfs": PATH, "size_mib": N or null, "keep": [PATHS]}`` an empty private disk, in which the
kept paths stay visible; ``{"bind": SOURCE, "on": PATH}`` one file or directory over another;
``{"sysfs": "/sys"}`` a view of this host's own network devices. Without ``namespaces`` the mounts
are done right here, and that is all: so a disk is added to a host that runs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import kernel


def main(spec: dict) -> int:
    if "namespaces" not in spec:  # started inside a host, to add to it
        for step in spec["mounts"]:
            _mount(step)
        return 0
    kernel.unshare(*spec["namespaces"])
    told_outer, tell_inner = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tell_inner)
        kernel.die_with_parent(0)
        return _process_one(spec, told_outer)
    os.close(told_outer)
    os.write(tell_inner, json.dumps({"pid": child}).encode())
    os.close(tell_inner)
    # The pipe of the session must be held by process 1 alone.
    os.close(0)
    os.close(1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) & 0xFF


def _process_one(spec: dict, told: int) -> int:
    signal.signal(signal.SIGCHLD, _reap)
    # A Ctrl-C in the terminal is for pytest, which then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(told) as stream:
        answer = stream.read()
    os.setsid()
    if "uts" in spec["namespaces"]:
        kernel.set_host_name(spec["name"])
    if "mnt" in spec["namespaces"]:
        kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
        kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    for step in spec["mounts"]:
        _mount(step)
    os.write(1, answer.encode() + b"\n")
    while os.read(0, 4096):
        pass
    return 0


def _reap(_signal: int, _frame: object) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _mount(step: dict) -> None:
    if "bind" in step:
        kernel.mount(step["bind"], step["on"], flags=kernel.MS_BIND | kernel.MS_REC)
    elif "sysfs" in step:
        sys_path = step["sysfs"]
        groups = _open(f"{sys_path}/fs/cgroup")
        kernel.mount("sysfs", sys_path, "sysfs")
        _bind_back(groups, f"{sys_path}/fs/cgroup")
    else:
        private_disk(step["tmpfs"], size_mib=step.get("size_mib"), keep=step.get("keep", []))


def private_disk(path: str, *, size_mib: float | None = None, keep: list[str]) -> None:
    """An empty tmpfs over ``path``; what ``keep`` names below it stays visible."""
    disk = Path(path)
    kept = {
        Path(name): _open(name)
        for name in keep
        if disk in Path(name).parents and Path(name).exists()
    }
    disk.mkdir(parents=True, exist_ok=True)
    size = f",size={int(size_mib * 1024)}k" if size_mib else ""
    kernel.mount("tmpfs", path, "tmpfs", options=f"mode={disk.stat().st_mode & 0o7777:o}{size}")
    for target, descriptor in kept.items():
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        _bind_back(descriptor, str(target))


def _open(path: str) -> int:
    # O_PATH keeps hold of what is there now, after something is mounted over it.
    return os.open(path, os.O_PATH)


def _bind_back(descriptor: int, path: str) -> None:
    kernel.mount(f"/proc/self/fd/{descriptor}", path, flags=kernel.MS_BIND | kernel.MS_REC)
    os.close(descriptor)


if __name__ == "__main__":
    # _exit: a fork of a fork must not run the other's clean-up.
    sys.stdout.flush()
    os._exit(main(json.loads(sys.argv[1])))
