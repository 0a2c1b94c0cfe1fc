"""The state of an engine besides tensors: step counts, the loss scaler, the engine's counters.

All of it goes into ``state.json`` (docs/development/contracts.md, "Checkpoints"). Tried by
``python -m pytest tests/unit/test_train_state.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from llmx.checkpoint.state.layout import Owner, is_scalar, states_of_another_shape
from llmx.errors import ConfigError
from llmx.models.parameters import persistent_buffers, whole_shape

KINDS = {
    "Adafactor": "adafactor",
    "AdamW": "adamw",
    "AdamW8bit": "adam8bit",
    "DeepSpeedCPUAdam": "cpu_adam",
    "FusedAdam": "fused_adam",
    "Lion": "lion",
    "Muon": "muon",
    "SGD": "sgd",
}
"""``optim.kind`` by class."""

SCALER_VALUES = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


Table = dict[str, dict[str, Any]]
"""What is known of each parameter or buffer, by name."""


def parameter_table(module: nn.Module) -> Table:
    """Name -> whole shape, whether it is trained, and the name of the one it is tied to."""
    first: dict[int, str] = {}
    table: Table = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        table[name] = {
            "shape": list(whole_shape(parameter)),
            "trained": parameter.requires_grad,
            "tied_to": first.get(id(parameter)),
        }
        first.setdefault(id(parameter), name)
    return table


def buffer_table(module: nn.Module) -> Table:
    """Name -> shape of the buffers that a checkpoint holds."""
    return {name: {"shape": list(buffer.shape)} for name, buffer in persistent_buffers(module)}


def check_tables(parameters: Table, buffers: Table, saved: Table, saved_buffers: Table) -> None:
    """Raise ConfigError unless the checkpoint is one of this very model."""
    for kind, of_model, of_checkpoint in (
        ("parameter", parameters, saved),
        ("buffer", buffers, saved_buffers),
    ):
        if extra := [name for name in of_checkpoint if name not in of_model]:
            raise ConfigError(
                f"The checkpoint has {len(extra)} {kind}s that the model lacks, e.g. {extra[0]}. "
                "Resume with the model.* of the run that wrote it."
            )
        if absent := [name for name in of_model if name not in of_checkpoint]:
            raise ConfigError(
                f"The model has {len(absent)} {kind}s that the checkpoint lacks, e.g. {absent[0]}. "
                "Resume with the model.* of the run that wrote it."
            )
        for name, entry in of_model.items():
            if entry != of_checkpoint[name]:
                raise ConfigError(
                    f"{name} is {_described(of_checkpoint[name])} in the checkpoint and "
                    f"{_described(entry)} in the model. Resume with the model.* of the run that "
                    "wrote it."
                )


def _described(entry: dict[str, Any]) -> str:
    shape = "x".join(map(str, entry["shape"])) or "a number"
    trained = "" if entry.get("trained", True) else ", not trained"
    return shape + trained + (f", tied to {entry['tied_to']}" if entry.get("tied_to") else "")


def optimizer_kind(optimizer: torch.optim.Optimizer) -> str:
    """``optim.kind`` of DeepSpeed's base optimizer; the class's name for one that is none."""
    name = type(optimizer).__name__
    return KINDS.get(name, name)


def check_states(optimizer: torch.optim.Optimizer, *, partitioned: bool) -> None:
    """Raise ConfigError for an optimizer whose states ZeRO cannot cut into parts. Before training.

    Most of the known ones (``KINDS``) keep one value for each element. Another one is tried: a step
    on a matrix and a vector of its own, since factored states (Adafactor) are those of matrices
    only.
    """
    if not partitioned or type(optimizer).__name__ in {*KINDS} - {"Adafactor", "AdamW8bit"}:
        return
    parameters = [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(3))]
    trial = type(optimizer)(parameters, **optimizer.defaults)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    trial.step()
    for parameter in parameters:
        if shapes := states_of_another_shape(trial.state[parameter], parameter):
            listed = ", ".join(f"{key} of shape {shape}" for key, shape in shapes.items())
            raise ConfigError(
                f"{type(optimizer).__name__} keeps states that are not one value for each element "
                f"of a parameter ({listed}). ZeRO cuts parameters into flat parts, of which such "
                "states cannot be kept. Set zero.stage=0, or optim.kind=adamw."
            )


def check_kind(saved: str, current: str) -> None:
    """Raise ConfigError unless ``current`` can resume from the states of ``saved``."""
    adam = {"adamw", "cpu_adam", "fused_adam"}
    if saved != current and not {saved, current} <= adam:
        raise ConfigError(
            f"The checkpoint was written with optim.kind={saved}, this run has "
            f"optim.kind={current}, which keeps other states. Resume with optim.kind={saved}."
        )


def read_scalars(owners: list[Owner]) -> dict[str, float]:
    """Numbers that the optimizer keeps for each tensor (``step``), one for all.

    The greatest: DeepSpeed's FusedAdam counts the steps of a group on its last tensor alone.
    Empty before the first step.
    """
    scalars: dict[str, float] = {}
    for owner in owners:
        for key, value in owner.optimizer.state.get(owner.tensor, {}).items():
            if is_scalar(key, value):
                number = value.item() if torch.is_tensor(value) else value
                number = int(number) if float(number).is_integer() else number
                scalars[key] = max(scalars.get(key, number), number)
    return scalars


def write_scalars(owner: Owner, scalars: dict[str, float]) -> None:
    """Put them into the owner's state, in the form its optimizer expects."""
    state, optimizer = owner.optimizer.state[owner.tensor], owner.optimizer
    of_torch = type(optimizer).__module__.startswith("torch.")
    of_torch = of_torch or getattr(optimizer, "steps_are_tensors", False)
    for key, number in scalars.items():
        if torch.is_tensor(state.get(key)):
            state[key].fill_(number)
        elif key in state or not of_torch:
            state[key] = number
        else:
            # As torch.optim makes it: on the device only where the kernel reads it there.
            on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
            device = owner.tensor.device if on_device else "cpu"
            state[key] = torch.tensor(float(number), dtype=torch.float32, device=device)


def replay_cpu_adam(owners: list[Owner], scalars: dict[str, float]) -> None:
    """Bring DeepSpeedCPUAdam's own powers of beta to where the saved run had them.

    Its C++ side multiplies them up step by step, which differs in the last bit from the power
    that it would compute at the first step after a restart (``cpu_adam.h``, IncrementStep). So
    the steps are counted again, on no elements: a few microseconds each.
    """
    if "step" not in scalars:
        return
    done: set[int] = set()
    for owner in owners:
        optimizer: Any = owner.optimizer
        if type(optimizer).__name__ != "DeepSpeedCPUAdam" or id(optimizer) in done:
            continue
        done.add(id(optimizer))
        state, group = optimizer.state[owner.tensor], optimizer.param_groups[0]
        value = owner.tensor.data.view(-1)[:0]
        first, second = state["exp_avg"].view(-1)[:0], state["exp_avg_sq"].view(-1)[:0]
        for step in range(1, int(scalars["step"]) + 1):
            optimizer.ds_opt_adam.adam_update(
                optimizer.opt_id, step, group["lr"], *group["betas"], group["eps"],
                group["weight_decay"], group["bias_correction"], value, value, first, second,
            )  # fmt: skip


def read_loss_scaler(engine: Any) -> dict[str, float] | None:
    """The dynamic loss scale of fp16 and what it goes by; None at the other precisions."""
    scaler = loss_scaler(engine)
    if scaler is None:
        return None
    return {key: getattr(scaler, key) for key in SCALER_VALUES if hasattr(scaler, key)}


def write_loss_scaler(engine: Any, values: dict[str, float] | None) -> None:
    """Set the values that this engine's scaler has; those of another wrapper may be fewer."""
    scaler = loss_scaler(engine)
    if scaler is None or values is None:
        return
    for key in SCALER_VALUES:
        if key in values and hasattr(scaler, key):
            setattr(scaler, key, values[key])


def read_counters(engine: Any) -> dict[str, int]:
    """DeepSpeed's own counts of updates."""
    return {"global_steps": engine.global_steps, "skipped_steps": engine.skipped_steps}


def write_counters(engine: Any, counters: dict[str, int]) -> None:
    """At a step's boundary, whatever the accumulation was when they were read."""
    engine.global_steps = counters["global_steps"]
    engine.skipped_steps = counters["skipped_steps"]
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    engine.global_samples = engine.global_steps * engine.train_batch_size()


def loss_scaler(engine: Any) -> Any | None:
    """DeepSpeed's: ``loss_scaler`` under ZeRO, ``loss_scale_config`` at stage 0; None unless
    fp16."""
    if not engine.fp16_enabled():
        return None
    optimizer = engine.optimizer
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)
