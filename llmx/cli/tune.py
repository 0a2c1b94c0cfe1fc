"""``python -m llmx tune [objective=...] [axes]``: a sweep that chooses its trials itself."""

from __future__ import annotations

import re
from collections.abc import Sequence

from llmx.cli.hydra_app import run_hydra
from llmx.config.schema import FAILURES
from llmx.errors import ConfigError

SPEED = "tokens_per_s"
OWN = {
    "objective": "sweep.objective",
    "max_trials": "sweep.max_trials",
    "max_minutes": "sweep.max_minutes",
}
TRIAL_STEPS = 10
SWEEPER = "hydra/sweeper=tune"


def main(words: Sequence[str]) -> int:
    """Search; returns the exit code."""
    return run_hydra(["--multirun", *tune_words(words)])


def tune_words(words: Sequence[str]) -> list[str]:
    """The words of the sweep that ``tune`` is."""
    overrides = []
    for word in words:
        key, equal, value = word.partition("=")
        if word == "--dry-run":
            word = "dry_run=true"
        elif equal and key in OWN:
            word = f"{OWN[key]}={value}"
        elif key in ("hydra/sweeper", "hydra/launcher"):
            raise ConfigError(f"{word}: tune has its own. For another search: python -m llmx -m.")
        overrides.append(word)
    typed = {word.partition("=")[0]: word.partition("=")[2] for word in overrides}
    objective = typed.get("sweep.objective", SPEED)
    if objective != SPEED:
        if not re.fullmatch(r"eval/\S+", objective):
            raise ConfigError(
                f"objective={objective}: no such objective. Use {SPEED} (the default), eval/loss, "
                "or eval/NAME with a metric that the task measures."
            )
        if "sweep.halving" not in typed:
            raise ConfigError(
                f"objective={objective}: a loss or a metric is tuned by successive halving, and "
                "needs sweep.halving=N, the steps after which half of the trials are stopped: a "
                "tenth of the run or so, past the warm-up."
            )
        return overrides
    again = ",".join(outcome for outcome in (*FAILURES, "refused") if outcome != "oom")
    defaults = {
        "sweep.objective": SPEED,
        "sweep.trial_steps": str(TRIAL_STEPS),
        # Out of memory is an answer, which a search that goes on need not ask for again.
        "sweep.retry": f"[{again}]",
    }
    more = [f"{key}={value}" for key, value in defaults.items() if key not in typed]
    return [SWEEPER, *more, *overrides]
