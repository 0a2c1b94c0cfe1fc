"""A run as a batch job of Slurm: the script, its submission, and the requeue before its limit.

    python -m llmx experiment=... hardware=slurm ... launch.slurm.submit=true

The script starts the typed command inside the allocation, and continues its run when the job is
started again: after ``requeue_job``, a preemption, the loss of a node, or ``sbatch job.sh``.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from llmx.config import Experiment
from llmx.errors import ConfigError, LaunchError
from llmx.hardware.slurm import ask, read_allocation
from llmx.launch.spec import code_root
from llmx.launch.supervision.outcome import Result
from llmx.launch.supervision.signals import BEFORE_LIMIT_S
from llmx.launch.transports.slurm import chosen_options, gpus_option
from llmx.plan.types import Plan
from llmx.run.rundir import RunDir, write_text
from llmx.run.snapshot import failed_before_a_step

SCRIPT = "job.sh"
SIGNAL_S = 120
"""The least time between Slurm's signal and the time limit."""


def submit(
    exp: Experiment, plan: Plan, *, words: Sequence[str], config_dir: str | None, stream: TextIO
) -> int:
    """Write ``RUN_DIR/job.sh`` and submit it; LaunchError where Slurm refuses it."""
    run = RunDir(Path(exp.run_dir))
    job = os.environ.get("SLURM_JOB_ID")
    if job:
        raise ConfigError(
            f"launch.slurm.submit=true inside the allocation of job {job}: leave it out to start "
            "there, or submit from a shell outside of it."
        )
    if run.config.exists() and not failed_before_a_step(run):
        raise ConfigError(
            f"run_dir={run.root} already contains a run. To continue it as a job: sbatch "
            f"{shlex.quote(str(run.root / SCRIPT))}; else choose another directory."
        )
    text = batch_script(exp, plan, words=words, config_dir=config_dir)
    number = queue_script(run, text)
    where = shlex.quote(str(run.root))
    for line in (
        f"Submitted as Slurm job {number}; the run directory is {run.root}",
        f"  its queue:      squeue --job {number}",
        f"  its state:      python -m llmx status {where}   (once it runs)",
        f"  its console:    tail -F {shlex.quote(str(run.console_log))}",
        f"  save and end:   scancel --batch --signal=TERM {number}",
        f"  continue it:    sbatch {shlex.quote(str(run.root / SCRIPT))}",
    ):
        print(line, file=stream)
    return 0


def queue_script(run: RunDir, text: str) -> str:
    """Write ``RUN_DIR/job.sh`` and put it into the queue; the number of its job.

    LaunchError where Slurm refuses it.
    """
    path = run.root / SCRIPT
    run.logs.mkdir(parents=True, exist_ok=True)
    write_text(path, text, mode=0o755)
    done = ask(["sbatch", "--parsable", str(path)])
    number = done.stdout.strip().partition(";")[0]
    if done.returncode != 0 or not number.isdecimal():
        message = done.stderr.strip() or done.stdout.strip() or "it said nothing"
        raise LaunchError(
            f"sbatch refused {path}: {message}. Change launch.slurm.* (partition, account, "
            "time_limit, gres, sbatch_args), or edit the script and submit it yourself."
        )
    return number


def script_head(options: Sequence[str], *, root: str | None) -> list[str]:
    """The first lines of a script: what it asks of Slurm, and the path of the code where it is not
    installed (``root``)."""
    directives = (f"#SBATCH {shlex.quote(option)}" for option in options)
    path = f"export PYTHONPATH={shlex.quote(root or '')}${{PYTHONPATH:+:$PYTHONPATH}}"
    return ["#!/bin/bash", *directives, *([path] if root else [])]


def job_options(
    exp: Experiment, plan: Plan, run: RunDir, *, name: str, cpus_per_task: int | None
) -> list[str]:
    """The options of ``sbatch`` for the hosts of a plan, with a task for each rank."""
    slots = plan.hosts[0].slots
    options = [
        f"--job-name={name}",
        f"--nodes={len(plan.hosts)}",
        f"--ntasks-per-node={slots}",
        # % begins a pattern of Slurm.
        f"--output={str(run.console_log).replace('%', '%%')}",
        "--open-mode=append",
    ]
    if cpus_per_task:
        options.append(f"--cpus-per-task={cpus_per_task}")
    if plan.on_gpus:
        options.append(gpus_option(exp.launch.slurm, slots))
    return [*options, *chosen_options(exp.launch.slurm)]


def named_hosts(plan: Plan) -> str:
    """The option that asks for the very hosts of a plan."""
    return f"--nodelist={','.join(host.name for host in plan.hosts)}"


def batch_script(
    exp: Experiment, plan: Plan, *, words: Sequence[str], config_dir: str | None
) -> str:
    """The script that starts and continues the run of a command. ``words``: its overrides."""
    run = RunDir(Path(exp.run_dir))
    again = ["resume", str(run.root)]
    signal_s = min(max(SIGNAL_S, 60 + math.ceil(exp.launch.stop_grace_s)), int(BEFORE_LIMIT_S))
    sbatch_options = [f"--chdir={Path.cwd()}", "--requeue", f"--signal=B:USR1@{signal_s}"]
    if exp.hardware.kind == "slurm":
        again += ["hardware=slurm", f"hardware.device={exp.hardware.device}"]
        again += [f"hardware.slots={plan.hosts[0].slots}"]
    else:
        sbatch_options.append(named_hosts(plan))
    slurm = exp.launch.slurm
    sbatch_options += job_options(
        exp, plan, run, name=f"llmx-{exp.name}", cpus_per_task=slurm.cpus_per_task
    )
    options = [] if config_dir is None else ["--config-dir", config_dir]
    first = [word for word in words if not word.startswith(("run_dir=", "launch.slurm.submit="))]
    first += [f"run_dir={run.root}", "launch.slurm.submit=false", "launch.slurm.requeue=true"]
    lines = script_head([*sbatch_options, *slurm.sbatch_args], root=code_root())
    lines += [
        "# Starts the run, or continues it where it has begun. Written by llmx.",
        f"if [ -e {shlex.quote(str(run.identity))} ]; then",
        f"  set -- {shlex.join([*again, *options])}",
        "else",
        f"  set -- {shlex.join([*first, *options])}",
        "fi",
        "# exec: the signal before the time limit must reach python.",
        f'exec {shlex.quote(exp.launch.python or sys.executable)} -m llmx "$@"',
    ]
    return "\n".join(lines) + "\n"


def requeue_job(run: RunDir, result: Result, *, first_step: int, stream: TextIO) -> None:
    """Put this job back into the queue if its time limit ended the run. ``first_step``: where the
    job began; without a checkpoint after it, it would begin there forever."""
    job = os.environ.get("SLURM_JOB_ID")
    # SIGUSR1 is the signal that the script asks for; SIGTERM is a user's, or a preemption's.
    if not job or result.signal != "SIGUSR1":
        return
    if result.stopped_by == "scheduler":  # before Slurm 23, jobs are not told their end
        allocation = read_allocation(job)
        ends_at = None if allocation is None else allocation.ends_at
        if ends_at is None or ends_at - time.time() > BEFORE_LIMIT_S:
            return
    saved = run.newest_step()
    if saved <= first_step:
        print(
            f"not requeued: job {job} saved no checkpoint after step {first_step}, and would not "
            "get further. Raise launch.slurm.time_limit.",
            file=stream,
            flush=True,
        )
        return
    print(f"requeued: job {job} continues from step {saved}", file=stream, flush=True)
    done = ask(["scontrol", "requeue", job])
    if done.returncode != 0:
        print(
            f"! not requeued: {done.stderr.strip()}. To continue: sbatch {run.root / SCRIPT}",
            file=stream,
            flush=True,
        )
