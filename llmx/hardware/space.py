"""Whether hosts have the RAM and the disk that a plan takes of them (``llmx.plan.storage``). Pure.

What cannot work is an error before a rank is started: a disk without space for the first checkpoint
and the one that replaces it. What may become too little is a warning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmx import text as human
from llmx.plan.storage import less_ram
from llmx.plan.types import HostStorage, Plan, StoragePlan
from llmx.text import plural


@dataclass(frozen=True)
class DiskUse:
    """What a run takes on one file system."""

    checkpoint: int
    """Bytes of one checkpoint."""
    model: int
    """Bytes of ``model/``, written at the end."""
    at_once: int | None
    """Checkpoints while one is written; None: no limit."""
    kept: int | None
    """Checkpoints between two saves."""
    there: int = 0
    """Checkpoints of the run that lie there already."""
    certain: float = 1.0
    """The part of both sizes that does not depend on what is not known yet."""

    @property
    def first_needed(self) -> int:
        """For the first checkpoint and the second one, which is complete before the first is
        removed; then for ``model/`` beside the last one."""
        ever = 2 if self.at_once is None else min(2, self.at_once)
        new = max(ever - self.there, min(1, ever))
        stays = max(0, min(1, ever) - self.there)
        found = max(new * self.checkpoint, stays * self.checkpoint + self.model)
        return math.floor(self.certain * found)

    @property
    def needed(self) -> int | None:
        """At most, beyond what lies there; None: no limit."""
        if self.at_once is None or self.kept is None:
            return None
        there = min(self.there, self.kept)
        stays = (self.kept - there) * self.checkpoint + self.model
        return max((self.at_once - there) * self.checkpoint, stays)


def disk_use(storage: StoragePlan | None, host: str | None, *, there: int = 0) -> DiskUse | None:
    """On the file system of a host's run directory; None: of the launching machine, which has
    whole checkpoints. None where sizes are not known."""
    if storage is None:
        return None
    own = next((one for one in storage.hosts if host in one.hosts), None)
    checkpoint = storage.checkpoint_bytes if own is None else own.checkpoint_bytes
    model = storage.model_bytes if own is None else own.model_bytes
    if checkpoint is None or model is None:
        return None
    return DiskUse(
        checkpoint,
        model,
        storage.checkpoints_at_once,
        storage.checkpoints_kept,
        there,
        storage.certain,
    )


def disk_problem(use: DiskUse, free: int, *, where: str) -> tuple[str, str]:
    """(error, warning) where the disk has too little space; empty where it has enough. ``where``:
    the host and the run directory."""
    has = f"{where} has {human.size(free)} of disk free"
    if free < use.first_needed:
        instead = "Free some space, or set run_dir to a directory on a larger disk."
        if use.at_once == 0:
            return f"{has}, and the model that is written at the end takes " + (
                f"{human.size(use.first_needed)}. {instead}"
            ), ""
        text = f"{has}. A checkpoint takes {human.size(use.checkpoint)}"
        if use.there:
            text += ", and the last one is removed only when the next is complete"
        elif use.at_once is None or use.at_once > 1:
            text += ", and the first one is removed only when the second is complete"
        at_least = human.size(use.first_needed)
        return (
            f"{text}: with the final model at least {at_least} are needed. {instead} "
            "checkpoint=none saves no training state.",
            "",
        )
    if use.needed is None or free >= use.needed:
        return "", ""
    least = DiskUse(use.checkpoint, use.model, min(2, use.at_once or 0), min(1, use.kept or 0))
    smaller = ""
    if (use.kept or 0) > 1:
        smaller = (
            f" With checkpoint.keep.last=1 they take {human.size(least.needed or 0)}, if neither "
            "checkpoint.keep.best nor checkpoint.keep.every keeps more."
        )
    return "", (
        f"{has}, and up to {human.size(use.needed)} more are needed: "
        f"{plural(use.at_once or 0, 'checkpoint')} of {human.size(use.checkpoint)} at once, and "
        f"model/. When the disk is full, saves fail.{smaller}"
    )


def problems_here(plan: Plan, run_dir: str, facts: Mapping[str, Any]) -> tuple[str, ...]:
    """What this machine lacks now, of RAM for its ranks and of disk (``survey.space_facts``)."""
    found: list[str] = []
    use = disk_use(plan.storage, None, there=facts.get("checkpoints", 0))
    if use is not None:
        found += disk_problem(use, facts["free_bytes"], where=run_dir)
    local = {host.name for host in plan.hosts if host.is_local}
    for one in plan.storage.hosts if plan.storage is not None else ():
        if local & set(one.hosts):
            found.append(ram_problem(one, "this machine", facts))
    return tuple(text for text in found if text)


def ram_problem(host: HostStorage, name: str, facts: Mapping[str, Any]) -> str:
    """A warning where a host has less RAM available than the plan takes; empty otherwise."""
    available, needed = facts.get("ram_available_bytes"), host.ram_bytes
    if not available or needed is None or needed <= available:
        return ""
    return (
        f"{name}: {human.size(needed)} of RAM predicted, {human.size(available)} available now: "
        f"the kernel may kill ranks. {less_ram(host)}"
    )
