"""Through ``srun``, inside or outside an allocation. Ranks take their numbers from
``SLURM_PROCID`` and its kin. The run directory must lie on a file system that all hosts
share; the supervisor reaches the hosts through Slurm alone and needs no ssh."""

from __future__ import annotations

import shlex

from llmx.config.addresses import name_problem
from llmx.config.build import shown
from llmx.config.schema import Experiment
from llmx.errors import ConfigError
from llmx.launch.environment import render_ds_env
from llmx.launch.spec import LaunchSpec
from llmx.launch.transports.base import deepspeed_argv
from llmx.plan.types import Plan


class SlurmTransport:
    """``deepspeed --launcher slurm`` with every request explicit."""

    name = "slurm"
    programs: tuple[tuple[str, str], ...] = (
        ("srun", "slurm-client"),
        ("scancel", "slurm-client"),
        ("sinfo", "slurm-client"),
    )
    has_agents = False

    def problems(self, exp: Experiment, plan: Plan) -> list[str]:
        problems: list[str] = []
        slots = {host.name: host.slots for host in plan.hosts}
        if len(set(slots.values())) > 1:
            listed = ", ".join(f"{name} {count}" for name, count in slots.items())
            problems.append(
                f"launch.transport=slurm: DeepSpeed's Slurm launcher needs the same number of "
                f"slots on every host, got {listed}; give them all {min(slots.values())}, or use "
                "launch.transport=pdsh inside the allocation."
            )
        if exp.launch.sync != "none":
            problems.append(
                "launch.sync=rsync: hosts are reached through Slurm without ssh, so nothing can "
                "be copied to them; keep the run directory on the shared file system (run_dir=...) "
                "with launch.sync=none, or use launch.transport=pdsh."
            )
        return problems

    def argv(self, spec: LaunchSpec) -> list[str]:
        launcher = [
            "--launcher=slurm",
            "--force_multi",
            f"--launcher_args={shlex.join(self._srun_args(spec))}",
        ]
        # DeepSpeed drops --module here: the worker is named by its path.
        worker = ["--no_local_rank", spec.worker_path, str(spec.run_dir.root)]
        return deepspeed_argv(spec, [*launcher, *worker])

    def _srun_args(self, spec: LaunchSpec) -> list[str]:
        hosts, slurm = spec.plan.hosts, spec.exp.launch.slurm
        args = [
            f"--job-name={spec.job_name}",
            f"--nodes={len(hosts)}",
            f"--ntasks-per-node={hosts[0].slots}",
            # In the order of the plan: rank 0 must be where the rendezvous is.
            "--distribution=arbitrary",
            f"--chdir={spec.run_dir.root}",
            "--kill-on-bad-exit=1",
            "--unbuffered",
            "--label",
            "--mpi=none",
        ]
        if spec.cpus_per_task:
            # Slurm's own default is one core, for all threads of a rank.
            args += [f"--cpus-per-task={spec.cpus_per_task}", "--cpu-bind=cores"]
        if spec.plan.accelerator == "cuda":
            # Each rank sees all GPUs of its host, and takes the one of its local rank.
            args += [f"--gpus-per-node={hosts[0].slots}", "--gpu-bind=none"]
        if slurm.partition:
            args.append(f"--partition={slurm.partition}")
        if slurm.account:
            args.append(f"--account={slurm.account}")
        if slurm.time_limit:
            args.append(f"--time={slurm.time_limit}")
        return [*args, *slurm.extra_args]

    def env(self, spec: LaunchSpec) -> dict[str, str]:
        return {
            # srun --export=ALL,K=V breaks at a comma in a value, so the ranks inherit their
            # environment from srun. Without a name here DeepSpeed reads ~/.deepspeed_env.
            "DS_ENV_FILE": "/dev/null",
            "SLURM_HOSTFILE": str(spec.run_dir.root / "slurm_hosts"),
        }

    def ds_env(self, spec: LaunchSpec, env: dict[str, str]) -> str:
        return render_ds_env(env, shell=True)

    def cancel(self, spec: LaunchSpec, *, force: bool) -> list[list[str]]:
        # Without the signal Slurm itself waits KillWait (30 s) before it kills.
        signal = ["--signal=KILL", "--full"] if force else []
        return [
            ["scancel", "--quiet", *signal, f"--name={spec.job_name}"],
            _to_steps(spec, *signal[:1]),
        ]

    def signal(self, spec: LaunchSpec, name: str) -> list[list[str]]:
        # A signal for a job goes to its steps anyway, so one way serves both kinds of run.
        return [_to_steps(spec, f"--signal={name}")]


def _to_steps(spec: LaunchSpec, *words: str) -> list[str]:
    """scancel for the steps of the run. Inside an allocation the run is a step of somebody
    else's job, to be found by its name."""
    find = "squeue --noheader --steps --format='%i %j'"
    own = f"awk '$2 == \"{spec.job_name}\" {{print $1}}'"
    end = shlex.join(["xargs", "-r", "scancel", "--quiet", *words])
    return ["sh", "-c", f"{find} | {own} | {end}"]


def render_slurm_hosts(spec: LaunchSpec) -> str:
    """One line a rank, in rank order: what ``--distribution=arbitrary`` reads."""
    hosts = spec.plan.hosts
    for host in hosts:
        problem = name_problem(host.name)
        if problem:
            raise ConfigError(f"host {shown(host.name)}: {problem}.")
    return "".join(f"{hosts[rank.host].name}\n" for rank in spec.plan.ranks)
