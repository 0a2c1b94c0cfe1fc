"""One sweep while it runs: what is done with each trial, written down as it happens.

The Hydra launcher plugin begins and ends trials; in between Hydra calls the job of ``python -m
llmx``, which asks ``skips`` once the trial's config is composed and planned. Hydra hands a job
nothing but its config, so the sweep that runs is found by ``current()``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

from llmx.compose.complete import Composed
from llmx.compose.short_trial import objective_of
from llmx.config import Experiment, SweepConfig
from llmx.config.schema import FAILURES
from llmx.errors import ConfigError, RunFailed
from llmx.run.metrics import Metric
from llmx.sweep import journal as journals
from llmx.sweep.journal import ENDED, RUNNING, WAITING, Entry, Journal
from llmx.sweep.prune import OutOfMemory, impossible, key_of, needs_more

FAILED = (*FAILURES, "refused", "failed")
MAX_TAG = 64
"""Characters of a tag of Weights & Biases."""
_CURRENT: ContextVar[Sweep | None] = ContextVar("llmx_sweep", default=None)


def current() -> Sweep | None:
    """The sweep whose trial runs; None of a single run."""
    return _CURRENT.get()


class Sweep:
    """The trials of a sweep, in turn."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.settings = SweepConfig()
        """``sweep.*`` of the trials, which all have the same."""
        self.skipped = False
        """Whether the trial that ended last was not run now."""
        self._entry = self._before = Entry(0, [])
        """The trial of now, and what was known of it before."""
        self._seen: dict[str, int] = {}
        """Key -> the first trial that has it."""
        self._out_of_memory: list[OutOfMemory] = []
        self._composed: Composed | None = None
        self._declared: dict[str, Metric] = {}
        """What the tasks of the trials measure."""
        self._told = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """While it is the current one."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    def expect(self, trials: Sequence[tuple[int, Sequence[str]]]) -> None:
        """Trials that are going to run, with their numbers."""
        for index, overrides in trials:
            self.journal.entry(index, overrides)
        self.journal.write()

    @property
    def common(self) -> set[str]:
        """The words that all trials share."""
        words = [set(entry.overrides) for entry in self.journal.trials]
        return set.intersection(*words) if words else set()

    def begin(self, index: int, overrides: Sequence[str]) -> None:
        """The next trial is composed now."""
        self._before = self.journal.entry(index, overrides)
        self._entry = Entry(index, list(overrides))
        self._composed, self.skipped = None, False

    def named(self, exp: Experiment) -> Experiment:
        """The experiment of the trial; trackers show its sweep as the group, unless there is one,
        and what is its own as tags."""
        own = [word for word in self._entry.overrides if word not in self.common]
        tags = exp.tracking.tags
        short = [word for word in own if len(word) <= MAX_TAG and word not in tags]
        group = exp.tracking.group or self.journal.directory.name
        tracking = replace(exp.tracking, group=group, tags=[*tags, *short])
        return replace(exp, tracking=tracking)

    def skips(self, composed: Composed) -> bool:
        """Whether the trial need not run: it did in an earlier attempt at this sweep, is the same
        as another one, or cannot fit. Else it counts as running from now on.

        Raises:
            RunFailed: it failed in an earlier attempt and is not to run again (``sweep.retry``).
            ConfigError: the trials differ in ``sweep.*``.
        """
        exp, entry, before = composed.experiment, self._entry, self._before
        self._settle(exp.sweep, exp.checkpoint.metric)
        self._composed = composed
        entry.key = key_of(exp)
        entry.run_dir = journals.relative(Path(exp.run_dir), self.journal.directory)
        first = self._seen.setdefault(entry.key, entry.index)
        if self.settings.prune and first != entry.index:
            self._leave_out("same", f"the same config as trial {first}", same_as=first)
        elif before.state == ENDED and before.key == entry.key and self._stands(before.outcome):
            self._entry, self.skipped = before, True
            if not before.good:
                retry = ",".join(self.settings.retry)
                raise RunFailed(f"{before.cause} (not run again: sweep.retry=[{retry}])")
        elif self.settings.prune and (why := self._too_much(composed)):
            self._leave_out("pruned", why, fix="sweep.prune=false runs it all the same")
        if self.skipped:
            return True
        if aside := journals.put_aside(Path(exp.run_dir)):
            print(f"[{entry.index}] the earlier attempt is now {aside.name}", flush=True)
            Path(exp.run_dir).mkdir(parents=True, exist_ok=True)
        entry.state, entry.started = RUNNING, time.time()
        self.journal.put(entry)
        return False

    def end(
        self,
        outcome: str,
        cause: str,
        fix: str,
        run_dir: Path,
        *,
        declared: Mapping[str, Metric],
    ) -> Entry:
        """The trial is over. What was not run keeps what is known of it.

        ``declared``: what its task measures.
        """
        entry, composed = self._entry, self._composed
        if not self.skipped:
            entry.state, entry.outcome, entry.cause, entry.fix = ENDED, outcome, cause, fix
            entry.run_dir = journals.relative(run_dir, self.journal.directory)
            entry.ended = time.time()
        # Each time: a first trial that was refused has told neither objective nor metrics.
        self._declared.update(declared)
        self.journal.mode = mode_of(self.journal.objective, self._declared)
        if entry.outcome == "oom" and composed is not None:
            self._out_of_memory.append(OutOfMemory(entry.index, composed.experiment, composed.plan))
        self.journal.put(entry)
        return entry

    def ends_now(self, outcome: str) -> bool:
        """Whether no further trial is to be started after one that ended so."""
        failed = outcome not in journals.GOOD
        return outcome == "interrupted" or (self.settings.fail_fast and failed)

    def finish(self) -> None:
        """Every trial was reached."""
        self.journal.complete = all(entry.state != WAITING for entry in self.journal.trials)
        self.journal.write()

    def _settle(self, settings: SweepConfig, metric: str) -> None:
        """Take over ``sweep.*`` of a trial, which all trials have in common."""
        if self._told and settings != self.settings:
            mine, theirs = vars(self.settings), vars(settings)
            keys = [f"sweep.{key}" for key in mine if mine[key] != theirs[key]]
            raise ConfigError(
                f"{', '.join(keys)}: differs between trials, but is the sweep's. Set it once."
            )
        self.settings, self._told = settings, True
        self.journal.objective = objective_of(settings, metric)

    def _stands(self, outcome: str) -> bool:
        """Whether a trial that ended so in an earlier attempt is not run again."""
        if outcome in ("pruned", "same", "interrupted"):
            return False  # found out anew, or not run to its end
        return outcome in journals.GOOD or outcome not in (self.settings.retry or FAILED)

    def _too_much(self, composed: Composed) -> str:
        exp, plan = composed.experiment, composed.plan
        return impossible(exp, plan) or needs_more(exp, plan, self._out_of_memory)

    def _leave_out(
        self, outcome: str, cause: str, *, fix: str = "", same_as: int | None = None
    ) -> None:
        entry = self._entry
        entry.state, entry.outcome, entry.cause, entry.fix = ENDED, outcome, cause, fix
        entry.same_as, entry.ended = same_as, time.time()
        self.skipped = True


def mode_of(objective: str, declared: Mapping[str, Metric]) -> str:
    """``max`` or ``min``: which way of the objective is better."""
    name = objective.partition("/")[2]
    better = declared[name].higher_is_better if name in declared else None
    return "max" if objective == "tokens_per_s" or better else "min"
