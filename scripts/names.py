#!/usr/bin/env python3
"""Measures locals that do not say what they hold, and docstrings without a subject.

    python scripts/names.py                 # a line for each package, and the whole
    python scripts/names.py llmx/train -v   # the functions and docstrings
    python scripts/names.py --check         # fails above 1 % of docstrings

A local is named for what it holds: ``matches``, ``missing_hosts``, ``plan_without_offload``; never
a pronoun, a quantifier or a participle. Loop variables and parameters count. A docstring, also that
of a field or a constant, begins with its subject or a verb, so that it is understood without the
name of what it describes. Standard library only.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
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
NO_SUBJECT = ("Of ", "By ", "That ", "Those ", "...")
MAX_SHARE = 0.01
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


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Every string that stands alone: of modules, classes, functions, fields and constants."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str()) as docstring):
                yield docstring


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, default=[Path("llmx"), Path("launchers")])
    parser.add_argument("-v", "--verbose", action="store_true", help="name functions, docstrings")
    parser.add_argument("--check", action="store_true", help="exit 1 above 1 %% of docstrings")
    options = parser.parse_args()
    functions: Counter[str] = Counter()
    vague: Counter[str] = Counter()
    documented: Counter[str] = Counter()
    headless: Counter[str] = Counter()
    for root in options.paths:
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            package = "/".join(path.parts[:-1][:2])
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                if not isinstance(node, Function):
                    continue
                functions[package] += 1
                if names := sorted(locals_of(node) & VAGUE - ALLOWED):
                    vague[package] += 1
                    if options.verbose:
                        print(f"{path}:{node.lineno}: {node.name}: {', '.join(names)}")
            for docstring in docstrings(tree):
                documented[package] += 1
                if str(docstring.value).startswith(NO_SUBJECT):
                    headless[package] += 1
                    if options.verbose:
                        print(f"{path}:{docstring.lineno}: {str(docstring.value)[:60]!r}")
    rows = [
        (name, *(c[name] for c in (vague, functions, headless, documented)))
        for name in sorted(functions)
    ]
    total = ("all", *(c.total() for c in (vague, functions, headless, documented)))
    for name, bad_names, all_functions, bad_docstrings, all_docstrings in (*rows, total):
        print(
            f"{name:<24} locals {bad_names:4} of {all_functions:5}   "
            f"docstrings {bad_docstrings:4} of {all_docstrings:5}"
        )
    if options.check and headless.total() > MAX_SHARE * documented.total():
        raise SystemExit(
            f"{headless.total()} docstrings begin without a subject (at most 1 %): -v names them"
        )


if __name__ == "__main__":
    main()
