"""The program of a trial's Slurm job: ``python -m llmx.sweep.job RUN_DIR``, inside its allocation.

It launches and supervises the run that the snapshot of the directory describes, as a single run is.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from llmx.errors import exit_code
from llmx.hardware.detect import local_names
from llmx.launch import supervise, write_launch_files
from llmx.plan import Plan
from llmx.run import snapshot
from llmx.run.rundir import RunDir, read_json


def main() -> int:
    """The exit code is that of the run."""
    run = RunDir(Path(sys.argv[1]))
    exp, plan = snapshot.load(run), Plan.from_dict(read_json(run.plan))
    # The snapshot was made where the sweep runs.
    names = local_names()
    hosts = [
        dataclasses.replace(host, is_local=bool({host.name, host.address} & names))
        for host in plan.hosts
    ]
    plan = dataclasses.replace(plan, hosts=tuple(hosts))
    launch = write_launch_files(exp, plan, run)
    return supervise(exp, plan, run, launch=launch).exit_code


if __name__ == "__main__":
    sys.exit(exit_code(main))
