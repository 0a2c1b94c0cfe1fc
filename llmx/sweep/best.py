"""The best trial of a sweep as an experiment: ``python -m llmx experiment=SWEEP_DIR/best``.

It says what was typed for that trial, without what is of the sweep (``sweep.trial_steps``, ...),
so that it trains in full.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from llmx.config.groups import GROUPS
from llmx.observe.report.sweep_table import Trial, best_of
from llmx.run.rundir import write_text
from llmx.sweep.journal import Journal

NAME = "best"
_NOT_OF_THE_RUN = ("sweep", "hydra", "dry_run", "run_dir", "name")
_NESTED = "hardware/devices"


def write_best(journal: Journal, trials: Sequence[Trial]) -> Trial | None:
    """Write ``experiment/best.yaml`` below the sweep's directory (a config directory by it).

    Returns the best trial so far; None where none ended well.
    """
    best = best_of(trials, journal.objective, journal.mode)
    if best is None:
        return None
    good = sum(trial.outcome == "ok" for trial in trials)
    head = [
        "# @package _global_",
        f"# Trial {best.index}, the best of {good} by {journal.objective}: "
        f"{' '.join(best.overrides)}",
        f"# Train with it: {command(journal)}",
    ]
    text = yaml.safe_dump(experiment(best.overrides), allow_unicode=True, sort_keys=False)
    write_text(journal.directory / "experiment" / f"{NAME}.yaml", "\n".join([*head, text]))
    return best


def command(journal: Journal) -> str:
    """What trains with the best trial's values."""
    words = ["python -m llmx"]
    if journal.config_dir:
        words.append(f"--config-dir {shlex.quote(journal.config_dir)}")
    place = os.path.relpath(journal.directory, journal.cwd or None)
    shown = str(journal.directory) if place.startswith("..") else place
    return " ".join([*words, f"experiment={shlex.quote(f'{shown}/{NAME}')}"])


def experiment(overrides: Sequence[str]) -> dict[str, Any]:
    """Overrides as the content of an option of the group ``experiment``."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    defaults: list[Any] = []
    values: dict[str, Any] = {}
    for override in parser.parse_overrides(list(overrides)):
        key = override.key_or_group
        if key.split(".")[0].split("/")[0] in _NOT_OF_THE_RUN or override.is_delete():
            continue
        value = override.value()
        if key == "experiment":
            if value is not None:
                defaults.insert(0, str(value))  # an option of the same group
        elif key in (*GROUPS, _NESTED):
            defaults.append({f"override /{key}": value})
        else:
            _put(values, key.split("."), value)
    return {"defaults": [*defaults, "_self_"], **values}


def _put(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        values = values.setdefault(part, {})
    values[path[-1]] = value
