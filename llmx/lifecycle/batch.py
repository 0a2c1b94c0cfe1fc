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
    run.logs.mkdir(parents=True, exist_ok=True)
    write_text(run.root / SCRIPT, text, mode=0o755)
    done = ask(["sbatch", "--parsable", str(run.root / SCRIPT)])
    number = done.stdout.strip().partition(";")[0]
    if done.returncode != 0 or not number.isdecimal():
        message = done.stderr.strip() or done.stdout.strip() or "it said nothing"
        raise LaunchError(
            f"sbatch refused {run.root / SCRIPT}: {message}. Change launch.slurm.* (partition, "
            "account, time_limit, gres, sbatch_args), or edit the script and submit it yourself."
        )
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


def batch_script(
    exp: Experiment, plan: Plan, *, words: Sequence[str], config_dir: str | None
) -> str:
    """The script that starts and continues the run of a command. ``words``: its overrides."""
    run = RunDir(Path(exp.run_dir))
    again = ["resume", str(run.root)]
    hosts = plan.hosts
    if exp.hardware.kind == "slurm":
        again += ["hardware=slurm", f"hardware.device={exp.hardware.device}"]
        again += [f"hardware.slots={hosts[0].slots}"]
    options = [] if config_dir is None else ["--config-dir", config_dir]
    first = [word for word in words if not word.startswith(("run_dir=", "launch.slurm.submit="))]
    first += [f"run_dir={run.root}", "launch.slurm.submit=false", "launch.slurm.requeue=true"]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in _options(exp, plan, run)),
        "# Starts the run, or continues it where it has begun. Written by llmx.",
    ]
    if root := code_root():
        lines.append(f"export PYTHONPATH={shlex.quote(root)}${{PYTHONPATH:+:$PYTHONPATH}}")
    lines += [
        f"if [ -e {shlex.quote(str(run.identity))} ]; then",
        f"  set -- {shlex.join([*again, *options])}",
        "else",
        f"  set -- {shlex.join([*first, *options])}",
        "fi",
        "# exec: the signal before the time limit must reach python.",
        f'exec {shlex.quote(exp.launch.python or sys.executable)} -m llmx "$@"',
    ]
    return "\n".join(lines) + "\n"


def _options(exp: Experiment, plan: Plan, run: RunDir) -> list[str]:
    """The options of ``sbatch``, quoted as it reads them in a script."""
    hosts, slurm = plan.hosts, exp.launch.slurm
    signal_s = min(max(SIGNAL_S, 60 + math.ceil(exp.launch.stop_grace_s)), int(BEFORE_LIMIT_S))
    options = [
        f"--job-name=llmx-{exp.name}",
        f"--nodes={len(hosts)}",
        f"--ntasks-per-node={hosts[0].slots}",
        f"--chdir={Path.cwd()}",
        # % begins a pattern of Slurm.
        f"--output={str(run.console_log).replace('%', '%%')}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{signal_s}",
    ]
    if exp.hardware.kind != "slurm":
        options.append(f"--nodelist={','.join(host.name for host in hosts)}")
    if slurm.cpus_per_task:
        options.append(f"--cpus-per-task={slurm.cpus_per_task}")
    if plan.on_gpus:
        options.append(gpus_option(slurm, hosts[0].slots))
    return [
        shlex.quote(option) for option in (*options, *chosen_options(slurm), *slurm.sbatch_args)
    ]


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
