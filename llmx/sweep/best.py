"""The best trial of a sweep as an experiment: ``python -m llmx experiment=SWEEP_DIR/best``.

It has the overrides of that trial without those of the sweep (``sweep.trial_steps``, ...), so it
trains in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmx.config.groups import GROUPS
from llmx.config.yaml_files import dump_yaml
from llmx.observe.report.sweep_table import BEST_CONFIG, experiment_command
from llmx.run.rundir import write_text
from llmx.run.sweepdir import Sweep

_NOT_OF_THE_RUN = ("sweep", "hydra", "dry_run", "run_dir", "name")
_NESTED = "hardware/devices"


def write_best(sweep: Sweep) -> None:
    """Write ``experiment/best.yaml`` below the sweep's directory, if a trial has ended well."""
    best = sweep.best
    if best is None:
        return
    good = sum(trial.outcome == "ok" for trial in sweep.trials)
    head = [
        "# @package _global_",
        f"# Trial {best.index}, the best of {good} by {sweep.objective}: "
        f"{' '.join(best.overrides)}",
        f"# Train with it: {experiment_command(sweep)}",
    ]
    text = dump_yaml(experiment(best.overrides))
    write_text(sweep.directory / BEST_CONFIG, "\n".join([*head, text]))


def experiment(overrides: Sequence[str]) -> dict[str, Any]:
    """Overrides as the content of an option of the group ``experiment``."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    defaults: list[Any] = []
    values: dict[str, Any] = {}
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.key_or_group
        is_option = key in (*GROUPS, _NESTED)
        no_value = override.is_delete() and not is_option
        if key.split(".")[0].split("/")[0] in _NOT_OF_THE_RUN or no_value:
            continue
        value = None if override.is_delete() else override.value()
        if key == "experiment":
            if value is not None:
                defaults.insert(0, str(value))  # an option of the same group
        elif is_option:
            defaults.append({f"override /{key}": value})
        else:
            *sections, name = key.split(".")
            section = values
            for part in sections:
                section = section.setdefault(part, {})
            section[name] = value
    return {"defaults": [*defaults, "_self_"], **values}
