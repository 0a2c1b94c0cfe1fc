"""What every transport can say, and what they share."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from llmx.config.schema import Experiment
from llmx.launch.spec import LaunchSpec
from llmx.plan.types import HostPlan, Plan


class Transport(Protocol):
    """One way of starting ranks on hosts. Stateless: everything comes from the arguments."""

    name: str
    programs: tuple[tuple[str, str], ...]
    """What must be on PATH here: (program, Debian package)."""
    has_agents: bool
    """Whether the supervisor reaches the other hosts by ssh, to watch and to clean up."""

    def problems(self, exp: Experiment, plan: Plan) -> list[str]:
        """Why this plan cannot be started this way; value, rule and fix. Pure."""

    def argv(self, spec: LaunchSpec) -> list[str]:
        """The exact ``deepspeed`` command."""

    def env(self, spec: LaunchSpec) -> dict[str, str]:
        """What this transport adds to the environment of ``deepspeed``."""

    def ds_env(self, spec: LaunchSpec, env: dict[str, str]) -> str:
        """The text of ``RUN_DIR/ds_env`` for the environment of a rank."""

    def cancel(self, spec: LaunchSpec, *, force: bool) -> list[list[str]]:
        """Commands that end the run besides ending its processes, for this machine: asking the
        ranks, or (``force``) killing what did not end."""

    def signal(self, spec: LaunchSpec, name: str) -> list[list[str]]:
        """Commands that send ``SIG<name>`` to ranks that no agent reaches, for this machine."""


def deepspeed_argv(spec: LaunchSpec, launcher: list[str]) -> list[str]:
    """``deepspeed`` with everything that must never be guessed by it.

    A hostfile makes DeepSpeed ssh to its first host with the user's own settings to check
    it, unless told not to; the address and the port are ours, never ``hostname -I`` and 29500.
    """
    script = Path(spec.python).parent / "deepspeed"
    program = (
        [str(script)] if script.is_file() else [spec.python, "-m", "deepspeed.launcher.runner"]
    )
    return [
        *program,
        f"--hostfile={spec.run_dir.hostfile}",
        "--no_ssh_check",
        f"--master_addr={spec.plan.master_addr}",
        f"--master_port={spec.port}",
        *launcher,
    ]


def module_argv(spec: LaunchSpec) -> list[str]:
    """The rank's program as a module, with one path and no ``--local_rank``."""
    return ["--module", "--no_local_rank", spec.worker, str(spec.run_dir.root)]


def remote_hosts(plan: Plan) -> list[HostPlan]:
    """The hosts that are not this machine."""
    return [host for host in plan.hosts if not host.is_local]
