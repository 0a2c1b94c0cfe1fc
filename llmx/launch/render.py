"""Writes what is about to be run: ``hostfile``, ``ssh_config``, ``ds_env``, ``command.txt``.

``python -m llmx dry_run=true`` writes them and launches nothing; ``command.txt`` can be
pasted into a shell.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Mapping

from llmx.config.addresses import name_problem
from llmx.config.schema import Experiment
from llmx.errors import ConfigError, LaunchError
from llmx.launch.environment import check_config_env, launcher_env, rank_env
from llmx.launch.hostfile import HostSlots, render_hostfile
from llmx.launch.record import run_id
from llmx.launch.spec import LaunchSpec, make_spec
from llmx.launch.ssh import render_ssh_config
from llmx.launch.transports import transport_of
from llmx.launch.transports.local import visible_devices
from llmx.launch.transports.slurm import render_slurm_hosts
from llmx.plan.types import Plan
from llmx.rundir import RunDir, write_text

_READ_BY_SHELLS = re.compile(r"""[\s'"`$&;()<>|*?{}%\\]""")
DEFAULT_PORT = 29500
"""Shown in a dry run; a real run takes a free one."""


def check(exp: Experiment, plan: Plan) -> None:
    """ConfigError for everything about launching that is known before anything is touched."""
    problems = transport_of(plan.transport).problems(exp, plan)
    problems += check_config_env(exp.hardware.env, key="hardware.env")
    problems += check_config_env(exp.launch.env, key="launch.env")
    seen: set[str] = set()
    for host in plan.hosts:
        problem = name_problem(host.name)
        if problem:
            problems.append(f"host {host.name!r}: {problem}.")
        if host.slots < 1:
            problems.append(f"host {host.name!r}: slots={host.slots}; a host has at least one.")
        if host.name in seen:
            problems.append(f"host {host.name!r} is named twice; name it once with all its slots.")
        seen.add(host.name)
    for path in exp.launch.sync_extra:
        if not path.startswith("/"):
            problems.append(f"launch.sync_extra: {path!r} is not an absolute path.")
    if plan.transport != "local":
        problems += _travelling("run_dir", exp.run_dir)
        problems += _travelling("launch.python", exp.launch.python or sys.executable)
    if problems:
        raise ConfigError("\n".join(problems))


def _travelling(key: str, path: str) -> list[str]:
    """DeepSpeed writes paths into the command for the other hosts as they are."""
    found = _READ_BY_SHELLS.search(path)
    if found is None:
        return []
    return [
        f"{key}={path!r}: pdsh, mpirun or a shell on the other hosts would read {found[0]!r} as "
        "more than a letter of the path; choose one without it."
    ]


def check_programs(exp: Experiment, plan: Plan) -> None:
    """LaunchError naming the package of each program that this transport misses here."""
    wanted = list(transport_of(plan.transport).programs)
    if exp.launch.sync == "rsync" and plan.transport != "local":
        wanted.append(("rsync", "rsync"))
    missing = [(name, package) for name, package in wanted if shutil.which(name) is None]
    if missing:
        names = ", ".join(f'"{name}"' for name, _ in missing)
        packages = " ".join(sorted({package for _, package in missing}))
        raise LaunchError(
            f"launch.transport={plan.transport} needs {names} on this machine, which is not on "
            f"PATH; `apt-get install {packages}` (Debian, Ubuntu), or choose another transport."
        )


def render(
    exp: Experiment,
    plan: Plan,
    run_dir: RunDir,
    port: int | None = None,
    *,
    token: str | None = None,
) -> LaunchSpec:
    """Check and write everything of one launch; returns what it was rendered from."""
    check(exp, plan)
    port = port or exp.launch.master_port or DEFAULT_PORT
    spec = make_spec(exp, plan, run_dir, port=port, token=token or run_id(run_dir))
    write_rendered(spec)
    return spec


def write_rendered(spec: LaunchSpec) -> None:
    """Write the files of a spec into its run directory."""
    run_dir = spec.run_dir
    for path, text in rendered_files(spec).items():
        write_text(run_dir.root / path, text, mode=0o600 if path == "ds_env" else 0o644)


def rendered_files(spec: LaunchSpec) -> dict[str, str]:
    """File name in the run directory -> text. Pure."""
    transport = transport_of(spec.plan.transport)
    files = {
        "hostfile": render_hostfile(_hosts(spec)),
        "ssh_config": render_ssh_config(spec.plan.hosts),
        "ds_env": transport.ds_env(spec, rank_env(spec)),
        "command.txt": render_command(spec),
    }
    if spec.plan.transport == "slurm":
        files["slurm_hosts"] = render_slurm_hosts(spec)
    return files


def runner_env(spec: LaunchSpec) -> dict[str, str]:
    """The whole environment of the ``deepspeed`` process: built up, never inherited."""
    transport = transport_of(spec.plan.transport)
    return {**launcher_env(spec), **rank_env(spec), **transport.env(spec)}


def render_argv(argv: list[str]) -> str:
    """One line for a shell: ``shlex.split(render_argv(argv)) == argv``."""
    return shlex.join(argv)


def render_command(spec: LaunchSpec) -> str:
    """``command.txt``: what is run, to be pasted into a shell on this machine."""
    transport = transport_of(spec.plan.transport)
    env = {**rank_env(spec), **transport.env(spec)}
    return (
        "# What llmx runs for this run. Paste it into a shell to run it again by hand.\n"
        f"cd {shlex.quote(str(spec.run_dir.root))}\n"
        f"{_exports(env)}"
        f"{render_argv(transport.argv(spec))}\n"
    )


def _exports(env: Mapping[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(env.items()))


def _hosts(spec: LaunchSpec) -> tuple[HostSlots, ...]:
    """As planned; with chosen GPUs on this machine, DeepSpeed wants slots up to the last one."""
    if spec.plan.transport != "local":
        return spec.host_slots
    devices = visible_devices(spec)
    if devices is None:
        return spec.host_slots
    host = spec.plan.hosts[0]
    return (HostSlots(host.name, max(devices) + 1),)
