"""The agents of llmx start the ranks of their hosts (``ssh``, ``local``): the default. That needs
nothing but ssh and Python, each host gets a command of its own, and a rank's exit code comes back.

``launch.transport=ssh dry_run=true``; ``RUN_DIR/command.txt`` has commands for a shell, by which
DeepSpeed's launcher on each host starts the same ranks.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmx.config.schema import Experiment, HardwareConfig, LaunchConfig
from llmx.config.validate import RESERVED
from llmx.launch.environment import configured_env, launcher_env, rank_env, render_exports
from llmx.launch.spec import LaunchSpec
from llmx.launch.ssh_config import ssh_argv
from llmx.launch.transports import Transport, deepspeed_argv, module_argv
from llmx.plan.types import Plan


class SshTransport(Transport):
    """Ranks as children of the agents."""

    name = "ssh"
    programs: tuple[tuple[str, str], ...] = (("ssh", "openssh-client"),)
    agents_start_ranks = True
    ends_by_itself = False

    def ds_env(self, env: Mapping[str, str]) -> str:
        return "".join(f"{name}={value}\n" for name, value in env.items())

    def env(self, spec: LaunchSpec) -> dict[str, str]:
        return {}

    def start_message(self, spec: LaunchSpec, host: int) -> dict[str, Any]:
        """What the agent of a host needs to start its ranks (``Agent.do_start``)."""
        is_local = spec.plan.hosts[host].is_local and not spec.host(host).enter
        env, python = rank_env(spec, host), spec.python_on(host)
        return {
            "argv": [python, "-u", "-m", spec.worker, spec.path_on(host, spec.run_dir.root)],
            "env": {**launcher_env(spec), **env} if is_local else env,
            "fixed": sorted({*configured_env(spec, host), *RESERVED}),
            "first": {"PATH": str(Path(python).parent)}
            | {name: env[name] for name in ("PYTHONPATH",) if name in env},
            "inherit": not is_local,
            "ranks": rank_variables(spec, host),
        }

    def commands(self, spec: LaunchSpec) -> str:
        blocks = []
        for index, host in enumerate(spec.plan.hosts):
            config = spec.host(index)
            shell = [*config.enter, "bash" if config.setup else "sh", "-s"]
            setup = f". {shlex.quote(config.setup)}\n" if config.setup else ""
            words = shell if host.is_local else ssh_argv(spec.run_dir.ssh_config, host.name, shell)
            blocks.append(
                f"{shlex.join(words)} <<'END' &\n"
                f"cd {shlex.quote(spec.path_on(index, spec.run_dir.root))} || exit\n"
                f"{render_exports(rank_env(spec, index))}{setup}"
                f"exec {shlex.join(_node_argv(spec, index))}\n"
                "END\n"
            )
        return "".join(blocks) + "wait\n"


class LocalTransport(SshTransport):
    """All ranks on this machine, started by its agent. ``command.txt`` has the ``deepspeed``
    command, whose two launchers each import torch first."""

    name = "local"
    programs = ()
    is_remote = False
    has_agents = False

    def problems(self, launch: LaunchConfig, hardware: HardwareConfig) -> Iterator[str]:
        yield from super().problems(launch, hardware)
        if len(hardware.hosts) > 1:
            yield (
                f"launch.transport=local starts the ranks of this machine only, but there are "
                f"{len(hardware.hosts)} hosts. Use launch.transport=ssh, pdsh, openmpi or slurm."
            )

    def cores(self, exp: Experiment, plan: Plan) -> tuple[int | None, int | None]:
        return len(os.sched_getaffinity(0)), None

    def argv(self, spec: LaunchSpec) -> list[str]:
        return deepspeed_argv(spec, module_argv(spec))

    def commands(self, spec: LaunchSpec) -> str:
        return Transport.commands(self, spec)


def rank_variables(spec: LaunchSpec, host: int) -> dict[int, dict[str, str]]:
    """The ranks of a host, and what DeepSpeed's launcher would set for each."""
    plan = spec.plan
    ranks = [rank.rank for rank in plan.ranks if rank.host == host]
    common = {
        "WORLD_SIZE": plan.world_size,
        "LOCAL_SIZE": len(ranks),
        "CROSS_RANK": host,
        "CROSS_SIZE": len(plan.hosts),
    }
    return {
        rank: {
            name: str(value)
            for name, value in {**common, "RANK": rank, "LOCAL_RANK": local_rank}.items()
        }
        for local_rank, rank in enumerate(ranks)
    }


def _node_argv(spec: LaunchSpec, host: int) -> list[str]:
    """DeepSpeed's launcher of one host."""
    address, port = spec.rendezvous(host)
    world = {host.name: list(range(host.slots)) for host in spec.plan.hosts}
    encoded = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
    return [
        spec.python_on(host),
        "-m",
        "deepspeed.launcher.launch",
        f"--world_info={encoded}",
        f"--node_rank={host}",
        f"--master_addr={address}",
        f"--master_port={port}",
        *module_argv(spec)[:-1],
        spec.path_on(host, spec.run_dir.root),
    ]
