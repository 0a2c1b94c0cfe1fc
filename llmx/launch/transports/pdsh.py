"""ssh to every host in parallel, by pdsh: DeepSpeed's default, and the one that takes
unequal slots without any scheduler."""

from __future__ import annotations

from llmx.config.schema import Experiment
from llmx.launch.environment import render_ds_env
from llmx.launch.spec import LaunchSpec
from llmx.launch.transports.base import deepspeed_argv, module_argv
from llmx.plan.types import Plan


class PdshTransport:
    """``deepspeed --launcher pdsh`` with the run's own ssh settings."""

    name = "pdsh"
    programs: tuple[tuple[str, str], ...] = (("pdsh", "pdsh"), ("ssh", "openssh-client"))
    has_agents = True

    def problems(self, exp: Experiment, plan: Plan) -> list[str]:
        return []

    def argv(self, spec: LaunchSpec) -> list[str]:
        # --force_multi: DeepSpeed runs a one-host hostfile on this machine otherwise.
        return deepspeed_argv(spec, ["--launcher=pdsh", "--force_multi", *module_argv(spec)])

    def env(self, spec: LaunchSpec) -> dict[str, str]:
        return {
            "DS_ENV_FILE": str(spec.run_dir.ds_env),
            "PDSH_RCMD_TYPE": "ssh",
            "PDSH_SSH_ARGS_APPEND": f"-F {spec.run_dir.ssh_config}",
        }

    def ds_env(self, spec: LaunchSpec, env: dict[str, str]) -> str:
        return render_ds_env(env, shell=True)

    def cancel(self, spec: LaunchSpec, *, force: bool) -> list[list[str]]:
        return []

    def signal(self, spec: LaunchSpec, name: str) -> list[list[str]]:
        return []  # the agents do it
