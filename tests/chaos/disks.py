"""Disks of pretend hosts that outlive the host, can be full, and can be lost.

``Cluster``'s own private disks vanish with the host that has them, as if it had burned down. A
host that only loses its power comes back with what was written.
"""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

from tests.cluster.netns import Host

SIZE_MIB = 192


class Disk:
    """A small file system (tmpfs) of one host, shown there at ``mount_point``."""

    def __init__(self, path: Path, mount_point: Path) -> None:
        self.path, self.mount_point = path, mount_point
        path.mkdir(parents=True)
        options = f"size={SIZE_MIB}m,mode=755"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "llmx-chaos", path], check=True)

    def attach(self, host: Host) -> None:
        """Show the disk on the host; once after each boot."""
        host.bind(self.path, on=self.mount_point)

    def fill(self) -> None:
        """Leave not a byte, though somebody else writes meanwhile."""
        with (self.path / "filler").open("wb") as stream:
            size, piece = 0, 1 << 20
            while piece:
                try:
                    os.posix_fallocate(stream.fileno(), size, piece)
                    size += piece
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    piece //= 4

    def free(self) -> None:
        """Undo ``fill``."""
        (self.path / "filler").unlink(missing_ok=True)

    def wipe(self) -> None:
        """Everything on it is lost; it is not in use."""
        subprocess.run(["find", self.path, "-mindepth", "1", "-delete"], check=True)

    def remove(self) -> None:
        """Unmount; lazily, for a host that is still ending."""
        subprocess.run(["umount", "-l", self.path], check=True)
