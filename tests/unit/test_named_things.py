"""Docstrings, comments and docs name modules, functions and files that exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOTTED = re.compile(r"(?<![\w./@-])(?:llmx|tests|hydra_plugins)(?:\.[A-Za-z_]\w*)+(?![\w/-])")
PATH = re.compile(
    r"(?<![\w./<>*-])(?:llmx|tests|docs|conf|benchmarks|scripts|launchers)/[\w/.-]+"
    r"\.(?:py|md|yaml|json|sh|txt)\b"
)
SOURCES = ("llmx", "launchers", "tests", "benchmarks", "scripts", "conf", "docs")
GROUPS = ("file_types", "formats", "optimizers", "trackers", "transports")
NOT_MODULES = {"llmx.run_id", *(f"llmx.{group}" for group in GROUPS)}
"""Groups of entry points, and a tag in MLflow."""
PLACEHOLDER = re.compile(r"\.\.\.|/[A-Z]+[._]")
"""As in ``llmx/tasks/NAME.py``."""


@functools.cache
def texts() -> list[tuple[Path, str]]:
    """The prose of the repository: whole documents, docstrings and comments."""
    files = [path for name in SOURCES for path in (ROOT / name).rglob("*")]
    prose = [(path, path.read_text()) for path in files if path.suffix in (".md", ".yaml")]
    prose += [(ROOT / name, (ROOT / name).read_text()) for name in ("README.md", "CONTRIBUTING.md")]
    for path in files:
        if path.suffix == ".py":
            source = path.read_text()
            comments = re.findall(r"(?m)^\s*#.*$|  # .*$", source)
            strings = [
                node.value.value
                for node in ast.walk(ast.parse(source))
                if isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ]
            prose.append((path, "\n".join([*comments, *strings])))
    return prose


@functools.cache
def module_file(name: str) -> Path | None:
    base = ROOT / ("launchers" if name.startswith("hydra_plugins") else ".")
    path = base / name.replace(".", "/")
    if path.with_suffix(".py").is_file():
        return path.with_suffix(".py")
    return path / "__init__.py" if path.is_dir() else None


@functools.cache
def defined(path: Path) -> dict[str, ast.stmt]:
    """Top-level names of a module, imported ones as well (also those for the type checker)."""
    names: dict[str, ast.stmt] = {}
    body = ast.parse(path.read_text()).body if path.is_file() else []
    body += [inner for node in body if isinstance(node, ast.If) for inner in node.body]
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names[node.name] = node
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names.update({alias.asname or alias.name: node for alias in node.names})
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names.update({n.id: node for n in ast.walk(node) if isinstance(n, ast.Name)})
    return names


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, a name in it, or a member of a class in it."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = module_file(".".join(parts[:length]))
        if path is None:
            continue
        if not (rest := parts[length:]):
            return True
        node = defined(path).get(rest[0])
        if not isinstance(node, ast.ClassDef) or len(rest) == 1:
            return node is not None
        return re.search(rf"\b{rest[1]}\b", ast.unparse(node)) is not None
    return False


def test_names_in_docstrings_and_docs_resolve() -> None:
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in texts()
        for name in DOTTED.findall(text)
        if name not in NOT_MODULES and not resolves(name)
    }
    assert not missing, "\n".join(sorted(missing))


def test_paths_in_docstrings_and_docs_exist() -> None:
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in texts()
        for name in PATH.findall(text)
        if not PLACEHOLDER.search(name) and not (ROOT / name).exists()
    }
    assert not missing, "\n".join(sorted(missing))
