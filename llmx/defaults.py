"""Registers ``llmx_defaults`` with Hydra: every key of the schema with its default value.

So each key can be overridden without a ``+`` and a typo is an error, while types, sizes such
as ``5e8`` and rules stay with ``llmx.config``, which snapshots use as well.
"""

from __future__ import annotations


def register_defaults() -> None:
    """Idempotent; called before Hydra composes."""
    from hydra.core.config_store import ConfigStore

    from llmx.config import Experiment, to_dict

    values = to_dict(Experiment())
    # OmegaConf lets a "???" of a group not override a value: with the schema's own default,
    # `data=file` without a path would silently train on the demo.
    values["data"]["path"] = "???"
    ConfigStore.instance().store(name="llmx_defaults", node=values)
