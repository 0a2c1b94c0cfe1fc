"""The outcome of a campaign as a table, for the screen and for ``benchmarks/results``."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from benchmarks.machine import commit
from tests.chaos.campaign import Report


def table(report: Report) -> str:
    """Markdown: one row a kind, then what holds for all of it."""
    lines = [
        "| fault | tried | survived | steps repeated, at most | seconds to the next checkpoint |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in report.rows():
        lines.append(
            f"| {row['kind']} | {row['tried']} | {row['survived']} | {row['repeated']} | "
            f"{row['median_s']:.0f} |"
        )
    repeated = max((strike.repeated for strike in report.strikes), default=0)
    lines.append(f"| all | {len(report.strikes)} | {report.survived} | {repeated} | |")
    return "\n".join(lines)


def words(report: Report) -> str:
    """The section of the documentation."""
    date = time.strftime("%Y-%m-%d", time.localtime(report.started))
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    outcome = (
        f"All {report.equal_losses:,} logged losses and gradient norms and the hash of the final "
        "weights equal the undisturbed run's, bit for bit."
        if report.equal_losses
        else "Every prompt of every epoch was trained once, with the samples that are recorded, "
        "and steps that were trained again had the same losses."
    )
    return (
        f"{date}, commit {commit()}, seed {report.seed}: {report.survived} of {report.faults} "
        f"faults survived in {report.took_s / 60:.1f} minutes; {report.in_pairs} of the faults "
        "struck while the run recovered from another, and a pair shares its steps. "
        f"{report.steps:,} steps, a "
        f"checkpoint every {report.every_steps}. {outcome} {versions}; "
        f"load {os.getloadavg()[1]:.0f} at the end.\n\n"
        f"{table(report)}\n"
    )


def write_into_docs(report: Report, path: Path) -> None:
    """Replace the section between the two marks of the setup."""
    begin, end = (f"<!-- {report.setup}: {mark} -->" for mark in ("begin", "end"))
    text = path.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    path.write_text(pattern.sub(lambda _: f"{begin}\n{words(report)}{end}", text), encoding="utf-8")
