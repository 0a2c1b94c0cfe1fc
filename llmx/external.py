"""One of several processes that another program started: it becomes its rank of one run.

``torchrun --nproc-per-node 2 -m llmx ... run_dir=DIR launch=external`` runs this in each of them.
They meet in torch's key-value store at ``MASTER_ADDR``. The process of rank 0 composes the config
for the hosts that it learned there, writes the run directory and supervises; the others wait, and
become ``llmx.worker``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from llmx.cli.commands import COMMANDS
from llmx.cli.hydra_app import train
from llmx.cli.words import parse, split_command
from llmx.errors import ConfigError, LaunchError, exit_code
from llmx.hardware.external import PLACES, STARTED, Processes, process_facts
from llmx.launch.environment import TOKEN
from llmx.run.rundir import RunDir
from llmx.run.snapshot import read_overrides, run_id, run_token

_NAMES = {
    "RANK": tuple(rank for rank, _ in PLACES),
    "WORLD_SIZE": tuple(world for _, world in PLACES),
    "LOCAL_RANK": (
        "LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MPI_LOCALRANKID",
        "SLURM_LOCALID",
    ),
}
MEET_S = 900.0
"""For all processes to be started: Kubernetes may pull an image on one node only."""
PREPARE_S = 7200.0
"""For rank 0 to compose, check and prepare. If it exits, the others notice at once."""
SEE_S = 15.0
"""For the run directory to appear on a network file system."""


class Meeting:
    """The key-value store in which the processes of one start meet."""

    def __init__(self, rank: int) -> None:
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # torchrun serves a store there itself.
        serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = TCPStore(host, port, is_master=serves, timeout=timedelta(seconds=MEET_S))
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store: Any = PrefixStore(f"llmx/{start}", store)

    @property
    def is_open(self) -> bool:
        """Whether it can still be used."""
        return self._store is not None

    def put(self, key: str, value: Any) -> None:
        """Tell all processes a value."""
        self._store.set(key, json.dumps(value))

    def get(self, key: str, *, timeout_s: float) -> Any:
        """Wait for a value that a process tells."""
        self._store.wait([key], timedelta(seconds=timeout_s))
        return json.loads(self._store.get(key))

    def close(self) -> None:
        """Free the port for the ranks, which meet there next."""
        self._store = None


def main(words: list[str]) -> int:
    """Take this process's place; returns the exit code (a rank other than 0 never returns)."""
    complete_place(os.environ)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = Meeting(rank)
    meeting.put(f"facts/{rank}", process_facts(os.environ))
    if rank:
        return _become_rank(meeting, rank)
    facts = [_facts_of(meeting, number, world) for number in range(world)]

    def release(run_dir: str, environment: Mapping[str, str]) -> None:
        other_ranks = range(1, world)
        run = RunDir(Path(run_dir))
        variables = {name: value for name, value in environment.items() if name != TOKEN}
        meeting.put("run", {"run_dir": run_dir, "run_id": run_id(run), "env": variables})
        sees = {number: meeting.get(f"sees/{number}", timeout_s=60) for number in other_ranks}
        blind = [f"rank {rank} on {facts[rank]['host']}" for rank in other_ranks if not sees[rank]]
        meeting.put("start", not blind)
        for number in other_ranks:  # or they would lose the store in the middle of a question
            meeting.get(f"left/{number}", timeout_s=60)
        meeting.close()
        if blind:
            raise LaunchError(
                f"{run_dir}: {', '.join(blind)} cannot see this run directory. launch=external "
                "needs one on a file system that all processes share: set run_dir=/shared/DIR."
            )

    STARTED.append(Processes(facts, release))
    try:
        return _run(words)
    finally:
        if meeting.is_open:
            meeting.put("run", None)  # not started: nobody needs to wait


def complete_place(environment: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE and LOCAL_RANK from the names of MPI and Slurm where they are absent.
    ConfigError that says what is missing."""
    for name, sources in _NAMES.items():
        for source in sources:
            if source in environment:
                environment.setdefault(name, environment[source])
    environment.setdefault("LOCAL_RANK", "0")  # Kubernetes: one process in a container
    required = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in required if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"launch=external: {', '.join(missing)} not set. torchrun and Kubernetes operators set "
            "them (torchrun --nproc-per-node 8 -m llmx ... launch=external); under srun or mpirun "
            "export MASTER_ADDR (the host of rank 0) and MASTER_PORT. To let llmx start the ranks "
            "itself, leave launch=external out."
        )


def _facts_of(meeting: Meeting, number: int, world: int) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = meeting.get(f"facts/{number}", timeout_s=MEET_S)
    except RuntimeError as error:  # torch's DistStoreError
        raise LaunchError(
            f"launch=external: rank {number} of {world} did not come to "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within {MEET_S:.0f} s. Look "
            "at its output, and at firewalls between the hosts."
        ) from error
    return facts


def _become_rank(meeting: Meeting, rank: int) -> int:
    """Wait until rank 0 has prepared the run, then be the worker of this rank."""
    try:
        start = meeting.get("run", timeout_s=PREPARE_S)
        if start is None:
            raise LaunchError("rank 0 did not start the run; its output has the cause.")
        run = RunDir(Path(start["run_dir"]))
        deadline = time.monotonic() + SEE_S
        while not (sees := run_id(run) == start["run_id"]) and time.monotonic() < deadline:
            time.sleep(0.5)
        meeting.put(f"sees/{rank}", sees)
        starts = meeting.get("start", timeout_s=60 + SEE_S)
        meeting.put(f"left/{rank}", True)
    except RuntimeError as error:
        if isinstance(error, LaunchError):
            raise
        raise LaunchError(
            f"rank 0 has ended before it started the run; its output has the cause ({error})."
        ) from error
    if not starts:
        where = "another machine does" if sees else "this machine does"
        raise LaunchError(f"rank {rank}: {where} not see the run directory {run.root}.")
    argv = [sys.executable, "-m", "llmx.worker", str(run.root)]
    # The token is a secret, and anybody may read the store: it is in the run directory.
    environment = {**os.environ, **start["env"], TOKEN: run_token(run)}
    os.execve(sys.executable, argv, environment)


def _run(words: list[str]) -> int:
    """The command of all processes, here for all of them."""
    name, arguments = split_command(words, tuple(COMMANDS))
    if name == "resume":
        return _resume([*arguments, "hardware.kind=external"])
    if name != "train" or {"-m", "--multirun"} & set(arguments):
        raise ConfigError(f"launch=external: starts one run, not {name or 'a sweep'} (-m).")
    typed = [word.partition("=")[2] for word in arguments if word.startswith("run_dir=")]
    run = RunDir(Path(typed[-1])) if typed else None
    if run is None or not run.identity.exists():
        return train(parse("train", arguments))
    # Started again after a failure, with the same command.
    if sorted(read_overrides(run)) != sorted(w for w in arguments if not w.startswith("-")):
        raise ConfigError(
            f"run_dir={run.root}: contains a run of another command (its overrides.yaml). Give the "
            f"same words to continue it, or start: resume {run.root} launch=external."
        )
    return _resume([str(run.root), "hardware.kind=external"])


def _resume(words: list[str]) -> int:
    from llmx.lifecycle.resume import run as resume

    return resume(parse("resume", words))


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
