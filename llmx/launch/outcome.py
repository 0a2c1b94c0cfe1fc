"""From everything that was seen of a run to one verdict. Pure.

The rule: the *earliest* failure is the cause, by clocks corrected per host, and a failure
that usually follows from another one (a broken connection, a rank that was asked to end) is
only named when there is nothing else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from llmx.doctor.diagnose import (
    Diagnosis,
    Failure,
    diagnose,
    signal_in_log,
    signal_of_silent_death,
)
from llmx.launch.follow import FINAL_STATES
from llmx.plan.types import Plan

FULL_BYTES = 1 << 16
"""Less than this is no room for a status file and a traceback."""
SPEECHLESS = "disk_full_silent"


@dataclass(frozen=True)
class RankExit:
    """A rank's process went away."""

    time: float
    """On the supervisor's clock."""
    oom_kills: int = 0
    """Of the kernel of its host, since the run began."""
    disk_free: int | None = None
    """Bytes left on the disk of the run directory there; None where it is not known."""


@dataclass(frozen=True)
class Hang:
    """No rank made progress for too long."""

    time: float
    stuck_s: float
    step: int
    """The step that the slowest rank had done."""
    rank: int | None
    """The rank that the others wait for; None where all wait."""
    why: str
    """Why it is this one."""
    stack: str = ""
    """Where its main thread was."""


@dataclass
class Evidence:
    """What the supervisor saw."""

    statuses: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rank -> content of its status file, of this run only."""
    exits: dict[int, RankExit] = field(default_factory=dict)
    offsets_s: dict[int, float] = field(default_factory=dict)
    """Rank -> clock of its host minus the supervisor's."""
    lost_hosts: dict[str, float] = field(default_factory=dict)
    """Host -> when it was last heard."""
    runner_code: int | None = None
    """Exit code of ``deepspeed``; None while it runs or when the supervisor ended it."""
    launcher_log: str = ""
    rank_logs: dict[int, str] = field(default_factory=dict)
    """Rank -> the end of its log."""
    interrupted_at: float | None = None
    interrupted_by: str = ""
    hang: Hang | None = None
    ended_at: float | None = None
    """When the supervisor began to end what was left: what ranks say later follows from that."""
    start_timeout_s: float | None = None
    """Set when ranks did not show up for so long."""


@dataclass(frozen=True)
class Verdict:
    """How it ended, and whom to look at."""

    outcome: str
    cause: str = ""
    fix: str = ""
    rank: int | None = None
    host: str | None = None
    traceback: str = ""
    name: str = ""
    """The row of the catalogue of known failures; empty where none matched."""
    step: int | None = None
    """Where training diverged, if the rank said so."""
    lost_hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Candidate:
    time: float
    diagnosis: Diagnosis
    rank: int | None
    host: str
    traceback: str = ""


def all_finished(evidence: Evidence, plan: Plan) -> bool:
    """Whether every rank of the plan says so itself."""
    return all(
        evidence.statuses.get(rank.rank, {}).get("state") == "finished" for rank in plan.ranks
    )


def judge(evidence: Evidence, plan: Plan) -> Verdict:
    """The verdict on a run that is over."""
    if all_finished(evidence, plan):
        return Verdict("ok")
    candidates = _candidates(evidence, plan)
    if evidence.interrupted_at is not None:
        # Ranks that are asked to end may break each other's connections; that is no failure.
        candidates = [c for c in candidates if c.time < evidence.interrupted_at]
        if not candidates:
            return Verdict(
                "interrupted",
                f"stopped by {evidence.interrupted_by or 'the user'}",
            )
    before = [c for c in candidates if evidence.ended_at is None or c.time < evidence.ended_at]
    if evidence.hang is not None and not before:
        return _hung(evidence.hang, plan)
    if evidence.start_timeout_s is not None and not before:
        return _never_started(evidence, plan)
    # Ranks that leave after the end has begun were asked to by us: that says nothing.
    candidates = before or [c for c in candidates if c.diagnosis.outcome != "interrupted"]
    if candidates:
        # Where no disk is left nobody can say why: what others saw of it comes second.
        first = min(
            candidates,
            key=lambda c: (c.diagnosis.consequence, c.diagnosis.name != SPEECHLESS, c.time),
        )
        found = first.diagnosis
        if found.consequence and signal_in_log(evidence.launcher_log):
            # Where no agent looks (Slurm), only the launcher knows who was killed.
            return _from_launcher(evidence, plan)
        error = evidence.statuses.get(-1 if first.rank is None else first.rank, {}).get("error")
        step = (error or {}).get("step")
        return Verdict(
            found.outcome,
            found.cause,
            found.fix,
            first.rank,
            first.host,
            first.traceback,
            name=found.name,
            step=int(step) if isinstance(step, int) else None,
            lost_hosts=tuple(evidence.lost_hosts),
        )
    return _from_launcher(evidence, plan)


def _speechless(rank: int, host: str) -> Diagnosis:
    return Diagnosis(
        "disk_full",
        f"the disk of the run directory on {host} is full: rank {rank} died and could not even "
        "write why",
        f"free some space on {host} (`df -h`; checkpoint.keep sets how many checkpoints "
        "are kept), or set run_dir to a larger disk",
        SPEECHLESS,
    )


def _hung(hang: Hang, plan: Plan) -> Verdict:
    host = None if hang.rank is None else plan.hosts[plan.ranks[hang.rank].host].name
    who = "every rank waits for the others" if hang.rank is None else f"rank {hang.rank}"
    who += f" on {host}: {hang.why}" if host else ""
    return Verdict(
        "hang",
        f"no rank made progress for {hang.stuck_s:.0f} s after step {hang.step}; {who}",
        "the stacks of all threads are at the end of RUN_DIR/logs/rank-*.log; if steps may take "
        "so long, raise launch.hang_timeout_s",
        hang.rank,
        host,
        hang.stack,
    )


def _candidates(evidence: Evidence, plan: Plan) -> list[_Candidate]:
    found: list[_Candidate] = []
    for rank in plan.ranks:
        status = evidence.statuses.get(rank.rank, {})
        host = plan.hosts[rank.host].name
        offset = evidence.offsets_s.get(rank.rank, 0.0)
        if status.get("state") == "failed":
            error = status.get("error") or {}
            found.append(
                _Candidate(
                    float(error.get("time") or status.get("time") or 0.0) - offset,
                    diagnose(
                        Failure(
                            error_type=str(error.get("type") or ""),
                            message=str(error.get("message") or ""),
                            traceback=str(error.get("traceback") or ""),
                            category=str(error.get("category") or ""),
                        )
                    ),
                    rank.rank,
                    host,
                    str(error.get("traceback") or ""),
                )
            )
        elif rank.rank in evidence.exits and status.get("state") not in FINAL_STATES:
            gone = evidence.exits[rank.rank]
            log = evidence.rank_logs.get(rank.rank, "")
            failure = Failure(signal=signal_of_silent_death(log), oom_kills=gone.oom_kills, log=log)
            full = gone.disk_free is not None and gone.disk_free < FULL_BYTES
            diagnosis = _speechless(rank.rank, host) if full else diagnose(failure)
            found.append(_Candidate(gone.time, diagnosis, rank.rank, host, _traceback_in(log)))
        elif status.get("state") == "interrupted" and evidence.interrupted_at is None:
            found.append(
                _Candidate(
                    float(status.get("time") or 0.0) - offset,
                    Diagnosis(
                        "interrupted",
                        f"rank {rank.rank} on {host} was asked to end (SIGTERM or SIGUSR1) by "
                        "somebody else: a job's time limit, a preemption, or a person",
                        "under Slurm, ask for more time (launch.slurm.time_limit)",
                        # The launcher does the same to the other ranks of a host after a failure.
                        consequence=True,
                    ),
                    rank.rank,
                    host,
                )
            )
    for name, time in evidence.lost_hosts.items():
        diagnosis = Diagnosis(
            "host_lost",
            f"{name} does not respond any more: it is down, or cut off from the network",
            f"check that {name} is up and reachable: ssh -F RUN_DIR/ssh_config {name} uptime; run "
            "without it, or start again when it is back",
        )
        found.append(_Candidate(time, diagnosis, None, name))
    return found


def _never_started(evidence: Evidence, plan: Plan) -> Verdict:
    missing = [rank for rank in plan.ranks if rank.rank not in evidence.statuses]
    hosts = sorted({plan.hosts[rank.host].name for rank in missing})
    found = diagnose(Failure(log=evidence.launcher_log))
    numbers = ", ".join(str(rank.rank) for rank in missing)
    cause = f"rank {numbers} on {', '.join(hosts)} did not start within "
    cause += f"{evidence.start_timeout_s:.0f} s (launch.start_timeout_s)"
    if found.name:
        return Verdict(
            found.outcome,
            f"{cause}: {found.cause}",
            found.fix,
            missing[0].rank,
            hosts[0],
            name=found.name,
        )
    return Verdict(
        "comm",
        cause,
        "look at RUN_DIR/logs/launcher.log; a stale lock of a compiler cache also waits like this: "
        "find ~/.cache/torch_extensions -name lock",
        missing[0].rank if missing else None,
        hosts[0] if hosts else None,
    )


def _from_launcher(evidence: Evidence, plan: Plan) -> Verdict:
    """No rank said anything: the launcher's own log is all there is."""
    log = evidence.launcher_log
    rank = _rank_in_log(log, plan)
    signal = signal_in_log(log)
    found = diagnose(Failure(signal=signal, log=log))
    cause = found.cause
    if not found.name:
        code = evidence.runner_code
        said = "ended" if code is None else f"ended with code {code}"
        cause = f"deepspeed {said} before every rank had finished"
        last = [line.strip() for line in log.splitlines() if line.strip()][-1:]
        cause += f": {last[0]}" if last else ""
    host = None if rank is None else plan.hosts[plan.ranks[rank].host].name
    return Verdict(found.outcome, cause, found.fix, rank, host, _traceback_in(log), found.name)


def _rank_in_log(log: str, plan: Plan) -> int | None:
    """The rank that srun or mpirun names as the one that died."""
    match = re.search(r"srun: error: \S+: tasks? (\d+)[\d,-]*: (?!Terminated)", log)
    match = match or re.search(r"process rank (\d+) with PID", log)
    return int(match[1]) if match and int(match[1]) < plan.world_size else None


def _traceback_in(log: str) -> str:
    """The last Python traceback of a log, or nothing."""
    start = log.rfind("Traceback (most recent call last)")
    start = start if start >= 0 else log.rfind("Fatal Python error")
    return log[start:].strip() if start >= 0 else ""
