"""Old snapshots stay loadable: one function a version, from its values to the next one's.

A migration sets what keeps the behaviour of the version it comes from, also where a new
run's default is another. Pure; applied whenever a ``config.yaml`` is read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmx.config.build import shown
from llmx.config.schema import SCHEMA_VERSION
from llmx.errors import ConfigError


@dataclass(frozen=True)
class Migrated:
    """Values of today's schema, and what was done to them."""

    values: dict[str, Any]
    notes: tuple[str, ...] = ()
    """One line a version passed; empty for a snapshot of today's schema."""


def migrate(values: Any, *, source: str = "config.yaml") -> Migrated:
    """Bring the values of any earlier version to today's; the argument is left as it is.

    ``source`` names the file in messages. ConfigError for values of a newer llmx, and for
    what is no snapshot at all.
    """
    version = values.get("schema_version") if isinstance(values, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ConfigError(
            f"{source}: schema_version={shown(version)}: must be a whole number from 1 to "
            f"{SCHEMA_VERSION}. Give a run directory that llmx wrote."
        )
    if version > SCHEMA_VERSION:
        raise ConfigError(
            f"{source}: schema_version={version}, but this llmx reads up to {SCHEMA_VERSION}. "
            "Install the llmx that wrote it, or a newer one."
        )
    values = copy.deepcopy(values)
    notes = []
    for number in range(version, SCHEMA_VERSION):
        note = MIGRATIONS[number](values)
        values["schema_version"] = number + 1
        notes.append(f"schema {number} -> {number + 1}: {note}")
    return Migrated(values, tuple(notes))


def _one_to_two(values: dict[str, Any]) -> str:
    """2 has checkpoints, restarts and divergence policies; 1 had none of them."""
    values["checkpoint"] = {"every_steps": None, "every_minutes": None, "at_end": False}
    values["checkpoint"]["on_signal"] = False
    # No answer to a rank that stands still, as before; stop_grace_s stays what it was.
    values.setdefault("launch", {}).update(max_restarts=0, elastic=False, hang_timeout_s=0.0)
    values.setdefault("task", {}).update(stop_at_step=None, on_divergence="stop", spike_factor=None)
    return "no checkpoints, no automatic restarts, as that version ran"


def _two_to_three(values: dict[str, Any]) -> str:
    """3 chooses the type of gradient sums, kernels and the length of a batch; 2 had one of each.

    Keys that are there stay: an llmx between the two wrote them, and ran by them.
    """
    model, data, zero = (values.setdefault(group, {}) for group in ("model", "data", "zero"))
    if "grad_accum_dtype" not in zero and model.get("attention", "auto") == "auto":
        model["attention"] = "sdpa"  # all that ``auto`` was
    # precision=auto is decided in the plan, so that its name is not known here.
    zero.setdefault("grad_accum_dtype", "precision")
    recompute = model.get("activation_checkpointing", False)
    if isinstance(recompute, bool):
        model["activation_checkpointing"] = "full" if recompute else "none"
    for key in ("fused_loss", "compile", "liger_kernel"):
        model.setdefault(key, False)
    data.setdefault("layout", "packed")
    data.setdefault("pad_to_multiple_of", 8)
    return "gradients are summed in the run's precision, attention and loss as that version ran"


MIGRATIONS: dict[int, Callable[[dict[str, Any]], str]] = {1: _one_to_two, 2: _two_to_three}
"""Version -> the function that makes the next one of it, in place; returns what it did."""
