"""What a restart waits for: its back-off, hosts that answer again, a disk with space.

Every wait ends at once when the user asks for the end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from llmx.launch.console import duration
from llmx.launch.spec import LaunchSpec
from llmx.launch.ssh import ssh_argv
from llmx.launch.sync import plain_env
from llmx.launch.transports import transport_of
from llmx.plan.types import HostPlan

PROBE_EVERY_S = 5.0
PROBE_TIMEOUT_S = 15.0
TELL_EVERY_S = 60.0
MIN_FREE_PART = 0.05
MIN_FREE_MIB = 256.0
"""What a disk must have again (the smaller of both), where no checkpoint says how much a save
takes."""


@dataclass
class Waiting:
    """The waits of one supervisor. ``asked`` says whether the user asked for the end; ``wake`` is
    set when that happens."""

    asked: Callable[[], bool]
    wake: threading.Event
    say: Callable[[str], None]
    countdown: Callable[[str, float], None]
    """Shows a text and the seconds left, several times a second."""
    alive: Callable[[], None]

    def back_off(self, wait_s: float, text: str) -> bool:
        """Wait; False where the user asked for the end."""
        until = time.monotonic() + wait_s
        while not self.asked() and (left_s := until - time.monotonic()) > 0:
            self.countdown(text, left_s)
            self.alive()
            self.wake.wait(min(0.5, left_s))
        self.countdown("", 0.0)
        return not self.asked()

    def hosts(self, spec: LaunchSpec, *, limit_s: float) -> list[str]:
        """Wait until every host answers; returns those that still do not after ``limit_s``."""
        missing = silent_hosts(spec)
        if not missing or limit_s <= 0:
            return missing
        began = told = time.monotonic()
        self.say(f"waiting for {_listed(missing)} to answer over ssh, {duration(limit_s)} at most")
        while missing and not self.asked():
            left_s = limit_s - (time.monotonic() - began)
            if left_s <= 0:
                break
            self.alive()
            self.countdown(f"waiting for {_listed(missing)}; giving up in", left_s)
            self.wake.wait(min(PROBE_EVERY_S, left_s))
            if time.monotonic() - told > TELL_EVERY_S:
                told = time.monotonic()
                self.say(f"still waiting for {_listed(missing)}, {duration(left_s)} left")
            missing = silent_hosts(spec)
        self.countdown("", 0.0)
        if not missing:
            self.say("every host answers again")
        return missing

    def disk(self, spec: LaunchSpec, host: str | None, *, limit_s: float) -> bool:
        """Wait until the disk of the run directory on ``host`` has space for a checkpoint; False
        where it has not in time, or the user asked for the end."""
        began = told = time.monotonic()
        while not self.asked():
            space = disk_space(spec, host)
            if space is None:
                break
            free_mib, need_mib = space
            if free_mib >= need_mib:
                break
            left_s = limit_s - (time.monotonic() - began)
            text = (
                f"{spec.run_dir.root} on {host or 'this machine'} has {free_mib:.0f} MiB free, a "
                f"checkpoint takes {need_mib:.0f} MiB"
            )
            if left_s <= 0:
                self.say(text)
                return False
            if told == began or time.monotonic() - told > TELL_EVERY_S:
                told = time.monotonic()
                self.say(f"{text}: waiting for space, {duration(left_s)} at most")
            self.countdown("waiting for space; giving up in", left_s)
            self.alive()
            self.wake.wait(min(PROBE_EVERY_S, left_s))
        self.countdown("", 0.0)
        return not self.asked()


def silent_hosts(spec: LaunchSpec) -> list[str]:
    """The hosts that do not answer over ssh now. Empty where the transport needs no ssh."""
    if not transport_of(spec.plan.transport).has_agents:
        return []
    hosts = [host for host in spec.plan.hosts if not host.is_local]
    if not hosts:
        return []
    with ThreadPoolExecutor(max_workers=min(16, len(hosts))) as pool:
        answers = list(pool.map(lambda host: _answers(spec, host), hosts))
    return [host.name for host, answer in zip(hosts, answers, strict=True) if not answer]


def _answers(spec: LaunchSpec, host: HostPlan) -> bool:
    return _ssh(spec, host.name, ["true"]) is not None


def disk_space(spec: LaunchSpec, host: str | None) -> tuple[float, float] | None:
    """MiB free at the run directory on a host (None: this machine), and MiB that it must have;
    None where that cannot be told."""
    run_dir = spec.run_dir
    sizes = [size_of(path) for path in run_dir.checkpoints.glob("step-*")]
    if host not in {h.name for h in spec.plan.hosts if not h.is_local}:
        at = run_dir.checkpoints if run_dir.checkpoints.is_dir() else run_dir.root
        usage = shutil.disk_usage(at)
        free_mib, total_mib = usage.free / 2**20, usage.total / 2**20
    else:
        said = _ssh(spec, str(host), ["df", "-Pk", str(run_dir.checkpoints)])
        said = said or _ssh(spec, str(host), ["df", "-Pk", str(run_dir.root)])
        words = said.splitlines()[-1].split() if said else []
        if len(words) < 4 or not (words[1].isdigit() and words[3].isdigit()):
            return None
        free_mib, total_mib = int(words[3]) / 1024, int(words[1]) / 1024
        sizes = [size // max(1, len(spec.plan.hosts)) for size in sizes]
    need_mib = 1.2 * max(sizes) / 2**20 if sizes else min(MIN_FREE_MIB, MIN_FREE_PART * total_mib)
    return free_mib, need_mib


def size_of(directory: os.PathLike[str] | str) -> int:
    """Bytes below a directory."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size  # noqa: PTH116, PTH118
            except OSError:
                continue
    return total


def _ssh(spec: LaunchSpec, host: str, remote: list[str]) -> str | None:
    """What a command says there; None where it or ssh fails."""
    try:
        done = subprocess.run(
            ssh_argv(spec.run_dir.ssh_config, host, remote),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
            env=plain_env(),
            start_new_session=True,  # a Ctrl-C in the terminal is not for it
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def _listed(names: Collection[str]) -> str:
    return ", ".join(names)
