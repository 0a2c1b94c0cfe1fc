"""What differs between two runs, and both loss curves in one picture.

python -m llmx compare RUN_A RUN_B [--out FILE.png] [--width N]

Reads the two run directories; works for runs that still train, and for those that failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmx.errors import ConfigError
from llmx.observe.page import Block, block, table
from llmx.observe.report import wording
from llmx.observe.report.figure import draw_losses
from llmx.observe.report.screen import open_console, print_blocks
from llmx.observe.run import Run, load_run
from llmx.run.metrics.equality import compare_runs
from llmx.run.provenance.differences import (
    MEANING,
    Difference,
    changed_values,
    differences,
    flattened,
    not_recorded,
    plan_differences,
    short_value,
)
from llmx.run.rundir import check_writable, read_mapping
from llmx.text import plural

OWN_KEYS = ("name", "run_dir", "dry_run", "schema_version")
"""What every run has of its own."""
NOT_SET = "not set"


def run(options: argparse.Namespace) -> int:
    """Print everything, write the picture, say where; returns the exit code (0 also where the runs
    differ: it is reported)."""
    out: Path | None = options.out
    if out is not None:
        check_writable(out, fix="Set --out to a file, e.g. --out compare.png.")
    a, b = load_run(options.run_a), load_run(options.run_b)
    if a.dir.root.resolve() == b.dir.root.resolve():
        raise ConfigError(f"{a.dir.root} is compared with itself. Give two run directories.")
    console = open_console(sys.stdout, width=options.width)
    console.print(f"A  {a.dir.root}\nB  {b.dir.root}\n", soft_wrap=True)
    tables, notes = difference_of(a, b)
    for title, content in tables.items():
        if content is None:
            console.print(f"{title}: no difference")
        else:
            print_blocks(console, [block("heading", title), content])
    console.print()
    warnings = [f"{name}: {text}" for name, data in (("A", a), ("B", b)) for text in data.warnings]
    print_blocks(console, [block("text", "\n".join(notes)), block("list", warnings)])
    picture = _picture(a, b, out)
    console.print(
        f"both curves: {picture}" if picture else "no picture: neither run has logged a loss yet.",
        soft_wrap=True,
    )
    return 0


def difference_of(a: Run, b: Run) -> tuple[dict[str, Block | None], list[str]]:
    """Compare configs, environments, outcomes and logged values: a table for each of the first
    three, None where nothing differs, and sentences on the rest."""
    config = config_rows(a.config, b.config)
    tables, notes = {"config": _table(config)}, []
    records = [read_mapping(data.dir.provenance, data.damage) for data in (a, b)]
    ds_configs = [read_mapping(data.dir.ds_config, data.damage) for data in (a, b)]
    try:
        rows = environment_rows(records, plans=(a.plan, b.plan), ds=ds_configs, config=config)
        differing = [(row.what, row.then, row.now, MEANING[row.severity]) for row in rows]
        tables["environment"] = _table(differing, "which")
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        notes.append(
            "environment: not compared, since a provenance.json or plan.json has a value that llmx "
            f"does not write ({error!r})."
        )
    if missing := sorted({name for record in records for name in not_recorded(record)}):
        notes.append(f"not recorded by both: {', '.join(missing)}")
    losses = compare_runs(a.dir, b.dir).summary("in A", "in B")
    notes.append(f"losses: {losses}")
    tables["outcome"] = _table(outcome_rows(a, b))
    return tables, notes


def _table(rows: Sequence[Sequence[str]], *heads: str) -> Block | None:
    return table(rows, heads=["", "A", "B", *heads], kinds=["name", *[""] * (2 + len(heads))])


def _picture(a: Run, b: Run, out: Path | None) -> Path | None:
    """Draw to ``out``, else into B's directory, else here where that cannot be written."""
    name = f"compare_{a.dir.root.name}.png"
    places = [out] if out else [b.dir.root / name, Path.cwd() / name]
    for place in places:
        try:
            return place if draw_losses([a, b], place) else None
        except OSError as error:
            if place is places[-1]:
                raise ConfigError(
                    f"{place}: cannot write the picture ({error.strerror or error}). Set "
                    "--out to another file, e.g. --out compare.png."
                ) from error
    return None


def config_rows(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Keys whose values differ, in the order of the schema, without a run's own, with both."""
    in_a, in_b = flattened(a), flattened(b)
    return [
        (key, short_value(in_a.get(key, NOT_SET)), short_value(in_b.get(key, NOT_SET)))
        for key in changed_values(b, a)
        if key not in OWN_KEYS
    ]


def environment_rows(
    records: Sequence[Mapping[str, Any]],
    *,
    plans: tuple[Any, Any],
    ds: Sequence[Mapping[str, Any]],
    config: list[tuple[str, str, str]],
) -> list[Difference]:
    """Code, packages, devices, inputs, and what the plan made of them.

    DeepSpeed's JSON only where the ``config`` that it is made from is the same.
    """
    rows = differences(*records) if all(records) else []
    groups = {key.partition(".")[0] for key, _, _ in config}
    if groups & {"zero", "batch", "optim", "model", "data", "hardware"}:
        ds = ({}, {})
    if plans[0] and plans[1]:
        rows += plan_differences(plans[0], plans[1], ds_then=ds[0], ds_now=ds[1])
    return rows


def outcome_rows(a: Run, b: Run) -> list[tuple[str, str, str]]:
    """The summaries of both reports side by side: name, value of A, value of B."""
    rows_a, rows_b = dict(_rows(a)), dict(_rows(b))
    names = [*rows_a, *(name for name in rows_b if name not in rows_a)]
    return [(name, rows_a.get(name, "-"), rows_b.get(name, "-")) for name in names]


def _rows(data: Run) -> list[tuple[str, str]]:
    causes = [text.splitlines()[0] for name, text in wording.reasons(data) if name == "cause"]
    rows = [("outcome", wording.headline(data)[1]), *(("cause", text) for text in causes)]
    rows += wording.summary_rows(data)
    restarts = data.result.get("restarts")
    if restarts:
        rows.append(("restarts", str(restarts)))
    ranks, hosts = data.plan.get("ranks") or [], data.plan.get("hosts") or []
    if ranks:
        rows.append(("ranks", f"{len(ranks):,} on {plural(len(hosts), 'host')}"))
    return rows
