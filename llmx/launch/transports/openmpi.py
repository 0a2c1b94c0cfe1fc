"""Through ``mpirun``, which starts one daemon on each host over ssh. Ranks take their numbers from
``OMPI_COMM_WORLD_*``; training uses nothing of MPI."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from llmx.launch.environment import TOKEN, without_token
from llmx.launch.spec import LaunchSpec
from llmx.launch.transports import Transport, deepspeed_argv, module_argv


class OpenMpiTransport(Transport):
    """``deepspeed --launcher openmpi`` with explicit network, ssh and binding."""

    name = "openmpi"
    programs = (
        ("mpirun", "openmpi-bin"),
        ("ompi_info", "openmpi-bin"),
        ("ssh", "openssh-client"),
    )
    ds_env_for_shell = False

    def ds_env(self, env: Mapping[str, str]) -> str:
        return super().ds_env(without_token(env))

    def argv(self, spec: LaunchSpec) -> list[str]:
        launcher = [
            "--launcher=openmpi",
            "--force_multi",
            f"--launcher_args={shlex.join(_mpirun_args(spec))}",
        ]
        return deepspeed_argv(spec, [*launcher, *module_argv(spec)])


def _mpirun_args(spec: LaunchSpec) -> list[str]:
    args = [
        "--mca", "plm_rsh_agent", f"ssh -F {spec.run_dir.ssh_config}",
        # Only this machine has ssh_config, so no host may start daemons on another one.
        "--mca", "plm_rsh_no_tree_spawn", "1",
        # On the command line of every daemon: by it the agents find the daemon as a process of
        # the run. The token itself, which nobody else may see, is in the environment of mpirun.
        "--mca", "llmx_run", spec.tag, "-x", TOKEN,
        # By default each rank is bound to one core, or to one socket.
        "--bind-to", "none", "--map-by", "slot", "--allow-run-as-root",
    ]  # fmt: skip
    # The interfaces of all hosts; OpenMPI ignores those that a host does not have.
    names = sorted({name for name in spec.interfaces if name})
    network = ",".join(names) if names and all(spec.interfaces) else None
    # DeepSpeed adds eth0 unless a value is given.
    args += ["--mca", "btl_tcp_if_include", network or "0.0.0.0/0"]
    if network:
        args += ["--mca", "oob_tcp_if_include", network]
    return [*args, *spec.exp.launch.openmpi_args]
