"""Start a new run from the snapshot of an old one: ``python -m llmx reproduce RUN_DIR``.

A run always starts from its snapshot, so this is the normal path, entered one step later.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from llmx import snapshot
from llmx.compose import plan_experiment
from llmx.errors import ConfigError
from llmx.job import run_composed
from llmx.rundir import RunDir, read_json


def main(words: list[str]) -> int:
    """The command line; returns the exit code."""
    if len(words) != 1:
        raise ConfigError("reproduce takes one run directory: python -m llmx reproduce RUN_DIR")
    return reproduce(Path(words[0]))


def reproduce(source: Path) -> int:
    """Launch the snapshot of ``source`` again, in a directory beside it; returns the exit code."""
    run = RunDir(source)
    exp = snapshot.load(run)
    target = fresh_sibling(run.root)
    print(f"reproducing {run.root}\n       into {target}")
    for line in differences(run):
        print(f"  differs: {line}")
    exp = dataclasses.replace(exp, run_dir=str(target), dry_run=False)
    return run_composed(plan_experiment(exp), overrides=[f"reproduce={run.root}"])


def fresh_sibling(root: Path) -> Path:
    """A directory beside ``root`` that does not exist yet."""
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    target, number = root.parent / f"{root.name}_reproduced_{stamp}", 1
    while target.exists():
        number += 1
        target = root.parent / f"{root.name}_reproduced_{stamp}_{number}"
    return target


def differences(run: RunDir) -> list[str]:
    """What differs between the recorded code and packages and those here, a line each."""
    old, new = read_json(run.provenance), snapshot.provenance([])
    found = [
        f"{name}: {version} then, {new['packages'].get(name)} now"
        for name, version in old.get("packages", {}).items()
        if version != new["packages"].get(name)
    ]
    for part in ("commit", "diff"):
        then, now = (old.get("git") or {}).get(part), (new.get("git") or {}).get(part)
        if then != now:
            found.append(f"git {part}" + (f": {then} then, {now} now" if part == "commit" else ""))
    return found
