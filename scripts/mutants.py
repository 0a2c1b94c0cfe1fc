#!/usr/bin/env python3
"""Counts how many small defects the tests see, e.g. before and after tests are removed.

    python scripts/mutants.py --of COMMIT               # list the defects
    python scripts/mutants.py --of COMMIT --run 1 2 7   # put each in, run the tests, take it out

The defects are drawn with a fixed seed from the code as it was at COMMIT, and put into the code as
it is now, so that two versions of the tests get the same ones. Run it in a clone of its own: it
edits files. docs/development/mutants.md has the counts.
"""

from __future__ import annotations

import argparse
import ast
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("plan", "train", "data", "checkpoint", "launch", "tasks")
KINDS = ("negated condition", "dropped line", "swapped arguments", "off by one")
SLOW = "(deepspeed or cluster or chaos or wheel or long) and not nightly"
NEIGHBOURS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}


@dataclass(frozen=True)
class Mutant:
    """A defect: ``before`` stands in ``path`` exactly once, and ``after`` takes its place."""

    kind: str
    path: str
    function: str
    before: str
    after: str


def git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def changes_of(node: ast.AST, text: str) -> Iterator[tuple[str, ast.AST, str]]:
    """Defects that can be made of one node: kind, what is replaced, its replacement."""

    def source(part: ast.AST) -> str:
        return ast.get_source_segment(text, part) or ""

    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield KINDS[0], node.test, f"not ({source(node.test)})"
    dropped = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if dropped or isinstance(node, ast.AugAssign):
        yield KINDS[1], node, "pass"
    if isinstance(node, ast.Call) and not node.keywords:
        plain = [word for word in node.args if isinstance(word, ast.Name | ast.Attribute)]
        if len(plain) == len(node.args) == 2:
            first, second = map(source, plain)
            yield KINDS[2], node, f"{source(node.func)}({second}, {first})"
    if isinstance(node, ast.Compare) and type(node.ops[0]) in NEIGHBOURS and len(node.ops) == 1:
        sign = NEIGHBOURS[type(node.ops[0])]
        yield KINDS[3], node, f"{source(node.left)} {sign} {source(node.comparators[0])}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        sign = "+" if isinstance(node.op, ast.Add) else "-"
        if isinstance(node.right, ast.Constant) and type(node.right.value) is int:
            yield KINDS[3], node, f"{source(node.left)} {sign} {node.right.value + 1}"


def mutants_of(path: str, text: str) -> Iterator[Mutant]:
    """All defects of one file whose lines stand in it once."""
    lines = text.splitlines(keepends=True)
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in function.body:
            for node in ast.walk(statement):
                for kind, part, new in changes_of(node, text):
                    first, last = part.lineno - 1, part.end_lineno - 1  # type: ignore[attr-defined]
                    before = "".join(lines[first : last + 1])
                    head = lines[first].encode()[: part.col_offset].decode()  # type: ignore[attr-defined]
                    tail = lines[last].encode()[part.end_col_offset :].decode()  # type: ignore[attr-defined]
                    if text.count(before) == 1 and len(before.strip()) > 12:
                        yield Mutant(kind, path, function.name, before, head + new + tail)


def drawn(commit: str, count: int, seed: int) -> list[Mutant]:
    """Defects of the code at ``commit``: packages and kinds take turns."""
    pick = random.Random(seed)
    mutants: list[Mutant] = []
    names = git("ls-tree", "-r", "--name-only", commit, "llmx").split()
    texts = {name: git("show", f"{commit}:{name}") for name in names if name.endswith(".py")}
    while len(mutants) < count:
        package = PACKAGES[len(mutants) % len(PACKAGES)]
        kind = KINDS[(len(mutants) + len(mutants) // len(KINDS)) % len(KINDS)]
        path = pick.choice([name for name in texts if name.startswith(f"llmx/{package}/")])
        fitting = [one for one in mutants_of(path, texts[path]) if one.kind == kind]
        if fitting and (mutant := pick.choice(fitting)) not in mutants:
            mutants.append(mutant)
    return mutants


def tests_near(mutant: Mutant) -> list[str]:
    """Quick test files that name the module of a defect."""
    module = mutant.path.removesuffix(".py").replace("/", ".")
    package, _, name = module.rpartition(".")
    folder = ROOT / "tests" / "unit"
    texts = {
        str(path): path.read_text(encoding="utf-8") for path in sorted(folder.glob("test_*.py"))
    }
    named = (module, f"from {package} import {name}")
    return [path for path, text in texts.items() if any(word in text for word in named)]


def seen_by(mutant: Mutant, slow: bool) -> str:
    """The first test that fails with a defect in place; empty where all pass."""
    path = ROOT / mutant.path
    text = path.read_text(encoding="utf-8")
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider"]
    stages = [[*pytest, *near]] if (near := tests_near(mutant)) else []
    stages.append([*pytest, "-n", "3", "--dist", "loadgroup"])
    if slow:
        stages.append([*pytest, "-n", "3", "--dist", "loadfile", "-m", SLOW])
    path.write_text(text.replace(mutant.before, mutant.after), encoding="utf-8")
    try:
        for stage in stages:
            done = subprocess.run(stage, cwd=ROOT, capture_output=True, text=True)
            for line in done.stdout.splitlines():
                if line.startswith(("FAILED ", "ERROR ")):
                    return line.split(" - ")[0].split(" ", 1)[1]
            if done.returncode not in (0, 5):  # 5: none was selected
                sys.exit(f"pytest did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    finally:
        path.write_text(text, encoding="utf-8")
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--of", required=True, metavar="COMMIT", help="whose code the defects are of"
    )
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=39)
    parser.add_argument("--run", type=int, nargs="*", metavar="N", help="these (none named: all)")
    parser.add_argument(
        "--slow", action="store_true", help="also the slow tests, for what is unseen"
    )
    options = parser.parse_args()
    for number, mutant in enumerate(drawn(options.of, options.count, options.seed), 1):
        if options.run is not None and options.run and number not in options.run:
            continue
        there = (ROOT / mutant.path).is_file()
        there = there and (ROOT / mutant.path).read_text(encoding="utf-8").count(mutant.before) == 1
        print(f"{number}. {mutant.path}, {mutant.function}: {mutant.kind}")
        if options.run is None:
            print(f"-{mutant.before.rstrip()}\n+{mutant.after.rstrip()}")
        if not there:
            print("   this code is gone", flush=True)
        elif options.run is not None:
            print(f"   {seen_by(mutant, options.slow) or 'NOT SEEN'}", flush=True)


if __name__ == "__main__":
    main()
