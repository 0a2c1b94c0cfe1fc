"""ssh to all hosts in parallel by pdsh: DeepSpeed's default. It needs no scheduler, and hosts may
have different numbers of slots."""

from __future__ import annotations

from llmx.launch.spec import LaunchSpec
from llmx.launch.transports import Transport, deepspeed_argv, module_argv


class PdshTransport(Transport):
    """``deepspeed --launcher pdsh`` with the ssh settings of the run."""

    name = "pdsh"
    ends_by_itself = False
    programs = (("pdsh", "pdsh"), ("ssh", "openssh-client"))

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
