"""The directory of a sweep: its trials, and ``sweep.json``, which says what became of each.

``sweep.json`` is replaced as a whole after every change. The process that runs a sweep holds
``.lock`` beside it, so a sweep that was killed is recognized. It is continued by the same command
in the same directory, or by ``python -m llmx sweep resume DIR``.

    {"version": 1, "words": ["zero=stage1,stage2"], "cwd": "/home/me", "config_dir": null,
     "objective": "tokens_per_s", "complete": false, "started": 0.0, "pid": 1, "host": "node-a",
     "trials": [{"index": 0, "overrides": ["zero=stage1"], "key": "16 hex digits",
                 "state": "ended", "outcome": "ok", "cause": "", "fix": "", "run_dir": "0_zero-1",
                 "same_as": null, "slots": "node-a:0,1", "job": "", "rungs": [], "started": 0.0,
                 "ended": 9.0}]}
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmx.errors import ConfigError
from llmx.run.metrics import Metric
from llmx.run.metrics.declared import SPEEDS
from llmx.run.rundir import no_run, read_json, write_json
from llmx.run.tail import SHAPES, misfit

FILE, LOCK = "sweep.json", ".lock"
VERSION = 1
WAITING, RUNNING, ENDED = "waiting", "running", "ended"
WELL = ("ok", "planned")
"""Outcomes of trials that ended as they should."""
NOT_RUN = ("pruned", "same")
"""Outcomes of trials that were left out: one cannot fit, one has the config of another trial."""
STOPPED = "stopped"
"""The outcome of a trial that was not among the better ones at a rung of ``sweep.halving``."""

NOT_OF_A_SWEEP = (
    *("sweep.", "launch.", "launch=", "tracking.", "tracking="),
    *("hydra.sweeper.n_trials=", "hydra.sweeper.n_jobs="),
)
"""Beginnings of words that may differ when a sweep is continued."""
OWN_WORDS = (
    *("hydra.sweep.dir=", "hydra.mode=", "hydra.searchpath="),
    "hydra.job.config.override_dirname.exclude_keys=",
)
"""Beginnings of words that llmx and Hydra add themselves."""
RECORDED = (
    "index", "overrides", "key", "state", "outcome", "cause", "fix", "run_dir", "same_as", "slots",
    "job", "rungs", "started", "ended",
)  # fmt: skip
"""Attributes of a trial that are in ``sweep.json``; the others are read from its run directory."""


@dataclass
class Trial:
    """One trial of a sweep; None where a number is not known."""

    index: int
    overrides: Sequence[str]
    run_dir: Path
    """The run directory; it does not exist for a trial that was never started."""
    outcome: str = ""
    """As in ``result.json``; ``planned`` for a dry run, ``refused`` or ``failed`` where it was
    never started, one of ``NOT_RUN``, or ``STOPPED``; empty while it waits or runs."""
    cause: str = ""
    fix: str = ""
    key: str = ""
    """Hash of the composed config (``prune.key_of``); empty where it was refused."""
    same_as: int | None = None
    """The index of the trial of the same config, whose numbers these are."""
    slots: str = ""
    """Slots of the pool (``sweep.slots_per_trial``): ``node-a:0,1``."""
    job: str = ""
    """The number of its Slurm job."""
    rungs: list[list[float | None]] = field(default_factory=list)
    """Steps and the objective at each rung of ``sweep.halving`` that it has reached."""
    started: float | None = None
    """Seconds since the epoch, like ``ended``."""
    ended: float | None = None

    steps: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    """Training loss: the mean of the last logged interval where it is known, else its last step."""
    eval_loss: float | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """What the task measures besides the loss, by name, at the last evaluation that did."""
    trained: Mapping[str, float | None] = field(default_factory=dict)
    """The newest logged step, by name."""
    declared: Mapping[str, Metric] = field(default_factory=dict)
    tokens_per_s: float | None = None
    memory_gib: float | None = None
    """Memory of the fullest rank; as predicted for a trial that was only planned."""
    seconds: float | None = None
    curve: Sequence[tuple[int, float]] = field(default=(), repr=False)
    """Step and training loss, as logged."""

    @property
    def state(self) -> str:
        """Whether the trial is ``waiting``, ``running`` or ``ended``."""
        return ENDED if self.outcome else RUNNING if self.started else WAITING

    @property
    def word(self) -> str:
        """The outcome or state of the trial: ``ok``, ``oom``, ``same as 3``, ``running``."""
        if self.outcome == "same" and self.same_as is not None:
            return f"same as {self.same_as}"
        return self.outcome or self.state

    @property
    def failed(self) -> bool:
        """Whether the trial ended, and not as it should."""
        return bool(self.outcome) and not self.is_done

    @property
    def is_done(self) -> bool:
        """Whether the trial need not run again."""
        return self.outcome in (*WELL, *NOT_RUN, STOPPED)

    @property
    def label(self) -> str:
        """``[3]``."""
        return f"[{self.index}]"

    def value(self, objective: str) -> float | None:
        """The trial's value of an objective; None where it has none."""
        if objective in ("steps", "tokens_per_s", "memory_gib", "seconds"):
            number: float | None = getattr(self, objective)
            return number
        kind, _, name = objective.partition("/")
        if name == "loss":
            return self.loss if kind == "train" else self.eval_loss
        return (self.trained if kind == "train" else self.metrics).get(name)


@dataclass
class Sweep:
    """One sweep."""

    directory: Path
    trials: list[Trial] = field(default_factory=list)
    objective: str = ""
    """``tokens_per_s``, ``train/loss``, ``eval/loss`` or ``eval/NAME``."""
    words: list[str] = field(default_factory=list)
    """The overrides as they were typed."""
    cwd: str = ""
    config_dir: str | None = None
    complete: bool = False
    """Every trial was reached; false for a sweep that was killed."""
    started: float = 0.0
    pid: int = 0
    """The process that runs the sweep, or did, on ``host``."""
    host: str = ""
    has_own_objective: bool = True
    """Whether the objective is the one that the sweep was run for."""

    @property
    def mode(self) -> str:
        """``max`` or ``min``: which values of the objective are better."""
        name = self.objective.removeprefix("train/").removeprefix("eval/")
        declared = (trial.declared[name] for trial in self.trials if name in trial.declared)
        is_higher = any(metric.higher_is_better for metric in declared)
        return "max" if name in SPEEDS or is_higher else "min"

    @property
    def best(self) -> Trial | None:
        """The best trial that ended ok; None where none has a finite value."""
        first = self.ranked[0] if self.trials else None
        return first if first is not None and math.isfinite(self._rank(first)[0]) else None

    @property
    def ranked(self) -> list[Trial]:
        """The trials, the best first; last those that did not end ok with a finite value."""
        return sorted(self.trials, key=self._rank)

    def _rank(self, trial: Trial) -> tuple[float, float, int]:
        """The sort key of a trial; among equal ones less memory comes first, then the number."""
        value, memory = trial.value(self.objective), trial.memory_gib
        if trial.outcome != "ok" or value is None or not math.isfinite(value):
            return math.inf, math.inf, trial.index
        needed = memory if memory is not None and math.isfinite(memory) else math.inf
        return -value if self.mode == "max" else value, needed, trial.index

    @property
    def is_finished(self) -> bool:
        """Whether nothing is missing and nothing has failed."""
        return self.complete and all(trial.is_done for trial in self.trials)

    def trials_of(self, indices: Iterable[int]) -> list[Trial]:
        """The trials of those numbers."""
        by_index = {trial.index: trial for trial in self.trials}
        return [by_index[index] for index in indices]

    def own_words(self, trial: Trial) -> list[str]:
        """The overrides of a trial that are not those of all trials."""
        common = set.intersection(*(set(other.overrides) for other in self.trials))
        return [word for word in trial.overrides if word not in common]

    def write(self) -> None:
        """Replace ``sweep.json`` by the sweep as it is now."""
        trials = []
        for trial in self.trials:
            place = str(trial.run_dir.relative_to(self.directory))
            values = {name: getattr(trial, name) for name in RECORDED}
            trials.append({**values, "overrides": [*trial.overrides], "run_dir": place})
        names = ("words", "cwd", "config_dir", "objective", "complete", "started", "pid", "host")
        values = {name: getattr(self, name) for name in names}
        write_json(self.directory / FILE, {"version": VERSION, **values, "trials": trials})


def load(directory: Path) -> Sweep:
    """The sweep of a directory, without the numbers of its trials.

    Raises:
        ConfigError: it is not one, or its ``sweep.json`` cannot be read.
    """
    path = directory / FILE
    try:
        values = read_json(path)
        version = values.pop("version")
        if version != VERSION:
            raise ConfigError(f"{path}: is of version {version}, and this llmx reads {VERSION}.")
        if fault := misfit(values, SHAPES[FILE]):
            raise ValueError(fault)
        trials = []
        for row in values.pop("trials"):
            del row["state"]
            trials.append(Trial(**{**row, "run_dir": directory / row["run_dir"]}))
        return Sweep(directory, trials, **values)
    except FileNotFoundError:
        raise ConfigError(no_run(directory)) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: cannot be read ({error}). Restore it from a backup.") from error


def is_sweep(directory: Path) -> bool:
    """Whether ``directory`` is that of a sweep."""
    return (directory / FILE).is_file()


def identity(words: Iterable[str]) -> tuple[str, ...]:
    """The words by which two sweeps, or two trials, are the same one."""
    return tuple(
        sorted(word for word in words if not word.startswith((*NOT_OF_A_SWEEP, *OWN_WORDS)))
    )


def unfinished(
    root: Path, words: Sequence[str], *, cwd: Path, config_dir: str | None
) -> Sweep | None:
    """The newest sweep below ``root`` with the same words, typed in the same directory; None where
    that one is finished, or a process runs it."""
    for path in sorted(root.glob(f"*/{FILE}"), reverse=True):
        try:
            sweep = load(path.parent)
        except ConfigError:
            continue
        typed = (identity(sweep.words), sweep.cwd, sweep.config_dir)
        if typed == (identity(words), str(cwd), config_dir):
            return None if sweep.is_finished or is_running(path.parent) else sweep
    return None


def lock(directory: Path) -> int:
    """Take the lock of a sweep; the descriptor, which the kernel closes when the process ends.

    Raises:
        ConfigError: another process runs the sweep.
    """
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ConfigError(
            f"{directory}: this sweep is running. `python -m llmx status {directory}` shows it."
        ) from None
    return descriptor


def is_running(directory: Path) -> bool:
    """Whether a process holds the lock of the sweep."""
    return is_locked(directory / LOCK)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a file."""
    try:
        with path.open("r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def holds_lock(path: Path, pid: object) -> bool:
    """Whether the kernel says that this process holds the lock of a file. The content of the file
    could name any process: the directory may be somebody else's."""
    inode = path.stat().st_ino
    locks = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    return any(
        words[1] == "FLOCK" and words[4] == str(pid) and words[5].endswith(f":{inode}")
        for words in map(str.split, locks)  # 1: FLOCK ADVISORY WRITE PID x:y:INODE ...
        if len(words) > 5
    )
