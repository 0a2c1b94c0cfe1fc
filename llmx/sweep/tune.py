"""What ``python -m llmx tune`` chooses from, and what it tries next. Nothing is started here.

The candidates are the combinations of ZeRO options, activation checkpointing and micro batches, as
``llmx.plan.choices`` has them, and of keys that were typed with several values. Each is planned.
Those that differ by their micro batch alone are a *line*. The search begins with the candidate that
is fastest by the plan, and changes its micro batch while that is faster. Then it tries the other
lines in the order of their plans: at the micro batch of the best one, and lines that only save
memory (recomputed activations, an offload) at a larger one, where memory is what keeps it from
growing. What it does next follows from what was measured alone, so a search that was killed goes on
where it was.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import yaml

from llmx import text as human
from llmx.compose.complete import Composed, plan_experiment
from llmx.config import Experiment, experiment_from_dict, to_dict
from llmx.errors import ConfigError, LlmxError
from llmx.lifecycle.knowledge import fingerprint, gather
from llmx.plan.by_device import CHECKPOINTING, checkpointing_by_device
from llmx.plan.choices import CHECKPOINTING_KEY, MICRO_BATCH, OPTIONS, ZERO, micro_batches
from llmx.plan.knowledge import Knowledge
from llmx.plan.step_time import tokens_per_s
from llmx.plan.types import MemoryPlan
from llmx.run.sweepdir import Trial
from llmx.sweep.prune import impossible

Axes = Mapping[str, Sequence[str]]
"""Key -> its values as words, micro batches in ascending order."""
Compose = Callable[[Sequence[str]], tuple[Experiment, list[str]]]
"""Overrides -> the completed experiment, and what is wrong with it."""

MAX_CANDIDATES = 2000
MAX_LINES = 8
"""Lines that are tried: the first by the plan."""
NO_MEMORY = ("oom", "pruned")
"""Outcomes of trials that tell how much fits."""
AT_MOST = {"none": 1.0, "selective": 0.97, "full": 0.85}
"""Highest speed that recomputing activations leaves: a fourth of the work is done again."""
OFFLOAD_AT_MOST = 0.9
"""Highest speed that an offload of the optimizer, or of the parameters, leaves."""
FITS = 0.95
"""Largest share of a device's memory that a plan may take, as in ``MemoryPlan.fits``."""
HOPELESS = 1.3
"""Predicted memory as a share of the device's from which on a candidate is not tried."""
SAFELY_MORE = 1.15
"""Ratio of two predicted memories from which on the larger one surely needs more."""
BACK_OFF = 0.8
"""Largest predicted memory of the next trial, as a fraction of the one that ran out."""
WORTH = 1.01
"""How much faster a candidate must be able to be."""
ASSUMED_GAIN = 1.25
"""What doubling the micro batch gains, where it was not measured."""
MANY_FAILURES = 3
"""Trials that fail for another reason than memory, before any ends well: the config is wrong."""


@dataclass(frozen=True)
class Candidate:
    """One combination of the axes' values, as its plan has it."""

    words: tuple[str, ...]
    """Its overrides, one for each axis."""
    line: tuple[str, ...] = ()
    """Its overrides beside the micro batch."""
    micro: int = 0
    """The number of its micro batch among those of the axis."""
    speed: float = 0.0
    """Tokens/s by the plan: good for an order, no more."""
    memory_gib: float = 0.0
    """Predicted memory of the fullest rank; 0 where it is not known."""
    capacity_gib: float = 0.0
    """Memory of that rank's device; 0 where it is not known."""
    at_most: float = 1.0
    """The speed that what saves memory leaves at best, compared with doing without."""
    ruled_out: str = ""
    """Why the plan rules it out with certainty, or why its config is refused."""

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def fits(self) -> bool:
        """Whether the plan, which is a prediction, fits into the device."""
        return self.capacity_gib == 0 or self.memory_gib <= FITS * self.capacity_gib


# --- The candidates --------------------------------------------------------------------------


def axes_of(base: Composed, typed: Axes, fixed: Sequence[str]) -> dict[str, list[str]]:
    """The keys that are varied: those that were typed with several values, and those that matter on
    this hardware and are not ``fixed``."""
    exp, plan = base.experiment, base.plan
    names = [
        name
        for name, values in OPTIONS.items()
        # Stage 0 sums 16 bit gradients in 16 bits: another training.
        if (values["stage"] != 0 or plan.precision == "fp32")
        and (plan.on_gpus or not name.endswith("_offload"))
        and (plan.world_size > 1 or name in ("stage1", "stage2_offload", "stage3_offload"))
    ]
    usual = {
        ZERO: names,
        MICRO_BATCH: [str(size) for size in micro_batches(exp, plan)],
        CHECKPOINTING_KEY: [*CHECKPOINTING],
    }
    if {"zero.stage", "zero.offload_optimizer"} & {*typed, *fixed}:
        del usual[ZERO]
    axes = {key: values for key, values in usual.items() if key in typed or key not in fixed}
    axes |= {key: list(dict.fromkeys(values)) for key, values in typed.items()}
    sizes = axes.get(MICRO_BATCH, [])
    if all(size.isdecimal() for size in sizes):
        sizes.sort(key=int)
    return axes


def plan_candidates(axes: Axes, compose: Compose, *, ram_gib: float) -> list[Candidate]:
    """Plan every combination of the axes' values, without micro batches that no rank can fill.

    ``ram_gib``: RAM of this machine; what CPU ranks have, where the hardware does not say.

    Raises:
        ConfigError: there are too many, or none has a config that is allowed.
    """
    count = 1
    for values in axes.values():
        count *= len(values)
    if count > MAX_CANDIDATES:
        sizes = ", ".join(f"{key}: {len(values)}" for key, values in axes.items())
        raise ConfigError(
            f"tune: {count} candidates ({sizes}); at most {MAX_CANDIDATES} are planned. Give fewer "
            "values, or fix a key: batch.micro_batch=8."
        )
    candidates: list[Candidate] = []
    bases: dict[tuple[str, ...], tuple[Experiment, list[str]] | LlmxError] = {}
    knowledge: dict[str, Knowledge] = {}
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        words = {key: f"{key}={value}" for key, value in chosen.items()}
        candidate = Candidate(
            tuple(words.values()),
            tuple(word for key, word in words.items() if key != MICRO_BATCH),
            axes[MICRO_BATCH].index(chosen[MICRO_BATCH]) if MICRO_BATCH in axes else 0,
        )
        composed = tuple(word for key, word in words.items() if key not in DIRECT)
        if composed not in bases:
            try:
                bases[composed] = compose(composed)
            except LlmxError as error:
                bases[composed] = error
        base = bases[composed]
        try:
            if isinstance(base, LlmxError):
                raise base
            exp = with_values(base[0], {key: chosen[key] for key in DIRECT if key in chosen})
            planned = plan_experiment(exp, base[1])
            network = fingerprint(planned.experiment, planned.plan)
            if network not in knowledge:
                knowledge[network] = replace(gather(planned, variants=True), runs=())
            planned = plan_experiment(exp, is_checked=True, knowledge=knowledge[network])
        except LlmxError as error:
            cause = f"refused: {str(error).splitlines()[0]}"
            candidates.append(replace(candidate, ruled_out=cause))
            continue
        if candidate.micro and max(planned.plan.batch.micro_batches) < exp.batch.micro_batch:
            continue
        candidates.append(_planned(candidate, planned, ram_gib))
    if all(candidate.ruled_out for candidate in candidates):
        first = candidates[0]
        raise ConfigError(f"tune: no candidate can run. The first: {first.text}: {first.ruled_out}")
    return candidates


DIRECT = (MICRO_BATCH, CHECKPOINTING_KEY)
"""Keys that nothing else of a config follows from: set without composing it anew."""


def with_values(exp: Experiment, values: Mapping[str, str]) -> Experiment:
    """Set keys as the schema reads their words."""
    changed = to_dict(exp)
    for key, word in values.items():
        section, name = key.split(".")
        changed[section][name] = yaml.safe_load(word)
    return experiment_from_dict(changed) if values else exp


def _planned(candidate: Candidate, planned: Composed, ram_gib: float) -> Candidate:
    exp, plan = planned.experiment, planned.plan
    bound = max(AT_MOST[way] for way in checkpointing_by_device(exp).values())
    bound *= OFFLOAD_AT_MOST if exp.zero.offload_optimizer != "none" else 1.0
    bound *= OFFLOAD_AT_MOST if exp.zero.offload_param != "none" else 1.0
    ranks = []
    for part in plan.memory:
        capacity = part.capacity_gib or _ram_of_a_rank(planned, part, ram_gib)
        share = part.total_gib / capacity if capacity else 0.0
        ranks.append((share, part.total_gib, capacity))
    _, memory, capacity = max(ranks, default=(0.0, 0.0, 0.0))
    return replace(
        candidate,
        speed=tokens_per_s(exp, plan),
        memory_gib=memory,
        capacity_gib=capacity,
        at_most=bound,
        ruled_out=impossible(exp, plan),
    )


def _ram_of_a_rank(planned: Composed, part: MemoryPlan, ram_gib: float) -> float:
    exp, plan = planned.experiment, planned.plan
    if plan.on_gpus:
        return 0.0
    rams = []
    for config, host in zip(exp.hardware.hosts, plan.hosts, strict=True):
        if host.device == part.device:
            rams.append((config.memory_gib or (ram_gib if host.is_local else 0.0)) / host.slots)
    return min(rams, default=0.0)


# --- The search ------------------------------------------------------------------------------


class Search:
    """Decides which candidate is tried next, and why."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = list(candidates)
        self.trials: dict[Candidate, Trial] = {}
        """The trials that have ended."""
        self.ended = ""
        """Why the search is over."""
        self.limit = ""
        """The key that ended it before all was tried: ``sweep.max_trials``."""
        self._at = {(candidate.line, candidate.micro): candidate for candidate in candidates}

    @property
    def best(self) -> Candidate | None:
        """The fastest that was measured."""
        measured = [candidate for candidate in self.trials if self._speed(candidate)]
        return max(measured, key=self._speed, default=None)

    def next(self) -> tuple[Candidate, str] | None:
        """The next candidate and the reason; None where the search is over (``ended`` says why)."""
        best = self.best
        step = self._first() if best is None else next(self._beside(best), None)
        if step is None and best is not None:
            self.ended = "no other candidate could be faster than the best"
        return step

    def why_not(self, candidate: Candidate) -> tuple[str, bool]:
        """Why a candidate that was not tried cannot run, and whether a trial has shown it; empty
        where it may."""
        if candidate.ruled_out:
            return candidate.ruled_out, False
        for smaller, trial in self.trials.items():
            if trial.outcome not in NO_MEMORY:
                continue
            needs_as_much = candidate.memory_gib >= smaller.memory_gib > 0
            is_as_plain = candidate.at_most >= smaller.at_most
            is_alike = candidate.line == smaller.line or (needs_as_much and is_as_plain)
            if is_alike and candidate.micro >= smaller.micro:
                return f"trial {trial.index} ran out of memory and needs no more", True
            if candidate.memory_gib > SAFELY_MORE * smaller.memory_gib > 0:
                return (
                    f"trial {trial.index} ran out of memory and needs less by the plan "
                    f"({human.gib(smaller.memory_gib)} GiB, here {human.gib(candidate.memory_gib)})"
                ), True
        # What the largest trial took, by its plan, corrects the other plans.
        memory_pairs = [
            (trial.memory_gib, tried.memory_gib)
            for tried, trial in self.trials.items()
            if self._speed(tried) and trial.memory_gib and tried.memory_gib
        ]
        took, predicted = max(memory_pairs, default=(1.0, 1.0))
        needed, capacity = candidate.memory_gib * took / predicted, candidate.capacity_gib
        if capacity and needed > HOPELESS * capacity:
            by = "by the plan and what the trials took" if memory_pairs else "by the plan"
            return (
                f"would take about {human.gib(needed)} GiB {by}, the device has "
                f"{human.gib(capacity)}"
            ), bool(memory_pairs)
        return "", False

    def _speed(self, candidate: Candidate | None) -> float:
        """Tokens/s that were measured; 0 where none were."""
        trial = self.trials.get(candidate) if candidate else None
        return (trial.tokens_per_s or 0.0) if trial and trial.outcome == "ok" else 0.0

    def _is_open(self, candidate: Candidate | None) -> bool:
        """Whether a candidate may be tried."""
        return (
            candidate is not None
            and candidate not in self.trials
            and not self.why_not(candidate)[0]
        )

    def _first(self) -> tuple[Candidate, str] | None:
        """The next one while no trial has ended well."""
        failures = [trial for trial in self.trials.values() if trial.outcome not in NO_MEMORY]
        if len(failures) >= MANY_FAILURES:
            self.ended = (
                f"the first {len(failures)} trials failed, and not for memory: it is not the "
                "configuration that is varied here"
            )
            return None
        left = [candidate for candidate in self.candidates if self._is_open(candidate)]
        if not left:
            self.ended = "no remaining candidate could fit"
            return None
        if not all(candidate.memory_gib and candidate.capacity_gib for candidate in left):
            first = min(left, key=lambda c: (c.micro, -c.speed))
            return first, "the smallest micro batch: the plan does not know what fits"
        fitting = [candidate for candidate in left if candidate.fits]
        if not fitting:
            least = min(left, key=lambda c: c.memory_gib)
            return least, "needs the least memory; by the plan nothing fits"
        over = [c.memory_gib for c, trial in self.trials.items() if trial.outcome in NO_MEMORY]
        # The plan has promised too much: well below it, so that the next one runs.
        below = [c for c in fitting if not over or c.memory_gib <= BACK_OFF * min(over)]
        fastest = max(below or fitting, key=lambda c: (c.speed, -c.memory_gib))
        if over:
            return fastest, "by the plan the fastest of those that need clearly less"
        return fastest, "by the plan the fastest that fits"

    def _beside(self, best: Candidate) -> Iterator[tuple[Candidate, str]]:
        """Candidates that could be faster than the best, the most promising first."""
        for direction, word in ((1, "larger"), (-1, "smaller")):
            other = self._moved(best, direction)
            if other and self._is_open(other) and not self._was_slower(best, direction):
                yield other, f"a {word} micro batch may be faster"
        up = self._moved(best, 1)
        is_full = up is not None and bool(self.why_not(up)[0])
        down = self._speed(self._moved(best, -1))
        gain = self._speed(best) / down if down else ASSUMED_GAIN
        steps: list[tuple[Candidate, str]] = []
        tried_lines = {candidate.line for candidate in self.trials}
        for line in dict.fromkeys(candidate.line for candidate in self.candidates):
            alike, larger = self._at.get((line, best.micro)), self._at.get((line, best.micro + 1))
            smaller = self._at.get((line, best.micro - 1))
            if line == best.line or (line not in tried_lines and len(tried_lines) >= MAX_LINES):
                continue
            text = " ".join(word for word in line if word not in best.line)
            if alike and alike.at_most >= best.at_most:
                if self._is_open(alike):
                    steps.append((alike, f"{text} may be faster"))
                elif gain < ASSUMED_GAIN and not self._speed(alike) and self._is_open(smaller):
                    assert smaller is not None
                    steps.append((smaller, f"{text} may be faster, with a smaller micro batch"))
            if is_full and larger and self._is_open(larger):
                bound = gain * larger.at_most / best.at_most
                less = larger.memory_gib < (up.memory_gib if up else 0.0)
                if bound >= WORTH and (less or larger.at_most < best.at_most):
                    steps.append((larger, f"{text} leaves memory for that"))
        yield from sorted(steps, key=lambda step: (step[0].at_most < best.at_most, -step[0].speed))

    def _moved(self, candidate: Candidate, direction: int) -> Candidate | None:
        """The same with the next micro batch, a larger or a smaller one."""
        return self._at.get((candidate.line, candidate.micro + direction))

    def _was_slower(self, best: Candidate, direction: int) -> bool:
        """Whether the same change of the micro batch was slower on another line."""
        return any(
            0 < self._speed(self._moved(trial, direction)) < 0.97 * self._speed(trial)
            for trial in self.trials
            if trial.micro == best.micro
        )

    def word_of(self, candidate: Candidate) -> str:
        """The outcome of a candidate, in a word or two."""
        if candidate in self.trials:
            return self.trials[candidate].outcome
        reason, by_trial = self.why_not(candidate)
        if reason:
            return f"ruled out by {'a trial' if by_trial else 'the plan'}"
        if self.limit:
            return f"not tried ({self.limit})"
        return "not worth trying" if self.ended else "not tried"

    def counts(self) -> dict[str, int]:
        """The number of candidates of each outcome, those that were tried counted together."""
        return dict(
            Counter("tried" if c in self.trials else self.word_of(c) for c in self.candidates)
        )
