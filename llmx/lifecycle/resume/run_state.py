"""Reads the state of a run: its end, the checkpoint to resume from, its history; and asks its
hosts, to compare them with those of its launch (``hosts.json``)."""

from __future__ import annotations

import queue
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmx.checkpoint.commit import committed_dir
from llmx.checkpoint.manifest import MANIFEST, Manifest, Problem, read_manifest
from llmx.checkpoint.pointers import BEST, LATEST, read_pointer, set_pointer
from llmx.checkpoint.selection import is_present, list_steps, verify
from llmx.compose.words import Words
from llmx.config import Experiment
from llmx.launch.agents.preflight import start_agents, survey_hosts
from llmx.launch.files import make_spec
from llmx.plan.types import Plan
from llmx.run import snapshot, trust
from llmx.run.metrics.lines import read_metrics
from llmx.run.provenance.differences import HARMLESS, MAY, Difference, differences
from llmx.run.provenance.machine import PACKAGES
from llmx.run.rundir import RunDir, read_mapping, write_json
from llmx.run.scratch import scratch_directory

if TYPE_CHECKING:
    from llmx.lifecycle.resume.changes import Change


@dataclass(frozen=True)
class RunState:
    """The state of a run, read from its files."""

    num_samples: int | None
    """Samples of the training split; None before training began."""
    total_steps: int | None
    """As of the last start or ``resumed`` event; None before training began."""
    last_step: int
    """The last step that a line of ``metrics.jsonl`` names; 0 without one."""
    finished_at: int | None
    """The step of the ``end`` line of a run that ended well."""
    outcome: str | None
    """Outcome in ``result.json``; None while the run goes on, or if its supervisor was killed."""
    cause: str
    checkpoints: tuple[int, ...]
    """Committed steps on this machine, ascending; whether they are whole is not said."""
    stopped_early: bool
    """Whether ``task.early_stopping`` ended a run that ended well."""
    saved: frozenset[int]
    """Steps that were committed once, as the metrics tell."""
    was_launched: bool
    """Whether a supervisor ever took it up; False after ``dry_run=true``."""

    @property
    def ending(self) -> str:
        """``failed as oom at step 57: CUDA out of memory``."""
        if not self.was_launched:
            return "was planned and never started"
        at = f"at step {self.last_step}" if self.last_step else "before the first step"
        if self.outcome is None:
            return f"ended {at} without a result"
        if self.outcome == "ok":
            return f"finished {at}"
        word = "interrupted" if self.outcome == "interrupted" else f"failed ({self.outcome})"
        cause = self.cause.splitlines()[0] if self.cause else ""
        return f"{word} {at}" + (f": {cause}" if cause else "")


def trusted_run(words: Words) -> tuple[RunDir, Experiment]:
    """The run that a command names, and its snapshot. ConfigError unless its code may run here."""
    run = RunDir(words.run_directory())
    exp = snapshot.load(run)
    kinds = (trust.MODEL, trust.TASK, trust.LAUNCH)
    trusted = words.flag("trust")
    trust.check_trusted(run, trust.code_of(exp), *kinds, trusted=trusted, say="trust=true")
    return run, exp


def read_state(run: RunDir) -> RunState:
    """Read it; torn and missing files count as not there."""
    lines = read_metrics(run.metrics)
    result = read_mapping(run.result)
    steps = [int(line["step"]) for line in lines if isinstance(line.get("step"), int)]
    ends = [int(line["step"]) for line in lines if line.get("kind") == "end"]
    ok = result.get("outcome") == "ok"
    early = {line.get("step") for line in lines if line.get("event") == "early_stopped"}
    start = next((line for line in lines if line.get("kind") == "start"), {})
    totals = [line.get("total_steps") for line in lines if line.get("event") == "resumed"]
    total_steps = [start.get("total_steps"), *filter(None, totals)][-1] if start else None
    return RunState(
        num_samples=start.get("num_samples"),
        total_steps=total_steps,
        last_step=max(steps, default=0),
        finished_at=ends[-1] if ok and ends else None,
        stopped_early=ok and bool(ends) and ends[-1] in early,
        outcome=str(result["outcome"]) if result.get("outcome") else None,
        cause=str(result.get("cause") or ""),
        checkpoints=tuple(committed(run.checkpoints)),
        saved=frozenset(int(line["step"]) for line in lines if line.get("event") == "saved"),
        was_launched=any(
            path.exists() for path in (run.result, run.metrics, run.supervisor, run.attempts)
        ),
    )


def committed(directory: Path) -> list[int]:
    """Steps of the checkpoints that have a manifest, ascending."""
    steps = list_steps(directory)
    return [step for step in steps if (committed_dir(directory, step) / MANIFEST).is_file()]


HASHED_BYTES = 1 << 30
"""A checkpoint up to this size is verified here, in about a second."""


def newest_usable(run: RunDir, steps: Sequence[int]) -> tuple[int | None, dict[int, str]]:
    """The newest of these checkpoints without a problem here; and newer step -> its problems."""
    damaged: dict[int, str] = {}
    for step in sorted(steps, reverse=True):
        problems = problems_of(run, step)
        if not problems:
            return step, damaged
        damaged[step] = "; ".join(problems)
    return None, damaged


def problems_of(run: RunDir, step: int) -> list[str]:
    """The problems of the checkpoint of a step; empty where manifest and sizes are right, and for a
    small one the hashes (``is_hashed``).

    Without a shared file system a file may lie on the host that wrote it alone: only a host
    with none of its files missing here is held to them.
    """
    directory = run.checkpoint(step)
    manifest = read_manifest(directory)
    if isinstance(manifest, Problem):
        return [str(manifest)]
    missing = {name for name in manifest.files if not is_present(directory / name)}
    hosts = set(manifest.hosts.values())
    holding = {host for name, host in manifest.hosts.items() if name not in missing}
    elsewhere = hosts - holding if len(hosts) > 1 else set()
    files = [
        name
        for name in manifest.files
        if name not in missing or manifest.hosts.get(name) not in elsewhere
    ]
    problems = verify(directory, files, hashes=manifest.num_bytes <= HASHED_BYTES)
    return [str(problem) for problem in problems]


def is_hashed(run: RunDir, step: int) -> bool:
    """Whether ``problems_of`` has read every byte of it: it is small, and all of it is here."""
    directory = run.checkpoint(step)
    manifest = read_manifest(directory)
    return (
        isinstance(manifest, Manifest)
        and manifest.num_bytes <= HASHED_BYTES
        and all((directory / name).is_file() for name in manifest.files)
    )


def archive_run(
    run: RunDir,
    *,
    edits: Sequence[Change],
    differs: Sequence[Difference],
    words: Sequence[str],
    step: int,
) -> Path:
    """Copy the former snapshot into a new numbered directory, with ``changes.json``; returns it.

    ``step``: where the run goes on with the new values. ``differs``: what is not as it was in
    code, packages and devices.
    """
    numbers = [int(path.name) for path in history(run)]
    directory = run.root / "history" / f"{max(numbers, default=0) + 1:03d}"
    directory.mkdir(parents=True)
    for path in (
        run.config, run.plan, run.ds_config, run.overrides, run.provenance, run.result,
        run.resume, run.metrics,
    ):  # fmt: skip
        if path.is_file():
            shutil.copy2(path, directory / path.name)
    write_json(
        directory / "changes.json",
        {
            "time": time.time(),
            "step": step,
            "words": list(words),
            "changes": {change.key: [change.old, change.new] for change in edits},
            "effects": {change.key: change.rule.effect for change in edits},
            "differs": [difference.to_dict() for difference in differs],
        },
    )
    return directory


def history(run: RunDir) -> list[Path]:
    """The numbered directories of ``history/``, the oldest first."""
    parent = run.root / "history"
    entries = parent.iterdir() if parent.is_dir() else iter(())
    return sorted(path for path in entries if path.name.isdigit() and path.is_dir())


def roll_back(run: RunDir, rollbacks: Sequence[int], step: int) -> list[int]:
    """``went_back`` of ``resume.json``, with a rollback to ``step`` added.

    A checkpoint that was set aside, and was brought back by hand, is no longer given up.
    """
    manifest = read_manifest(run.checkpoint(step)) if step else None
    if isinstance(manifest, Manifest) and manifest.is_abandoned(rollbacks):
        rollbacks = [max(earlier, step) for earlier in rollbacks]
    return [*rollbacks, step]


def set_aside(run: RunDir, steps: Sequence[int], directory: Path) -> None:
    """Move newer checkpoints away: the run goes on from an earlier one, and must never return to
    the abandoned branch by itself. They are renamed, so nothing is copied or lost."""
    for step in steps:
        target = directory / "checkpoints" / run.checkpoint(step).name
        target.parent.mkdir(parents=True, exist_ok=True)
        run.checkpoint(step).rename(target)
    left = committed(run.checkpoints)
    for name in (LATEST, BEST):
        if read_pointer(run.checkpoints, name) in steps:
            if left and name == LATEST:
                set_pointer(run.checkpoints, name, left[-1])
            else:  # which of the others is the best is known to the ranks, at their next save
                (run.checkpoints / name).unlink()


def hosts_then_and_now(run: RunDir, exp: Experiment, plan: Plan) -> list[Difference]:
    """Ask the hosts of a run over several now, and list the differences from then."""
    then = read_mapping(run.hosts)
    if len(plan.hosts) < 2 or not then:
        return []
    return host_differences(then, ask_hosts(exp, plan))


def ask_hosts(exp: Experiment, plan: Plan) -> dict[str, dict[str, Any]]:
    """Host -> its survey, by an agent there; ``{"error": why}`` for one that does not answer."""
    with scratch_directory() as directory:
        spec = make_spec(exp, plan, RunDir(directory), port=0)
        try:
            connections = start_agents(spec, queue.Queue())
        except OSError as error:  # no ssh on this machine
            return {host.name: {"error": str(error)} for host in plan.hosts}
        try:
            surveys, problems = survey_hosts(spec, connections, is_alone=True)
        finally:
            for connection in connections:
                connection.close(timeout_s=5)
    return surveys | {name: {"error": problem} for name, problem in problems.items()}


def host_differences(
    then: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]
) -> list[Difference]:
    """The differences of each host that took part then and does now. Pure."""
    rows = []
    for name, facts in now.items():
        if "error" in facts:
            rows.append(Difference(MAY, f"{name}: cannot be asked", "-", str(facts["error"])))
        elif name in then and "error" not in then[name]:
            rows += [
                replace(row, what=f"{name}: {row.what}")
                for row in differences(_record(then[name]), _record(facts))
            ]
    return rows


def of_this_machine(rows: list[Difference], plan: Plan) -> list[Difference]:
    """Mark differences of this machine's packages and devices as harmless if no rank runs on it."""
    if any(host.is_local for host in plan.hosts):
        return rows
    machine = {*PACKAGES, "GPUs", "CPU", "NVIDIA driver", "CUDA of torch", "NCCL", "Python"}
    return [
        replace(row, severity=HARMLESS, what=f"{row.what} (here, where no rank runs)", advice="")
        if row.what in machine
        else row
        for row in rows
    ]


def _record(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A survey in the form of ``provenance.json``."""
    record: dict[str, Any] = {
        "python": {"version": facts.get("python")},
        "packages": facts.get("packages") or {},
        "nvidia_driver": facts.get("driver"),
        "nccl": dict(pin.split("==", 1) for pin in facts.get("nccl") or ()),
        "cpu": facts.get("cpu"),
    }
    if "gpu_names" in facts:
        record["gpus"] = facts["gpu_names"]
    return record
