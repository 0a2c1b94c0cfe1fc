#!/usr/bin/env python3
"""Measures the share of functions with locals that do not say what they hold.

    python scripts/names.py                 # a line for each package, and the whole
    python scripts/names.py llmx/train -v   # the functions and their locals

A local is named for what it holds: ``matches``, ``missing_hosts``, ``plan_without_offload``; never
a pronoun, a quantifier or a participle. Loop variables and parameters count. Standard library only.
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from pathlib import Path

VAGUE = frozenset(
    (
        "all any anything asked both each every everything few found given gone held it kept "
        "known left made many mine more most much named none nothing one ones other others ours "
        "own rest said same seen several shown some something such taken that their theirs them "
        "these they this those told tried two us wanted what which whole wrong"
    ).split()
)
ALLOWED = frozenset({"left", "other"})
"""A side; the other operand of a comparison."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def locals_of(function: Function) -> set[str]:
    """Names that a function binds, parameters included; nested functions count for themselves."""
    arguments = function.args
    names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop()
        if isinstance(node, Function | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        pending += ast.iter_child_nodes(node)
    return names


def vague_locals(path: Path) -> list[tuple[Function, list[str]]]:
    """Each function of a file, with its locals that do not say what they hold."""
    return [
        (node, sorted(locals_of(node) & VAGUE - ALLOWED))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, Function)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, default=[Path("llmx"), Path("launchers")])
    parser.add_argument("-v", "--verbose", action="store_true", help="name the functions")
    options = parser.parse_args()
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for root in options.paths:
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            package = "/".join(path.parts[:-1][:2])
            for function, names in vague_locals(path):
                totals[package][0] += 1
                totals[package][1] += bool(names)
                if options.verbose and names:
                    print(f"{path}:{function.lineno}: {function.name}: {', '.join(names)}")
    total = [sum(counts[index] for counts in totals.values()) for index in (0, 1)]
    for package, (functions, vague) in [*sorted(totals.items()), ("all", total)]:
        print(f"{package:<28} {vague:5} of {functions:5} functions {vague / functions:7.1%}")


if __name__ == "__main__":
    main()
