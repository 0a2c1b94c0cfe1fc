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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmx import text as human

MICRO_BATCH = "batch.micro_batch"
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
class Measured:
    """What became of a trial."""

    trial: int
    outcome: str
    speed: float | None = None
    memory_gib: float | None = None

    @property
    def ok(self) -> bool:
        return self.outcome == "ok" and self.speed is not None and self.speed > 0


@dataclass(frozen=True)
class Step:
    """The next trial."""

    candidate: Candidate
    why: str


class Search:
    """Over candidates, which are all combinations of the axes' values."""

    def __init__(
        self,
        axes: Sequence[Axis],
        candidates: Sequence[Candidate],
        *,
        own: tuple[int, ...] | None = None,
    ) -> None:
        """``own``: the place of the config as it was given, where that is a candidate."""
        self.axes = tuple(axes)
        self.at = {candidate.place: candidate for candidate in candidates}
        self.measured: dict[tuple[int, ...], Measured] = {}
        self.ended = ""
        """Why the search is over."""
        self.limit = ""
        """The key that ended it before all was tried: ``sweep.max_trials``."""
        keys = [axis.key for axis in self.axes]
        self._micro = keys.index(MICRO_BATCH) if MICRO_BATCH in keys else None
        self._own = own

    # --- What is known -----------------------------------------------------------------------

    def tell(self, candidate: Candidate, measured: Measured) -> None:
        """What became of the trial of a candidate."""
        self.measured[candidate.place] = measured

    @property
    def best(self) -> Candidate | None:
        """The fastest that was measured."""
        found = [(m.speed or 0.0, place) for place, m in self.measured.items() if m.ok]
        return self.at[max(found)[1]] if found else None

    def why_not(self, candidate: Candidate) -> str:
        """Why a candidate that was not measured cannot run; empty where it may."""
        if candidate.ruled_out:
            return candidate.ruled_out
        for place, measured in self.measured.items():
            if measured.outcome == "oom":
                less = self.at[place]
                if self._needs_no_less(candidate, less):
                    return f"trial {measured.trial} ran out of memory and needs no more"
                if candidate.memory_gib and candidate.memory_gib > SAFELY_MORE * less.memory_gib:
                    return (
                        f"trial {measured.trial} ran out of memory and needs less by the plan "
                        f"({human.gib(less.memory_gib)} GiB, here "
                        f"{human.gib(candidate.memory_gib)})"
                    )
        return self._too_large(candidate)

    def _too_large(self, candidate: Candidate) -> str:
        capacity = candidate.capacity_gib
        if not capacity or not candidate.memory_gib:
            return ""
        taken = [
            (self._micro_of(self.at[place]), measured, self.at[place])
            for place, measured in self.measured.items()
            if measured.ok
            and measured.memory_gib
            and self._same_but_micro(candidate, self.at[place])
        ]
        scale = self._scale()
        if taken:
            _, measured, near = max(taken, key=lambda found: found[0])
            more = scale * (candidate.memory_gib - near.memory_gib)
            needed, limit = (measured.memory_gib or 0.0) + more, MEASURED_MORE * capacity
            by = f"by what trial {measured.trial} took"
        else:
            needed, limit = scale * candidate.memory_gib, HOPELESS * capacity
            by = "by the plan" if scale == 1.0 else "by the plan and what the trials took"
        if needed > limit:
            return (
                f"would take about {human.gib(needed)} GiB {by}, the device has "
                f"{human.gib(capacity)}"
            )
        return ""

    def _scale(self) -> float:
        """What trials took, as a part of what their plans say: of the one that took most."""
        found = [
            (measured.memory_gib, self.at[place].memory_gib)
            for place, measured in self.measured.items()
            if measured.ok and measured.memory_gib and self.at[place].memory_gib
        ]
        if not found:
            return 1.0
        took, planned = max(found)
        return took / planned

    def _needs_no_less(self, candidate: Candidate, less: Candidate) -> bool:
        if self._micro_of(candidate) < self._micro_of(less):
            return False
        if self._same_but_micro(candidate, less):
            return True
        known = candidate.memory_gib and less.memory_gib
        return (
            bool(known)
            and candidate.memory_gib >= less.memory_gib
            and candidate.at_most >= less.at_most
        )

    def _micro_of(self, candidate: Candidate) -> int:
        return 0 if self._micro is None else candidate.place[self._micro]

    def _same_but_micro(self, one: Candidate, other: Candidate) -> bool:
        return all(
            a == b
            for at, (a, b) in enumerate(zip(one.place, other.place, strict=True))
            if at != self._micro
        )

    def _open(self, candidate: Candidate | None) -> bool:
        """Whether it may be tried."""
        return (
            candidate is not None
            and candidate.place not in self.measured
            and candidate.same_as is None
            and not self.why_not(candidate)
        )

    def _ran(self, candidate: Candidate) -> bool:
        """Whether it was measured, and did not run out of memory."""
        measured = self.measured.get(candidate.place)
        return measured is not None and measured.outcome != "oom"

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
        failures = [m for m in self.measured.values() if m.outcome != "oom"]
        if len(failures) >= MANY_FAILURES:
            self.ended = (
                f"the first {len(failures)} trials failed, and not for memory: it is not the "
                "configuration that is varied here"
            )
            return None
        found = [candidate for candidate in self.at.values() if self._open(candidate)]
        if not found:
            self.ended = "no remaining candidate could fit"
            return None
        fitting = [candidate for candidate in found if candidate.fits]
        if not all(candidate.memory_gib and candidate.capacity_gib for candidate in found):
            own = self.at.get(self._own) if self._own else None
            like = [c for c in found if own and self._micro_of(c) == self._micro_of(own)]
            if like:
                first = max(like, key=lambda c: c.speed)
                return Step(
                    first, "the micro batch of the config: the plan does not know what fits"
                )
            first = min(found, key=lambda c: (self._micro_of(c), -c.speed))
            return Step(first, "the smallest micro batch: the plan does not know what fits")
        if not fitting:
            least = min(found, key=lambda c: c.memory_gib)
            return Step(least, "needs the least memory; by the plan nothing fits")
        over = [self.at[p].memory_gib for p, m in self.measured.items() if m.outcome == "oom"]
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
        found: list[tuple[bool, float, Step]] = []
        for number, axis in enumerate(self.axes):
            if number != self._micro:
                for step, saves in self._along(best, number, axis, limited):
                    found.append((saves, -step.candidate.speed, step))
        yield from (step for *_, step in sorted(found, key=lambda each: each[:2]))

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
        other = self._beside(best, direction)
        assert other is not None
        for place, measured in self.measured.items():
            there = self.at[place]
            if self._micro_of(there) != self._micro_of(best) or not measured.ok:
                continue
            changed = self._beside(there, direction)
            if changed is None or self._micro_of(changed) != self._micro_of(other):
                continue
            then = self.measured.get(changed.place)
            if then and then.ok and (then.speed or 0) < CLEARLY_SLOWER * (measured.speed or 0):
                return True
        return False

    def _limited(self, best: Candidate) -> bool:
        """Whether memory is what keeps the micro batch from growing."""
        up = self._beside(best, 1)
        if up is None:
            return False
        measured = self.measured.get(up.place)
        return measured.outcome == "oom" if measured else bool(self.why_not(up))

    def _gain(self, best: Candidate) -> float:
        """What the last growth of the micro batch gained."""
        down = self._beside(best, -1)
        measured = self.measured.get(down.place) if down else None
        if measured is None or not measured.ok:
            return ASSUMED_GAIN
        return (self.measured[best.place].speed or 0.0) / (measured.speed or 1.0)

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
            elif not self._ran(other) and self._gain(best) < ASSUMED_GAIN:
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
        """What became of a candidate, in a word or two."""
        measured = self.measured.get(candidate.place)
        if measured is not None:
            return measured.outcome
        if candidate.same_as is not None:
            return "the same as another"
        if candidate.ruled_out:
            return "ruled out by the plan"
        if why := self.why_not(candidate):
            return "ruled out by a trial" if "trial" in why else "ruled out by the plan"
        if self.limit:
            return f"not tried ({self.limit})"
        return "not worth trying" if self.ended else "not tried"

    def counts(self) -> dict[str, int]:
        """How many candidates there are of each word, those that were tried as one."""
        found: dict[str, int] = {}
        for candidate in self.at.values():
            word = "tried" if candidate.place in self.measured else self.word_of(candidate)
            found[word] = found.get(word, 0) + 1
        return found
