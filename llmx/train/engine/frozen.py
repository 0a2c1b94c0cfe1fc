"""Frozen networks that are needed once, before training: built, used and freed.

Below ZeRO-3 each rank has them whole, in the training dtype and without an engine: gradients and
optimizer states, which take most of a device's memory in training, are not there yet. At ZeRO-3
they are sharded over the ranks as the trained network will be. Tried by ``python -m pytest -m
deepspeed tests/integration/test_dpo.py``.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from llmx.config import Experiment
from llmx.models.experts import gather_experts_together
from llmx.models.model import ForwardOf, Models, ModelSpec, NetworksByName, base_of
from llmx.plan.types import Plan
from llmx.train.engine.build import (
    Engine,
    build_networks,
    layout_of,
    models_of,
    seed_everything,
)
from llmx.train.engine.process_group import device_of


@dataclass(frozen=True)
class FrozenModels:
    """Networks without gradients and dropout."""

    models: Models
    sharded: bool
    """Whether a forward pass is collective: every rank runs equally many then."""

    @property
    def layout(self) -> str:
        """``packed`` or ``padded``."""
        return layout_of(self.models)


@contextlib.contextmanager
def frozen_models(
    exp: Experiment,
    plan: Plan,
    ds_config: dict[str, Any],
    *,
    tokenizer: Any,
    specs: Mapping[str, ModelSpec],
) -> Iterator[FrozenModels]:
    """The networks of ``specs``, which are frozen; freed with the block. Collective."""
    # Without gradients there is nothing to compute again.
    exp = replace(exp, model=replace(exp.model, activation_checkpointing="none"))
    device = device_of(plan)
    seed_everything(exp.seed, deterministic=exp.deterministic, accelerator=plan.accelerator)
    built = build_networks(exp, plan, ds_config, specs=specs, tokenizer=tokenizer, device=device)
    whole = NetworksByName({name: one.network for name, one in built.items()}, frozen=[*specs])
    engine = None
    if sharded := ds_config["zero_optimization"]["stage"] == 3:
        import deepspeed

        gather_experts_together(whole)
        engine, _, _, _ = deepspeed.initialize(
            model=whole, config=for_inference(ds_config), dist_init_required=False
        )
    (engine or whole).eval()
    try:
        models = models_of(
            built,
            specs=specs,
            tokenizer=tokenizer,
            device=device,
            forwards={
                name: ForwardOf(engine, name, one.network) if engine else one.network
                for name, one in built.items()
            },
        )
        yield FrozenModels(models, sharded)
    finally:
        if engine is not None:
            engine.destroy()
        # The caller may hold an exception, or the models: the weights go in any case.
        parameter: Any
        for parameter in whole.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            if hasattr(parameter, "ds_tensor"):  # this rank's part under ZeRO-3
                parameter.ds_tensor = None
        del engine, built, whole
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


@contextlib.contextmanager
def bases_of(engine: Engine, specs: Mapping[str, ModelSpec]) -> Iterator[FrozenModels]:
    """The trained network of ``engine`` without its adapter, under each name of ``specs``."""
    models = {name: base_of(engine.main, name=name, spec=spec) for name, spec in specs.items()}
    yield FrozenModels(Models(models), sharded=engine.stage == 3)


def for_inference(ds_config: dict[str, Any]) -> dict[str, Any]:
    """The config of a ZeRO-3 engine without an optimizer: nothing of optimizers is in it."""
    zero = {
        key: value
        for key, value in ds_config["zero_optimization"].items()
        if key != "offload_optimizer"
    }
    return {**ds_config, "zero_optimization": zero}
