"""Finds the failure that ended an attempt, in its evidence. Pure.

The *earliest* failure is the cause, by clocks corrected for each host. A failure that usually
follows from another one (a broken connection, a rank that received SIGTERM) is the cause only
where there is no other.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from llmx.failures.diagnose import (
    NO_FAILURE,
    Failure,
    diagnose,
    find_failure,
    signal_in_log,
    signal_of_silent_death,
)
from llmx.launch.supervision.outcome import Evidence, RankExit, all_finished
from llmx.launch.supervision.tail import FINAL_STATES
from llmx.launch.transports import transport_of
from llmx.plan.types import Plan

FULL_BYTES = 1 << 16
"""Free space below which a rank cannot write its status and a traceback."""
LAST_LINES = 3
"""Lines that are shown of the log of a rank that ended without a traceback."""
SILENT_DISK_FULL = "disk_full_silent"
"""The name of the failure of a rank that could not write its error."""


def classify(evidence: Evidence, plan: Plan) -> Failure:
    """The failure that ended an attempt; ``NO_FAILURE`` where every rank has finished."""
    if all_finished(evidence, plan):
        return NO_FAILURE
    failures = [
        *_failures_of_ranks(evidence, plan),
        *(_ended_by_agent(host, report) for host, report in evidence.agent_ends.items()),
        *(_host_lost(host, time) for host, time in evidence.lost_hosts.items()),
    ]
    if evidence.stopped is not None:
        # Ranks that exit on request may break each other's connections: no failure.
        failures = [failure for failure in failures if failure.time < evidence.stopped.time]
        if not failures:
            return evidence.stopped
    before = failures
    if evidence.ended_at is not None:
        before = [failure for failure in failures if failure.time < evidence.ended_at]
    if not before and evidence.hang is not None:
        return evidence.hang
    if not before and evidence.start_timeout_s is not None:
        return _never_started(evidence, plan)
    # Ranks that are interrupted after the shutdown began were interrupted by it.
    failures = before or [failure for failure in failures if failure.kind != "interrupted"]
    first = min(failures, key=_precedence, default=None)
    # Without agents (Slurm) only the launcher's log shows which rank was killed.
    if first is None or (first.consequence and signal_in_log(evidence.launcher_log)):
        return _from_launcher(evidence, plan)
    return replace(first, lost_hosts=tuple(evidence.lost_hosts))


def _precedence(failure: Failure) -> tuple[int, float]:
    """The smallest is the cause of the others."""
    if failure.consequence:
        return 2, failure.time
    # A rank on a full disk reports nothing; what the others report follows from it.
    return (0 if failure.name == SILENT_DISK_FULL else 1), failure.time


def _failures_of_ranks(evidence: Evidence, plan: Plan) -> Iterator[Failure]:
    """The failure of each rank that reported one, or exited without a final status."""
    for rank in plan.ranks:
        number, host = rank.rank, plan.hosts[rank.host].name
        status, log = evidence.statuses.get(number, {}), evidence.rank_logs.get(number, "")
        offset_s = evidence.offsets_s.get(number, 0.0)
        state, rank_exit = status.get("state"), evidence.exits.get(number)
        if state == "failed":
            failure = _reported(status, log)
            failure = replace(failure, time=failure.time - offset_s)
        elif rank_exit is not None and state not in FINAL_STATES:
            failure = _unreported(number, host, rank_exit, log, bool(status), evidence.launcher_log)
            failure = replace(failure, time=rank_exit.time, traceback=_traceback_in(log))
        elif state == "interrupted" and evidence.stopped is None:
            by_slurm = transport_of(plan.transport).allocates
            failure = _signalled(number, host, by_slurm=by_slurm)
            failure = replace(failure, time=float(status.get("time") or 0.0) - offset_s)
        else:
            continue
        yield replace(failure, rank=number, host=host)


def _reported(status: dict[str, Any], log: str) -> Failure:
    """The failure of a rank by its status file, with the time of its host."""
    error = status.get("error") or {}
    traceback, step = str(error.get("traceback") or ""), error.get("step")
    failure = diagnose(
        log,
        error_type=str(error.get("type") or ""),
        message=str(error.get("message") or ""),
        traceback=traceback,
        category=str(error.get("category") or ""),
    )
    return replace(
        failure,
        traceback=traceback,
        step=int(step) if isinstance(step, int) else None,
        time=float(error.get("time") or status.get("time") or 0.0),
    )


def _unreported(
    rank: int, host: str, rank_exit: RankExit, log: str, has_run: bool, launcher_log: str
) -> Failure:
    """The failure of a rank that exited and reported none. ``has_run``: it has written its
    status."""
    if rank_exit.disk_free is not None and rank_exit.disk_free < FULL_BYTES:
        return _disk_full(rank, host)
    code, oom_kills = rank_exit.code, rank_exit.oom_kills
    if code is not None and (log.strip() or code < 0):
        failure = diagnose(log, signal=max(0, -code), oom_kills=oom_kills)
        if code > 0 and not failure.name and not _traceback_in(log):
            return _without_traceback(code, log)
        return failure
    if log.strip() or has_run or oom_kills:
        ended_by = signal_of_silent_death(log) if log.strip() else signal.SIGKILL
        return diagnose(log, signal=ended_by, oom_kills=oom_kills)
    return _without_log(rank, host, code, launcher_log)


def _disk_full(rank: int, host: str) -> Failure:
    return Failure(
        "disk_full",
        f"the disk of the run directory on {host} is full, read-only or fails: rank {rank} exited "
        "and could not write its error",
        f"free some space on {host} (`df -h`; checkpoint.keep sets how many checkpoints "
        "are kept) and look at its mount (`mount`, `dmesg`), or set run_dir to another disk",
        SILENT_DISK_FULL,
    )


def _without_log(rank: int, host: str, code: int | None, launcher_log: str) -> Failure:
    """The failure of a rank that ended before it wrote a line: only its launcher can say why."""
    if code is not None:
        return Failure(
            "crash",
            f"rank {rank} on {host} exited with code {code} before it wrote a line",
            f"start its Python by hand: ssh -F RUN_DIR/ssh_config {host}, then what follows exec "
            "in RUN_DIR/command.txt",
        )
    failure = diagnose(launcher_log)
    if failure.name:
        return failure
    match = find_failure(launcher_log)
    cause = f"rank {rank} on {host} ended before it wrote a log"
    return Failure(
        failure.kind,
        f"{cause}: {match.line}" if match else cause,
        "read RUN_DIR/logs/launcher.log: what starts the rank (Python, the worker, a script of the "
        "host) failed or was ended",
    )


def _without_traceback(code: int, log: str) -> Failure:
    """The failure of a rank that ended itself, e.g. by ``os._exit``: none of its lines must be the
    cause."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return Failure(
        "crash",
        f"exit code {code}, no traceback, last lines: {' | '.join(lines[-LAST_LINES:])}",
        "the whole log of the rank is in RUN_DIR/logs; look for os._exit, sys.exit and native "
        "libraries in the code that ran last",
    )


def _host_lost(name: str, time: float) -> Failure:
    return Failure(
        "host_lost",
        f"{name} stopped responding: the host is down, or its network is",
        f"check that {name} is up and reachable: ssh -F RUN_DIR/ssh_config {name} uptime; then "
        "resume the run, or resume it without the host (launch.elastic=true)",
        host=name,
        time=time,
    )


def _signalled(rank: int, host: str, *, by_slurm: bool) -> Failure:
    """A rank that received a signal which neither the supervisor nor an agent sent."""
    received = f"rank {rank} on {host} received SIGTERM or SIGUSR1 from outside llmx: "
    sender, who, fix = "user", f"a user or a program on {host}", ""
    if by_slurm:
        sender, who = "scheduler", "the time limit of its Slurm job, a preemption, or scancel"
        fix = "request more time, e.g. launch.slurm.time_limit=24:00:00"
    return Failure(
        "interrupted",
        received + who,
        fix,
        f"signalled_by_{sender}",
        consequence=True,  # the launcher sends it to the other ranks of a host after a failure
        stopped_by=sender,
    )


def _ended_by_agent(name: str, report: dict[str, Any]) -> Failure:
    if report["signal"]:
        return Failure(
            "host_lost",
            f"the agent on {name} received {report['signal']} and ended its ranks: the host shuts "
            "down, or somebody ended its processes",
            f"check that {name} is up: ssh -F RUN_DIR/ssh_config {name} uptime",
            host=name,
            time=report["time"],
        )
    return Failure(
        "orphaned",
        f"the agent on {name} ended its ranks, because it heard nothing of the supervisor for "
        f"{report['silent_s']:.0f} s (launch.orphan_timeout_s): the supervisor or its machine was "
        "suspended, or its network was down",
        "start the supervisor on a machine that stays up and connected, or raise "
        "launch.orphan_timeout_s",
        host=name,
        time=report["time"],
    )


def _never_started(evidence: Evidence, plan: Plan) -> Failure:
    missing = [rank for rank in plan.ranks if rank.rank not in evidence.statuses]
    hosts = sorted({plan.hosts[rank.host].name for rank in missing})
    numbers = ", ".join(str(rank.rank) for rank in missing)
    cause = f"rank {numbers} on {', '.join(hosts)} did not start within "
    cause += f"{evidence.start_timeout_s:.0f} s (launch.start_timeout_s)"
    failure = diagnose(evidence.launcher_log)
    if failure.name:
        failure = replace(failure, cause=f"{cause}: {failure.cause}")
    else:
        failure = Failure(
            "comm",
            cause,
            "read RUN_DIR/logs (rank-*.log, launcher.log); a stale lock of the extension cache "
            "also blocks a start: find ~/.cache/torch_extensions -name lock",
        )
    return replace(failure, rank=missing[0].rank, host=hosts[0]) if missing else failure


def _from_launcher(evidence: Evidence, plan: Plan) -> Failure:
    """No rank reported an error: the log of the launcher is the only source."""
    log = evidence.launcher_log
    failure = replace(diagnose(log), traceback=_traceback_in(log))
    if not failure.name:
        code = evidence.runner_code
        exited = "exited" if code is None else f"exited with code {code}"
        cause = f"deepspeed {exited} before every rank had finished"
        failure = replace(failure, cause=f"{cause}: {failure.cause}" if log.strip() else cause)
    rank = _rank_in_log(log, plan)
    if rank is None:
        return failure
    return replace(failure, rank=rank, host=plan.hosts[plan.ranks[rank].host].name)


def _rank_in_log(log: str, plan: Plan) -> int | None:
    """The rank that srun or mpirun reports as killed."""
    match = re.search(r"srun: error: \S+: tasks? (\d+)[\d,-]*: (?!Terminated)", log)
    match = match or re.search(r"process rank (\d+) with PID", log)
    return int(match[1]) if match and int(match[1]) < plan.world_size else None


def _traceback_in(log: str) -> str:
    """The last Python traceback in a log; empty where there is none."""
    start = log.rfind("Traceback (most recent call last)")
    start = start if start >= 0 else log.rfind("Fatal Python error")
    return log[start:].strip() if start >= 0 else ""
