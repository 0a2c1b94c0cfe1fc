"""Through ``mpirun``, which starts one daemon a host over ssh. Ranks take their numbers from
``OMPI_COMM_WORLD_*``; nothing of MPI is used for training."""

from __future__ import annotations

import shlex

from llmx.config.schema import Experiment
from llmx.launch.environment import render_ds_env
from llmx.launch.spec import LaunchSpec
from llmx.launch.transports.base import deepspeed_argv, module_argv
from llmx.plan.types import Plan


class OpenMpiTransport:
    """``deepspeed --launcher openmpi`` with explicit network, ssh and binding."""

    name = "openmpi"
    programs: tuple[tuple[str, str], ...] = (
        ("mpirun", "openmpi-bin"),
        ("ompi_info", "openmpi-bin"),
        ("ssh", "openssh-client"),
    )
    has_agents = True

    def problems(self, exp: Experiment, plan: Plan) -> list[str]:
        return []

    def argv(self, spec: LaunchSpec) -> list[str]:
        launcher = [
            "--launcher=openmpi",
            "--force_multi",
            f"--launcher_args={shlex.join(self._mpirun_args(spec))}",
        ]
        return deepspeed_argv(spec, [*launcher, *module_argv(spec)])

    def _mpirun_args(self, spec: LaunchSpec) -> list[str]:
        args = [
            "--mca", "plm_rsh_agent", f"ssh -F {spec.run_dir.ssh_config}",
            # ssh_config lies on this machine alone, so no host starts daemons on another.
            "--mca", "plm_rsh_no_tree_spawn", "1",
            # Given to every daemon's command line: what the agents know the run by there.
            "--mca", "llmx_run_token", spec.token,
            # The default binds each rank to one core, or one socket.
            "--bind-to", "none", "--map-by", "slot", "--allow-run-as-root",
        ]  # fmt: skip
        # DeepSpeed adds eth0 unless something is given.
        network = _networks(spec)
        args += ["--mca", "btl_tcp_if_include", network or "0.0.0.0/0"]
        if network:
            args += ["--mca", "oob_tcp_if_include", network]
        return [*args, *spec.exp.launch.openmpi_args]

    def env(self, spec: LaunchSpec) -> dict[str, str]:
        return {"DS_ENV_FILE": str(spec.run_dir.ds_env)}

    def ds_env(self, spec: LaunchSpec, env: dict[str, str]) -> str:
        return render_ds_env(env, shell=False)

    def cancel(self, spec: LaunchSpec, *, force: bool) -> list[list[str]]:
        return []

    def signal(self, spec: LaunchSpec, name: str) -> list[list[str]]:
        return []  # the agents do it


def _networks(spec: LaunchSpec) -> str | None:
    """The interfaces towards the other hosts; OpenMPI skips those that a host does not have."""
    names = sorted({name for name in spec.interfaces if name})
    return ",".join(names) if names and all(spec.interfaces) else None
