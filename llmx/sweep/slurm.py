"""A trial as a Slurm job of its own (``launch.transport=slurm``, outside an allocation).

``sbatch`` gets the hosts of the trial's plan, and ``RUN_DIR/job.sh``, which supervises the run from
its snapshot inside the allocation (``main``). So a job waits in the queue and runs without the
sweep's process; the journal has its number, by which a sweep that is continued finds it again.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
import sys
import time
from pathlib import Path

from llmx.config import Experiment
from llmx.errors import RunFailed, exit_code
from llmx.hardware.detect import local_names
from llmx.hardware.slurm import ask
from llmx.launch import supervise, write_launch_files
from llmx.launch.spec import LaunchSpec
from llmx.lifecycle.batch import job_options, named_hosts, queue_script, script_head
from llmx.plan.types import Plan
from llmx.run import snapshot
from llmx.run.rundir import RunDir, read_json, read_mapping
from llmx.sweep.process import End

POLL_S = 2.0
"""Between two questions to the controller on one job."""
FINISH_S = 180.0
"""Longest wait for a job to leave the queue once its ``result.json`` is there."""
ENDS = {
    "CANCELLED": ("interrupted", "was cancelled"),
    "TIMEOUT": ("interrupted", "reached its time limit (launch.slurm.time_limit)"),
    "PREEMPTED": ("interrupted", "was preempted"),
    "DEADLINE": ("interrupted", "reached its deadline"),
    "NODE_FAIL": ("host_lost", "lost a node"),
    "BOOT_FAIL": ("host_lost", "had a node that did not boot"),
    "OUT_OF_MEMORY": ("oom", "took more memory than Slurm gave it"),
}
"""States of a job that left no result: the outcome of its trial, and the cause in words."""


def applies(exp: Experiment) -> bool:
    """Whether trials are jobs of their own: with Slurm, outside an allocation."""
    return exp.launch.transport == "slurm" and "SLURM_JOB_ID" not in os.environ


class SlurmJob:
    """One job of a trial."""

    def __init__(self, run: RunDir, number: str) -> None:
        self.run, self.number = run, number
        self._asked_at = 0.0
        self._result_at: float | None = None
        self._end: End | None = None

    @classmethod
    def submit(cls, spec: LaunchSpec) -> SlurmJob:
        """Put a trial into the queue; LaunchError where Slurm refuses it."""
        plan = spec.plan
        # Its name is not that of its ranks, which are cancelled by theirs.
        name, cpus = f"llmx-trial-{spec.exp.name}", spec.cpus_per_task
        sbatch_options = job_options(spec.exp, plan, spec.run_dir, name=name, cpus_per_task=cpus)
        sbatch_options += [named_hosts(plan), f"--chdir={spec.run_dir.root}", "--no-requeue"]
        words = [spec.python, "-m", "llmx.sweep.slurm", str(spec.run_dir.root)]
        lines = [*script_head(sbatch_options, root=spec.code_root), f"exec {shlex.join(words)}", ""]
        return cls(spec.run_dir, queue_script(spec.run_dir, "\n".join(lines)))

    def poll(self) -> End | None:
        """The end of the job; None while it waits or runs."""
        now = time.monotonic()
        if self._end is None and now - self._asked_at >= POLL_S:
            self._asked_at = now
            if not self._is_over(now):
                return None
            self._end = self._how_it_ended()
        return self._end

    def signal(self, number: int) -> None:
        """A job that waits is cancelled; the supervisor of one that runs gets the signal."""
        name = signal.Signals(number).name.removeprefix("SIG")
        ask(["scancel", "--quiet", "--state=PENDING", self.number])
        ask(["scancel", "--quiet", "--batch", f"--signal={name}", self.number])

    def _is_over(self, now: float) -> bool:
        done = ask(["squeue", "--noheader", "--format=%T", f"--jobs={self.number}"])
        if done.returncode != 0:
            # Else the controller does not answer: asked again.
            return "Invalid job id" in done.stderr
        if self._result():
            self._result_at = self._result_at or now
            if now - self._result_at > FINISH_S:
                return True
        return done.stdout.strip() in ("", *ENDS, "COMPLETED", "FAILED")

    def _result(self) -> dict[str, object]:
        result = read_mapping(self.run.result)
        return result if result.get("run_id") == snapshot.run_id(self.run) else {}

    def _how_it_ended(self) -> End:
        deadline = time.monotonic() + 5
        while not (result := self._result()) and time.monotonic() < deadline:
            state = self._facts().get("JobState", "")
            if state in ENDS:
                break
            time.sleep(0.2)  # a shared disk shows it later
        if result:
            code = result.get("exit_code")
            return End(code if isinstance(code, int) else 1)
        facts = self._facts()
        state = facts.get("JobState", "")
        outcome, ending = ENDS.get(state, ("crash", "ended without a result"))
        waited = facts.get("RunTime", "").strip("0:") == "" and bool(facts)
        when = " before it started" if waited else ""
        log = "" if waited else f" (log: {self.run.console_log})"
        cause = f"its Slurm job {self.number} {ending}{when}{log}"
        return End(1, RunFailed(cause), outcome)

    def _facts(self) -> dict[str, str]:
        """The values of ``scontrol show job``, by key."""
        done = ask(["scontrol", "show", "job", self.number, "--oneliner"])
        pairs = (word.partition("=") for word in done.stdout.split() if "=" in word)
        return {key: value for key, _, value in pairs}


def main() -> int:
    """The program of the job: launch and supervise the run of a directory; its exit code."""
    run = RunDir(Path(sys.argv[1]))
    exp, plan = snapshot.load(run), Plan.from_dict(read_json(run.plan))
    # The snapshot was made where the sweep runs.
    names = local_names(plan.hosts)
    hosts = [
        dataclasses.replace(host, is_local=bool({host.name, host.address} & names))
        for host in plan.hosts
    ]
    plan = dataclasses.replace(plan, hosts=tuple(hosts))
    launch = write_launch_files(exp, plan, run)
    return supervise(exp, plan, run, launch=launch).exit_code


if __name__ == "__main__":
    sys.exit(exit_code(main))
