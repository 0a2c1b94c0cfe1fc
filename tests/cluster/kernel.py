"""The few system calls that make a host: unshare, setns, mount, prctl. Standard library only.

Called through ctypes, because Python before 3.12 has no ``os.unshare`` and no version has
``mount``. Imported by ``host_init.py`` and ``enter.py``, which run as plain scripts with
``python -I -S`` and must start in a few hundredths of a second.
"""

from __future__ import annotations

import ctypes
import os
import signal

NAMESPACES = {
    "net": 0x40000000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "pid": 0x20000000,
    "mnt": 0x00020000,
}
MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x2, 0x4, 0x8
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def _check(status: int, what: str) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(*names: str) -> None:
    """New namespaces for this process (``pid``: for its future children)."""
    flags = 0
    for name in names:
        flags |= NAMESPACES[name]
    _check(_libc.unshare(flags), f"unshare {' '.join(names)}")


def join(pid: int) -> None:
    """Enter all namespaces of ``pid`` (``pid``: for future children)."""
    # Open them all before entering one: afterwards /proc is another.
    descriptors = [
        (os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC), flag)
        for name, flag in NAMESPACES.items()
    ]
    for descriptor, flag in descriptors:
        _check(_libc.setns(descriptor, flag), f"setns to process {pid}")
        os.close(descriptor)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2); raises OSError that names the target."""
    status = _libc.mount(
        source.encode(), target.encode(), kind.encode() or None, flags, options.encode() or None
    )
    _check(status, f"mount {kind or source} on {target}")


def set_host_name(name: str) -> None:
    """sethostname(2), in this UTS namespace."""
    _check(_libc.sethostname(name.encode(), len(name.encode())), f"sethostname {name}")


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process when its parent dies; ``parent`` 0: it is outside our PIDs."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if os.getppid() != parent:  # it died between fork and prctl
        os._exit(1)
