"""``sweep`` runs a grid or continues one; ``tune`` is a sweep that chooses its trials itself."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from llmx.cli.arguments import sweep_overrides
from llmx.cli.hydra_app import train
from llmx.compose.words import Words
from llmx.config.build import shown
from llmx.config.groups import SWEEPS
from llmx.config.schema import FAILURES
from llmx.errors import ConfigError, did_you_mean
from llmx.run.sweepdir import FILE, NOT_OF_A_SWEEP, is_sweep, load

RESUME = "resume"
SPEED = "tokens_per_s"
TRIAL_STEPS = 10
SWEEPER = "hydra/sweeper=tune"


def sweep(words: Words) -> int:
    """Run or continue a sweep; returns the exit code."""
    names = sorted(path.stem for path in SWEEPS.glob("*.yaml"))
    if not words.bare:
        raise ConfigError(
            f"sweep needs a name or a YAML file, or resume DIR. There are: {', '.join(names)}."
        )
    name, *arguments = words.bare
    if name == RESUME:
        return resume(words)
    path = Path(name) if name.endswith(".yaml") else SWEEPS / f"{name}.yaml"
    if not path.is_file():
        hint = did_you_mean(name, [*names, RESUME])
        raise ConfigError(f"no sweep {name!r}.{hint} There are: {', '.join(names)}.")
    overrides = (*sweep_overrides(path), *arguments, *words.overrides)
    return train(words.but(multirun=True, overrides=overrides))


def resume(words: Words) -> int:
    """Run the missing and the failed trials of the sweep in a directory."""
    if len(words.bare) < 2:
        raise ConfigError("sweep resume needs a sweep's directory: python -m llmx sweep resume DIR")
    directory, overrides = Path(words.bare[1]).absolute(), [*words.bare[2:], *words.overrides]
    if not is_sweep(directory):
        raise ConfigError(
            f"{directory}: not a sweep directory: it has no {FILE}. Sweeps are in outputs/sweeps."
        )
    sweep = load(directory)
    other = [word for word in overrides if not word.startswith(NOT_OF_A_SWEEP)]
    if other:
        raise ConfigError(
            f"{shown(other[0])}: would make it a different sweep. To continue a sweep, change only "
            "sweep.*, launch.*, tracking.* and hydra.sweeper.n_trials; for other changes start a "
            "new one."
        )
    if not Path(sweep.cwd).is_dir():
        raise ConfigError(
            f"{sweep.cwd}: the directory where the sweep was started no longer exists, and "
            "relative paths start there. Create it again, or start a new sweep."
        )
    os.chdir(sweep.cwd)
    changed = {word.partition("=")[0] for word in overrides}
    unchanged = [word for word in sweep.words if word.partition("=")[0] not in changed]
    all_words = (*unchanged, *overrides, f"hydra.sweep.dir='{directory}'")
    return train(words.but(multirun=True, config_dir=sweep.config_dir, overrides=all_words))


def tune(words: Words) -> int:
    """Search for a configuration; returns the exit code."""
    return train(words.but(multirun=True, overrides=tuple(tune_words(words.overrides))))


def tune_words(words: Sequence[str]) -> list[str]:
    """The words of the sweep that ``tune`` is."""
    for word in words:
        if word.partition("=")[0] in ("hydra/sweeper", "hydra/launcher"):
            raise ConfigError(f"{word}: tune has its own. For another search: python -m llmx -m.")
    typed = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    objective = typed.get("sweep.objective", SPEED)
    if objective != SPEED:
        if not re.fullmatch(r"eval/\S+", objective):
            raise ConfigError(
                f"sweep.objective={objective}: no such objective. Use {SPEED} (the default), "
                "eval/loss, or eval/NAME with a metric that the task measures."
            )
        if "sweep.halving" not in typed:
            raise ConfigError(
                f"sweep.objective={objective}: a loss or a metric is tuned by successive "
                "halving, and needs sweep.halving=N, the steps after which half of the trials are "
                "stopped: a tenth of the run or so, past the warm-up."
            )
        return list(words)
    again = ",".join(outcome for outcome in (*FAILURES, "refused") if outcome != "oom")
    defaults = {
        "sweep.objective": SPEED,
        "sweep.trial_steps": str(TRIAL_STEPS),
        # Out of memory is an answer, which a search that goes on need not ask for again.
        "sweep.retry": f"[{again}]",
    }
    filled_in = [f"{key}={value}" for key, value in defaults.items() if key not in typed]
    return [SWEEPER, *filled_in, *words]
