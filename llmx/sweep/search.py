"""The search of ``python -m llmx tune``: which candidate is tried next, and why. Pure.

The candidates are the combinations of a few axes, each planned before anything is started. The
search begins with the one that is fastest by the plan and goes on from the best measured one, one
axis at a time: a larger micro batch while that is faster, then the other values of each axis. What
only saves memory (recomputed activations, an offload) is tried where memory is what keeps the
micro batch from growing, and at the larger micro batch. It ends where no neighbour of the best is
left that could be faster. What it does next follows from what was measured alone, so a search that
was killed goes on where it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmx import text as human
from llmx.run.sweepdir import Trial

MICRO_BATCH = "batch.micro_batch"
NO_MEMORY = ("oom", "pruned")
"""Outcomes of trials that tell how much fits."""
FITS = 0.95
"""Of a device's memory: what a plan may take of it, as in ``MemoryPlan.fits``."""
HOPELESS = 1.3
"""Of a device's memory: a plan that takes more than this is not tried."""
SAFELY_MORE = 1.15
"""Plans of two different configs are that exact, at least, when they are compared."""
MEASURED_MORE = 1.05
"""As much again for a plan that is corrected by what another micro batch took."""
BACK_OFF = 0.8
"""Of what a trial needed by the plan that ran out of memory: what the next one may need."""
WORTH = 1.01
"""How much faster a candidate must be able to be."""
CLEARLY_SLOWER = 0.97
ASSUMED_GAIN = 1.25
"""What doubling the micro batch gains, where it was not measured."""
MANY_FAILURES = 3
"""Trials that fail for another reason than memory, before any ends well: the config is wrong."""


@dataclass(frozen=True)
class Axis:
    """One thing that is varied."""

    key: str
    values: tuple[str, ...]
    """As words: ``stage1``; in ascending order where there is one."""
    ordered: bool = True
    """Whether speed rises and falls along it at most once; else every value is tried."""


@dataclass(frozen=True)
class Candidate:
    """One combination of the axes' values, as its plan has it."""

    place: tuple[int, ...]
    """The number of its value on each axis."""
    words: tuple[str, ...]
    """Its overrides, one for each axis."""
    speed: float = 0.0
    """Tokens/s by the plan: good for an order, no more."""
    memory_gib: float = 0.0
    """Of the fullest rank by the plan; 0 where it is not known."""
    capacity_gib: float = 0.0
    """Of that rank's device; 0 where it is not known."""
    at_most: float = 1.0
    """The speed that what saves memory leaves at best, compared with doing without."""
    ruled_out: str = ""
    """Why the plan rules it out with certainty, or why its config is refused."""
    same_as: tuple[int, ...] | None = None
    """The candidate that trains the same."""

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def fits(self) -> bool:
        """By the plan, which is a prediction."""
        return self.capacity_gib == 0 or self.memory_gib <= FITS * self.capacity_gib


@dataclass(frozen=True)
class RuledOut:
    """The reason for which a candidate cannot run that was not tried."""

    cause: str
    by_trial: bool = False
    """Whether a trial has shown it; else the plan says so."""


@dataclass(frozen=True)
class Step:
    """The candidate to try next, and the reason."""

    candidate: Candidate
    why: str


class Search:
    """Over candidates, which are all combinations of the axes' values."""

    def __init__(
        self,
        axes: Sequence[Axis],
        candidates: Sequence[Candidate],
        *,
        config_place: tuple[int, ...] | None = None,
    ) -> None:
        """``config_place``: the place of the config as it was given, where that is a candidate."""
        self.axes = tuple(axes)
        self.at = {candidate.place: candidate for candidate in candidates}
        self.trials: dict[tuple[int, ...], Trial] = {}
        self.ended = ""
        """Why the search is over."""
        self.limit = ""
        """The key that ended it before all was tried: ``sweep.max_trials``."""
        keys = [axis.key for axis in self.axes]
        self._micro = keys.index(MICRO_BATCH) if MICRO_BATCH in keys else None
        self._config_place = config_place

    # --- What is known -----------------------------------------------------------------------

    def tell(self, candidate: Candidate, trial: Trial) -> None:
        """Record the trial of a candidate."""
        self.trials[candidate.place] = trial

    @property
    def best(self) -> Candidate | None:
        """The fastest that was measured."""
        speeds = [(speed, place) for place in self.trials if (speed := self._speed(place))]
        return self.at[max(speeds)[1]] if speeds else None

    def why_not(self, candidate: Candidate) -> RuledOut | None:
        """Why a candidate that was not tried cannot run; None where it may."""
        if candidate.ruled_out:
            return RuledOut(candidate.ruled_out)
        for place, trial in self.trials.items():
            if trial.outcome in NO_MEMORY:
                smaller = self.at[place]
                if self._needs_no_less(candidate, smaller):
                    cause = f"trial {trial.index} ran out of memory and needs no more"
                    return RuledOut(cause, by_trial=True)
                if candidate.memory_gib and candidate.memory_gib > SAFELY_MORE * smaller.memory_gib:
                    return RuledOut(
                        f"trial {trial.index} ran out of memory and needs less by the plan "
                        f"({human.gib(smaller.memory_gib)} GiB, here "
                        f"{human.gib(candidate.memory_gib)})",
                        by_trial=True,
                    )
        return self._too_large(candidate)

    def _too_large(self, candidate: Candidate) -> RuledOut | None:
        capacity = candidate.capacity_gib
        if not capacity or not candidate.memory_gib:
            return None
        similar = [
            (self.at[place], trial, trial.memory_gib)
            for place, trial in self.trials.items()
            if self._speed(place)
            and trial.memory_gib
            and self._same_but_micro(candidate, self.at[place])
        ]
        scale = self._scale()
        if similar:
            nearest, trial, memory_gib = max(similar, key=lambda row: self._micro_of(row[0]))
            needed = memory_gib + scale * (candidate.memory_gib - nearest.memory_gib)
            limit, by = MEASURED_MORE * capacity, f"by what trial {trial.index} took"
        else:
            needed, limit = scale * candidate.memory_gib, HOPELESS * capacity
            by = "by the plan" if scale == 1.0 else "by the plan and what the trials took"
        if needed <= limit:
            return None
        return RuledOut(
            f"would take about {human.gib(needed)} GiB {by}, the device has {human.gib(capacity)}",
            by_trial=bool(similar) or scale != 1.0,
        )

    def _scale(self) -> float:
        """Measured by planned memory, of the trial that took the most."""
        memory = [
            (trial.memory_gib, self.at[place].memory_gib)
            for place, trial in self.trials.items()
            if self._speed(place) and trial.memory_gib and self.at[place].memory_gib
        ]
        if not memory:
            return 1.0
        took, planned = max(memory)
        return took / planned

    def _speed(self, place: tuple[int, ...]) -> float:
        """Tokens/s that were measured; 0 where none were."""
        trial = self.trials.get(place)
        return (trial.tokens_per_s or 0.0) if trial and trial.outcome == "ok" else 0.0

    def _needs_no_less(self, candidate: Candidate, smaller: Candidate) -> bool:
        if self._micro_of(candidate) < self._micro_of(smaller):
            return False
        if self._same_but_micro(candidate, smaller):
            return True
        return (
            bool(candidate.memory_gib and smaller.memory_gib)
            and candidate.memory_gib >= smaller.memory_gib
            and candidate.at_most >= smaller.at_most
        )

    def _micro_of(self, candidate: Candidate) -> int:
        return 0 if self._micro is None else candidate.place[self._micro]

    def _same_but_micro(self, first: Candidate, second: Candidate) -> bool:
        return all(
            a == b
            for axis, (a, b) in enumerate(zip(first.place, second.place, strict=True))
            if axis != self._micro
        )

    def _open(self, candidate: Candidate | None) -> bool:
        """Whether it may be tried."""
        return (
            candidate is not None
            and candidate.place not in self.trials
            and candidate.same_as is None
            and self.why_not(candidate) is None
        )

    # --- What is next ------------------------------------------------------------------------

    def next(self) -> Step | None:
        """The next trial; None where the search is over (``ended`` says why)."""
        if self.best is None:
            return self._first()
        steps = list(self._steps(self.best))
        if steps:
            return steps[0]
        self.ended = "no neighbour of the best is left that could be faster"
        return None

    def _first(self) -> Step | None:
        failures = [t for t in self.trials.values() if t.outcome not in NO_MEMORY]
        if len(failures) >= MANY_FAILURES:
            self.ended = (
                f"the first {len(failures)} trials failed, and not for memory: it is not the "
                "configuration that is varied here"
            )
            return None
        left = [candidate for candidate in self.at.values() if self._open(candidate)]
        if not left:
            self.ended = "no remaining candidate could fit"
            return None
        if not all(candidate.memory_gib and candidate.capacity_gib for candidate in left):
            base = self.at.get(self._config_place) if self._config_place else None
            like = [c for c in left if base and self._micro_of(c) == self._micro_of(base)]
            if like:
                first = max(like, key=lambda c: c.speed)
                return Step(
                    first, "the micro batch of the config: the plan does not know what fits"
                )
            first = min(left, key=lambda c: (self._micro_of(c), -c.speed))
            return Step(first, "the smallest micro batch: the plan does not know what fits")
        fitting = [candidate for candidate in left if candidate.fits]
        if not fitting:
            least = min(left, key=lambda c: c.memory_gib)
            return Step(least, "needs the least memory; by the plan nothing fits")
        over = [self.at[p].memory_gib for p, t in self.trials.items() if t.outcome in NO_MEMORY]
        # The plan has promised too much: well below it, so that the next one runs.
        below = [c for c in fitting if not over or c.memory_gib <= BACK_OFF * min(over)]
        fastest = max(below or fitting, key=lambda c: (c.speed, -c.memory_gib))
        if over:
            return Step(fastest, "by the plan the fastest of those that need clearly less")
        return Step(fastest, "by the plan the fastest that fits")

    def _steps(self, best: Candidate) -> Iterator[Step]:
        """Neighbours of the best that could be faster, the most promising first."""
        up, down = self._beside(best, 1), self._beside(best, -1)
        if up and self._open(up) and not self._saturated(best, 1):
            yield Step(up, "a larger micro batch may be faster")
        if down and self._open(down) and not self._saturated(best, -1):
            yield Step(down, "a smaller micro batch may be faster")
        limited = self._limited(best)
        steps: list[tuple[bool, float, Step]] = []
        for number, axis in enumerate(self.axes):
            if number != self._micro:
                for step, saves in self._along(best, number, axis, limited):
                    steps.append((saves, -step.candidate.speed, step))
        yield from (step for *_, step in sorted(steps, key=lambda row: row[:2]))

    def _beside(self, candidate: Candidate, direction: int) -> Candidate | None:
        """The next micro batch that is another training than this one's."""
        if self._micro is None:
            return None
        place = list(candidate.place)
        while True:
            place[self._micro] += direction
            other = self.at.get(tuple(place))
            if other is None or other.same_as is None:
                return other

    def _saturated(self, best: Candidate, direction: int) -> bool:
        """Whether the same change of the micro batch was clearly slower elsewhere."""
        neighbour = self._beside(best, direction)
        assert neighbour is not None
        for place in self.trials:
            before, changed = self.at[place], self._beside(self.at[place], direction)
            if changed is None or self._micro_of(before) != self._micro_of(best):
                continue
            is_same_change = self._micro_of(changed) == self._micro_of(neighbour)
            if is_same_change and 0 < self._speed(changed.place) < CLEARLY_SLOWER * self._speed(
                place
            ):
                return True
        return False

    def _limited(self, best: Candidate) -> bool:
        """Whether memory is what keeps the micro batch from growing."""
        up = self._beside(best, 1)
        if up is None:
            return False
        trial = self.trials.get(up.place)
        return trial.outcome in NO_MEMORY if trial else self.why_not(up) is not None

    def _gain(self, best: Candidate) -> float:
        """The gain in speed by the last growth of the micro batch."""
        down = self._beside(best, -1)
        speed = self._speed(down.place) if down else 0.0
        return self._speed(best.place) / speed if speed else ASSUMED_GAIN

    def _along(
        self, best: Candidate, number: int, axis: Axis, limited: bool
    ) -> Iterator[tuple[Step, bool]]:
        """Other values of one axis, each with whether it costs speed to save memory."""
        place = best.place
        line = [
            self.at[tuple(value if at == number else other for at, other in enumerate(place))]
            for value in range(len(axis.values))
        ]
        for other in self._near(best, line, number, ordered=axis.ordered):
            word = other.words[number]
            if self._open(other):
                yield Step(other, f"{word} instead of {best.words[number]} may be faster"), False
            elif self._has_no_room(other) and self._gain(best) < ASSUMED_GAIN:
                smaller = self._beside(other, -1)
                if smaller and self._open(smaller):
                    yield (
                        Step(smaller, f"{word} may be faster, and fits a smaller micro batch only"),
                        False,
                    )
        if not limited:
            return
        for other in line:
            larger = self._beside(other, 1)
            less = other.memory_gib < best.memory_gib or other.at_most < best.at_most
            bound = self._gain(best) * other.at_most / best.at_most
            if other is not best and less and larger and self._open(larger) and bound >= WORTH:
                saves = other.at_most < best.at_most
                yield Step(larger, f"{other.words[number]} leaves memory for that"), saves

    def _has_no_room(self, candidate: Candidate) -> bool:
        """Whether it was not tried, or ran out of memory."""
        trial = self.trials.get(candidate.place)
        return trial is None or trial.outcome in NO_MEMORY

    def _near(
        self, best: Candidate, line: Sequence[Candidate], number: int, *, ordered: bool
    ) -> Iterator[Candidate]:
        """Values that may be faster at the same micro batch: those beside it, and all that save
        less memory at the price of speed."""
        here = best.place[number]
        alike = [
            other
            for other in line
            if other.at_most == best.at_most and other.same_as is None and not other.ruled_out
        ]
        yield from (other for other in line if other.at_most > best.at_most)
        if not ordered:
            yield from (other for other in alike if other is not best)
            return
        yield from [other for other in alike if other.place[number] < here][-1:]
        yield from [other for other in alike if other.place[number] > here][:1]

    # --- What became of all ------------------------------------------------------------------

    def word_of(self, candidate: Candidate) -> str:
        """The outcome of a candidate, in a word or two."""
        if candidate.place in self.trials:
            return self.trials[candidate.place].outcome
        if candidate.same_as is not None:
            return "the same as another"
        if reason := self.why_not(candidate):
            return f"ruled out by {'a trial' if reason.by_trial else 'the plan'}"
        if self.limit:
            return f"not tried ({self.limit})"
        return "not worth trying" if self.ended else "not tried"

    def counts(self) -> dict[str, int]:
        """The number of candidates of each outcome, those that were tried counted together."""
        words = [
            "tried" if candidate.place in self.trials else self.word_of(candidate)
            for candidate in self.at.values()
        ]
        return dict(Counter(words))
