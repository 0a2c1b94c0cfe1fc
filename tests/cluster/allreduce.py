"""The smallest DeepSpeed program with ranks that talk: each rank adds its number over gloo.

``deepspeed ... allreduce.py OUT_DIR`` writes ``OUT_DIR/rank-N.json`` on the rank's own host. The
rank's place comes from DeepSpeed's launcher, from Open MPI or from Slurm, whichever started it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

FOREIGN = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "SLURM_PROCID"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"),
}


def main(out: Path) -> None:
    for name, others in FOREIGN.items():
        for other in others:
            if other in os.environ:
                os.environ.setdefault(name, os.environ[other])
    import deepspeed
    import torch
    import torch.distributed
    from deepspeed.accelerator import get_accelerator

    # As llmx does: DeepSpeed would compile its all-reduce for the ranks of one host at first.
    if (shared_memory := get_accelerator().create_op_builder("ShareMemCommBuilder")) is not None:
        deepspeed.ops.__compatible_ops__[shared_memory.NAME] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    rank = torch.distributed.get_rank()
    total = torch.tensor([float(rank + 1)])
    deepspeed.comm.all_reduce(total)
    answer = {
        "rank": rank,
        "world_size": torch.distributed.get_world_size(),
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "host": socket.gethostname(),
        "sum": total.item(),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / f"rank-{rank}.json").write_text(json.dumps(answer))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
