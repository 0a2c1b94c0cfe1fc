"""Processes that another program started: torchrun, Kubernetes, Ray, LSF, srun, mpirun.

With ``launch=external`` each of them becomes its rank (``llmx.external``). Without it each would
train a model of its own, so a start as one of several is refused.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmx.config.schema import HardwareConfig, HostConfig
from llmx.errors import ConfigError
from llmx.hardware.detect import Gpu, match_device, usable_gpus

PLACES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    # Of the step, not of the job: a batch script is one process, whatever SLURM_NTASKS is.
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
"""Variables with the number of a process and the number of all: torchrun and Kubernetes, OpenMPI,
MVAPICH, MPICH and Intel MPI, srun."""
WORDS = ("launch=external", "launch.transport=external")


@dataclass
class Processes:
    """The processes of this start, as the one of rank 0 knows them."""

    facts: Sequence[Mapping[str, Any]]
    """``process_facts`` of each rank."""
    release: Callable[[str, Mapping[str, str]], None]
    """Lets the others become ranks of a run directory, with these variables added; LaunchError
    where one of them does not see the directory."""


STARTED: list[Processes] = []
"""The processes of this start, in the process of rank 0; else empty."""


def is_external(words: Sequence[str]) -> bool:
    """Whether a command line takes the place that another program gave to this process."""
    return any(word in WORDS for word in words)


def refuse_several(environ: Mapping[str, str]) -> None:
    """ConfigError where this process is one of several that another program started."""
    for rank, world in PLACES:
        count, number = environ.get(world, ""), environ.get(rank, "")
        if number.isdecimal() and count.isdecimal() and int(count) > 1:
            raise ConfigError(
                f"{rank}={number} {world}={count}: another program started {count} of these "
                "processes (torchrun, srun, mpirun, Kubernetes), and each would train a model of "
                "its own. Add launch=external, with which each becomes a rank of one run; or start "
                "`python -m llmx` once, and it starts the ranks itself. Where the variables are "
                f"only left over in this shell: unset {rank} {world}."
            )


def process_facts(environ: Mapping[str, str]) -> dict[str, Any]:
    """The facts of this process that rank 0 must know."""
    gpus = usable_gpus(environ)
    local_rank = int(environ["LOCAL_RANK"])
    gpu = gpus[local_rank if local_rank < len(gpus) else 0] if gpus else None
    return {
        "host": socket.gethostname(),
        "local_rank": local_rank,
        "gpu": None if gpu is None else dataclasses.asdict(gpu),
    }


def hardware_of_processes(
    hardware: HardwareConfig, *, environ: Mapping[str, str] = os.environ
) -> HardwareConfig:
    """``kind: external`` made explicit: a host for each machine, with a slot for each process."""
    if not STARTED:
        raise ConfigError(
            "launch=external: no other program started this process (RANK, WORLD_SIZE and "
            "MASTER_ADDR are not set). Start it with one, e.g. torchrun --nproc-per-node 8 -m llmx "
            "... launch=external; or leave launch=external out."
        )
    facts = STARTED[0].facts
    devices = dict(hardware.devices)
    hosts: list[HostConfig] = []
    for rank, fact in enumerate(facts):
        name = str(fact["host"])
        if not hosts or hosts[-1].name != name:
            if any(host.name == name for host in hosts):
                raise ConfigError(
                    f"launch=external: rank {rank} is on {name}, and so are earlier ranks, but not "
                    f"rank {rank - 1}. The ranks of a host follow each other: start them in blocks "
                    "(torchrun does; srun --distribution=block, mpirun --map-by slot)."
                )
            gpu = None if fact["gpu"] is None else Gpu(**fact["gpu"])
            device, devices[device] = match_device(gpu, hardware.devices)
            hosts.append(HostConfig(name=name, slots=0, device=device))
        host = hosts[-1]
        if fact["local_rank"] != host.slots:
            raise ConfigError(
                f"launch=external: rank {rank} on {name} has LOCAL_RANK={fact['local_rank']}, "
                f"expected {host.slots}. Number the processes of a host from 0 on in the order of "
                "their ranks, and give each machine or container a host name of its own."
            )
        host.slots += 1
    return dataclasses.replace(
        hardware, kind="static", hosts=hosts, devices=devices, master_addr=environ["MASTER_ADDR"]
    )
