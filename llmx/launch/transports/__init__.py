"""The transports, which start ranks on hosts; here their common part.

``local``: this machine; ``ssh``: the agents start ranks; ``pdsh``: ssh to every host in parallel;
``openmpi``: ``mpirun``; ``slurm``: ``srun``; ``external``: another program has started the
processes. Without agents that start the ranks, the argv and the environment of ``deepspeed`` are
rendered from a ``LaunchSpec`` alone. ``llmx.config.plugins`` lists them; an installed package can
add one.

``python -m llmx launch.transport=openmpi hardware=a100x2_v100x2 dry_run=true`` shows it.
"""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from llmx.config.by_host import keys_of
from llmx.config.plugins import TRANSPORTS
from llmx.config.schema import Experiment, HardwareConfig, LaunchConfig
from llmx.hardware.resolve import HostSlots
from llmx.launch.environment import rank_env, render_ds_env, render_exports
from llmx.launch.spec import LaunchSpec
from llmx.plan.types import Plan


class Transport:
    """One way of starting ranks on hosts. Stateless: everything comes from the arguments."""

    name: str
    programs: tuple[tuple[str, str], ...] = ()
    """What must be on PATH of this machine: (program, Debian package)."""
    is_remote = True
    """Whether it starts ranks on other hosts, too."""
    has_agents = True
    """Whether the supervisor starts an agent on every other host over ssh."""
    agents_start_ranks = False
    """Whether these start the ranks, instead of ``argv``."""
    ends_by_itself = True
    """Whether the launcher is waited for after the last rank has exited: it removes files of its
    own. DeepSpeed's leaves nothing, and takes two to three seconds to notice."""
    ds_env_for_shell = True
    """Whether a shell on the other host reads the values of ``ds_env``."""
    allocates = False
    """Whether a scheduler gives each run cores and GPUs of its own, which no run can choose."""
    restarts = True
    """Whether another attempt can be started; else whoever started the ranks starts them again."""

    def problems(self, launch: LaunchConfig, hardware: HardwareConfig) -> Iterator[str]:
        """Rules of the config that are broken: value, rule and fix."""
        for host in () if self.agents_start_ranks else hardware.hosts:
            if keys := keys_of(host):
                yield (
                    f"launch.transport={self.name} starts the same command on every host, and "
                    f"{host.name} has {', '.join(keys)}. Use launch.transport=ssh."
                )
        if hardware.reach and not self.agents_start_ranks:
            yield (
                f"launch.transport={self.name} gives every rank the same address, and rank 0 "
                f"cannot use hardware.reach={hardware.reach} itself. Use launch.transport=ssh."
            )
        elif hardware.reach and not launch.master_port:
            yield (
                f"hardware.reach={hardware.reach} must lead to a port that is known. Set "
                "launch.master_port to the port of the first host to which it is forwarded."
            )
        chosen = [host.name for host in hardware.hosts if host.gpus]
        if chosen and self.allocates:
            yield (
                f"launch.transport={self.name} chooses the GPUs of a host itself, and {chosen[0]} "
                "has gpus. Leave them out, or use launch.transport=ssh."
            )

    def host_problems(self, spec: LaunchSpec) -> list[str]:
        """Hosts on which no rank can be started, where that is known without an agent there: value,
        rule and fix."""
        return []

    def cores(self, exp: Experiment, plan: Plan) -> tuple[int | None, int | None]:
        """CPU cores of each host and of a rank, where they are known on this machine."""
        return None, None

    def is_queued(self, line: str) -> bool | None:
        """Whether the run waits, by this line of the launcher's log, for an allocation of its
        hosts. None where it says nothing of it."""
        return None

    def fixed_port(self, spec: LaunchSpec) -> int | None:
        """The port of the rendezvous where it is given from outside; else None."""
        return None

    def release(self, spec: LaunchSpec) -> None:
        """What is to be done right before the command starts; may raise LaunchError."""

    def argv(self, spec: LaunchSpec) -> list[str]:
        """The ``deepspeed`` command, with all of its arguments."""
        raise NotImplementedError

    def env(self, spec: LaunchSpec) -> dict[str, str]:
        """Variables that the transport adds to the environment of ``deepspeed``."""
        return {"DS_ENV_FILE": str(spec.run_dir.ds_env)}

    def ds_env(self, env: Mapping[str, str]) -> str:
        """The text of ``RUN_DIR/ds_env`` for the environment of a rank."""
        return render_ds_env(env, shell=self.ds_env_for_shell, transport=self.name)

    def hostfile(self, spec: LaunchSpec) -> Iterable[HostSlots]:
        """The lines of ``RUN_DIR/hostfile``."""
        return [HostSlots(host.name, host.slots) for host in spec.plan.hosts]

    def start_message(self, spec: LaunchSpec, host: int) -> dict[str, Any]:
        """What the agent of a host is sent to start its ranks (``agents_start_ranks``)."""
        raise NotImplementedError

    def commands(self, spec: LaunchSpec) -> str:
        """The text of ``command.txt``: shell commands for this machine that run the ranks."""
        exports = render_exports({**rank_env(spec), **self.env(spec)})
        return f"cd {shlex.quote(str(spec.run_dir.root))}\n{exports}{shlex.join(self.argv(spec))}\n"

    def further_files(self, spec: LaunchSpec) -> dict[str, str]:
        """Files of the run directory that only this transport needs: name -> text."""
        return {}

    def cancel(self, spec: LaunchSpec, *, force: bool) -> list[list[str]]:
        """Commands for this machine that end ranks which no agent reaches: with SIGTERM, or
        (``force``) with SIGKILL."""
        return []

    def signal(self, spec: LaunchSpec, name: str) -> list[list[str]]:
        """Commands for this machine that send ``SIG<name>`` to ranks which no agent reaches."""
        return []


@functools.cache
def transport_of(name: str) -> Transport:
    """The transport of ``plan.transport`` or ``launch.transport``; ``auto`` is most like
    ``ssh``."""
    transport: Transport = TRANSPORTS.load("ssh" if name == "auto" else name)()
    return transport


def deepspeed_argv(spec: LaunchSpec, launcher: list[str]) -> list[str]:
    """``deepspeed`` with every value explicit that it would guess otherwise.

    Given a hostfile, DeepSpeed checks its first host over ssh with the user's own settings, unless
    told not to; the address and the port would be ``hostname -I`` and 29500.
    """
    script = Path(spec.python).parent / "deepspeed"
    # The first line of the script names its Python: a kernel reads no blank in it, and 127 bytes.
    runs = script.is_file() and " " not in str(script) and len(os.fsencode(spec.python)) < 125
    return [
        *([str(script)] if runs else [spec.python, "-m", "deepspeed.launcher.runner"]),
        f"--hostfile={spec.run_dir.hostfile}",
        "--no_ssh_check",
        f"--master_addr={spec.plan.master_addr}",
        f"--master_port={spec.port}",
        *launcher,
    ]


def module_argv(spec: LaunchSpec) -> list[str]:
    """The program of a rank as a module, with one argument and no ``--local_rank``."""
    return ["--module", "--no_local_rank", spec.worker, str(spec.run_dir.root)]
