"""``python -m tests.fuzz --count 2000 --seed 7``: the counts, and every case that fails."""

from __future__ import annotations

import argparse
import collections
import shutil
import sys
import tempfile
from pathlib import Path

from tests.fuzz.after import finished_run
from tests.fuzz.cases import Case, make_case
from tests.fuzz.check import Outcome, run_case


def base_run(directory: Path) -> Path:
    """A planned run, for ``resume`` and ``reproduce``."""
    case = Case(0, 0, ["plan", "hardware=cpu2", "run_dir=base"])
    outcome = run_case(case, directory / "made")
    assert outcome.accepted, outcome
    base = directory / "base"
    (directory / "made" / "base").rename(base)
    return base


def main() -> int:
    """0 when no case had a fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", help="one case again: SEED:NUMBER")
    parser.add_argument("--after", action="store_true", help="the commands after training")
    options = parser.parse_args()
    seed, first, count = options.seed, options.first, options.count
    if options.case:
        seed, first = (int(part) for part in options.case.split(":"))
        count = 1
    outcomes: list[Outcome] = []
    faults: collections.Counter[str] = collections.Counter()
    directory = Path(tempfile.mkdtemp(prefix="llmx-fuzz-"))
    base = finished_run(directory / "base") if options.after else base_run(directory)
    for number in range(first, first + count):
        case = make_case(seed, number, after=options.after)
        outcome = run_case(case, directory / "case", base=base)
        outcomes.append(outcome)
        if options.case:
            print(case, outcome.code, outcome.message, sep="\n")
        for fault in outcome.faults:
            faults[fault.split(":")[0]] += 1
            argv = [word if len(word) < 80 else f"{word[:77]}..." for word in case.argv]
            print(f"{seed}:{number} {argv!r}\n  {fault[-1500:]}")
            print(f"  message: {outcome.message[:400]!r}\n", flush=True)
    shutil.rmtree(directory)
    accepted = sum(outcome.accepted for outcome in outcomes)
    slowest = max(outcome.cpu_s for outcome in outcomes)
    print(f"{len(outcomes)} cases: {accepted} accepted, {len(outcomes) - accepted} refused; "
          f"slowest {slowest:.2f} s of CPU; faults: {dict(faults) or 'none'}")  # fmt: skip
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
