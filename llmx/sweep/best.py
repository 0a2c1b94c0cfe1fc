"""The best trial of a sweep as a file of words: ``python -m llmx SWEEP_DIR/best.yaml``.

It has the words of that trial without those of the sweep (``sweep.trial_steps``, ...), so it trains
in full.
"""

from __future__ import annotations

import re

from llmx.config.yaml_files import dump_yaml
from llmx.observe.report.sweep_table import BEST_CONFIG, experiment_command
from llmx.run.rundir import write_text
from llmx.run.sweepdir import Sweep

_OF_THE_SWEEP = re.compile(r"[+~]*(sweep|hydra|dry_run|run_dir|name)\b")


def write_best(sweep: Sweep) -> None:
    """Write ``best.yaml`` into the sweep's directory, if a trial has ended well."""
    best = sweep.best
    if best is None:
        return
    good = sum(trial.outcome == "ok" for trial in sweep.trials)
    head = [
        f"# Trial {best.index}, the best of {good} by {sweep.objective}: "
        f"{' '.join(best.overrides)}",
        f"# Train with it: {experiment_command(sweep)}",
    ]
    words = [word for word in best.overrides if not _OF_THE_SWEEP.match(word)]
    write_text(sweep.directory / BEST_CONFIG, "\n".join([*head, dump_yaml(words)]))
