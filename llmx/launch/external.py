"""Processes that another program started: torchrun, Kubernetes, Ray, srun, mpirun.

Each such process would train a model of its own, so a start as one of several is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmx.errors import ConfigError

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


def refuse_several(environ: Mapping[str, str]) -> None:
    """ConfigError where this process is one of several that another program started."""
    for rank, world in PLACES:
        count, number = environ.get(world, ""), environ.get(rank, "")
        if number.isdecimal() and count.isdecimal() and int(count) > 1:
            raise ConfigError(
                f"{rank}={number} {world}={count}: another program started {count} of these "
                "processes (torchrun, srun, mpirun, Kubernetes), and each would train a model of "
                "its own. Start `python -m llmx` once: it starts the ranks itself. Where the "
                f"variables are only left over in this shell: unset {rank} {world}."
            )
