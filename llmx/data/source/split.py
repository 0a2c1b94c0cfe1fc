"""The rows of an experiment: of one source or several, which are held out, which are left out.

Rows are numbered in the order in which they are read, over all sources. Which of them belong to
the evaluation, which are repeated and how often a source is taken are functions of that number
and the seed alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from llmx.config import Experiment
from llmx.data.examples import Row
from llmx.data.format.formats import Document
from llmx.data.source.origin import Origin
from llmx.data.source.part import TAKEN, Part, no_rows
from llmx.data.source.progress import Progress
from llmx.data.source.records import Meter, OnBad, RowError, Stretch, refuse
from llmx.data.source.rejected import Rejects
from llmx.data.source.selection import held_out, weight_draws
from llmx.data.source.survey import Survey, survey_of
from llmx.errors import ConfigError, DataError

__all__ = ["SPLITS", "Row", "Source", "has_eval"]

SPLITS = ("train", "eval")
Numbered = tuple[int, Row | None, int]
"""A row with its number before it, and which copy it is."""


def has_eval(exp: Experiment) -> bool:
    """Whether there is anything to evaluate on: a source, held-out rows, or the demo's."""
    data = exp.data
    own = data.path == "demo" and not data.sources
    return bool(data.eval_path or data.eval_samples > 0 or own)


@dataclass(frozen=True)
class Source(Origin):
    """One split of the experiment's data. Nothing is read before it is asked for."""

    rejects: Rejects = field(default_factory=Rejects, compare=False)
    """Rows that ``rows()`` passed over, when ``data.on_bad_row=skip``."""
    left_out: Counter[str] = field(default_factory=Counter, compare=False)
    """Good rows that ``rows()`` left out, by reason."""
    meter: Meter = field(default_factory=Meter, compare=False)
    """How far ``rows()`` has read."""

    @classmethod
    def of(cls, exp: Experiment, split: str, *, takes: tuple[type, ...] = TAKEN) -> Source:
        """``takes``: the types of rows that are wanted. Raises ConfigError for a split that the
        experiment has not."""
        if split not in SPLITS:
            raise ConfigError(f"split {split!r} is not one of {', '.join(SPLITS)}.")
        if split == "eval" and not has_eval(exp):
            raise ConfigError(
                "There is no evaluation data: set data.eval_path, or data.eval_samples to hold "
                "out that many rows of data.path."
            )
        return cls(exp.data, exp.seed, split, takes=takes)

    def rows(self) -> Iterator[Row | None]:
        """Every row of the split, in order; None for a conversation without an answer.

        Raises RowError (a DataError) at the first row that is wrong, or notes it in ``rejects``;
        DataError when there is no row at all.
        """
        self.rejects.clear()
        self.left_out.clear()
        survey, chosen = self._survey, self._held_out
        self.meter.bytes = 0
        bad = self.on_bad
        empty = True
        for index, row, copy in self._every(bad, weighted=self.split == "train"):
            empty = False
            first = copy == 0
            if survey is not None and survey.is_repeated(index):
                self._leave_out("identical to an earlier row", row, first)
            elif chosen is not None and (index in chosen) != (self.split == "eval"):
                continue
            elif self._is_empty(row):
                self._leave_out("empty", row, first)
            else:
                yield row
        if empty and not self.rejects.counts:
            raise self.empty()

    def rows_of(
        self, part: Part, file: Path, stretch: Stretch, *, first: bool
    ) -> Iterator[Row | None]:
        """Those of ``rows()`` that stand in one file, or in some of its lines; all of them, one
        after the other, are ``rows()`` of a source that is ``divisible``. ``first``: the first
        copy, whose rejects are noted."""
        bad = self.on_bad if first else _pass_over
        for row in part.rows_of(file, stretch, bad, meter=self.meter):
            if self._is_empty(row):
                self._leave_out("empty", row, first)
            else:
                yield row

    @property
    def on_bad(self) -> OnBad:
        """What is done with a bad row: ``data.on_bad_row``."""
        return self.rejects.add if self.data.on_bad_row == "skip" else refuse

    @staticmethod
    def _is_empty(row: Row | None) -> bool:
        return isinstance(row, Document) and row.last and not row.text.strip()

    def _leave_out(self, reason: str, row: Row | None, first: bool) -> None:
        if first and _is_whole(row):
            self.left_out[reason] += 1

    def empty(self) -> DataError:
        """For sources in which there is no row at all."""
        return no_rows(self.path)

    def _numbered(self, part: Part, start: int, bad: OnBad) -> Iterator[tuple[int, Row | None]]:
        """(number, row) of one source; the pieces of one text have one number."""
        limits = [] if part.max_rows is None else [part.max_rows]
        if self.data.max_rows is not None:
            limits.append(max(0, self.data.max_rows - start))
        stop = start + min(limits) if limits else None
        index = start
        rows = part.rows(bad, meter=self.meter)
        while stop is None or index < stop:
            try:
                row = next(rows)
            except StopIteration:
                return
            yield index, row
            index += _is_whole(row)

    def _every(self, bad: OnBad, *, weighted: bool) -> Iterator[tuple[int, Row | None, int]]:
        """(number, row, which copy) over all sources; ``weighted``: each as often as its weight
        says, else once."""
        start = 0
        for number, part in enumerate(self.parts):
            stop = start
            for copy in range(self.copies(part) if weighted else 1):
                weight = part.weight - copy if weighted else 1.0
                taken = weight_draws(self.seed, number, weight)
                for index, row in self._numbered(part, start, bad if copy == 0 else _pass_over):
                    if taken is None or taken(index - start):
                        yield index, row, copy
                    stop = max(stop, index + _is_whole(row))
            start = stop

    @cached_property
    def _survey(self) -> Survey | None:
        """A first reading, where it is needed: to know how many rows there are, or which repeat."""
        if not self.held_out_rows and not self.data.deduplicate:
            return None
        skips = self.data.on_bad_row == "skip"
        rows = self._every(_pass_over if skips else refuse, weighted=False)
        meter, total = self.meter, self.source_bytes
        meter.bytes = 0
        title = f"Counting the rows of {self.path}"
        with Progress(title, total_bytes=total, read=lambda: meter.bytes) as progress:
            return survey_of(_shown(rows, meter, progress), find_repeated=self.data.deduplicate)

    def look_ahead(self) -> None:
        """The first reading of ``rows()``, if it needs one: before its own progress is shown."""
        _ = self._survey

    @cached_property
    def _held_out(self) -> set[int] | None:
        wanted, survey = self.held_out_rows, self._survey
        if not wanted or survey is None:
            return None
        if wanted >= survey.num_different:
            raise ConfigError(
                f"data.eval_samples={wanted} of {survey.num_different} rows in {self.path} leaves "
                "nothing to train on. Hold out fewer, or give data.eval_path."
            )
        return held_out(survey, wanted, seed=self.seed)


def _is_whole(row: Row | None) -> bool:
    """Whether nothing more of the same row follows."""
    return not isinstance(row, Document) or row.last


def _shown(rows: Iterator[Numbered], meter: Meter, progress: Progress) -> Iterator[Numbered]:
    """The same rows; progress is told now and then."""
    for number, row in enumerate(rows):
        if number % 1000 == 0:
            progress.add(size=meter.bytes - progress.bytes)
        yield row


def _pass_over(error: RowError) -> None:
    """A bad row that is noted in another reading of the same rows."""
