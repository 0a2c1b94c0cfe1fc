"""Activation checkpointing that differs by type of device.

``model.activation_checkpointing`` is the run's, ``hardware.devices.NAME.activation_checkpointing``
that of one type of device. Pure. docs/unequal.md.

``python -m pytest tests/unit/test_plan_by_device.py``
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement

from llmx.config.hardware_rules import used_devices
from llmx.config.schema import Experiment

CHECKPOINTING = ("none", "selective", "full")
"""In the order of what is kept: all, some, least."""
RECOMPUTED = {"none": 1.0, "selective": 1.1, "full": 4 / 3}
"""Time of a step, of what it is without activation checkpointing, for the split over ranks."""
HOW = "model.activation_checkpointing"

Ways = Mapping[str, str]
"""Activation checkpointing by type of device, of all that the run uses."""


def own_key(device: str) -> str:
    """The key of one type of device."""
    return f"hardware.devices.{device}.activation_checkpointing"


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
    how = checkpointing_on(exp, device)
    if how == exp.model.activation_checkpointing:
        return exp
    return replace(exp, model=replace(exp.model, activation_checkpointing=how))


def in_words(ways: Ways) -> str:
    """``full``; or ``none, full on v100_32g`` where types differ: that of most types first."""
    values = list(ways.values())
    usual = max(dict.fromkeys(values), key=values.count)
    exceptions = [f"{way} on {name}" for name, way in ways.items() if way != usual]
    return ", ".join([usual, *exceptions])


def with_checkpointing(exp: Experiment, ways: Ways) -> Experiment:
    """Set activation checkpointing by type of device, with as few values as that takes."""
    if checkpointing_by_device(exp) == dict(ways):
        return exp
    run = exp.model.activation_checkpointing
    if run not in ways.values():
        run = min(ways.values(), key=CHECKPOINTING.index)
    devices = {
        name: replace(
            device,
            activation_checkpointing=ways[name] if name in ways and ways[name] != run else None,
        )
        if name in ways
        else device
        for name, device in exp.hardware.devices.items()
    }
    return replace(
        exp,
        model=replace(exp.model, activation_checkpointing=run),
        hardware=replace(exp.hardware, devices=devices),
    )


def checkpointing_overrides(before: Experiment, after: Experiment) -> list[str]:
    """To type, so that the one becomes the other."""
    overrides = []
    if before.model.activation_checkpointing != after.model.activation_checkpointing:
        overrides.append(f"{HOW}={after.model.activation_checkpointing}")
    for name in used_devices(before.hardware):
        was = before.hardware.devices[name].activation_checkpointing
        will = after.hardware.devices[name].activation_checkpointing
        if was != will:
            overrides.append(f"{own_key(name)}={will or 'null'}")
    return overrides


def uniform_ways(exp: Experiment, *, keep_own: bool = False) -> list[dict[str, str]]:
    """Each way for all types of devices; ``keep_own``: for those without a value of their own."""
    fixed = _own(exp) if keep_own else {}
    names = used_devices(exp.hardware)
    return [{name: fixed.get(name, how) for name in names} for how in CHECKPOINTING]


def mixed_ways(exp: Experiment, *, keep_own: bool = False) -> Iterator[dict[str, str]]:
    """Ways that differ by type of device: one with less memory keeps no more than one with more.
    Types with as much memory have the same."""
    fixed = _own(exp) if keep_own else {}
    free = {n: device for n, device in used_devices(exp.hardware).items() if n not in fixed}
    sizes = sorted({device.memory_gib for device in free.values()}, reverse=True)
    for combination in combinations_with_replacement(CHECKPOINTING, len(sizes)):
        if len(set(combination)) == 1:
            continue
        by_size: dict[float, str] = dict(zip(sizes, combination, strict=True))
        yield {
            name: fixed[name] if name in fixed else by_size[free[name].memory_gib]
            for name in used_devices(exp.hardware)
        }


def intricacy(ways: Ways) -> tuple[int, int]:
    """The plainest first: what the type of device does that keeps least; one value for all."""
    values: Sequence[str] = list(ways.values())
    return max(map(CHECKPOINTING.index, values), default=0), len(set(values))


def _own(exp: Experiment) -> dict[str, str]:
    devices = used_devices(exp.hardware)
    return {
        name: device.activation_checkpointing
        for name, device in devices.items()
        if device.activation_checkpointing is not None
    }
