"""ssh to all hosts in parallel by pdsh: DeepSpeed's default. It needs no scheduler, and hosts may
have different numbers of slots."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from llmx.launch.environment import TOKEN, rank_env, without_token
from llmx.launch.spec import LaunchSpec
from llmx.launch.transports import Transport, deepspeed_argv, module_argv


class PdshTransport(Transport):
    """``deepspeed --launcher pdsh`` with the ssh settings of the run."""

    name = "pdsh"
    ends_by_itself = False
    programs = (("pdsh", "pdsh"), ("ssh", "openssh-client"))

    def ds_env(self, env: Mapping[str, str]) -> str:
        return super().ds_env(without_token(env))

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
