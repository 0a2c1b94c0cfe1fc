#!/usr/bin/env python3
"""Counts lines, files and functions of each package, so that growth is seen in review.

python scripts/sizes.py            # print the table
python scripts/sizes.py --write    # write it into docs/development/contracts.md
python scripts/sizes.py --check    # fail if something is larger than [tool.llmx.lines] allows
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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


def packages() -> dict[str, list[Path]]:
    """Python files by row of the table: packages of llmx, and what stands beside them."""
    names = sorted(path.parent.name for path in (ROOT / "llmx").glob("*/__init__.py"))
    rows = {name: sorted((ROOT / "llmx" / name).rglob("*.py")) for name in names}
    rows["modules"] = sorted((ROOT / "llmx").glob("*.py"))
    for name in ("launchers", "tests", "benchmarks"):
        rows[name] = sorted((ROOT / name).rglob("*.py"))
    return rows


def table() -> str:
    """Markdown: a row for each package, the sum of what is installed, and what stands beside it."""
    rows = packages()
    beside = {name: rows.pop(name) for name in ("tests", "benchmarks")}
    rows["**all**"] = [path for files in rows.values() for path in files]
    lines = ["| package | lines | files | functions |", "|---|---:|---:|---:|"]
    for name, files in {**rows, **beside}.items():
        lines.append("| " + " | ".join([name, *(f"{count:,}" for count in size(files))]) + " |")
    return "\n".join(lines)


def words_of_docs() -> int:
    """Words that people write: all pages without blocks of code and what is generated."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks/README.md"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in pages)
    text = re.sub(r"<!-- (\w+): begin.*?<!-- \1: end -->", "", text, flags=re.S)
    return len(re.sub(r"^```.*?^```", "", text, flags=re.S | re.M).split())


def counts() -> dict[str, int]:
    """Lines of each package; of the docs words."""
    lines = {
        name: sum(path.read_text(encoding="utf-8").count("\n") for path in files)
        for name, files in packages().items()
    }
    return {**lines, "docs": words_of_docs()}


def check() -> list[str]:
    """What breaks a budget of ``[tool.llmx.lines]``; empty where nothing does."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    budgets: dict[str, int] = settings["tool"]["llmx"]["lines"]
    found = counts()
    wrong = [f"{name}: no such package; remove its budget" for name in budgets.keys() - found]
    for name, count in found.items():
        if name not in budgets:
            wrong.append(f"{name}: has {count:,} lines and no budget; add one")
        elif count > budgets[name]:
            wrong.append(
                f"{name}: {count:,}, the budget is {budgets[name]:,}. Remove "
                f"{count - budgets[name]:,}, or raise the budget and say why in the commit's body"
            )
    return wrong


def write(text: str, *, begin: str, end: str) -> None:
    """Into the page, between two marks."""
    page = PAGE.read_text(encoding="utf-8")
    pattern = f"{re.escape(begin)}.*{re.escape(end)}"
    section = f"{begin}\n{text}\n{end}"
    PAGE.write_text(re.sub(pattern, lambda _: section, page, flags=re.S), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)}")
    action.add_argument("--check", action="store_true", help="against [tool.llmx.lines]")
    options = parser.parse_args()
    if options.write:
        write(table(), begin=BEGIN, end=END)
    elif options.check:
        wrong = check()
        print("\n".join(["[tool.llmx.lines] in pyproject.toml:", *wrong]) if wrong else "sizes: ok")
        sys.exit(bool(wrong))
    else:
        print(table())


if __name__ == "__main__":
    main()
