"""A sweep as it lies on disk: its journal ``sweep.json`` and its trials' run directories.

Light: ``status`` and ``watch`` read sweeps with it, too. Sweeps of earlier versions have no
journal; their trials are the directories ``N_.../config.yaml``, and those that were refused are in
``sweep.csv``.
"""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmx.errors import ConfigError, LlmxError
from llmx.observe.report.run_data import RunData, load_run
from llmx.run.metrics import Metric
from llmx.run.metrics.lines import step_of
from llmx.run.rundir import RunDir, no_run
from llmx.run.snapshot import read_overrides

JOURNAL, CSV, MULTIRUN = "sweep.json", "sweep.csv", "multirun.yaml"
VERSION = 1
"""Of the journal, up to which it is understood whole."""
WAITING, RUNNING, ENDED = "waiting", "running", "ended"
WELL = ("ok", "planned")
"""Outcomes of trials that ended as they should."""
NOT_RUN = ("pruned", "same")
"""Outcomes of trials that were not run, with no failure."""
STOPPED = "stopped"
"""The outcome of a trial that ended well at a rung of ``sweep.halving`` and was not of the best."""
SWEEP = "sweep"
"""The axis of several sweeps: the name of a trial's sweep."""

_TRIAL_DIRECTORY = re.compile(r"(\d+)_")
_OF_A_RUN = ("name", "run_dir", "dry_run")
_OF_NO_NUMBER = ("tracking.", "sweep.")
"""Keys in which two trials may differ and are the same training."""
_OF_NUMBERS = ("sweep.trial_steps",)
"""Among those, keys that change the numbers."""


@dataclass(frozen=True)
class Trial:
    """One trial of a sweep; None where a number is not known."""

    index: int
    overrides: tuple[str, ...]
    run_dir: Path
    outcome: str
    """As in ``result.json``; ``planned`` of a dry run, ``refused`` where it was never started,
    ``pruned`` where it was left out, ``same`` where its config is that of ``same_as``; empty while
    it waits or runs."""
    cause: str = ""
    fix: str = ""
    steps: int | None = None
    loss: float | None = None
    """Of training: the mean of the last logged interval where it is known, else its last step."""
    eval_loss: float | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """What the task measures besides the loss, by name, at the last evaluation that did."""
    declared: Mapping[str, Metric] = field(default_factory=dict)
    tokens_per_s: float | None = None
    memory_gib: float | None = None
    """Of the fullest rank; of a trial that was only planned, as predicted."""
    seconds: float | None = None
    state: str = ENDED
    """``waiting``, ``running`` or ``ended``."""
    same_as: int | None = None
    """The index of the trial of the same config, whose numbers these are."""
    started: float | None = None
    ended: float | None = None
    total_steps: int | None = None
    sweep: str = ""
    """The name of its sweep, where several are shown together."""
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    curve: Sequence[tuple[int, float]] = field(default=(), repr=False)
    """Step and training loss, as logged."""

    @property
    def word(self) -> str:
        """How it ended, or what it does: ``ok``, ``oom``, ``same as 3``, ``running``."""
        if self.outcome == "same" and self.same_as is not None:
            return f"same as {self.same_as}"
        return self.outcome or self.state

    @property
    def failed(self) -> bool:
        """Whether it ended, and not as it should."""
        return self.state == ENDED and self.outcome not in (*WELL, *NOT_RUN, STOPPED)

    @property
    def label(self) -> str:
        """``[3]``, or ``[NAME 3]`` where several sweeps are shown together."""
        return f"[{self.sweep} {self.index}]" if self.sweep else f"[{self.index}]"


@dataclass(frozen=True)
class Sweep:
    """One sweep, or several together."""

    directory: Path
    trials: list[Trial]
    objective: str
    """``tokens_per_s``, ``train/loss``, ``eval/loss`` or ``eval/NAME``."""
    mode: str
    """``max`` or ``min``: which values of the objective are better."""
    complete: bool = True
    words: tuple[str, ...] = ()
    """The overrides as they were typed."""
    started: float | None = None
    process: Mapping[str, Any] = field(default_factory=dict)
    """``pid`` and ``host`` of the process that runs the sweep, where the journal has them."""
    has_journal: bool = True
    of_one: bool = True
    """Whether ``directory`` is the one sweep's, and the objective the one it was run for."""
    warnings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def best(self) -> Trial | None:
        return best_of(self.trials, self.objective, self.mode)


def is_sweep(directory: Path) -> bool:
    """Whether ``directory`` is that of a sweep."""
    return any((directory / name).is_file() for name in (JOURNAL, CSV, MULTIRUN))


def objective_of(trial: Trial, objective: str) -> float | None:
    """The trial's value of an objective; None where it has none."""
    if objective in ("tokens_per_s", "memory_gib", "seconds"):
        value: float | None = getattr(trial, objective)
        return value
    kind, _, name = objective.rpartition("/")
    if name == "loss":
        return trial.loss if kind == "train" else trial.eval_loss
    return trial.metrics.get(name)


def direction_of(objective: str, trials: Iterable[Trial]) -> str:
    """``max`` or ``min``, as the objective's name or the metric's declaration says."""
    if objective == "tokens_per_s":
        return "max"
    name = objective.rpartition("/")[2]
    found = [trial.declared[name] for trial in trials if name in trial.declared]
    return "max" if any(metric.higher_is_better for metric in found) else "min"


def best_of(trials: Iterable[Trial], objective: str, mode: str) -> Trial | None:
    """The best trial that ended ok; of equal ones that with less memory, then the first.

    A value that is not finite never wins.
    """
    sign = -1.0 if mode == "max" else 1.0
    found = []
    for trial in trials:
        value = objective_of(trial, objective)
        if trial.outcome != "ok" or trial.state != ENDED or value is None:
            continue
        if math.isfinite(value):
            memory = trial.memory_gib
            known = memory if memory is not None and math.isfinite(memory) else math.inf
            found.append(((sign * value, known, trial.index), trial))
    return min(found, key=lambda entry: entry[0])[1] if found else None


# --- One trial -------------------------------------------------------------------------------


def read_trial(
    index: int, overrides: Sequence[str], run_dir: Path, *, error: BaseException | None = None
) -> Trial:
    """A trial as its run directory tells; ``error``: what ended it otherwise."""
    words = tuple(overrides)
    try:
        data = load_run(run_dir)
    except LlmxError:
        outcome = "refused" if isinstance(error, LlmxError) else "failed" if error else "ok"
        cause = f"{error}" if isinstance(error, LlmxError) else repr(error) if error else ""
        return Trial(index, words, run_dir, outcome, cause)
    return _of_run(index, words, data, error)


def _of_run(
    index: int, overrides: tuple[str, ...], data: RunData, error: BaseException | None
) -> Trial:
    values, result = data.summary, data.result or {}
    outcome, cause = str(result.get("outcome") or ""), str(result.get("cause") or "")
    if not outcome:
        outcome = "failed" if error or data.was_started else "planned"
        cause = str(error or "")
    memory = values.get("memory_gib_max")
    if memory is None and outcome == "planned":
        parts = [plan.items() for plan in data.plan.get("memory") or []]
        apart = ("host_gib", "capacity_gib")
        totals = [sum(v for k, v in p if k.endswith("_gib") and k not in apart) for p in parts]
        memory = max(totals, default=None)
    last = data.train[-1] if data.train else {}
    loss = last.get("loss_mean")
    points = data.metric_points("eval")
    trained = {name: [p for p in found if p[0] > 0] for name, found in points.items()}
    started, ended = result.get("started"), result.get("ended")
    took = (ended or 0.0) - (started or 0.0)
    return Trial(
        index,
        overrides,
        data.run.root,
        outcome,
        cause,
        str(result.get("fix") or ""),
        steps=values.get("steps"),
        loss=loss if loss is not None else values.get("final_loss"),
        eval_loss=values.get("final_eval_loss"),
        metrics={name: p[-1][1] if p else None for name, p in trained.items()},
        declared=data.declared,
        tokens_per_s=values.get("tokens_per_s"),
        memory_gib=memory,
        seconds=took if took > 0 else None,
        started=started,
        ended=ended,
        total_steps=values.get("total_steps"),
        config=data.config,
        curve=[(step_of(record), _loss(record)) for record in data.train],
    )


def _loss(record: Mapping[str, Any]) -> float:
    mean, loss = record.get("loss_mean"), record.get("loss")
    value = mean if mean is not None else loss
    return math.nan if value is None else float(value)


# --- The journal -----------------------------------------------------------------------------


def trials_of(journal: Mapping[str, Any], *, directory: Path) -> list[Trial]:
    """The trials that a journal lists, without their numbers: those are in the run directories.

    Pure. An entry that cannot be read is left out, and keys that are not known are passed over.
    """
    words = [str(word) for word in _list(journal.get("words"))]
    trials = []
    for entry in _list(journal.get("trials")):
        if not isinstance(entry, Mapping) or _whole(entry.get("index")) is None:
            continue
        own = [str(word) for word in _list(entry.get("overrides"))]
        swept = {_key(word) for word in own}
        fixed = [word for word in words if "=" in word and _key(word) not in swept]
        state = entry.get("state")
        started, ended = _time(entry.get("started")), _time(entry.get("ended"))
        trials.append(
            Trial(
                index=int(entry["index"]),
                overrides=(*fixed, *own),
                # Relative to the journal's own directory, or absolute.
                run_dir=directory / str(entry.get("run_dir") or f"{entry['index']}_not_run"),
                outcome=str(entry.get("outcome") or ""),
                cause=str(entry.get("cause") or ""),
                fix=str(entry.get("fix") or ""),
                state=str(state) if state in (WAITING, RUNNING, ENDED) else WAITING,
                same_as=_whole(entry.get("same_as")),
                started=started,
                ended=ended,
                seconds=ended - started if started and ended and ended > started else None,
            )
        )
    return sorted(trials, key=lambda trial: trial.index)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _time(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and value > 0 else None


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


class SweepReader:
    """Reads a sweep again and again; a trial that has ended is read once."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(os.path.abspath(directory.expanduser()))
        self._read: dict[int, tuple[Any, Trial]] = {}

    def read(self) -> Sweep:
        """The sweep as it is now; ConfigError where the directory is none."""
        if not is_sweep(self.directory):
            raise ConfigError(no_run(self.directory))
        warnings: list[str] = []
        journal = _journal(self.directory / JOURNAL, warnings)
        if journal is None:
            trials = _of_directories(self.directory)
        else:
            listed = trials_of(journal, directory=self.directory)
            trials = same_resolved([self._measured(trial) for trial in listed])
        facts = journal or {}
        objective = str(facts.get("objective") or _guessed(trials))
        mode = str(facts.get("mode") or "")
        return Sweep(
            self.directory,
            trials,
            objective,
            mode if mode in ("min", "max") else direction_of(objective, trials),
            complete=bool(facts.get("complete", journal is None)),
            words=tuple(str(word) for word in _list(facts.get("words"))),
            started=_time(facts.get("started")),
            process={key: facts[key] for key in ("pid", "host") if facts.get(key)},
            has_journal=journal is not None,
            warnings=tuple(warnings),
        )

    def _measured(self, trial: Trial) -> Trial:
        """With the numbers of its run directory, where it has been run."""
        run = RunDir(trial.run_dir)
        if trial.state == WAITING or trial.outcome in NOT_RUN or not run.config.is_file():
            return trial
        stamp = (trial, _mtime(run.result), _mtime(run.metrics))
        if trial.index in self._read and self._read[trial.index][0] == stamp:
            return self._read[trial.index][1]
        found = _with_journal(read_trial(trial.index, trial.overrides, trial.run_dir), trial)
        self._read[trial.index] = (stamp, found)
        return found


def load_sweep(directory: Path) -> Sweep:
    """Read a sweep's directory; ConfigError where it is none."""
    return SweepReader(directory).read()


def _journal(path: Path, warnings: list[str]) -> dict[str, Any] | None:
    from llmx.run.rundir import read_json

    try:
        journal = read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warnings.append(f"{JOURNAL} cannot be read, so only trials with a directory are shown: "
                        f"{error}")  # fmt: skip
        return None
    if not isinstance(journal, dict):
        warnings.append(
            f"{JOURNAL} is not a JSON object, so only trials with a directory are shown."
        )
        return None
    version = journal.get("version")
    if isinstance(version, int) and version > VERSION:
        warnings.append(f"{JOURNAL} is of version {version}, and this llmx knows {VERSION}: "
                        "some of it may be missing here.")  # fmt: skip
    return journal


def _with_journal(found: Trial, listed: Trial) -> Trial:
    """What the run directory measured, with what the journal says of the trial's end."""
    over = bool(found.ended) and _is_of(found, listed)
    state = ENDED if listed.state == ENDED or over else listed.state
    outcome = (listed.outcome or found.outcome) if state == ENDED else ""
    return replace(
        found,
        outcome=outcome,
        cause=(listed.cause or found.cause) if state == ENDED else "",
        fix=(listed.fix or found.fix) if state == ENDED else "",
        state=state,
        same_as=listed.same_as,
        started=listed.started or found.started,
        ended=listed.ended or (found.ended if over else None),
        seconds=(found.seconds or listed.seconds) if state == ENDED else None,
    )


def _is_of(found: Trial, listed: Trial) -> bool:
    """Whether the result is of this start of the trial, and not of one before it."""
    return listed.started is None or (found.ended or 0.0) >= listed.started


def _mtime(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def same_resolved(trials: Sequence[Trial]) -> list[Trial]:
    """Trials of the same config as another one with the numbers of that one."""
    by_index = {trial.index: trial for trial in trials}

    def resolved(trial: Trial) -> Trial:
        other = by_index.get(-1 if trial.same_as is None else trial.same_as)
        if trial.outcome != "same" or other is None or other is trial:
            return trial
        numbers = ("steps", "loss", "eval_loss", "metrics", "declared", "tokens_per_s",
                   "memory_gib", "run_dir", "total_steps", "config")  # fmt: skip
        return replace(trial, **{name: getattr(other, name) for name in numbers})

    return [resolved(trial) for trial in trials]


# --- Without a journal -----------------------------------------------------------------------


def _of_directories(directory: Path) -> list[Trial]:
    """The trials of a sweep of an earlier version."""
    from llmx.observe.status.observer import Observer
    from llmx.observe.status.view import LIVE, interpret

    found: dict[int, Trial] = {}
    for path in directory.glob("*/config.yaml"):
        match = _TRIAL_DIRECTORY.match(path.parent.name)
        if match is None:
            continue
        index, run = int(match[1]), RunDir(path.parent)
        trial = read_trial(index, read_overrides(run), run.root)
        if trial.ended is None and trial.outcome == "failed":
            if interpret(Observer(str(run.root), brief=True).facts()).state in LIVE:
                trial = replace(trial, outcome="", cause="", state=RUNNING)
            else:
                trial = replace(trial, cause=trial.cause or "it has no result: it was killed")
        found[index] = trial
    words = [trial.overrides for trial in found.values()]
    shared = [word for word in (words or [()])[0] if all(word in each for each in words)]
    for trial in _of_table(directory / CSV):
        # The table has the words that differ; the others are those of the trials that ran.
        found.setdefault(trial.index, replace(trial, overrides=(*shared, *trial.overrides)))
    return [found[index] for index in sorted(found)]


def _of_table(path: Path) -> list[Trial]:
    """The trials of ``sweep.csv``: of those that were refused there is nothing else."""
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
    except (OSError, ValueError, csv.Error):
        return []
    trials = []
    for row in rows:
        names = list(row)
        if not str(row.get("trial") or "").isdigit() or "outcome" not in names:
            continue
        keys = names[1 : names.index("outcome")]
        trials.append(
            Trial(
                int(row["trial"]),
                tuple(f"{key}={row[key]}" for key in keys if row[key]),
                path.parent / (row.get("run_dir") or f"{row['trial']}_refused"),
                row["outcome"] or "",
                row.get("cause") or "",
                row.get("fix") or "",
            )
        )
    return trials


_LEARNING = ("optim", "task", "data", "model", "adapter", "batch.global_batch", "seed")


def _guessed(trials: Sequence[Trial]) -> str:
    """The objective of a sweep that names none: a loss where what is learned differs."""
    learning = any(name.startswith(_LEARNING) for name in axes(trials))
    if learning and any(trial.eval_loss is not None for trial in trials):
        return "eval/loss"
    return "train/loss" if learning else "tokens_per_s"


# --- Axes ------------------------------------------------------------------------------------


def axes(trials: Sequence[Trial]) -> list[str]:
    """The keys that differ between trials, in the order of the command line."""
    values: dict[str, set[str]] = {}
    given: dict[str, int] = {}
    for trial in trials:
        for word in trial.overrides:
            key, _, value = word.partition("=")
            values.setdefault(key.lstrip("+"), set()).add(value)
        for key in {word.partition("=")[0].lstrip("+") for word in trial.overrides}:
            given[key] = given.get(key, 0) + 1
    found = [
        key
        for key, seen in values.items()
        # Typed in one sweep and not in another: the other has the default, or its own option.
        if len(seen) > 1 or (given[key] < len(trials) and key not in _OF_A_RUN)
    ]
    found = found or list(values)
    return [*found, SWEEP] if len({trial.sweep for trial in trials}) > 1 else found


def value_of(trial: Trial, axis: str) -> str | None:
    """What a trial has for an axis: as typed, else as in its config; None where neither tells."""
    if axis == SWEEP and trial.sweep:
        return trial.sweep
    for word in reversed(trial.overrides):
        key, equal, typed = word.partition("=")
        if equal and key.lstrip("+") == axis:
            return typed
    value: Any = trial.config
    for name in axis.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return None if value is None or isinstance(value, (Mapping, list)) else str(value)


# --- Several sweeps --------------------------------------------------------------------------


def union(sweeps: Sequence[Sweep]) -> Sweep:
    """Several sweeps as one: the name of the sweep is a further axis, and trials of the same config
    are one trial, that which ended well, else the newest."""
    if len(sweeps) == 1:
        return sweeps[0]
    names = _names([sweep.directory for sweep in sweeps])
    trials: list[Trial] = []
    by_config: dict[Any, int] = {}
    by_words: dict[Any, int] = {}
    left_out = 0
    for sweep, name in zip(sweeps, names, strict=True):
        for trial in sweep.trials:
            if trial.outcome == "same":
                left_out += 1
                continue
            named, config, words = replace(trial, sweep=name), _numbers(trial), _typed(trial)
            at = by_config.get(config) if config else None
            if at is None and words in by_words:
                # What was typed tells only where one of the two has no config to compare.
                near = by_words[words]
                at = near if not config or not trials[near].config else None
            if at is None:
                at = len(trials)
                trials.append(named)
            else:
                left_out += 1
                trials[at] = max(trials[at], named, key=_worth)
            by_words.setdefault(words, at)
            if config:
                by_config.setdefault(config, at)
    order = {name: at for at, name in enumerate(names)}
    trials.sort(key=lambda trial: (order[trial.sweep], trial.index))
    first = sweeps[0]
    warnings = [f"{s.name}: {text}" for s in sweeps for text in s.warnings]
    if any(sweep.objective != first.objective for sweep in sweeps):
        others = sorted({sweep.objective for sweep in sweeps} - {first.objective})
        warnings.append(
            f"The sweeps have other objectives ({', '.join(others)}); the best is that by "
            f"{first.objective}. --objective {others[0]} takes another."
        )
    if left_out:
        warnings.append(
            f"{left_out} of the trials have the same config as another one and are shown once."
        )
    return Sweep(
        first.directory,
        trials,
        first.objective,
        first.mode,
        complete=all(sweep.complete for sweep in sweeps),
        has_journal=all(sweep.has_journal for sweep in sweeps),
        of_one=False,
        warnings=tuple(warnings),
    )


def _names(directories: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    for count in range(1, max(len(path.parts) for path in directories) + 1):
        names = ["/".join(path.parts[-count:]) for path in directories]
        if len(set(names)) == len(names):
            return names
    return names


def _typed(trial: Trial) -> frozenset[str]:
    return frozenset(trial.overrides)


def _numbers(trial: Trial) -> tuple[tuple[str, str], ...]:
    """The config, but for what changes no number; empty where it is not known."""
    from llmx.run.provenance.differences import flattened

    return tuple(
        (key, repr(value))
        for key, value in sorted(flattened(trial.config).items())
        if key not in _OF_A_RUN and (key in _OF_NUMBERS or not key.startswith(_OF_NO_NUMBER))
    )


def _worth(trial: Trial) -> tuple[int, float]:
    if trial.outcome == "ok":
        rank = 3
    elif trial.failed or trial.state == RUNNING or trial.outcome == "planned":
        rank = 2
    else:
        rank = 1 if trial.outcome else 0
    return rank, trial.ended or trial.started or 0.0
