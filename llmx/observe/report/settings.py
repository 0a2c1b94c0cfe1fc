"""The part of a config that a reader wants: what every run has, and what is not a default. Pure.

The other hundred keys have the values that the schema gives them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from llmx.config import Experiment, to_dict
from llmx.run.provenance.differences import flattened

ALWAYS = (
    "seed", "precision", "model.kind", "model.path", "model.init", "data.path", "data.seq_len",
    "data.packing", "task.kind", "task.steps", "task.epochs", "zero.stage", "optim.kind",
    "optim.lr", "optim.schedule", "optim.weight_decay", "batch.global_batch", "batch.micro_batch",
)  # fmt: skip
"""Shown also where they are the defaults; not where they are not set."""
NEVER = ("schema_version", "name", "run_dir", "dry_run", "hardware.hosts", "hardware.devices")
"""The run's own, and what the plan shows better."""
NOT_OF_A_RUN = ("tokenizer.",)
"""Groups of other commands."""


def chosen(config: Mapping[str, Any]) -> dict[str, Any]:
    """The nested part of ``config``, in its order."""
    defaults = flattened(to_dict(Experiment()))
    found: dict[str, Any] = {}
    for key, value in flattened(config).items():
        if key.startswith((*NEVER, *NOT_OF_A_RUN)) or value in ({}, []):
            continue
        if value != defaults.get(key) or (key in ALWAYS and value is not None):
            place = found
            *parents, last = key.split(".")
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = value
    return found


class _Dumper(yaml.SafeDumper):
    """Lists on one line, as they are typed."""


_Dumper.add_representer(
    list, lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", value, True)
)


def as_yaml(values: Mapping[str, Any]) -> str:
    """``chosen`` for a reader."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=60)


def shown(value: Any) -> str:
    """A value on one line, as YAML writes it."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.strip().removesuffix("...").strip()
