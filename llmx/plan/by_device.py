"""Activation checkpointing that differs by type of device.

``model.activation_checkpointing`` is the run's, ``hardware.devices.NAME.activation_checkpointing``
that of one type of device. Pure. docs/unequal.md.

``python -m pytest tests/unit/test_plan_by_device.py``
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from llmx.config.hardware_rules import used_devices
from llmx.config.schema import Experiment

CHECKPOINTING = ("none", "selective", "full")
"""The settings in the order of what is kept: all, some, least."""
RECOMPUTED = {"none": 1.0, "selective": 1.1, "full": 4 / 3}
"""Time of a step, of what it is without activation checkpointing, for the split over ranks."""


def checkpointing_on(exp: Experiment, device: str) -> str:
    """The activation checkpointing of the ranks on a type of device."""
    described = exp.hardware.devices.get(device)
    of_device = None if described is None else described.activation_checkpointing
    return exp.model.activation_checkpointing if of_device is None else of_device


def checkpointing_by_device(exp: Experiment) -> dict[str, str]:
    """The activation checkpointing of each type of device, in the order of the hosts."""
    return {name: checkpointing_on(exp, name) for name in used_devices(exp.hardware)}


def on_device(exp: Experiment, device: str) -> Experiment:
    """The experiment as ranks on this type of device run it."""
    setting = checkpointing_on(exp, device)
    if setting == exp.model.activation_checkpointing:
        return exp
    return replace(exp, model=replace(exp.model, activation_checkpointing=setting))


def in_words(by_device: Mapping[str, str]) -> str:
    """``full``; or ``none, full on v100_32g`` where types differ: that of most types first."""
    values = list(by_device.values())
    usual = max(dict.fromkeys(values), key=values.count)
    others = [f"{setting} on {name}" for name, setting in by_device.items() if setting != usual]
    return ", ".join([usual, *others])
