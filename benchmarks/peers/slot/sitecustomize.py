"""Gives each rank a part of a core, whatever starts it: a slot that is the same everywhere.

On PYTHONPATH of ``benchmarks/sweep.py concurrent``, for both sides. A rank is a process with RANK;
SLOT_CORES says how much of a core it gets (control groups v1).
"""

import os
import uuid

cores = os.environ.get("SLOT_CORES")
if cores and "RANK" in os.environ:
    group = f"/sys/fs/cgroup/cpu/llmx-slot-{uuid.uuid4().hex}"
    os.mkdir(group)  # noqa: PTH102
    quota_us = int(float(cores) * 100_000)
    for name, value in (("cpu.cfs_quota_us", quota_us), ("cgroup.procs", 0)):
        with open(f"{group}/{name}", "w") as stream:  # noqa: PTH123
            stream.write(str(value))
