"""Where a campaign takes place: two hosts with disks of their own, and one run over both.

    with Site(directory, steps=400, every=10) as site:
        site.start()
        site.until(lambda: site.step >= 50, what="step 50")

Everything is read from the files of the run, as a user's own eyes would.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos.run_files import Disk, RunFiles
from tests.chaos.training import GaveUp, training_words
from tests.cluster.launching import REPOSITORY, hardware_of, rank_pids, start_program, write_option
from tests.cluster.netns import Cluster, Host, wait_until

PATIENCE_S = 240.0
"""From a fault to the next new checkpoint, at most; an idle machine needs a tenth of it."""
EMPTY_S = 60.0
"""For agents to notice that the supervisor is gone, and for ranks to save and leave."""


class Site(RunFiles):
    """A cluster and the run on it. A context manager."""

    HANG_S = 20
    """A step takes a tenth of a second, and a host is lost after 12 s of silence."""
    draws_anew = False
    """Whether steps after a resume have other samples, and so other losses, than before."""

    def __init__(self, directory: Path, *, steps: int, every: int) -> None:
        self.directory = directory
        self.steps, self.every = steps, every
        self.work = directory / "work"
        self.work.mkdir(parents=True)
        names = ("node-a", "node-b")
        disks = {name: Disk(directory / "disks" / name, self.work) for name in names}
        super().__init__(Cluster(hosts=names), disks)
        for host in self.cluster.hosts:
            self.disks[host.name].attach(host)
        self.process: subprocess.Popen[Any] | None = None
        self.seen_step = 0
        """The newest logged step when the last fault had struck, and was undone."""
        self.out = directory / "console.out"

    @classmethod
    def words(cls, steps: int) -> list[str]:
        """What is trained."""
        return training_words(steps)

    @classmethod
    def undisturbed_words(cls, steps: int) -> list[str]:
        """The same, as ranks of this machine."""
        return [*cls.words(steps), "hardware=cpu2"]

    def start_words(self) -> list[str]:
        """What else is set where faults are to strike."""
        return []

    def goes_on(self) -> bool:
        """Whether all that trained before the last fault does so again."""
        return True

    def check_samples(self) -> None:
        """GaveUp unless the run, which is over, has trained what it should."""

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.cluster.close()
        for disk in self.disks.values():
            disk.remove()

    def start(self) -> None:
        """``python -m llmx`` on the first host."""
        words = [
            *self.words(self.steps),
            *self.start_words(),
            *("hardware=chaos", "launch.sync=rsync"),
            *(f"checkpoint.every_steps={self.every}", "checkpoint.keep.last=3"),
            *("launch.max_restarts=8", "launch.restart_backoff_s=0.2"),
            *("launch.restart_backoff_max_s=1", "launch.heartbeat_timeout_s=6"),
            *("launch.orphan_timeout_s=15", f"launch.hang_timeout_s={self.HANG_S}"),
            *("launch.stop_grace_s=6", "launch.host_wait_s=300", "launch.start_timeout_s=100"),
            *(f"run_dir={self.work}/run", f"data.cache_dir={self.directory}/cache"),
            write_option(self.directory, "chaos", hardware_of(self.cluster, (1, 1))),
        ]
        self._llmx(words)

    def resume(self) -> None:
        """``python -m llmx resume`` on the first host, after its supervisor ended."""
        self._llmx(["resume", f"{self.work}/run"])

    def _llmx(self, words: list[str]) -> None:
        argv, env = [sys.executable, "-m", "llmx", *words], {"PYTHONPATH": str(REPOSITORY)}
        self.process = start_program(self.near, argv, self.out, env=env)

    def is_over(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def until(
        self,
        condition: Callable[[], Any],
        *,
        what: str,
        may_end: bool = False,
        timeout_s: float = PATIENCE_S,
    ) -> None:
        """Wait for the run to come to ``condition``; GaveUp where it ends or takes too long."""

        def seen() -> bool:
            self.look()
            if condition():
                return True
            if self.is_over() and not may_end:
                self.look()
                if condition():
                    return True
                raise GaveUp(f"the run ended while waiting for {what}\n{self.story()}")
            return False

        try:
            wait_until(seen, timeout_s=timeout_s, what=what)
        except TimeoutError as late:
            raise GaveUp(f"{late}\n{self.story()}") from None

    def story(self) -> str:
        """The ends of all logs, for a failure."""
        run = self.run_dir(self.near)
        paths = [self.out, run.supervisor_log]
        for host in self.cluster.hosts:
            paths += sorted(self.run_dir(host).logs.glob("rank-*.log"))
        parts = []
        for path in paths:
            if path.exists():
                lines = path.read_text(errors="replace").splitlines()[-25:]
                parts.append(f"--- {path.relative_to(self.directory)}\n" + "\n".join(lines))
        return "\n".join(parts)

    # What can be seen of its processes.

    def processes(self, host: Host) -> dict[int, list[str]]:
        """The processes of the run on a host, by the token in their environment."""
        try:
            token = (self.run_dir(self.near).root / f".token-{os.getuid()}").read_text()
        except OSError:
            return {}
        mark = f"LLMX_RUN_TOKEN={token}".encode()
        found = {}
        for pid, argv in host.processes().items():
            try:
                environ = host.path(f"/proc/{pid}/environ").read_bytes()
            except OSError:  # it has just ended
                continue
            if mark in environ.split(b"\0"):
                found[pid] = argv
        return found

    def ranks(self, host: Host) -> list[int]:
        return rank_pids(host)

    def agents(self, host: Host) -> list[int]:
        """llmx's agents on a host."""
        return [
            pid
            for pid, argv in host.processes().items()
            if Path(argv[0]).name.startswith("python") and "llmx-remote" in " ".join(argv)
        ]

    def signal(self, host: Host, pid: int, number: signal.Signals) -> None:
        """Send a signal to a process of a host (numbered as there)."""
        host.run(["kill", f"-{number.value}", str(pid)], check=False)

    def until_empty(self) -> None:
        """Until no process of the run is left on any host that is up."""

        def left() -> dict[str, dict[int, list[str]]]:
            found = {host.name: self.processes(host) for host in self.cluster.hosts if host.is_up}
            return {name: processes for name, processes in found.items() if processes}

        try:
            wait_until(lambda: not left(), timeout_s=EMPTY_S, what="no process of the run")
        except TimeoutError:
            raise GaveUp(f"left {EMPTY_S:.0f} s after the supervisor ended: {left()}") from None

    def boot(self, host: Host) -> None:
        """Start a host that is down; its disk is as it was."""
        host.boot()
        self.disks[host.name].attach(host)
