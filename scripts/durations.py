#!/usr/bin/env python3
"""Sums the seconds of the tests of each directory, so that a slower suite is seen in review.

    make test                              # writes build/test-times/*.xml
    python scripts/durations.py            # print the table
    python scripts/durations.py --write    # write it into docs/development/contracts.md

Standard library only.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

from sizes import PAGE, ROOT, write

BEGIN, END = "<!-- durations: begin -->", "<!-- durations: end -->"
TIMES = ROOT / "build" / "test-times"


def durations(directory: Path) -> dict[str, list[tuple[float, str]]]:
    """Seconds of each test that ran, with what was set up for it, by directory of tests."""
    found: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for file in sorted(directory.glob("*.xml")):
        for case in ElementTree.parse(file).iter("testcase"):
            if case.find("skipped") is None:
                module = case.attrib["classname"].split(".")
                name = f"{module[-1]}::{case.attrib['name']}"
                found["/".join(module[:-1])].append((float(case.attrib["time"]), name))
    return found


def table(found: dict[str, list[tuple[float, str]]]) -> str:
    """Markdown: a row for each directory, and one for all."""
    every = [test for tests in found.values() for test in tests]
    lines = ["| directory | tests | seconds | longest |", "|---|---:|---:|---|"]
    for place, tests in [*sorted(found.items()), ("**all**", every)]:
        seconds, (longest_s, name) = sum(took_s for took_s, _ in tests), max(tests)
        lines.append(f"| {place} | {len(tests):,} | {seconds:,.0f} | `{name}`, {longest_s:.0f} s |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)}")
    parser.add_argument("--times", type=Path, default=TIMES, help="the directory of XML files")
    options = parser.parse_args()
    found = durations(options.times)
    if not found:
        sys.exit(f"{options.times} has no times of tests. Run `make test` first.")
    if options.write:
        write(table(found), begin=BEGIN, end=END)
    else:
        print(table(found))


if __name__ == "__main__":
    main()
