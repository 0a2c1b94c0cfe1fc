"""ZeRO-3 with experts that are modules of their own, each run only where a token needs it.

``deepspeed --num_gpus 2 --module --no_local_rank tests.programs.experts OUT``

Each rank gets other tokens, so other experts. Without leaf modules a rank waits for the gathering
of an expert that the other one has no token for. Each rank writes ``OUT/rank<rank>.json``: what it
did at stage 3, and at stage 0, where nothing is gathered. With
``NO_LEAF_MODULES=1`` the leaf modules are left out, to see the hang.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.models.mixtral import modeling_mixtral as mixtral

from llmx.models.attention import AttentionMethod, model_inputs
from llmx.models.loss import micro_batch_loss
from llmx.plan import ds_config, make_plan
from llmx.train.engine import build as building
from llmx.train.engine.build import build_engine
from llmx.train.engine.process_group import join_process_group
from tests.programs.leaving import run_and_leave
from tests.reference import word_tokenizer
from tests.rundirs import parity_experiment, with_batch

STEPS = 3


class OneByOne(nn.Module):
    """Experts as models outside of transformers have them: a list, and a loop over those hit."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.up = nn.ModuleList(nn.Linear(width, inner) for _ in range(config.num_local_experts))
        self.down = nn.ModuleList(nn.Linear(inner, width) for _ in range(config.num_local_experts))

    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        result = torch.zeros_like(hidden)
        for expert in chosen.unique().tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            made = self.down[expert](torch.relu(self.up[expert](hidden[token])))
            result = result.index_add(0, token, made * weights[token, place, None])
        return result


def initialise(self: PreTrainedModel, module: nn.Module) -> None:
    if isinstance(module, mixtral.MixtralTopKRouter):
        nn.init.normal_(module.weight)
    else:
        PreTrainedModel._init_weights(self, module)


def train(out: Path, *, stage: int) -> dict[str, Any]:
    """Losses, gradient norms, and which experts this rank's tokens needed, by step."""
    exp = parity_experiment(out, ranks=2, stage=stage, kind="mixtral")
    exp.model.config = {**exp.model.config, "num_local_experts": 16}
    # Every parameter is partitioned, however small, and gathered when its module runs.
    exp.zero.param_persistence_threshold = 0
    plan = with_batch(make_plan(exp), (1, 1), 1)
    engine = build_engine(
        exp, plan, ds_config(exp.model, exp.zero, exp.optim, plan), tokenizer=word_tokenizer()
    )
    engine.set_lr(0.01)
    rank = torch.distributed.get_rank()
    found: dict[str, Any] = {"losses": [], "norms": [], "experts": []}
    for step in range(STEPS):
        length = 2 + 6 * rank
        ids = torch.arange(length)[None] * 3 + 20 * step + 10 * rank + 3
        batch = {
            "input_ids": ids,
            "labels": ids.roll(-1, dims=1).index_fill(1, torch.tensor([length - 1]), -100),
            "position_ids": torch.arange(length)[None],
            "segment_ids": torch.ones(1, length, dtype=torch.int64),
        }
        inputs, labels = model_inputs(
            batch, method=AttentionMethod(), dtype=torch.float32, device=engine.device
        )
        engine.main.routing.begin_step()
        with engine.main.routing.watch(batch["segment_ids"]):
            loss = micro_batch_loss(engine.engine, inputs, labels)
        engine.backward(engine.main.routing.objective(loss / 8, factor=1 / 16))
        engine.engine.step()
        load = engine.main.routing.load
        assert load is not None
        found["losses"].append(float(loss.detach()))
        found["norms"].append(engine.grad_norm())
        found["experts"].append([sorted(each.nonzero().flatten().tolist()) for each in load])
    engine.engine.destroy()
    return found


def main() -> None:
    out = Path(sys.argv[1])
    mixtral.MixtralExperts = OneByOne
    # Under another name: DeepSpeed knows transformers' own Mixtral by its name.
    mixtral.MixtralSparseMoeBlock = type("ForeignBlock", (mixtral.MixtralSparseMoeBlock,), {})
    mixtral.MixtralPreTrainedModel._init_weights = initialise
    if os.environ.get("NO_LEAF_MODULES"):
        building.gather_experts_together = lambda model: None
    join_process_group(make_plan(parity_experiment(out, ranks=2, kind="mixtral")))
    mine = {stage: train(out, stage=stage) for stage in (3, 0)}
    (out / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(mine))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run_and_leave(main)
