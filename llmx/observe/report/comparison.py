"""What differs between two runs, as rows of tables: config, environment, outcome. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmx.observe.report import wording
from llmx.observe.report.run_data import RunData
from llmx.run.provenance.differences import (
    Difference,
    changed_values,
    differences,
    flattened,
    plan_differences,
)
from llmx.text import plural

OWN_KEYS = ("name", "run_dir", "dry_run", "schema_version")
"""What every run has of its own."""
NOT_SET = "not set"


@dataclass(frozen=True)
class ConfigRow:
    """One key with its value in both runs; ``NOT_SET`` where a run has no such key."""

    key: str
    a: Any
    b: Any

    @property
    def group(self) -> str:
        return self.key.split(".", 1)[0] if "." in self.key else ""


def config_rows(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[ConfigRow]:
    """Keys whose values differ, in the order of the schema, without a run's own."""
    one, two = flattened(a), flattened(b)
    return [
        ConfigRow(key, one.get(key, NOT_SET), two.get(key, NOT_SET))
        for key in changed_values(b, a)
        if key not in OWN_KEYS
    ]


def environment_rows(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    *,
    plans: tuple[Any, Any],
    ds: tuple[Any, Any],
    config: list[ConfigRow],
) -> list[Difference]:
    """Code, packages, devices, inputs, and what the plan made of them.

    DeepSpeed's JSON only where the ``config`` that it is made from is the same.
    """
    found = differences(a, b) if a and b else []
    if {row.group for row in config} & {"zero", "batch", "optim", "model", "data", "hardware"}:
        ds = ({}, {})
    if plans[0] and plans[1]:
        found += plan_differences(plans[0], plans[1], ds_then=ds[0], ds_now=ds[1])
    return found


def outcome_rows(a: RunData, b: RunData) -> list[tuple[str, str, str]]:
    """What became of each: the rows of the report side by side."""
    one, two = dict(_rows(a)), dict(_rows(b))
    names = [*one, *(name for name in two if name not in one)]
    return [(name, one.get(name, "-"), two.get(name, "-")) for name in names]


def _rows(data: RunData) -> list[tuple[str, str]]:
    found = wording.headline(data)
    line = found.line.removeprefix(f"{data.name}: ")
    rows = [("outcome", line)]
    if found.cause:
        rows.append(("cause", found.cause.splitlines()[0]))
    rows += wording.summary_rows(data)
    restarts = (data.result or {}).get("restarts")
    if restarts:
        rows.append(("restarts", str(restarts)))
    ranks, hosts = data.plan.get("ranks") or [], data.plan.get("hosts") or []
    if ranks:
        rows.append(("ranks", f"{len(ranks):,} on {plural(len(hosts), 'host')}"))
    return rows
