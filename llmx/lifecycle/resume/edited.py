"""Whether ``config.yaml`` of a run is still what llmx wrote, and which keys were edited since."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmx.lifecycle.resume.rules import ROUNDING, SAME, changes
from llmx.run import snapshot
from llmx.run.provenance.differences import BREAKS, HARMLESS, MAY, Difference, short_value
from llmx.run.rundir import RunDir

SEVERITY = {SAME: HARMLESS, ROUNDING: MAY}
"""What an edit does to the numbers, by the rule of its key; all else breaks bitwise equality."""


def edited_config(run: RunDir, then: Mapping[str, Any]) -> list[Difference]:
    """A row for each key that was edited by hand; one for the file where they are not known.

    ``then``: the provenance of the run. Nothing where it has no hash of the config:
    ``not_recorded`` says so.
    """
    recorded = then.get("config")
    now = snapshot.config_values(run.config)
    if not recorded or now is None or snapshot.hash_of(now) == recorded:
        return []
    for path in _copies(run):
        former = snapshot.config_values(path)
        if former is not None and snapshot.hash_of(former) == recorded:
            return [
                Difference(
                    SEVERITY.get(change.rule.effect, BREAKS),
                    f"config.yaml was edited: {change.key}",
                    short_value(change.old),
                    short_value(change.new),
                    f"{path.relative_to(run.root)} has it as it was",
                )
                for change in changes(former, now)
            ]
    return [
        Difference(
            BREAKS, "config.yaml was edited by hand", str(recorded)[:12],
            snapshot.hash_of(now)[:12], "no copy of the recorded one is left to compare it with",
        )
    ]  # fmt: skip


def _copies(run: RunDir) -> Iterator[Path]:
    """Of ``config.yaml`` as it was: in checkpoints, the newest first."""
    yield from sorted(run.checkpoints.glob("step-*/config.yaml"), reverse=True)
