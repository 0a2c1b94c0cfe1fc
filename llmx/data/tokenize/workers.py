"""How many cores tokenize: as many as are wanted, there and allowed; less is said on stderr."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator

FILES_KEPT = 64
"""Open files that the rest of the process may need."""


def worker_count(wanted: int) -> int:
    """``data.num_workers`` made to fit this host; a line on stderr says why it is less."""
    limits = {
        "open files (ulimit -n)": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "processes and threads (ulimit -u)": resource.getrlimit(resource.RLIMIT_NPROC)[0],
    }
    count, remark = fitted(wanted, cores=core_count(), limits=limits)
    if remark:
        print(remark, file=sys.stderr, flush=True)
    return count


def fitted(wanted: int, *, cores: int, limits: dict[str, int]) -> tuple[int, str]:
    """(workers, what to say where they are fewer than wanted). A limit that is negative is none."""
    count = min(wanted or cores, cores)
    remark = ""
    if wanted > cores:
        remark = (
            f"data.num_workers={wanted}, but this process may use {cores} cores: {count} are used. "
            "More would only wait for each other."
        )
    for name, limit in limits.items():
        room = max(1, (limit - FILES_KEPT) // 4)
        if limit >= 0 and room < count:
            count = room
            remark = (
                f"Only {limit} {name} are allowed: {count} of {cores} cores tokenize. Raise the "
                "limit to use all of them."
            )
    return count, remark


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def parallel_tokenizers(workers: int) -> Iterator[None]:
    """Let ``tokenizers`` use its threads here; ranks switch them off for everything else."""
    names = ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(TOKENIZERS_PARALLELISM="true", RAYON_NUM_THREADS=str(workers))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
