"""The files of a launch: ``hostfile``, ``ssh_config``, ``ds_env``, ``command.txt``.

``python -m llmx dry_run=true`` writes them and launches nothing; ``command.txt`` can be pasted into
a shell.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import sys
from pathlib import Path

from llmx.config.hardware_rules import no_ranks_there
from llmx.config.schema import Experiment, LaunchConfig
from llmx.errors import ConfigError, LaunchError
from llmx.hardware.resolve import render_hostfile
from llmx.launch.environment import COPIED_NAMES, launcher_env, rank_env
from llmx.launch.spec import LaunchSpec, code_root
from llmx.launch.ssh_config import render_ssh_config
from llmx.launch.transports import transport_of
from llmx.plan.types import Plan
from llmx.redact import is_secret
from llmx.run.rundir import RunDir, write_text
from llmx.run.snapshot import run_token

_SPECIAL_TO_SHELLS = re.compile(r"""[\s'"`$&;()<>|*?{}%\\]""")
DEFAULT_PORT = 29500
"""Shown in a dry run; a run takes a free one."""


EXAMPLES = frozenset({"a100x2_v100x2", "a800x2_n7"})
"""Options of ``hardware`` that show how to write one: their hosts are 10.0.0.1, 10.0.0.2, ..."""
EXAMPLE_S = 1.0
"""Time for a host at such an address to answer: somebody may have hosts there."""


def example_problems(exp: Experiment, plan: Plan) -> list[str]:
    """Hosts of an example, where no sshd answers on the first two."""
    addresses = [f"10.0.0.{number}" for number in range(1, len(plan.hosts) + 1)]
    hosts = plan.hosts
    if exp.hardware.name not in EXAMPLES or [host.address for host in hosts] != addresses:
        return []
    for host in hosts[:2]:
        place = (host.address, host.ssh_port)
        with (
            contextlib.suppress(OSError),
            socket.create_connection(place, timeout=EXAMPLE_S) as answer,
        ):
            if answer.recv(4) == b"SSH-":  # a gateway may open connections to any address
                return []
    return [
        f"hardware={exp.hardware.name}: {addresses[0]} to {addresses[-1]} are the addresses of an "
        "example, and no sshd answers there. `python -m llmx plan` with the same words works "
        "without hosts. To train, name your hosts: 'hardware.hosts=[{name: gpu-1, address: "
        f"192.168.0.11, slots: {hosts[0].slots}, device: {hosts[0].device}}}, ...]', or write them "
        "into DIR/hardware/mine.yaml and add --config-dir DIR hardware=mine (python -m llmx help "
        "hardware.hosts). hardware=local is this machine."
    ]


def check_launch(exp: Experiment, plan: Plan) -> None:
    """ConfigError for what would fail with this plan's transport, before anything is written.

    The rules that need no plan are in ``llmx.config.validate``.
    """
    problems = [] if exp.dry_run else [*example_problems(exp, plan), *path_problems(exp, plan)]
    if not exp.dry_run and (problem := no_ranks_there(plan.accelerator)):
        problems.append(problem)
    problems += [
        f"the environment variable {name} holds a password or a token, which every user of a host "
        "could read in the ranks' environment. Unset it, or set it to an address without "
        "credentials; download a private model or data set first and give its path."
        for name in sorted(COPIED_NAMES)
        if is_secret("", os.environ.get(name, ""))
    ]
    if exp.hardware.kind == "slurm" and not exp.dry_run and not exp.launch.slurm.submit:
        problems.append(
            "hardware=slurm: there is no allocation here (SLURM_JOB_ID is not set). Start in one "
            "(salloc, sbatch), or set launch.slurm.submit=true."
        )
    if not transport_of(plan.transport).is_remote:
        problems += [
            f'launch.transport={plan.transport}: "{host.name}" is another machine. Use '
            "launch.transport=ssh."
            for host in plan.hosts
            if not host.is_local
        ]
    problems += [
        f"{host.name}: root is for another machine, or for a container (enter). Leave it out."
        for config, host in zip(exp.hardware.hosts, plan.hosts, strict=False)
        if host.is_local and config.root and not config.enter
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def path_problems(exp: Experiment, plan: Plan) -> list[str]:
    """Paths that a launch cannot use. A plan only warns of them: it may be made in another place
    than where it is launched."""
    if transport_of(plan.transport).agents_start_ranks:
        return []
    # DeepSpeed writes paths into the command for the other hosts without quotes.
    paths = {"run_dir": exp.run_dir, "launch.python": exp.launch.python or sys.executable}
    special = {key: _SPECIAL_TO_SHELLS.search(path) for key, path in paths.items()}
    return [
        f"{key}={paths[key]!r}: pdsh, mpirun or a shell on the other hosts would interpret "
        f"{match[0]!r}. Use a path without it."
        for key, match in special.items()
        if match is not None
    ]


def check_programs(launch: LaunchConfig, plan: Plan) -> None:
    """LaunchError with the package of each program that the transport needs and that is missing."""
    transport = transport_of(plan.transport)
    programs = list(transport.programs)
    if launch.sync == "rsync" and transport.is_remote:
        programs.append(("rsync", "rsync"))
    missing = [(name, package) for name, package in programs if shutil.which(name) is None]
    if missing:
        names = ", ".join(f'"{name}"' for name, _ in missing)
        packages = " ".join(sorted({package for _, package in missing}))
        raise LaunchError(
            f"launch.transport={plan.transport} needs {names} on this machine, not found on PATH. "
            f"Install with `apt-get install {packages}` (Debian, Ubuntu), or use another transport."
        )


def make_spec(
    exp: Experiment,
    plan: Plan,
    run_dir: RunDir,
    *,
    port: int,
    token: str | None = None,
    worker: str = "llmx.worker",
) -> LaunchSpec:
    """The spec of a launch from this machine, with its current environment."""
    cores, cpus_per_task = transport_of(plan.transport).cores(exp, plan)
    return LaunchSpec(
        exp=exp,
        plan=plan,
        run_dir=run_dir,
        port=port,
        token=token or secrets.token_hex(16),
        python=exp.launch.python or sys.executable,
        code_root=code_root(),
        worker=worker,
        environ=dict(os.environ),
        cores=cores,
        cpus_per_task=cpus_per_task,
        interfaces=tuple(host.interface for host in plan.hosts),
    )


def rank_environment(exp: Experiment, plan: Plan) -> dict[str, str]:
    """The environment that a launch from here would give to a rank.

    Raises ConfigError for a variable that the transport cannot pass on.
    """
    environment = rank_env(make_spec(exp, plan, RunDir(Path(exp.run_dir)), port=0, token="-"))
    transport_of(plan.transport).ds_env(environment)
    return environment


def write_launch_files(exp: Experiment, plan: Plan, run_dir: RunDir) -> LaunchSpec:
    """Check a launch and write its files; returns the spec from which they were rendered."""
    check_launch(exp, plan)
    port = exp.launch.master_port or DEFAULT_PORT
    spec = make_spec(exp, plan, run_dir, port=port, token=run_token(run_dir))
    write_rendered(spec)
    return spec


def write_rendered(spec: LaunchSpec) -> None:
    """Write the files of a spec into its run directory."""
    for name, text in rendered_files(spec).items():
        mode = 0o600 if name in ("ds_env", "command.txt") else 0o644
        write_text(spec.run_dir.root / name, text, mode=mode)


def rendered_files(spec: LaunchSpec) -> dict[str, str]:
    """File name in the run directory -> text. Pure."""
    transport = transport_of(spec.plan.transport)
    files = {
        "hostfile": render_hostfile(transport.hostfile(spec)),
        "ssh_config": render_ssh_config([*spec.plan.hosts, *spec.plan.rollout_hosts]),
        "ds_env": transport.ds_env(rank_env(spec)),
        "command.txt": render_command(spec),
    }
    return files | transport.further_files(spec)


def runner_env(spec: LaunchSpec) -> dict[str, str]:
    """The whole environment of the ``deepspeed`` process: built from lists, never inherited."""
    transport = transport_of(spec.plan.transport)
    return {**launcher_env(spec), **rank_env(spec), **transport.env(spec)}


def render_command(spec: LaunchSpec) -> str:
    """``command.txt``: the command of the run, to be pasted into a shell on this machine."""
    return (
        "# The command of this run. Paste it into a shell to run it again by hand.\n"
        + transport_of(spec.plan.transport).commands(spec)
    )
