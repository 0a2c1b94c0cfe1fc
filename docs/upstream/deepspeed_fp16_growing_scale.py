"""DeepSpeed fp16: the update at which the dynamic loss scale doubles is halved.

Run on one CPU, no GPU needed::

    python docs/upstream/deepspeed_fp16_growing_scale.py

One weight, SGD with lr 1, no clipping, loss = weight, so every update must be exactly -1. With
``loss_scale_window: 2`` the scale doubles every second step; there the update is -0.5.

Cause: ``step`` calls ``_update_scale(overflow)`` before ``unscale_and_clip_grads``, which reads
``self.loss_scale`` (stage 0: ``loss_scale_config.cur_scale``): gradients that were computed with
the old scale are divided by the new one. At stage 3 ``_global_grad_norm`` is divided by the new
scale, too. Stages 1 and 2 already keep ``prev_scale`` for the norm. A fix is to unscale by
``prev_scale``, or to update the scale at the end of ``step`` where there was no overflow.
"""

import os
from unittest import mock

os.environ.update(
    DS_ACCELERATOR="cpu",
    RANK="0",
    LOCAL_RANK="0",
    WORLD_SIZE="1",
    LOCAL_SIZE="1",
    MASTER_ADDR="127.0.0.1",
    MASTER_PORT="29533",
)

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator


class OneWeight(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))

    def forward(self) -> torch.Tensor:
        return self.weight.float().sum()


def updates(stage: int, steps: int = 6) -> list[float]:
    model = OneWeight()
    config = {
        "train_batch_size": 1,
        "gradient_clipping": 0.0,
        "fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2},
        "zero_optimization": {"stage": stage, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    found = []
    for _ in range(steps):
        before = value(engine)
        # At stage 0 the engine's backward does not scale the loss, but step divides by the scale.
        scale = engine.optimizer.loss_scale if stage == 0 else 1.0
        engine.backward(engine() * scale)
        engine.step()
        found.append(round(value(engine) - before, 4))
    engine.destroy()
    return found


def value(engine: deepspeed.DeepSpeedEngine) -> float:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return engine.module.weight[0].item()


if __name__ == "__main__":
    # Not needed here, and it would be compiled first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    # DeepSpeed allows fp16 on the newest CPUs only; PyTorch computes it on any.
    with mock.patch.object(get_accelerator(), "is_fp16_supported", return_value=True):
        for each in range(4):
            print(f"stage {each}: updates {updates(each)}, expected -1.0 each")
