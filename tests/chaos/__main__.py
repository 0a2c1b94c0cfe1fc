"""``python -m tests.chaos --faults 200 --seed 7``: the table, a JSON file, the record."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.machine import commit
from llmx.run.rundir import write_json
from tests.chaos.campaign import SFT, Report, campaign
from tests.chaos.rollouts import AHEAD, SYNCHRONOUS
from tests.cluster.requirements import missing

REPOSITORY = Path(__file__).resolve().parents[2]
SETUPS = (SFT, SYNCHRONOUS, AHEAD)


def main() -> int:
    """0 when every fault was survived and the run ended as if undisturbed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--setup", choices=[setup.name for setup in SETUPS], default=SFT.name)
    parser.add_argument("--kind", action="append", help="only these, in order")
    parser.add_argument("--json", type=Path, default=Path("chaos.json"))
    parser.add_argument("--docs", action="store_true", help="write it into benchmarks/results")
    parser.add_argument("--keep", action="store_true", help="keep the run directories' logs")
    options = parser.parse_args()
    if reason := missing("rsync"):
        print(f"chaos: no test cluster: {reason}", file=sys.stderr)
        return 2
    (setup,) = (setup for setup in SETUPS if setup.name == options.setup)
    by_name = {kind.name: kind for kind in setup.kinds}
    if unknown := set(options.kind or ()) - set(by_name):
        parser.error(f"--kind {min(unknown)}: {setup.name} has {', '.join(by_name)}")
    kinds = [by_name[name] for name in options.kind or ()] or None
    directory = Path(tempfile.mkdtemp(prefix="llmx-chaos-"))
    try:
        report = campaign(
            directory,
            setup,
            faults=len(kinds) if kinds else options.faults,
            seed=options.seed,
            kinds=kinds,
            say=lambda text: print(text, flush=True),
        )
    finally:
        if not options.keep:
            shutil.rmtree(directory, ignore_errors=True)
    write_json(options.json, report.to_dict())
    print("\n" + table(report))
    for problem in report.problems:
        print(f"\nproblem: {problem}")
    if options.docs and report.passed:
        write_into_docs(report, REPOSITORY / "benchmarks" / "results" / "chaos.md")
    return 0 if report.passed else 1


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


if __name__ == "__main__":
    sys.exit(main())
