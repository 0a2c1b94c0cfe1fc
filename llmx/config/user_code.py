"""Finds code of the user's own without importing it: ``task.kind=my_package.my_task:MyTask``,
metrics of ``task.eval_metrics`` (``my_metrics:bleu``), ``task.options.rewards`` and
``task.options.environment``.

The control process imports no torch, and a task does. So it only finds out where the package lies:
that directory goes to the ranks' PYTHONPATH, to other hosts (``launch.sync=rsync``), and into the
provenance of the run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.machinery
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from llmx.config import TaskConfig
from llmx.errors import ConfigError


@dataclass(frozen=True)
class UserCode:
    """A package of the user's own that the config names, and its place on this machine."""

    module: str
    name: str
    """Name of the class or function."""
    root: Path
    """What must be on ``sys.path``."""
    package: Path
    """The top-level package (a directory) or module (a file) below ``root``."""

    @property
    def is_installed(self) -> bool:
        """Whether pip put it where every Python finds it."""
        places = {Path(path).resolve() for path in sysconfig.get_paths().values()}
        return self.root in places

    def files(self) -> list[Path]:
        """The Python files of the package."""
        if self.package.is_file():
            return [self.package]
        return sorted(self.package.rglob("*.py"))


def user_task(task: TaskConfig) -> UserCode | None:
    """The code of ``task.kind``; None for a task of llmx.

    Raises:
        ConfigError: there is no such package on this machine.
    """
    return _find(f"task.kind={task.kind}", task.kind, task)


def user_functions(task: TaskConfig) -> dict[str, str]:
    """The functions of the user's own that the task is given, by the key that names each."""
    rewards = task.options.get("rewards")
    by_key = {
        "task.eval_metrics": task.eval_metrics,
        "task.options.rewards": rewards if isinstance(rewards, list) else [],
        "task.options.environment": [task.options.get("environment")],
    }
    return {
        f"{key}: {name}": name
        for key, names in by_key.items()
        for name in names
        if isinstance(name, str) and ":" in name
    }


def user_code(task: TaskConfig) -> list[UserCode]:
    """The code of ``task.kind``, metrics and rewards, each package once.

    Raises:
        ConfigError: one of them is not on this machine.
    """
    packages: dict[Path, UserCode] = {}
    functions = user_functions(task).items()
    for code in (user_task(task), *(_find(where, name, task) for where, name in functions)):
        if code is not None:
            packages.setdefault(code.package, code)
    return list(packages.values())


def code_roots(task: TaskConfig) -> list[str]:
    """The directory of ``task.kind``'s code, for ``PYTHONPATH``; none for a task of llmx."""
    code = user_task(task)
    return [] if code is None else [str(code.root)]


def _find(where: str, path: str, task: TaskConfig) -> UserCode | None:
    """``path``: ``package.module:name``; None of anything else. ``where``: for the message."""
    module, _, name = path.partition(":")
    if not name:
        return None
    top = module.split(".")[0]
    if task.code_path is not None:
        paths = [str(Path(task.code_path).expanduser().absolute())]
    else:  # The directory where the command was typed counts, as for `python -m`.
        paths = [str(Path.cwd()), *(path for path in sys.path if path)]
    spec = importlib.machinery.PathFinder.find_spec(top, paths)
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    if spec is not None and not places and spec.origin:
        places = [spec.origin]
    if not places:
        looked_in = " or ".join([paths[0], *(["on PYTHONPATH"] if len(paths) > 1 else [])])
        raise ConfigError(
            f"{where}: there is no module {top!r} in {looked_in}. Set task.code_path to the "
            "directory that holds it, or install it."
        )
    package = Path(places[0]).resolve()
    return UserCode(module, name, package.parent, package)


def with_code_path(task: TaskConfig) -> TaskConfig:
    """Set ``code_path`` to the directory found from here, so that a resume finds the same from
    anywhere; unchanged where all code is llmx's own or installed.

    Raises:
        ConfigError: a task and its metrics lie in different directories.
    """
    roots = list(dict.fromkeys(code.root for code in user_code(task) if not code.is_installed))
    if not roots:
        return task
    if len(roots) > 1:
        raise ConfigError(
            f"The task, its metrics and its rewards are code in {' and '.join(map(str, roots))}. "
            "Put it into one directory, task.code_path, or install it."
        )
    return dataclasses.replace(task, code_path=str(roots[0]))


def code_hashes(*code: UserCode) -> dict[str, str]:
    """SHA-256 of each Python file of these packages, by its path below ``root``."""
    return {
        str(path.relative_to(package.root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for package in code
        for path in package.files()
    }
