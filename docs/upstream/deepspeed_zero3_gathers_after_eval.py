"""DeepSpeed ZeRO-3: after an evaluation, training gathers every parameter twice, one by one.

Run on one CPU, no GPU needed::

    python docs/upstream/deepspeed_zero3_gathers_after_eval.py

Two ranks, eight linear layers, which all fit in ``stage3_max_reuse_distance`` and in the prefetch
bucket. From the second training step on all are gathered at once in each step: 1 all-gather. With
two forward passes under ``no_grad`` before, each step takes 9 or more, for ever.

Cause: since #6662 one ``PartitionedParameterCoordinator`` serves training and evaluation. Its
``__params_to_release`` has an ``lru_cache`` by (module, place in the order). What it answers also
depends on the order of modules, which ``_invalidate_trace`` forgets while the cache stays: what
to release in a forward pass is what was right for an evaluation, in which nothing is used again.
A fix is to clear the cache there. One coordinator for each of ``torch.is_grad_enabled()`` would
also leave the order of training known over an evaluation.
"""

import os
from unittest import mock

import torch


def gathers(rank: int, *, evaluations: int) -> list[int]:
    """All-gathers of each training step."""
    import deepspeed
    from deepspeed.runtime.zero import partition_parameters

    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(8)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    batch = torch.ones(1, 16)
    for _ in range(evaluations):
        with torch.no_grad():
            engine(batch)
    found = []
    real = partition_parameters._dist_allgather_fn
    for _ in range(6):
        with mock.patch.object(partition_parameters, "_dist_allgather_fn", wraps=real) as calls:
            engine.backward(engine(batch).sum())
            engine.step()
        found.append(calls.call_count)
    engine.destroy()
    return found


def main(rank: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_SIZE="2")
    os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT="29534")
    import deepspeed

    # Not needed here, and it would be compiled first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    for evaluations in (0, 2):
        found = gathers(rank, evaluations=evaluations)
        if rank == 0:
            print(f"{evaluations} evaluations first: all-gathers of each training step {found}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=2)
