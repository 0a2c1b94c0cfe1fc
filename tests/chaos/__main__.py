"""``python -m tests.chaos --faults 200 --seed 7``: the table, and the record of it."""

from __future__ import annotations

import argparse
import os
import platform
import random
import re
import shutil
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from benchmarks.machine import commit
from tests.chaos.campaign import EVERY, SFT, Report, Strike, campaign
from tests.chaos.kinds import Volley, draw, pair
from tests.chaos.rollouts import AHEAD, SYNCHRONOUS
from tests.cluster.launching import REPOSITORY
from tests.cluster.requirements import missing

SETUPS = {setup.name: setup for setup in (SFT, SYNCHRONOUS, AHEAD)}


def main() -> int:
    """0 when every fault was survived and the run ended as if undisturbed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--setup", choices=SETUPS, default=SFT.name)
    parser.add_argument("--kind", action="append", help="only these, in order, none in a pair")
    parser.add_argument("--docs", action="store_true", help="write it into benchmarks/results")
    parser.add_argument("--keep", action="store_true", help="keep the run directories' logs")
    options = parser.parse_args()
    if reason := missing("rsync"):
        print(f"chaos: no test cluster: {reason}", file=sys.stderr)
        return 2
    setup, chance = SETUPS[options.setup], random.Random(options.seed)
    by_name = {kind.name: kind for kind in setup.kinds}
    if unknown := set(options.kind or ()) - set(by_name):
        parser.error(f"--kind {min(unknown)}: {setup.name} has {', '.join(by_name)}")
    volleys: list[Volley] = [(by_name[name],) for name in options.kind or ()]
    volleys = volleys or pair(draw(options.faults, chance, setup.kinds), chance)
    directory, begun = Path(tempfile.mkdtemp(prefix="llmx-chaos-")), time.time()
    try:
        report = campaign(directory, setup, volleys, seed=options.seed)
    finally:
        if not options.keep:
            shutil.rmtree(directory, ignore_errors=True)
    rows = table(report)
    print(f"\n{rows}")
    for problem in report.problems:
        print(f"\nproblem: {problem}")
    if options.docs and report.passed:
        path = REPOSITORY / "benchmarks" / "results" / "chaos.md"
        marks = [f"<!-- {setup.name}: {mark} -->" for mark in ("begin", "end")]
        section = re.compile(f"{marks[0]}.*?{marks[1]}", re.DOTALL)
        new = f"{marks[0]}\n{words(report, options.seed, begun)}\n\n{rows}\n{marks[1]}"
        text = path.read_text(encoding="utf-8")
        path.write_text(section.sub(lambda _: new, text), encoding="utf-8")
    return 0 if report.passed else 1


def table(report: Report) -> str:
    """Markdown: one row a kind, then what holds for all of it."""
    lines = [
        "| fault | tried | survived | steps repeated, at most | seconds to the next checkpoint |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in dict.fromkeys(strike.words for strike in report.strikes):
        strikes = [strike for strike in report.strikes if strike.words == name]
        median_s = sorted(strike.took_s for strike in strikes)[len(strikes) // 2]
        lines.append(_row(name, strikes, f"{median_s:.0f}"))
    return "\n".join([*lines, _row("all", report.strikes, "")])


def _row(name: str, strikes: list[Strike], seconds: str) -> str:
    survived = sum(strike.survived for strike in strikes)
    repeated = max((strike.repeated for strike in strikes), default=0)
    return f"| {name} | {len(strikes)} | {survived} | {repeated} | {seconds} |"


def words(report: Report, seed: int, begun: float) -> str:
    """What stands above the table."""
    packages = [f"{name} {version(name)}" for name in ("torch", "deepspeed", "transformers")]
    versions = ", ".join([f"python {platform.python_version()}", *packages])
    follow = sum(strike.follows for strike in report.strikes)
    outcome = (
        f"All {report.equal_losses:,} logged losses and gradient norms and the hash of the final "
        "weights equal the undisturbed run's, bit for bit."
        if report.equal_losses
        else "Every prompt of every epoch was trained once, with the samples that are recorded; a "
        "resume draws the samples after its checkpoint anew."
    )
    return (
        f"{time.strftime('%Y-%m-%d', time.localtime(begun))}, commit {commit()}, seed {seed}: "
        f"{report.survived} of {report.faults} faults survived in "
        f"{(time.time() - begun) / 60:.1f} minutes; {follow} of the faults struck while the run "
        "recovered from another, and a pair shares its steps. "
        f"{report.steps:,} steps, a checkpoint every {EVERY}. {outcome} {versions}; "
        f"load {os.getloadavg()[1]:.0f} at the end."
    )


if __name__ == "__main__":
    sys.exit(main())
