"""The launchers of DeepSpeed that reach hosts over ssh: pdsh, its default, and ``mpirun``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from llmx.launch.environment import TOKEN, rank_env
from llmx.launch.spec import LaunchSpec
from llmx.launch.transports import Transport, deepspeed_argv, module_argv


class _OverSsh(Transport):
    """``ds_env`` is on command lines, so it has no token."""

    def ds_env(self, env: Mapping[str, str]) -> str:
        return super().ds_env({name: value for name, value in env.items() if name != TOKEN})


class PdshTransport(_OverSsh):
    """``deepspeed --launcher pdsh`` with the ssh settings of the run."""

    name = "pdsh"
    ends_by_itself = False
    programs = (("pdsh", "pdsh"), ("ssh", "openssh-client"))

    def further_files(self, spec: LaunchSpec) -> dict[str, str]:
        # What is in ds_env is on command lines. So the shell on the host reads the token from the
        # file that the agent of its user wrote; the agents know the shell by the tag.
        token = shlex.quote(f"{spec.run_dir.root}/.token-").replace("%", "%%")
        line = f"{TOKEN}=$(: {spec.tag}; cat {token}$(id -u))\n"
        return {"ds_env": self.ds_env(rank_env(spec)) + line}

    def argv(self, spec: LaunchSpec) -> list[str]:
        # --force_multi: DeepSpeed runs a hostfile of one host on this machine otherwise.
        launcher = ["--launcher=pdsh", "--force_multi"]
        return deepspeed_argv(spec, [*launcher, *module_argv(spec)])

    def env(self, spec: LaunchSpec) -> dict[str, str]:
        return {
            **super().env(spec),
            "PDSH_RCMD_TYPE": "ssh",
            "PDSH_SSH_ARGS_APPEND": f"-F {spec.run_dir.ssh_config}",
        }


class OpenMpiTransport(_OverSsh):
    """``deepspeed --launcher openmpi`` with explicit network, ssh and binding. Ranks take their
    numbers from ``OMPI_COMM_WORLD_*``; training uses nothing of MPI."""

    name = "openmpi"
    programs = (
        ("mpirun", "openmpi-bin"),
        ("ompi_info", "openmpi-bin"),
        ("ssh", "openssh-client"),
    )
    ds_env_for_shell = False

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
