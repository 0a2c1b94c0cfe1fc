"""Registers ``llmx_defaults`` with Hydra: every key of the schema with its default value.

So each key can be overridden without a ``+`` and a typo is an error, while types, sizes such
as ``5e8`` and rules stay with ``llmx.config``, which snapshots use as well.
"""

from __future__ import annotations

import dataclasses
import functools
import typing

from llmx.config import Experiment, to_dict
from llmx.config.build import hints_of


def register_defaults() -> None:
    """Idempotent; called before Hydra composes."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="llmx_defaults", node=_node())


@functools.cache
def _node() -> typing.Any:
    """The same each time: Hydra copies what it is given."""
    from omegaconf import OmegaConf

    values = to_dict(Experiment())
    # OmegaConf lets a "???" of a group not override a value: with the schema's own default,
    # `data=file` without a path would silently train on the demo.
    values["data"]["path"] = "???"
    node = OmegaConf.create(values)
    for key in free_mappings(Experiment):
        # `launch.env.NCCL_DEBUG=INFO` is no typo, and needs no `+`.
        OmegaConf.set_struct(OmegaConf.select(node, key), False)
    return node


def free_mappings(cls: type, prefix: str = "") -> list[str]:
    """Dotted keys of the schema's fields that are mappings with keys of the user's choice."""
    found: list[str] = []
    hints = hints_of(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            found += free_mappings(hint, f"{prefix}{field.name}.")
        elif typing.get_origin(hint) is dict:
            found.append(prefix + field.name)
    return found
