"""The waits before a restart: the backoff time, hosts that answer again, free disk space.

Every wait ends at once when the user requests the shutdown.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from llmx.launch.render.environment import tool_env
from llmx.launch.render.ssh_config import ssh_argv
from llmx.launch.spec import LaunchSpec
from llmx.launch.supervision.journal import Journal
from llmx.launch.supervision.log import RunLog
from llmx.launch.supervision.signals import ShutdownRequest
from llmx.launch.sync.files import size_of
from llmx.launch.transports import transport_of
from llmx.text import clock

PROBE_EVERY_S = 5.0
PROBE_TIMEOUT_S = 15.0
REPORT_EVERY_S = 60.0
MIN_FREE_PART = 0.05
MIN_FREE_MIB = 256.0
"""Free space that a disk must have again (the smaller of both), where no checkpoint shows how much
a save needs."""


class Backoff:
    """The waits of one supervisor."""

    def __init__(self, log: RunLog, journal: Journal, shutdown: ShutdownRequest) -> None:
        self.log, self.journal, self.shutdown = log, journal, shutdown

    def sleep(self, wait_s: float) -> bool:
        """Wait; False where the shutdown was requested."""
        until = time.monotonic() + wait_s
        while not self.shutdown.count and (left_s := until - time.monotonic()) > 0:
            self._pause("restart in", left_s, at_most_s=0.5)
        return self._ended()

    def wait_for_hosts(self, spec: LaunchSpec, *, limit_s: float) -> list[str]:
        """Wait until every host answers; returns those that still do not after ``limit_s``."""
        missing = unreachable_hosts(spec)
        if not missing or limit_s <= 0:
            return missing
        began = reported = time.monotonic()
        names = ", ".join(missing)
        self.log.info(f"waiting for {names} to answer over ssh, {clock(limit_s)} at most")
        while missing and not self.shutdown.count:
            left_s = limit_s - (time.monotonic() - began)
            if left_s <= 0:
                break
            names = ", ".join(missing)
            self._pause(f"waiting for {names}; giving up in", left_s)
            if time.monotonic() - reported > REPORT_EVERY_S:
                reported = time.monotonic()
                self.log.info(f"still waiting for {names}, {clock(left_s)} left")
            missing = unreachable_hosts(spec)
        self._ended()
        if not missing:
            self.log.info("every host answers again")
        return missing

    def wait_for_disk(self, spec: LaunchSpec, host: str | None, *, limit_s: float) -> bool:
        """Wait until the disk of the run directory on ``host`` has space for a checkpoint; False
        where it has not in time, or the shutdown was requested."""
        began = time.monotonic()
        reported: float | None = None
        while not self.shutdown.count:
            space = disk_space(spec, host)
            if space is None or space[0] >= space[1]:
                break
            free_mib, need_mib = space
            left_s = limit_s - (time.monotonic() - began)
            text = (
                f"{spec.run_dir.root} on {host or 'this machine'} has {free_mib:.0f} MiB free, a "
                f"checkpoint needs {need_mib:.0f} MiB"
            )
            if left_s <= 0:
                self.log.info(text)
                return False
            if reported is None or time.monotonic() - reported > REPORT_EVERY_S:
                reported = time.monotonic()
                self.log.info(f"{text}: waiting for space, {clock(left_s)} at most")
            self._pause("waiting for space; giving up in", left_s)
        return self._ended()

    def _pause(self, text: str, left_s: float, *, at_most_s: float = PROBE_EVERY_S) -> None:
        self.log.console.countdown(text, left_s)
        self.journal.heartbeat()
        self.shutdown.event.wait(min(at_most_s, left_s))

    def _ended(self) -> bool:
        """Clear the countdown; whether the wait ended without a shutdown request."""
        self.log.console.countdown("", 0.0)
        return not self.shutdown.count


def unreachable_hosts(spec: LaunchSpec) -> list[str]:
    """The hosts that do not answer over ssh now. Empty where the transport needs no ssh."""
    if not transport_of(spec.plan.transport).has_agents:
        return []
    hosts = [host.name for host in spec.plan.hosts if not host.is_local]
    with ThreadPoolExecutor(max_workers=16) as pool:
        answers = list(pool.map(lambda host: _ssh(spec, host, ["true"]) is not None, hosts))
    return [host for host, answers_now in zip(hosts, answers, strict=True) if not answers_now]


def disk_space(spec: LaunchSpec, host: str | None) -> tuple[float, float] | None:
    """MiB free at the run directory on a host (None: this machine), and MiB that it needs; None
    where unknown."""
    run_dir = spec.run_dir
    sizes = [size_of(path) for path in run_dir.checkpoints.glob("step-*")]
    if host not in {h.name for h in spec.plan.hosts if not h.is_local}:
        at = run_dir.checkpoints if run_dir.checkpoints.is_dir() else run_dir.root
        usage = shutil.disk_usage(at)
        free_mib, total_mib = usage.free / 2**20, usage.total / 2**20
    else:
        output = _ssh(spec, str(host), ["df", "-Pk", str(run_dir.checkpoints)])
        output = output or _ssh(spec, str(host), ["df", "-Pk", str(run_dir.root)])
        words = output.splitlines()[-1].split() if output else []
        if len(words) < 4 or not (words[1].isdigit() and words[3].isdigit()):
            return None
        free_mib, total_mib = int(words[3]) / 1024, int(words[1]) / 1024
        sizes = [size // max(1, len(spec.plan.hosts)) for size in sizes]
    need_mib = 1.2 * max(sizes) / 2**20 if sizes else min(MIN_FREE_MIB, MIN_FREE_PART * total_mib)
    return free_mib, need_mib


def _ssh(spec: LaunchSpec, host: str, remote: list[str]) -> str | None:
    """The output of a command on ``host``; None where it or ssh fails."""
    try:
        done = subprocess.run(
            ssh_argv(spec.run_dir.ssh_config, host, remote),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
            env=tool_env(),
            start_new_session=True,  # Ctrl-C in the terminal is not for it
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
