"""Starts a run from a composed experiment, for a single run and for a trial of a sweep.

``python -m llmx`` calls ``run_composed`` once, a sweep calls ``prepare`` for every trial. With
``launch.detach=true`` the supervisor goes on in a session of its own, without the terminal.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from llmx import text as human
from llmx.compose.complete import Composed, check_paths, refusal
from llmx.compose.task_rules import training_notes
from llmx.errors import ConfigError, exit_code
from llmx.lifecycle.knowledge import informed, keep_traces
from llmx.lifecycle.learned import learn
from llmx.lifecycle.preflight import check_inputs
from llmx.plan.choices import compared
from llmx.plan.knowledge import Knowledge
from llmx.redact import HIDDEN
from llmx.run import snapshot
from llmx.run.rundir import RunDir, read_mapping
from llmx.tracking.base import check_packages

if TYPE_CHECKING:
    from llmx.launch.spec import LaunchSpec


def run_composed(
    composed: Composed,
    *,
    overrides: list[str],
    stream: TextIO | None = None,
    config_dir: str | None = None,
    is_trial: bool = False,
) -> int:
    """Write the run directory, then plan only (``dry_run``), or launch and supervise, or submit a
    job that does.

    ``config_dir``: of the user's own groups. ``is_trial``: it is one of a sweep.
    """
    out = stream or sys.stdout
    exp = composed.experiment
    if exp.launch.slurm.submit and not exp.dry_run and not is_trial:
        from llmx.launch import check_launch
        from llmx.lifecycle.batch import submit

        check_launch(exp, composed.plan)
        check_packages(exp.tracking)
        check_inputs(composed)
        return submit(exp, composed.plan, words=overrides, config_dir=config_dir, stream=out)
    composed = _checked(composed, is_trial=is_trial, stream=out)
    launch = _written(composed, overrides=overrides)
    exp, plan = launch.exp, launch.plan
    if not exp.dry_run:
        for line in plan.memory_warnings:
            print(f"! {line}", file=out, flush=True)
        return launched(launch)
    _print_plan(launch, composed.knowledge, overrides=overrides, stream=out, is_written=True)
    return 0


def show_plan(composed: Composed, *, overrides: list[str], stream: TextIO) -> None:
    """Print the plan of an experiment, checked as its run would be; nothing is written."""
    from llmx.launch import check_launch, rank_environment
    from llmx.launch.files import make_spec

    composed = _checked(composed, is_trial=False, stream=stream)
    exp, plan = composed.experiment, composed.plan
    check_launch(exp, plan)
    rank_environment(exp, plan)
    launch = make_spec(exp, plan, RunDir(Path(exp.run_dir)), port=0)
    _print_plan(launch, composed.knowledge, overrides=overrides, stream=stream, is_written=False)


def _print_plan(
    launch: LaunchSpec,
    knowledge: Knowledge,
    *,
    overrides: list[str],
    stream: TextIO,
    is_written: bool,
) -> None:
    from llmx.hardware.compare import problems_here
    from llmx.hardware.survey import space_facts
    from llmx.launch.files import path_problems, render_command
    from llmx.launch.sync import sync_sizes
    from llmx.observe.report.plan_table import print_plan

    exp, plan, run = launch.exp, launch.plan, launch.run_dir
    here = space_facts(str(run.root))
    lacking = problems_here(plan, str(run.root), here)
    plan = replace(plan, notes=(*plan.notes, *path_problems(exp, plan), *lacking))
    print_plan(
        plan,
        exp,
        command=render_command(launch).replace(launch.token, HIDDEN) if is_written else None,
        run_dir=run.root if is_written else None,
        stream=stream,
        traces=knowledge.traces,
        options=compared(exp, plan, knowledge, allows=refusal),
        here=here,
        copied=sync_sizes(launch, run_dir=is_written),
        overrides=overrides,
    )


def prepare(composed: Composed, *, overrides: list[str]) -> LaunchSpec:
    """Check a trial of a sweep and write its run directory; what is to be launched."""
    composed = _checked(composed, is_trial=True, stream=sys.stdout)
    return _written(composed, overrides=overrides)


def _written(composed: Composed, *, overrides: list[str]) -> LaunchSpec:
    """The launch of a checked run, with its snapshot and its files in the run directory."""
    from llmx.launch import rank_environment, write_launch_files

    exp, plan = composed.experiment, composed.plan
    environment = rank_environment(exp, plan)
    run = snapshot.write(
        exp, plan, composed.ds_config, overrides=overrides, environment=environment
    )
    keep_traces(composed)
    return write_launch_files(exp, plan, run)


def _checked(composed: Composed, *, is_trial: bool, stream: TextIO) -> Composed:
    """A run that can be launched, planned with all that is known; prints what was chosen."""
    from llmx.launch import check_launch

    if is_trial and composed.experiment.launch.slurm.submit:
        raise ConfigError(
            "launch.slurm.submit=true: is for a single run. The trials of a sweep are jobs by "
            "themselves with launch=slurm: leave it out."
        )
    # Before anything is written: a secret in launch.env must not reach config.yaml.
    check_launch(composed.experiment, composed.plan)
    check_paths(composed.experiment, composed.plan)
    if not composed.experiment.dry_run:
        if not is_trial:
            for note in training_notes(composed.experiment):
                print(note, file=stream, flush=True)
        check_packages(composed.experiment.tracking)
    notes = check_inputs(composed)
    # A trial of a sweep is one of many, and read by nobody.
    variants = composed.experiment.dry_run and not is_trial
    composed = informed(composed, variants=variants, choose=True, is_trial=is_trial)
    model, size = composed.experiment.model, composed.plan.num_parameters
    if model.init == "scratch" and not composed.experiment.dry_run and not is_trial:
        print(
            f"From scratch: {model.name or model.kind}, {human.count(size) if size else 'its'} "
            "parameters initialised at random. Fine-tune a model: model.path=DIR_OR_HUB_ID",
            file=stream,
            flush=True,
        )
    chosen = composed.plan.chosen
    if chosen is not None and not composed.experiment.dry_run:
        print(f"auto: {' '.join(chosen.words)}: {chosen.problem or chosen.reason}", file=stream)
    return replace(composed, plan=replace(composed.plan, notes=(*composed.plan.notes, *notes)))


def launched(launch: LaunchSpec) -> int:
    """Run what is ready to be launched, here or detached; returns the exit code."""
    if launch.exp.launch.detach:
        return detach(launch.run_dir, lambda: supervised(launch))
    return supervised(launch)


def supervised(launch: LaunchSpec) -> int:
    """Supervise a run to its end; returns the exit code. If it ends well, it teaches
    (``learned.json``)."""
    from llmx.launch import supervise

    exp, run = launch.exp, launch.run_dir
    first_step = run.newest_step()
    if exp.launch.slurm.requeue:  # read now: the disk may not answer when the run ends
        from llmx.lifecycle.batch import requeue_job
    result = supervise(exp, launch.plan, run, launch=launch)
    if result.exit_code == 0:
        learn(run, exp)
    elif exp.launch.slurm.requeue:
        requeue_job(run, result, first_step=first_step, stream=sys.stdout)
    return result.exit_code


def detach(run: RunDir, supervise: Callable[[], int]) -> int:
    """Run ``supervise`` in another process; returns as soon as that one holds the run, or with its
    exit code where it ends before that."""
    run.logs.mkdir(parents=True, exist_ok=True)
    earlier = run.console_log.stat().st_size if run.console_log.exists() else 0
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or both processes would print what is in it
    pid = os.fork()
    if pid == 0:
        os.setsid()  # a terminal that closes is not for it
        write_to_console_log(run)
        code = exit_code(supervise)
        sys.stdout.flush()
        os._exit(code)
    while read_mapping(run.supervisor_lock).get("pid") != pid:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            text = run.console_log.read_bytes()[earlier:].decode("utf-8", "replace")
            print(text, end="", file=sys.stderr)
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    where = shlex.quote(str(run.root))
    print(f"The run goes on as process {pid} on {socket.gethostname()}.")
    print(f"  its console:    python -m llmx attach {where}")
    print(f"  its state:      python -m llmx status {where}")
    print(f"  save and end:   python -m llmx stop {where}")
    return 0


def write_to_console_log(run: RunDir) -> None:
    """Send all output of this process to the console log, and read no input."""
    log = os.open(run.console_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
