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
from tests.behaviour.differences import Difference, differences
from tests.behaviour.material import write_material
from tests.behaviour.recording import FILE, Recording, commit, environment
from tests.behaviour.runs import Facts, Failed, Workshop


def main(argv: Sequence[str] | None = None) -> int:
    """0 when everything was recorded, or is equal; 1 on a difference; 2 on a wrong call."""
    options = _parser().parse_args(argv)
    try:
        names = list(chosen(options.only))
        recorded = Recording.load(options.file) if options.file.is_file() else None
        if options.what == "record":
            return record(recorded, names, options)
        if recorded is None:
            raise ValueError(f"{options.file} is missing. Record it: make behaviour-record")
        return compare(recorded, names, options)
    except ValueError as error:
        print(f"behaviour: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
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
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="run in this new directory, and keep it"
    )
    return parser


def record(old: Recording | None, names: list[str], options: argparse.Namespace) -> int:
    """Write the facts of these cases into the recording; the others stay.

    Raises ValueError where the others were recorded elsewhere, or with other code.
    """
    now = Recording(environment(), commit=commit())
    if options.only and old is not None:
        stale = [*_changed(old.environment, now.environment)]
        if old.commit != now.commit:
            stale.append(f"code: {old.commit} recorded, {now.commit} now")
        if stale:
            raise ValueError(
                f"{options.file} was recorded elsewhere; a part of it cannot be recorded here. "
                f"Record everything, without --only.\n  " + "\n  ".join(stale)
            )
        now.cases = old.cases
    with _Directory(options.keep) as directory:
        for name, facts, seconds in _carry_out(directory, names):
            if isinstance(facts, Failed):
                print(f"✗ {name}: {facts}")
                return 1
            now.cases[name] = facts
            print(f"  {name:<42} {len(facts):3} facts  {seconds:5.1f} s", flush=True)
    order = {name: number for number, name in enumerate(chosen([]))}
    now.cases = {
        name: now.cases[name] for name in sorted(now.cases, key=lambda name: order.get(name, -1))
    }
    now.save(options.file)
    print(f"recorded {len(names)} cases in {options.file}")
    return 0


def compare(recorded: Recording, names: list[str], options: argparse.Namespace) -> int:
    """Run these cases again and print what differs from the recording."""
    elsewhere = _changed(recorded.environment, environment())
    print(f"recorded with {recorded.commit}\ncompared with {commit()}")
    if elsewhere:
        print("Recorded elsewhere: equality to the last bit is not promised here.")
        print("".join(f"  {line}\n" for line in elsewhere), end="")
    failed = equal = 0
    with _Directory(options.keep) as directory:
        for name, facts, seconds in _carry_out(directory, names):
            found: list[Difference] | list[Failed]
            if isinstance(facts, Failed):
                found = [facts]
            elif name not in recorded.cases:
                found = [Failed("is not in the recording; record it: make behaviour-record")]
            else:
                found = differences(recorded.cases[name], facts)
                equal += len(facts) - len(found)
            mark, what = ("✗", f"{len(found)} differ") if found else ("✓", "equal")
            print(f"{mark} {name:<42} {what:<10} {seconds:5.1f} s", flush=True)
            for difference in found:
                print(f"    {difference}", flush=True)
            failed += bool(found)
        directory.keep_for(failed)
    gone = [] if options.only else [name for name in recorded.cases if name not in names]
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


def _carry_out(
    directory: _Directory, names: list[str]
) -> Iterator[tuple[str, Facts | Failed, float]]:
    """(name, facts or the failure, seconds) of each case, as it ends."""
    write_material(directory.path / "material")
    workshop = Workshop(directory.path)
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


def _changed(then: dict[str, object], now: dict[str, object]) -> list[str]:
    return [
        f"{name}: {then.get(name)} recorded, {now.get(name)} now"
        for name in {**then, **now}
        if then.get(name) != now.get(name)
    ]


class _Directory:
    """Where the cases run: removed at the end, unless it is asked for or something differs."""

    def __init__(self, keep: Path | None) -> None:
        self._keeps = keep is not None
        if keep is not None:
            if keep.exists():
                raise ValueError(f"--keep {keep} exists. Name a new directory.")
            keep.mkdir(parents=True)
        self.path = (keep or Path(tempfile.mkdtemp(prefix="llmx-behaviour-"))).resolve()

    def __enter__(self) -> _Directory:
        return self

    def keep_for(self, failed: int) -> None:
        """Keep it where cases differ, and say where it is."""
        if failed and not self._keeps:
            self._keeps = True
            print(f"The run directories are kept in {self.path}.")

    def __exit__(self, *_: object) -> None:
        if not self._keeps:
            shutil.rmtree(self.path, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
