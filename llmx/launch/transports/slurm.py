"""Through ``srun``, inside or outside an allocation. Ranks take their numbers from
``SLURM_PROCID``, ``SLURM_NTASKS`` and ``SLURM_LOCALID``. The run directory must be on a shared
file system: the supervisor reaches the hosts through Slurm only, without ssh."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence

from llmx.config.schema import Experiment, HardwareConfig, LaunchConfig, SlurmConfig
from llmx.hardware.slurm import output_of, read_allocation
from llmx.launch.spec import LaunchSpec
from llmx.launch.transports import Transport, deepspeed_argv
from llmx.plan.types import Plan


class SlurmTransport(Transport):
    """``deepspeed --launcher slurm`` with every request explicit."""

    name = "slurm"
    programs = (
        ("srun", "slurm-client"),
        ("scancel", "slurm-client"),
        ("sinfo", "slurm-client"),
    )
    has_agents = False
    allocates = True

    def problems(self, launch: LaunchConfig, hardware: HardwareConfig) -> Iterator[str]:
        yield from super().problems(launch, hardware)
        hosts = hardware.hosts
        if len({host.slots for host in hosts}) > 1:
            slots = ", ".join(f"{host.name} {host.slots}" for host in hosts)
            yield (
                f"launch.transport=slurm needs the same number of slots on every host (they have: "
                f"{slots}). Use hardware.slots={min(host.slots for host in hosts)}, or "
                "launch.transport=ssh inside the allocation."
            )
        if launch.slurm.submit and launch.detach:
            yield (
                "launch.slurm.submit=true with launch.detach=true: a job has no terminal. Leave "
                "launch.detach out."
            )
        if launch.sync == "rsync":
            yield (
                "launch.sync=rsync copies over ssh, which launch.transport=slurm does not use: it "
                "needs a shared file system. Use launch.sync=none, or launch.transport=ssh."
            )

    def host_problems(self, spec: LaunchSpec) -> list[str]:
        hosts, job = [host.name for host in spec.plan.hosts], spec.environ.get("SLURM_JOB_ID", "")
        if not job:
            every_node = output_of(["sinfo", "--noheader", "--Node", "--format=%N"]).split()
            return missing_nodes(hosts, list(dict.fromkeys(every_node)), job="")
        allocation = read_allocation(job)
        if allocation is None:
            return []  # Slurm does not answer: srun will say why
        if problem := allocation.problem():
            return [problem]
        return missing_nodes(hosts, allocation.nodes, job=job)

    def cores(self, exp: Experiment, plan: Plan) -> tuple[int | None, int | None]:
        slots = max(host.slots for host in plan.hosts)
        of_a_rank = exp.launch.slurm.cpus_per_task or share_of_cores(
            slurm_cores(os.environ, [host.name for host in plan.hosts]), slots
        )
        return of_a_rank * slots if of_a_rank else None, of_a_rank

    def is_queued(self, line: str) -> bool | None:
        if "queued and waiting for resources" in line:
            return True
        return False if "has been allocated resources" in line else None

    def argv(self, spec: LaunchSpec) -> list[str]:
        launcher = [
            "--launcher=slurm",
            "--force_multi",
            f"--launcher_args={shlex.join(self._srun_args(spec))}",
        ]
        # DeepSpeed's Slurm runner drops --module, so the worker is given by its path.
        worker = ["--no_local_rank", spec.worker_path, str(spec.run_dir.root)]
        return deepspeed_argv(spec, [*launcher, *worker])

    def _srun_args(self, spec: LaunchSpec) -> list[str]:
        hosts, slurm = spec.plan.hosts, spec.exp.launch.slurm
        args = [
            f"--job-name={spec.job_name}",
            f"--nodes={len(hosts)}",
            f"--ntasks-per-node={hosts[0].slots}",
            # In the order of the plan: rank 0 must be on the host of master_addr.
            "--distribution=arbitrary",
            f"--chdir={spec.run_dir.root}",
            "--kill-on-bad-exit=1",
            "--unbuffered",
            "--label",
            "--mpi=none",
        ]
        if spec.cpus_per_task:
            # By default Slurm gives a rank one core for all its threads.
            args += [f"--cpus-per-task={spec.cpus_per_task}", "--cpu-bind=cores"]
        if spec.plan.on_gpus:
            # Each rank sees all GPUs of its host, and takes the one of its local rank.
            args += [gpus_option(slurm, hosts[0].slots), "--gpu-bind=none"]
        return [*args, *chosen_options(slurm)]

    def env(self, spec: LaunchSpec) -> dict[str, str]:
        return {
            # srun --export=ALL,K=V splits values at commas, so the ranks inherit their environment
            # from srun. Without this variable DeepSpeed reads ~/.deepspeed_env.
            "DS_ENV_FILE": "/dev/null",
            "SLURM_HOSTFILE": str(spec.run_dir.root / "slurm_hosts"),
        }

    def further_files(self, spec: LaunchSpec) -> dict[str, str]:
        # One line a rank, in rank order: what --distribution=arbitrary reads.
        names = [spec.plan.hosts[rank.host].name for rank in spec.plan.ranks]
        return {"slurm_hosts": "".join(f"{name}\n" for name in names)}

    def cancel(self, spec: LaunchSpec, *, force: bool) -> list[list[str]]:
        # Without a signal Slurm waits KillWait (30 s) before it kills.
        signal = ["--signal=KILL", "--full"] if force else []
        return [
            ["scancel", "--quiet", *signal, f"--name={spec.job_name}"],
            _to_steps(spec, *signal[:1]),
        ]

    def signal(self, spec: LaunchSpec, name: str) -> list[list[str]]:
        # A signal to a job goes to its steps, so this works inside and outside an allocation.
        return [_to_steps(spec, f"--signal={name}")]


def _to_steps(spec: LaunchSpec, *words: str) -> list[str]:
    """scancel for the steps of the run, found by their name: inside an allocation the run is a step
    of the user's own job."""
    find = "squeue --noheader --steps --format='%i %j'"
    select = f"awk '$2 == \"{spec.job_name}\" {{print $1}}'"
    end = shlex.join(["xargs", "-r", "scancel", "--quiet", *words])
    return ["sh", "-c", f"{find} | {select} | {end}"]


def chosen_options(slurm: SlurmConfig) -> list[str]:
    """The options of ``srun`` and ``sbatch`` by ``launch.slurm``."""
    options = {
        "partition": slurm.partition,
        "account": slurm.account,
        "time": slurm.time_limit,
    }
    return [*(f"--{name}={value}" for name, value in options.items() if value), *slurm.extra_args]


def gpus_option(slurm: SlurmConfig, count: int) -> str:
    """The option of ``srun`` and ``sbatch`` for the GPUs of each node."""
    return f"--gres={slurm.gres}" if slurm.gres else f"--gpus-per-node={count}"


def share_of_cores(cores: int | None, slots: int) -> int | None:
    """Cores of one rank. An even number, since Slurm allocates both threads of a core: 7 ranks with
    13 of 96 would be rounded up to 98."""
    if cores is None:
        return None
    share = max(1, cores // slots)
    return share if share == 1 else share - share % 2


def slurm_cores(environ: Mapping[str, str], hosts: list[str]) -> int | None:
    """Cores that every host has for the run: of the allocation, else as Slurm lists the hosts; None
    where unknown."""
    cpus_per_node = environ.get("SLURM_JOB_CPUS_PER_NODE")
    if cpus_per_node:  # 16(x2),8
        counts = [part.split("(")[0] for part in cpus_per_node.split(",")]
        return min((int(count) for count in counts if count.isdecimal()), default=None)
    if environ.get("SLURM_JOB_ID"):
        # An allocation joined by its id: it may have fewer cores than its hosts.
        return None
    words = ["sinfo", "--noheader", "--Node", f"--nodes={','.join(hosts)}", "--format=%c"]
    return min((int(word) for word in output_of(words).split() if word.isdecimal()), default=None)


def missing_nodes(hosts: Sequence[str], nodes: Sequence[str], *, job: str) -> list[str]:
    """A sentence for each host that is not among the nodes of an allocation, or of Slurm itself
    where ``job`` is empty. No nodes: nothing is known."""
    where = f"in the allocation of job {job}" if job else "a node of Slurm"
    listed = ", ".join(nodes[:8]) + (", ..." if len(nodes) > 8 else "")
    allocate = ", or allocate it (salloc --nodelist={})" if job else ""
    return [
        f"{host}: is not {where} (nodes: {listed}). Use the names of these nodes in the hardware "
        f"file{allocate.format(host)}."
        for host in hosts
        if nodes and host not in nodes
    ]
