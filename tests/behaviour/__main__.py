"""``python -m tests.behaviour record|compare [--only WORD ...]``: see the package."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.behaviour.cases import chosen
from tests.behaviour.differences import differences
from tests.behaviour.material import write_material
from tests.behaviour.recording import FILE, Recording, commit, environment
from tests.behaviour.runs import Facts, Failed, Workshop


def main(argv: Sequence[str] | None = None) -> int:
    """0 when everything was recorded, or is equal; 1 on a difference; 2 on a wrong call."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.behaviour",
        description="Run llmx's trainings and data preparations in small, and record the results "
        "or compare them with the recording, bit for bit.",
    )
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="cases with a word in their name"
    )
    parser.add_argument("--file", type=Path, default=FILE, help="the recording")
    options = parser.parse_args(argv)
    directory = Path(tempfile.mkdtemp(prefix="llmx-behaviour-")).resolve()
    try:
        names = list(chosen(options.only))
        if options.what == "record":
            code = record(directory, names, options.file, only=bool(options.only))
        else:
            code = compare(directory, names, options.file, only=bool(options.only))
    except ValueError as error:
        print(f"behaviour: {error}", file=sys.stderr)
        code = 2
    if code == 1:
        print(f"The run directories are kept in {directory}.")
    else:
        shutil.rmtree(directory, ignore_errors=True)
    return code


def record(directory: Path, names: list[str], file: Path, *, only: bool) -> int:
    """Write the facts of these cases into a recording. ValueError for a part of one that is there:
    the rest was recorded with other code."""
    if only and file.is_file():
        raise ValueError(f"{file} is there. Record everything, without --only.")
    now = Recording(environment(), commit=commit())
    for name, facts, seconds in _carry_out(directory, names):
        if isinstance(facts, Failed):
            print(f"✗ {name}: {facts}")
            return 1
        now.cases[name] = facts
        print(f"  {name:<42} {len(facts):3} facts  {seconds:5.1f} s", flush=True)
    now.save(file)
    print(f"recorded {len(names)} cases in {file}")
    return 0


def compare(directory: Path, names: list[str], file: Path, *, only: bool) -> int:
    """Run these cases again and print what differs from the recording."""
    if not file.is_file():
        raise ValueError(f"{file} is missing. Record it: make behaviour-record")
    recorded, here = Recording.load(file), environment()
    then = recorded.environment
    elsewhere = [name for name in dict.fromkeys([*then, *here]) if then.get(name) != here.get(name)]
    print(f"recorded with {recorded.commit}\ncompared with {commit()}")
    if elsewhere:
        print("Recorded elsewhere: equality to the last bit is not promised here.")
    for name in elsewhere:
        print(f"  {name}: {then.get(name)} recorded, {here.get(name)} now")
    failed = equal = 0
    for name, facts, seconds in _carry_out(directory, names):
        if isinstance(facts, Failed):
            found = [str(facts)]
        elif name not in recorded.cases:
            found = ["is not in the recording; record it: make behaviour-record"]
        else:
            found = differences(recorded.cases[name], facts)
            equal += len(facts) - len(found)
        mark, what = ("✗", f"{len(found)} differ") if found else ("✓", "equal")
        print(f"{mark} {name:<42} {what:<10} {seconds:5.1f} s", flush=True)
        for difference in found:
            print(f"    {difference}", flush=True)
        failed += bool(found)
    gone = [] if only else [name for name in recorded.cases if name not in names]
    for name in gone:
        print(f"✗ {name}: recorded, but there is no such case any more")
    failed += len(gone)
    if failed:
        print(f"\n{failed} of {len(names) + len(gone)} cases differ.")
        if elsewhere:
            print("The recording is of other versions or another CPU: see the top.")
        return 1
    print(f"\nAll {len(names)} cases are equal: {equal} facts.")
    return 0


def _carry_out(directory: Path, names: list[str]) -> Iterator[tuple[str, Facts | Failed, float]]:
    """(name, facts or the failure, seconds) of each case, as it ends."""
    write_material(directory / "material")
    workshop = Workshop(directory)
    for name in names:
        started = time.monotonic()
        facts: Facts | Failed
        try:
            facts = workshop.facts(name)
        except Failed as error:
            facts = error
        except Exception:  # a difference as well: a case that ended before
            facts = Failed(traceback.format_exc())
        yield name, facts, time.monotonic() - started


if __name__ == "__main__":
    sys.exit(main())
