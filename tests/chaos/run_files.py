"""What a run says of itself, read from its files on the disks of the hosts, as a user would.

``Site`` is one of these, with the hosts and the processes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from llmx.run.metrics.lines import MetricsTail
from llmx.run.rundir import RunDir, read_json, read_mapping
from tests.cluster.netns import Cluster, Host


class RunFiles:
    """The run directory as it lies on each host."""

    def __init__(self, cluster: Cluster, disks: dict[str, Disk]) -> None:
        self.cluster, self.disks = cluster, disks
        self.near, self.far = cluster.hosts
        """The host where the supervisor is, and the other one."""
        self.trainers = cluster.hosts
        """The hosts with a rank and a part of the checkpoint each."""
        self.tail = MetricsTail(self.run_dir(self.near).metrics)
        self.step = 0
        """The newest step in ``metrics.jsonl``."""
        self.resumed: list[int] = []
        """The step of every resume that was seen."""
        self.lines: dict[int, dict[str, Any]] = {}
        """The newest ``train`` line of each step."""
        self.changed: list[int] = []
        """Steps that were trained again, with another loss than before."""
        self.resumed_at = 0.0
        """When the last of them was, seconds since the epoch."""
        self.repeated: list[int] = []
        """How many logged steps each of them took back."""
        self.events: list[dict[str, Any]] = []
        self.damaged: set[tuple[str, int]] = set()
        """Host and step of the checkpoints that were damaged on purpose, and still are."""
        self.may_repeat = 0
        """Steps that may have to be trained again beside those of the fault, as a copy lagged."""

    def run_dir(self, host: Host) -> RunDir:
        """The run directory as it lies on the disk of a host, up or down."""
        return RunDir(self.disks[host.name].path / "run")

    def look(self) -> None:
        """Take in what is new in ``metrics.jsonl``."""
        for record in self.tail.read():
            if record["kind"] == "train":
                self.step = int(record["step"])
                earlier = self.lines.get(self.step, record)
                if earlier["loss"] != record["loss"]:
                    self.changed.append(self.step)
                self.lines[self.step] = record
            elif record["kind"] == "event":
                self.events.append(record)
                if record["event"] == "resumed":
                    self.resumed.append(int(record["step"]))
                    self.resumed_at = float(record["time"])
                    self.repeated.append(max(0, self.step - int(record["step"])))
                    self.step = int(record["step"])

    def held(self) -> list[int]:
        """Steps of the checkpoints that every rank has committed and we not damaged, in order."""
        held = [
            {
                step
                for path in self.run_dir(host).checkpoints.glob("step-*")
                if (host.name, step := int(path.name[5:])) not in self.damaged
            }
            for host in self.trainers
        ]
        return sorted(set.intersection(*held))

    def newest(self) -> int:
        """The newest of them; 0 is none."""
        return max(self.held(), default=0)

    def saved_since_resume(self) -> int:
        """The newest step that was saved since the ranks were last started; 0 is none."""
        newest = 0
        for event in self.events:
            if event["event"] == "resumed":
                newest = 0
            elif event["event"] == "saved":
                newest = int(event["step"])
        return newest

    def supervisor(self) -> dict[str, Any]:
        """``supervisor.json``."""
        return dict(read_mapping(self.run_dir(self.near).supervisor))

    def attempts(self) -> list[dict[str, Any]]:
        """The whole lines of ``attempts.jsonl``."""
        return json_lines(self.run_dir(self.near).attempts)

    def result(self) -> dict[str, Any]:
        """``result.json``."""
        return dict(read_json(self.run_dir(self.near).result))

    def saves(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == "saved"]

    def failed_saves(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == "save_failed"]

    def copied(self) -> int:
        """The newest checkpoint of which the supervisor's host holds every file."""
        complete = [0]
        for path in self.run_dir(self.near).checkpoints.glob("step-*"):
            with contextlib.suppress(FileNotFoundError):  # pruned while we look
                manifest = read_json(path / "manifest.json")
                if all((path / name).exists() for name in manifest["files"]):
                    complete.append(int(path.name[5:]))
        return max(complete)

    def copy_lags(self) -> int:
        """Steps between the newest checkpoint and the newest that is copied."""
        return self.newest() - self.copied()


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that somebody may be appending to."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return []
    return [json.loads(line) for line in text.split("\n")[:-1] if line]


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
