"""Classifies the evidence of an attempt that has ended into one ``Outcome``. Pure.

The *earliest* failure is the cause, by clocks corrected for each host. A failure that usually
follows from another one (a broken connection, a rank that received SIGTERM) is the cause only
where there is no other.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from llmx.failures.diagnose import (
    Diagnosis,
    Failure,
    diagnose,
    find_failure,
    last_line,
    signal_in_log,
    signal_of_silent_death,
)
from llmx.launch.supervision.outcome import AgentEnd, Evidence, Hang, Outcome, all_finished
from llmx.launch.supervision.tail import FINAL_STATES
from llmx.launch.transports import transport_of
from llmx.plan.types import Plan

FULL_BYTES = 1 << 16
"""With less free space than this a rank cannot write its status and a traceback."""
LAST_LINES = 3
"""Of the log of a rank that ended without a traceback."""
SILENT_DISK_FULL = "disk_full_silent"
"""The name of the diagnosis of a rank that could not write its error."""


SENDERS = {
    "signalled_by_scheduler": "scheduler",
    "signalled_by_user": "user",
    "slurm_time": "scheduler",
}
"""Diagnoses of ranks that were asked to exit -> who asked (``Outcome.stopped_by``)."""


@dataclass(frozen=True)
class _Candidate:
    time: float
    diagnosis: Diagnosis
    rank: int | None
    host: str
    traceback: str = ""


def classify(evidence: Evidence, plan: Plan) -> Outcome:
    """The outcome of an attempt that is over."""
    if all_finished(evidence, plan):
        return Outcome("ok")
    candidates = _candidates(evidence, plan)
    if evidence.interrupted_at is not None:
        # Ranks that exit on request may break each other's connections: no failure.
        candidates = [c for c in candidates if c.time < evidence.interrupted_at]
        if not candidates:
            return Outcome(
                "interrupted",
                f"stopped by {evidence.interrupted_by or 'the user'}",
                stopped_by=evidence.sender or "user",
            )
    before = [c for c in candidates if evidence.ended_at is None or c.time < evidence.ended_at]
    if evidence.hang is not None and not before:
        return _hung(evidence.hang, plan)
    if evidence.start_timeout_s is not None and not before:
        return _never_started(evidence, plan)
    # Ranks that are interrupted after the shutdown began were interrupted by it.
    candidates = before or [c for c in candidates if c.diagnosis.outcome != "interrupted"]
    if candidates:
        # A rank on a full disk reports nothing; what the others report follows from it.
        first = min(
            candidates,
            key=lambda c: (c.diagnosis.consequence, c.diagnosis.name != SILENT_DISK_FULL, c.time),
        )
        diagnosis = first.diagnosis
        if diagnosis.consequence and signal_in_log(evidence.launcher_log):
            # Without agents (Slurm) only the launcher's log shows which rank was killed.
            return _from_launcher(evidence, plan)
        error = evidence.statuses.get(-1 if first.rank is None else first.rank, {}).get("error")
        step = (error or {}).get("step")
        return Outcome(
            diagnosis.outcome,
            diagnosis.cause,
            diagnosis.fix,
            first.rank,
            first.host,
            first.traceback,
            name=diagnosis.name,
            step=int(step) if isinstance(step, int) else None,
            lost_hosts=tuple(evidence.lost_hosts),
            stopped_by=SENDERS.get(diagnosis.name, ""),
        )
    return _from_launcher(evidence, plan)


def _disk_full(rank: int, host: str) -> Diagnosis:
    return Diagnosis(
        "disk_full",
        f"the disk of the run directory on {host} is full, read-only or fails: rank {rank} exited "
        "and could not write its error",
        f"free some space on {host} (`df -h`; checkpoint.keep sets how many checkpoints "
        "are kept) and look at its mount (`mount`, `dmesg`), or set run_dir to another disk",
        SILENT_DISK_FULL,
    )


def _without_log(rank: int, host: str, code: int | None, launcher_log: str) -> Diagnosis:
    """Of a rank that ended before it wrote a line: only its launcher can say why."""
    if code is not None:
        return Diagnosis(
            "crash",
            f"rank {rank} on {host} exited with code {code} before it wrote a line",
            f"start its Python by hand: ssh -F RUN_DIR/ssh_config {host}, then what follows exec "
            "in RUN_DIR/command.txt",
        )
    diagnosis = diagnose(Failure(log=launcher_log))
    if diagnosis.name:
        return diagnosis
    match = find_failure(launcher_log)
    cause = f"rank {rank} on {host} ended before it wrote a log"
    return Diagnosis(
        diagnosis.outcome,
        f"{cause}: {match.line}" if match else cause,
        "read RUN_DIR/logs/launcher.log: what starts the rank (Python, the worker, a script of the "
        "host) failed or was ended",
    )


def _without_traceback(code: int, log: str) -> Diagnosis:
    """Of a rank that ended itself, e.g. by ``os._exit``: none of its lines must be the cause."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return Diagnosis(
        "crash",
        f"exit code {code}, no traceback, last lines: {' | '.join(lines[-LAST_LINES:])}",
        "the whole log of the rank is in RUN_DIR/logs; look for os._exit, sys.exit and native "
        "libraries in the code that ran last",
    )


def _hung(hang: Hang, plan: Plan) -> Outcome:
    host = None if hang.rank is None else plan.hosts[plan.ranks[hang.rank].host].name
    who = "every rank waits for the others" if hang.rank is None else f"rank {hang.rank}"
    who += f" on {host}: {hang.why}" if host else ""
    if hang.is_loading:
        return Outcome(
            "hang",
            f"no rank made progress for {hang.stuck_s:.0f} s before the first step "
            f"(launch.loading_timeout_s); {who}",
            "the stacks of all threads are at the end of RUN_DIR/logs/rank-*.log; python -m llmx "
            "doctor with the same hardware tests the network between the hosts; if loading may "
            "take this long without a line in a log, raise launch.loading_timeout_s",
            hang.rank,
            host,
            hang.stack,
        )
    silent = f"no rank made progress for {hang.stuck_s:.0f} s after step {hang.step}"
    if hang.network:
        first, *_, fix = hang.network
        return Outcome("comm", f"{silent}: {first}", fix)
    return Outcome(
        "hang",
        f"{silent}; {who}",
        "the stacks of all threads are at the end of RUN_DIR/logs/rank-*.log; if a step may take "
        "this long, raise launch.hang_timeout_s",
        hang.rank,
        host,
        hang.stack,
    )


def _candidates(evidence: Evidence, plan: Plan) -> list[_Candidate]:
    candidates: list[_Candidate] = []
    for rank in plan.ranks:
        status = evidence.statuses.get(rank.rank, {})
        host = plan.hosts[rank.host].name
        offset = evidence.offsets_s.get(rank.rank, 0.0)
        if status.get("state") == "failed":
            error = status.get("error") or {}
            candidates.append(
                _Candidate(
                    float(error.get("time") or status.get("time") or 0.0) - offset,
                    diagnose(
                        Failure(
                            error_type=str(error.get("type") or ""),
                            message=str(error.get("message") or ""),
                            traceback=str(error.get("traceback") or ""),
                            category=str(error.get("category") or ""),
                            log=evidence.rank_logs.get(rank.rank, ""),
                        )
                    ),
                    rank.rank,
                    host,
                    str(error.get("traceback") or ""),
                )
            )
        elif rank.rank in evidence.exits and status.get("state") not in FINAL_STATES:
            rank_exit = evidence.exits[rank.rank]
            log = evidence.rank_logs.get(rank.rank, "")
            full = rank_exit.disk_free is not None and rank_exit.disk_free < FULL_BYTES
            if full:
                diagnosis = _disk_full(rank.rank, host)
            elif rank_exit.code is not None and (log.strip() or rank_exit.code < 0):
                ended_by = max(0, -rank_exit.code)
                diagnosis = diagnose(
                    Failure(signal=ended_by, oom_kills=rank_exit.oom_kills, log=log)
                )
                if rank_exit.code > 0 and not diagnosis.name and not _traceback_in(log):
                    diagnosis = _without_traceback(rank_exit.code, log)
            elif log.strip() or status or rank_exit.oom_kills:
                # One that has written its status has run, and said nothing at its end.
                silent = signal_of_silent_death(log) if log.strip() else signal.SIGKILL
                diagnosis = diagnose(Failure(signal=silent, oom_kills=rank_exit.oom_kills, log=log))
            else:
                diagnosis = _without_log(rank.rank, host, rank_exit.code, evidence.launcher_log)
            candidates.append(
                _Candidate(rank_exit.time, diagnosis, rank.rank, host, _traceback_in(log))
            )
        elif status.get("state") == "interrupted" and evidence.interrupted_at is None:
            by_slurm = transport_of(plan.transport).allocates
            candidates.append(
                _Candidate(
                    float(status.get("time") or 0.0) - offset,
                    _signalled(rank.rank, host, by_slurm=by_slurm),
                    rank.rank,
                    host,
                )
            )
    candidates += [
        _Candidate(report.time, _ended_by_agent(name, report), None, name)
        for name, report in evidence.agent_ends.items()
    ]
    for name, time in evidence.lost_hosts.items():
        diagnosis = Diagnosis(
            "host_lost",
            f"{name} stopped responding: the host is down, or its network is",
            f"check that {name} is up and reachable: ssh -F RUN_DIR/ssh_config {name} uptime; then "
            "resume the run, or resume it without the host (launch.elastic=true)",
        )
        candidates.append(_Candidate(time, diagnosis, None, name))
    return candidates


def _signalled(rank: int, host: str, *, by_slurm: bool) -> Diagnosis:
    """A rank that received a signal which neither the supervisor nor an agent sent."""
    received = f"rank {rank} on {host} received SIGTERM or SIGUSR1 from outside llmx: "
    if by_slurm:
        cause = "the time limit of its Slurm job, a preemption, or scancel"
        fix = "request more time, e.g. launch.slurm.time_limit=24:00:00"
        name = "signalled_by_scheduler"
    else:
        cause, fix, name = f"a user or a program on {host}", "", "signalled_by_user"
    # The launcher sends it to the other ranks of a host after a failure.
    return Diagnosis("interrupted", received + cause, fix, name, consequence=True)


def _ended_by_agent(name: str, report: AgentEnd) -> Diagnosis:
    if report.signal:
        return Diagnosis(
            "host_lost",
            f"the agent on {name} received {report.signal} and ended its ranks: the host shuts "
            "down, or somebody ended its processes",
            f"check that {name} is up: ssh -F RUN_DIR/ssh_config {name} uptime",
        )
    return Diagnosis(
        "orphaned",
        f"the agent on {name} ended its ranks, because it heard nothing of the supervisor for "
        f"{report.silent_s:.0f} s (launch.orphan_timeout_s): the supervisor or its machine was "
        "suspended, or its network was down",
        "start the supervisor on a machine that stays up and connected, or raise "
        "launch.orphan_timeout_s",
    )


def _never_started(evidence: Evidence, plan: Plan) -> Outcome:
    missing = [rank for rank in plan.ranks if rank.rank not in evidence.statuses]
    hosts = sorted({plan.hosts[rank.host].name for rank in missing})
    diagnosis = diagnose(Failure(log=evidence.launcher_log))
    numbers = ", ".join(str(rank.rank) for rank in missing)
    cause = f"rank {numbers} on {', '.join(hosts)} did not start within "
    cause += f"{evidence.start_timeout_s:.0f} s (launch.start_timeout_s)"
    if diagnosis.name:
        return Outcome(
            diagnosis.outcome,
            f"{cause}: {diagnosis.cause}",
            diagnosis.fix,
            missing[0].rank,
            hosts[0],
            name=diagnosis.name,
        )
    return Outcome(
        "comm",
        cause,
        "read RUN_DIR/logs (rank-*.log, launcher.log); a stale lock of the extension cache also "
        "blocks a start: "
        "find ~/.cache/torch_extensions -name lock",
        missing[0].rank if missing else None,
        hosts[0] if hosts else None,
    )


def _from_launcher(evidence: Evidence, plan: Plan) -> Outcome:
    """No rank reported an error: the log of the launcher is the only source."""
    log = evidence.launcher_log
    rank = _rank_in_log(log, plan)
    diagnosis = diagnose(Failure(log=log))
    cause = diagnosis.cause
    if not diagnosis.name:
        code = evidence.runner_code
        exited = "exited" if code is None else f"exited with code {code}"
        cause = f"deepspeed {exited} before every rank had finished"
        match = find_failure(log)
        last = match.line if match else last_line(log)
        cause += f": {last}" if last else ""
    host = None if rank is None else plan.hosts[plan.ranks[rank].host].name
    return Outcome(
        diagnosis.outcome,
        cause,
        diagnosis.fix,
        rank,
        host,
        _traceback_in(log),
        name=diagnosis.name,
        stopped_by=SENDERS.get(diagnosis.name, ""),
    )


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
