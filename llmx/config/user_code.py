"""A task of the user's own: ``task.kind=my_package.my_task:MyTask``, found without importing it.

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
class UserTask:
    """Where the code of a task lies on this machine."""

    module: str
    name: str
    """Of the class."""
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
        """Its Python files."""
        if self.package.is_file():
            return [self.package]
        return sorted(self.package.rglob("*.py"))


def user_task(task: TaskConfig) -> UserTask | None:
    """Of ``task.kind``; None for a task of llmx.

    Raises:
        ConfigError: there is no such package on this machine.
    """
    module, _, name = task.kind.partition(":")
    if not name:
        return None
    top = module.split(".")[0]
    if task.code_path is not None:
        paths = [str(Path(task.code_path).expanduser().absolute())]
    else:  # The directory where the command was typed counts, as for `python -m`.
        paths = [str(Path.cwd()), *(path for path in sys.path if path)]
    found = importlib.machinery.PathFinder.find_spec(top, paths)
    places = [] if found is None else list(found.submodule_search_locations or ())
    if found is not None and not places and found.origin:
        places = [found.origin]
    if not places:
        where = " or ".join([paths[0], *(["on PYTHONPATH"] if len(paths) > 1 else [])])
        raise ConfigError(
            f"task.kind={task.kind}: there is no module {top!r} in {where}. Set task.code_path to "
            "the directory that holds it, or install it."
        )
    package = Path(places[0]).resolve()
    return UserTask(module, name, package.parent, package)


def with_code_path(task: TaskConfig) -> TaskConfig:
    """With ``code_path`` as it was found from here, so that a resume finds the same from anywhere;
    unchanged for a task of llmx or an installed one."""
    found = user_task(task)
    if found is None or found.is_installed:
        return task
    return dataclasses.replace(task, code_path=str(found.root))


def code_hashes(task: UserTask) -> dict[str, str]:
    """SHA-256 of each Python file of the task's package, by its path below ``root``."""
    return {
        str(path.relative_to(task.root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in task.files()
    }
