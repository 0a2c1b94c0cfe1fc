"""The shipped config groups: where they lie, their options, one line of each.

Every YAML opens with a comment that says what it is and when to use it; ``--help`` is made
from those lines, so it cannot fall behind.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from llmx.config.build import shown
from llmx.errors import did_you_mean

GROUPS = (
    "experiment", "model", "adapter", "data", "task", "zero", "hardware", "optim", "batch",
    "checkpoint", "launch", "tracking",
)  # fmt: skip

ALIASES = {"zero_stage": "zero"}
"""Other spellings of a group, accepted wherever an override is written."""

OPTIONAL_GROUPS = ("experiment",)
"""Groups that may be left out: ``experiment=null``."""

_PACKAGE = Path(__file__).resolve().parent.parent


def _shipped(name: str) -> Path:
    """``conf`` and ``sweeps`` lie inside the installed package, or beside it in a checkout."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def conf_dir() -> Path:
    """Directory of the config groups."""
    return _shipped("conf")


def sweeps_dir() -> Path:
    """Directory of the committed sweeps."""
    return _shipped("sweeps")


def options(group: str, *, directory: Path | None = None) -> dict[str, str]:
    """Option name -> its one line, sorted by name."""
    folder = (directory or conf_dir()) / group
    return {path.stem: first_comment(path) for path in sorted(folder.glob("*.yaml"))}


def find_option(group: str, name: str, directories: Sequence[Path] = ()) -> Path | None:
    """The file of an option, the user's own before ours; None where there is none."""
    if not re.fullmatch(r"[\w./+ -]+", name) or ".." in name or name.startswith("/"):
        return None
    file = name if name.endswith(".yaml") else f"{name}.yaml"
    for directory in (*directories, conf_dir()):
        path = directory / group / file
        if path.is_file():
            return path
    return None


def option_names(group: str, directories: Sequence[Path] = ()) -> list[str]:
    """The options of a group, the user's own with them."""
    found = {
        path.stem for each in (*directories, conf_dir()) for path in (each / group).glob("*.yaml")
    }
    return sorted(found)


def no_such_option(group: str, name: str, directories: Sequence[Path] = ()) -> str:
    """The message for an option that a group does not have."""
    known = option_names(group, directories)
    # zero=4 is read as zero=stage4.
    typed = f"stage{name}" if group == "zero" and name.isdecimal() else name
    near = did_you_mean(typed[:100], known)
    null = ", or null for none" if group in OPTIONAL_GROUPS else ""
    return (
        f"{group}={shown(name)}: no such option.{near} Options of {group}: "
        f"{', '.join(known)}{null}; your own: --config-dir DIR."
    )


def first_comment(path: Path) -> str:
    """The first comment line of a YAML file that is not a Hydra directive."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("#") and "@package" not in line:
            return line.lstrip("# ").strip()
    return ""
