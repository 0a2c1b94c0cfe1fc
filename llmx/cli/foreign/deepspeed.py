"""DeepSpeed's JSON, alone or beside a trainer's settings, where ``auto`` is the trainer's value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmx.cli.foreign.convert import (
    LEFT_OUT,
    MAPPED,
    NO_EFFECT,
    REFUSED,
    UNKNOWN,
    Converter,
    Row,
    Settings,
    Source,
    choice,
    convert,
    shown_value,
)
from llmx.config.foreign import DEEPSPEED
from llmx.config.yaml_files import read_text
from llmx.errors import ConfigError
from llmx.plan.ds_config import REFUSED as REASONS
from llmx.plan.ds_config import TAKEN

OPTIMIZERS = {"Adam": "adamw", "AdamW": "adamw", "Lion": "lion", "SGD": "sgd", "Muon": "muon"}
SCHEDULES = {
    "WarmupLR": {"optim.schedule": "constant"},
    "WarmupDecayLR": {"optim.schedule": "linear", "optim.min_lr_ratio": 0.0},
    "WarmupCosineLR": {"optim.schedule": "cosine", "optim.min_lr_ratio": 0.0},
}
WRITTEN = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000,
           "hysteresis": 2, "min_loss_scale": 1}  # fmt: skip
"""The loss scale of every run in fp16."""


def precision(value: Any, source: Source) -> Settings | str:
    for kind in ("bf16", "fp16"):
        if source.get(f"{kind}.enabled") is True:
            return {"precision": kind}
    return {"precision": "fp32"}


def _size(key: str) -> Converter:
    return lambda value, source: {key: int(value)}


_ZERO = "zero_optimization."
_DEVICES = {"cpu": "cpu", "nvme": "nvme", "none": "none"}
CONVERTERS: dict[str, Converter] = {
    "optimizer.type": choice("optim.kind", OPTIMIZERS, "Add optim.kind=adamw."),
    "scheduler.type": choice("optim.schedule", SCHEDULES, "Add optim.schedule=cosine."),
    "bf16.enabled": precision,
    "fp16.enabled": precision,
    "gradient_accumulation_steps": lambda value, source: (
        "part of train_batch_size"
        if isinstance(source.get("train_batch_size"), int)
        else {"batch.accumulation": value}
    ),
    f"{_ZERO}offload_optimizer.device": choice("zero.offload_optimizer", _DEVICES),
    f"{_ZERO}offload_param.device": choice("zero.offload_param", _DEVICES),
    **{
        name: _size(key)
        for key, names in DEEPSPEED.mapped.items()
        for name in names.split()
        if key.endswith(("size", "threshold", "live_parameters", "distance"))
    },
}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON of DeepSpeed; ConfigError for another file."""
    try:
        values = json.loads(read_text(path))
    except ValueError as error:
        raise ConfigError(f"{path}: is not valid JSON ({error}). Correct it.") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: is a {type(values).__name__}, not an object of settings. Give the file of "
            "the settings, not that of the data."
        )
    return values


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``(dotted name, value)`` of each value."""
    for name, value in values.items():
        if isinstance(value, dict) and value and f"{prefix}{name}" not in _WHOLE:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


_WHOLE = {name for names in DEEPSPEED.no_effect.values() for name in names.split()}
"""Sections without effect are one row."""


def convert_json(
    values: Mapping[str, Any],
    *,
    answered: Sequence[str] = (),
    without: Sequence[str] = (),
    prefix: str = "",
) -> tuple[Settings, list[Row]]:
    """Settings and report of DeepSpeed's configuration. ``without``: dotted names to leave out."""
    flat_values = dict(flat(values))
    autos = [name for name, value in flat_values.items() if value == "auto"]
    source = Source(
        DEEPSPEED,
        {n: value for n, value in flat_values.items() if value != "auto" and n not in without},
        answered=answered,
    )
    settings, rows = convert(source, CONVERTERS)
    rows = [_explained(row, settings) for row in rows]
    extra: dict[str, Any] = {}
    for row in rows:
        if TAKEN.get(row.key) and row.kind == MAPPED:
            *sections, key = row.key.split(".")
            place = extra
            for section in sections:
                place = place.setdefault(section, {})
            place[key] = row.value
    rows += [Row(name, "auto", NO_EFFECT, "", "auto: the trainer's value") for name in autos]
    rows += [Row(n, flat_values[n], NO_EFFECT, "", LEFT_OUT) for n in without if n in flat_values]
    rows = [replace(row, key=prefix + row.key) for row in rows]
    return settings | ({"zero.extra": extra} if extra else {}), rows


def _explained(row: Row, settings: Settings) -> Row:
    """A row with DeepSpeed's meaning: what ``zero.extra`` takes, and why it does not."""
    section, _, key = row.key.rpartition(".")
    reason = REASONS.get(row.key) or REASONS.get(row.key.split(".")[0], "")
    if row.kind == NO_EFFECT and not row.remark:
        return replace(row, remark=reason or "a run has its own")
    if row.kind != UNKNOWN:
        return row
    if section == "fp16" and WRITTEN.get(key) == row.value:
        return replace(row, kind=NO_EFFECT, remark="every run in fp16 has it")
    if place := TAKEN.get(row.key):
        is_read = settings.get("zero.stage", 0) in place.stages and place.needs in (
            "",
            settings.get("precision"),
        )
        ours = f"zero.extra.{row.key}={shown_value(row.value)}"
        if is_read:
            return replace(row, kind=MAPPED, ours=ours, remark="")
        return replace(row, kind=NO_EFFECT, remark="DeepSpeed does not read it here")
    return replace(row, kind=REFUSED, remark=reason) if reason else row
