"""``python -m tests.chaos --faults 200 --seed 7``: the table, a JSON file, the record."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from llmx.run.rundir import write_json
from tests.chaos.campaign import SFT, campaign
from tests.chaos.record import table, write_into_docs
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


if __name__ == "__main__":
    sys.exit(main())
