"""The groups of the config: their directories, options, and keys.

Every YAML opens with a comment that says what it is and when to use it; ``--help`` is made from
those lines, so it cannot fall behind. An unknown key is explained, also one of another framework.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmx.config.build import hints_of, known_keys, shown, without_none
from llmx.config.foreign import NAMES
from llmx.config.schema import Experiment
from llmx.errors import closest, did_you_mean

GROUPS = {
    "experiment": "a complete recipe; experiment=null for none",
    "model": "the network, pretrained or from scratch",
    "adapter": "adapters on frozen weights (adapter=lora)",
    "data": "the training data",
    "task": "the training objective and length",
    "zero": "how DeepSpeed shards and offloads (zero_stage= is the same; zero=3 is zero=stage3)",
    "hardware": "hosts and devices",
    "optim": "optimizer and schedule",
    "batch": "global batch, micro batch, accumulation",
    "checkpoint": "when checkpoints are saved and which are kept",
    "launch": "how ranks are started on the hosts",
    "tracking": "where metrics are sent",
}
"""Group -> what it is, in one line."""

ALIASES = {"zero_stage": "zero"}
"""Other spellings of a group, accepted wherever an override is written."""

OPTIONAL_GROUPS = ("experiment",)
"""Groups that may be left out: ``experiment=null``."""

_PACKAGE = Path(__file__).resolve().parent.parent
# Inside the installed package, or beside it in a checkout.
_SHIPPED = _PACKAGE if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent
CONF = _SHIPPED / "conf"
"""Directory of the config groups."""
SWEEPS = _SHIPPED / "sweeps"
"""Directory of the committed sweeps."""
PIPELINES = CONF / "pipeline"
"""Directory of the committed pipelines."""


def options(group: str, directories: Sequence[Path] = ()) -> dict[str, str]:
    """Option name -> its one line, sorted by name; those of the user's own directories behind the
    shipped ones."""
    lines = {}
    for directory in (CONF, *directories):
        place = f" ({directory})" if directory != CONF else ""
        for path in sorted((directory / group).glob("*.yaml")):
            lines[path.stem] = f"{first_comment(path)}{place}".lstrip()
    return lines


def find_option(group: str, name: str, directories: Sequence[Path] = ()) -> Path | None:
    """The file of an option, the user's own before ours; None where there is none."""
    if not re.fullmatch(r"[\w./+ -]+", name) or ".." in name or name.startswith("/"):
        return None
    file = name if name.endswith(".yaml") else f"{name}.yaml"
    for directory in (*directories, CONF):
        path = directory / group / file
        if path.is_file():
            return path
    return None


def no_such_option(group: str, name: str, directories: Sequence[Path] = ()) -> str:
    """The message for an option that a group does not have."""
    if group in ("model", "data") and Path(name).exists():
        return f"{group}={shown(name)}: is a path, not an option. Write {group}.path={shown(name)}."
    names = sorted(options(group, directories))
    # zero=4 is read as zero=stage4.
    typed = f"stage{name}" if group == "zero" and name.isdecimal() else name
    near = did_you_mean(typed[:100], names)
    null = ", or null for none" if group in OPTIONAL_GROUPS else ""
    return (
        f"{group}={shown(name)}: no such option.{near} Options of {group}: "
        f"{', '.join(names)}{null}; your own: --config-dir DIR."
    )


def first_comment(path: Path) -> str:
    """The first comment line of a YAML file that is not a Hydra directive."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("#") and "@package" not in line:
            return line.lstrip("# ").strip()
    return ""


__all__ = ["elsewhere", "key_problem", "shown"]

# The last part of a dotted name alone, where it says enough: stage3_max_live_parameters, not type.
_LAST_PARTS = {last: key for name, key in NAMES.items() if "_" in (last := name.rpartition(".")[2])}


def counterpart(name: str) -> str:
    """``optim.lr`` for a key as Transformers, TRL, LLaMA-Factory, axolotl or DeepSpeed call it, or
    for the last part of one of ours; else empty."""
    typed = name.lstrip("-").replace("-", "_").lower()
    last = typed.rpartition(".")[2]
    homes = [dotted for dotted in known_keys() if dotted.rpartition(".")[2] == last]
    own = last if last in homes else ", ".join(homes)
    return NAMES.get(typed) or NAMES.get(last) or _LAST_PARTS.get(last) or own


def elsewhere(name: str) -> str:
    """`` Here it is optim.lr.`` for a key with a counterpart; else empty."""
    key = counterpart(name)
    return f" Here it is {key}." if key else ""


_HYDRA = re.compile(r"hydra/(launcher|sweeper)|hydra\.((launcher|sweeper)\.[\w.]+|sweep\.dir)")


def hydra_problem(key: str) -> str:
    """What is wrong with a key or group of Hydra's own; empty for one that may be set."""
    if _HYDRA.fullmatch(key):
        return ""
    return (
        "llmx sets this key of Hydra. You can set hydra/launcher, hydra/sweeper, the keys of both "
        "(hydra.sweeper.n_trials=20) and hydra.sweep.dir. The directory of a run is run_dir=DIR, "
        "that of options --config-dir DIR, a sweep -m."
    )


def lookup(key: str) -> tuple[Any, str]:
    """The type of a dotted key of the schema (``Any`` where anything goes), and the problem with
    the key in one line: empty for one that the schema knows."""
    hint: Any = Experiment
    parts = key.split(".")
    for index, part in enumerate(parts):
        before = ".".join(parts[:index])
        if hint is Any:
            return Any, ""
        if dataclasses.is_dataclass(hint):
            inner = hints_of(typing.cast(type, hint))
            if part not in inner:
                return Any, _no_such(key, ".".join(parts[: index + 1]), before, list(inner))
            hint = inner[part]
        elif typing.get_origin(hint) is dict:
            hint = typing.get_args(hint)[1]
        elif typing.get_origin(hint) is list:
            if not part.isdecimal():
                return Any, f"{shown(key)}: {before} is a list. Set it whole: {before}=[...]."
            hint = typing.get_args(hint)[0]
        else:
            rule = f"{before} is one value, without keys of its own"
            return Any, f"{shown(key)}: {rule}. Set {before}=..."
        hint, _ = without_none(hint)
    return hint, ""


def key_problem(key: str) -> str:
    """The problem with a dotted key in one line; empty for one that the schema knows."""
    return lookup(key)[1]


def _no_such(key: str, where: str, before: str, names: list[str]) -> str:
    last = key.rpartition(".")[2]
    homes = [dotted for dotted in known_keys() if dotted.rpartition(".")[2] == last]
    words = f" It exists as {', '.join(homes)}." if homes else elsewhere(last)
    if not words and len(key) < 200:
        near = closest(where.rpartition(".")[2], names)
        near = f"{before}.{near}" if near and before else near
        near = near or closest(key, [*known_keys(), *GROUPS])
        if near:
            words = f' Did you mean "{near}"?'
        if before and near == before:
            words = f" Known here: {', '.join(names)}."
    see = f"help {before.split('.')[0]}" if before else "--help"
    return f"{shown(key)}: no such key.{words} See python -m llmx {see}."
