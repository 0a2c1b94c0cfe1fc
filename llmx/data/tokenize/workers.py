"""How many cores tokenize: as many as are wanted, there and allowed; what is less is said."""

from __future__ import annotations

import resource
import sys

from llmx.data.tokenize.documents import core_count

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
