#!/usr/bin/env python3
"""Counts lines, files and functions of each package, so that growth is seen in review.

    python scripts/sizes.py            # print the table
    python scripts/sizes.py --write    # write it into docs/development/contracts.md

Standard library only.
"""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "development" / "contracts.md"
BEGIN, END = "<!-- sizes: begin -->", "<!-- sizes: end -->"


def size(files: list[Path]) -> tuple[int, int, int]:
    """Lines, files and functions."""
    texts = [path.read_text(encoding="utf-8") for path in files]
    functions = [
        node
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return sum(text.count("\n") for text in texts), len(files), len(functions)


def table() -> str:
    """Markdown: a row for each package, the sum that counts, and what stands beside it."""
    packages = sorted(path.parent for path in (ROOT / "llmx").glob("*/__init__.py"))
    rows = {path.name: sorted(path.rglob("*.py")) for path in packages}
    rows["modules of `llmx/`"] = sorted((ROOT / "llmx").glob("*.py"))
    rows["launchers"] = sorted((ROOT / "launchers").rglob("*.py"))
    rows["**all**"] = [path for files in rows.values() for path in files]
    for name in ("tests", "benchmarks"):
        rows[name] = sorted((ROOT / name).rglob("*.py"))
    lines = ["| package | lines | files | functions |", "|---|---:|---:|---:|"]
    for name, files in rows.items():
        lines.append("| " + " | ".join([name, *(f"{count:,}" for count in size(files))]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)}")
    if parser.parse_args().write:
        page = PAGE.read_text(encoding="utf-8")
        section = f"{BEGIN}\n{table()}\n{END}"
        pattern = f"{re.escape(BEGIN)}.*{re.escape(END)}"
        PAGE.write_text(re.sub(pattern, lambda _: section, page, flags=re.S), encoding="utf-8")
    else:
        print(table())


if __name__ == "__main__":
    main()
