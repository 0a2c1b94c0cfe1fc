"""One rank: from a run directory to a trained model. Started by DeepSpeed's launcher.

``deepspeed ... --module --no_local_rank llmx.worker RUN_DIR`` on every host. Reads
``config.yaml``, ``plan.json`` and ``ds_config.json`` there and nothing else.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping, MutableMapping
from pathlib import Path

if __package__ in (None, ""):
    # Slurm's runner in DeepSpeed starts this file by its path, and Python puts the directory
    # of the file first on sys.path, where llmx's modules would shadow others of their name.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from llmx.config import Experiment, experiment_of_snapshot
from llmx.config.by_host import experiment_on, host_named
from llmx.errors import ConfigError
from llmx.offline import stay_offline_if_unreachable
from llmx.plan.threads import threads_per_rank
from llmx.plan.types import Plan
from llmx.redact import redact
from llmx.rollout.server import choose_allocator
from llmx.run.rundir import RunDir, load_yaml, read_json
from llmx.train.status import RankStatus, ShutdownRequest, handle_signals

SOURCES = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "SLURM_PROCID"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"),
}
"""Where a rank's place stands when the transport, not DeepSpeed's launcher, started it."""


def main(argv: list[str]) -> int:
    """Run this rank; the exit code is 0 only if it finished."""
    if len(argv) != 1:
        print("usage: python -m llmx.worker RUN_DIR", file=sys.stderr)
        return 2
    run_dir = RunDir(Path(argv[0]))
    complete_environment(os.environ)
    rank = int(os.environ["RANK"])
    redirect_output(run_dir, rank=rank)
    status = RankStatus(run_dir, rank=rank)
    stop = handle_signals(status)
    status.start_heartbeat()
    try:
        train(run_dir, status, stop)
    except BaseException as error:
        status.fail(error)
        sys.stderr.write(redact(traceback.format_exc()))
        sys.stderr.flush()
        # Not sys.exit: clean-up would wait for peers that are dead, or for collectives.
        os._exit(1)
    status.stop_heartbeat()
    return 0


def train(run_dir: RunDir, status: RankStatus, stop: ShutdownRequest) -> None:
    """Everything between the first and the last line of the status file."""
    exp = read_experiment(run_dir)
    plan = Plan.from_dict(read_json(run_dir.plan))
    check_place(plan, os.environ)
    index = plan.ranks[int(os.environ["RANK"])].host
    exp = experiment_on(exp, host_named(exp.hardware, plan.hosts[index].name))
    # DeepSpeed counts CPU devices by it.
    os.environ["LOCAL_SIZE"] = str(sum(rank.host == index for rank in plan.ranks))
    choose_gpus(plan, os.environ)
    choose_interface(plan, os.environ)
    choose_threads(exp, plan, os.environ)
    if plan.on_gpus:
        choose_allocator(os.environ)
    if exp.deterministic and plan.on_gpus:
        # cuBLAS reads it at its first use.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    beside = [network.source for network in plan.beside if network.source]
    if offline := stay_offline_if_unreachable(exp.model, os.environ, more_models=beside):
        print(offline, flush=True)

    import torch

    from llmx.train.engine.process_group import join_process_group
    from llmx.train.loop import run

    join_process_group(plan, timeout_s=exp.launch.comm_timeout_s)
    run(exp, plan, read_json(run_dir.ds_config), run_dir, status, stop)
    status.enter("finished")
    # Without it a rank sometimes aborts at exit, in a thread of the communication library.
    torch.distributed.destroy_process_group()


def complete_environment(environment: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE and LOCAL_RANK from OpenMPI's or Slurm's names where they are absent.

    Raises ConfigError that names what is missing when nothing started this process as a rank.
    """
    for name, sources in SOURCES.items():
        if name not in environment:
            for source in sources:
                if source in environment:
                    environment[name] = environment[source]
                    break
    required = (*SOURCES, "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in required if name not in environment]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set: this process is no rank of a run. Start runs with "
            "`python -m llmx`; RUN_DIR/command.txt has the launcher's command."
        )


def check_place(plan: Plan, environment: Mapping[str, str]) -> None:
    """The launcher started as many ranks as were planned; else ranks would train separately."""
    world, rank = int(environment["WORLD_SIZE"]), int(environment["RANK"])
    if world != plan.world_size or not 0 <= rank < plan.world_size:
        raise ConfigError(
            f"This is rank {rank} of {world}, the plan has {plan.world_size} ranks: the "
            "launcher started another number of processes, or the nodes do not know each "
            "other. See logs/launcher.log, if it is there."
        )


def choose_gpus(plan: Plan, environment: MutableMapping[str, str]) -> None:
    """Make the GPUs visible that the launch chose for the ranks of this host. CUDA shows a process
    one MIG slice at most, so a rank with slices sees its own alone."""
    hosts = environment.get("LLMX_GPUS", "").split(":")
    if plan.on_gpus and len(hosts) == len(plan.hosts):
        gpus = hosts[plan.ranks[int(environment["RANK"])].host].split(",")
        if any(gpu.startswith("MIG-") for gpu in gpus):
            gpus = [gpus[int(environment["LOCAL_RANK"])]]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)


def choose_interface(plan: Plan, environment: MutableMapping[str, str]) -> None:
    """Take this host's network interface where they differ from host to host.

    One environment goes to all ranks, so the launch names them all, in the order of the hosts.
    """
    names = environment.get("LLMX_INTERFACES", "").split(",")
    if len(names) == len(plan.hosts) and all(names):
        name = names[plan.ranks[int(environment["RANK"])].host]
        environment.setdefault("GLOO_SOCKET_IFNAME", name)
        environment.setdefault("NCCL_SOCKET_IFNAME", name)


def choose_threads(exp: Experiment, plan: Plan, environment: MutableMapping[str, str]) -> None:
    """This rank's share of the cores of its host, which the launching machine may not know. Before
    torch is imported: OpenMP reads the variable once."""
    if "OMP_NUM_THREADS" in environment:
        return
    ranks = int(environment["LOCAL_SIZE"])
    # What srun gives to one task, whether it binds the task to them or not.
    of_task = environment.get("SLURM_CPUS_PER_TASK", "")
    cores = int(of_task) * ranks if of_task.isdecimal() else len(os.sched_getaffinity(0))
    threads = threads_per_rank(
        exp, plan.accelerator, cores=cores, ranks=ranks, environment=environment
    )
    environment["OMP_NUM_THREADS"] = str(threads)


def read_experiment(run_dir: RunDir) -> Experiment:
    """The snapshot's config, typed. Hydra and OmegaConf are not needed for it."""
    return experiment_of_snapshot(load_yaml(run_dir.config), source=str(run_dir.config))


def redirect_output(run_dir: RunDir, *, rank: int) -> None:
    """Send file descriptors 1 and 2 to this rank's log, so that C++ libraries land there too."""
    path = run_dir.rank_log(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads of the communication libraries sometimes abort the interpreter while
    # it is taken down, and a rank that has finished would count as one that crashed.
    os._exit(code)
