"""The rows of a split: of one source or several, without those held out and those left out.

A ``Source`` is one place that is read: files or a Hub dataset, in one dataset format. The rows of
a ``DatasetSplit`` are numbered in the order in which they are read, over all of its sources. Which
of them belong to the evaluation, which are duplicates and how often a source is taken are
functions of that number and the seed alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING

from llmx.config import DataConfig, SourceConfig
from llmx.data.format.columns import Fields, Reading
from llmx.data.format.formats import detect_form, format_of
from llmx.data.format.rows import Conversation, Preference, TextPair
from llmx.data.progress import PreparationProgress
from llmx.data.source.files import DEMO_DIRECTORY, digest_of, read_file, source_files
from llmx.data.source.hub import PREFIX, hub_id, hub_rows, revision_of
from llmx.data.source.records import (
    Document,
    Meter,
    OnBad,
    Record,
    RecordError,
    RejectedRecords,
    Row,
    refuse,
)
from llmx.errors import ConfigError, DataError
from llmx.text import plural, printable

if TYPE_CHECKING:  # the control process reads first rows, and draws none
    import numpy as np

TAKEN: tuple[type, ...] = (Conversation, Document)
"""The rows of a source that is read for no task."""
ROWS_VERSION = 5
"""Raised when a record or a text becomes another row than before."""
EVAL_SPLITS = ("validation", "test", "train")
"""The splits of ``data.eval_path``, the first that is there."""
MOST_IGNORED = 1000
"""Names of ignored columns that are kept."""
LOOKED_AT = 100
"""First records of a source that tell its form where bad ones are skipped."""


@dataclass(frozen=True)
class Source:
    """One source: a path with its own form and limits. Nothing is read before it is asked for."""

    data: DataConfig
    config: SourceConfig
    """The source, with what it leaves open taken from ``data``."""
    reading: Reading
    takes: tuple[type, ...] = TAKEN
    """The types of rows that are wanted (``Encoding.takes``)."""
    prefers: tuple[str, ...] = ("train",)
    """The splits of a directory that are read, the first that is there."""
    ignored: set[str] = field(default_factory=set, compare=False)
    """Names of the columns that were read and not used."""

    @classmethod
    def of(
        cls,
        data: DataConfig,
        source: SourceConfig,
        *,
        split: str,
        takes: tuple[type, ...] = TAKEN,
        turn_weights: bool = False,
    ) -> Source:
        """``split``: chooses the file of the demo, and the split of a directory."""
        columns = {**data.columns, **data.data_map, **source.columns}
        text_key = source.text_key or columns.pop("text", data.text_key)
        config = dataclasses.replace(
            source,
            path=str(DEMO_DIRECTORY / f"{split}.jsonl") if source.path == "demo" else source.path,
            form=source.form if source.form != "auto" else data.form,
            subset=source.subset or data.subset,
            split=source.split or data.split,
        )
        reading = Reading(columns, text_key, data.system, data.label_names, turn_weights)
        prefers = EVAL_SPLITS if split == "eval" and data.eval_path else ("train",)
        return cls(data, config, reading, takes, prefers)

    @property
    def path(self) -> str:
        return self.config.path

    @cached_property
    def hub(self) -> str | None:
        """The id on the Hub, or None for files."""
        return hub_id(self.path)

    @cached_property
    def files_by_use(self) -> tuple[list[Path], list[Path]]:
        """The files that are read, and those of other splits."""
        if self.hub:
            return [], []
        return source_files(self.path, split=self.config.split, prefers=self.prefers)

    @property
    def files(self) -> list[Path]:
        """The files on this machine; none for a Hub id."""
        return self.files_by_use[0]

    @cached_property
    def form(self) -> str:
        """The wanted form, or what the first record shows. Where bad records are skipped, the
        first of them decides nothing: it is the form of most of the first records."""
        if self.config.form != "auto":
            return self.config.form
        if self.takes == (Record,):
            return "record"
        skips_bad = self.data.on_bad_row == "skip"
        rejected: list[RecordError] = []
        problems: list[DataError] = []
        forms: Counter[str] = Counter()
        records = self.raw(rejected.append if skips_bad else refuse)
        for record in islice(records, LOOKED_AT if skips_bad else 1):
            if isinstance(record, Document):
                return "text"
            try:
                forms[detect_form(Fields(record, self.reading), takes=self.takes)] += 1
            except DataError as error:
                problems.append(error)
        if forms:
            return forms.most_common(1)[0][0]
        raise problems[0] if problems else no_rows(self.path, rejected)

    @cached_property
    def row_type(self) -> type | None:
        """The type of the rows: of those that the dataset format can be, the first that is wanted;
        None where none is."""
        candidates = (*format_of(self.form).readers, Record)
        return next((kind for kind in candidates if kind in self.takes), None)

    @cached_property
    def _revision(self) -> str:
        return revision_of(self.hub or "")

    def digests(self, *, cache: Path) -> list[str]:
        """Names of the bytes: SHA-256 of each file, or the commit of a Hub dataset."""
        if self.hub:
            return [f"{PREFIX}{self.hub}@{self._revision}"]
        digests = []
        for file in self.files:
            try:
                digests.append(digest_of(file, cache=cache))
            except OSError as error:
                raise DataError(f"{file}: cannot be read ({error.strerror or error}).") from error
        return digests

    def identity(self) -> dict[str, object]:
        """Everything but the bytes of the files that decides the rows."""
        data = self.data
        return {
            **dataclasses.asdict(self.reading),
            "form": self.form,
            "row_type": self.row_type.__name__ if self.row_type else None,
            "text_unit": data.text_unit,
            "truncate_prompt": data.truncate_prompt,
            "ignore_columns": sorted(data.ignore_columns),
            "max_rows": self.config.max_rows,
            "hub": [self.hub, self.config.subset, self.config.split] if self.hub else None,
            "weight": self.config.weight,
        }

    def raw(self, bad: OnBad, *, meter: Meter | None = None) -> Iterator[Record | Document]:
        """Records and documents of text files as they are read."""
        if self.hub:
            subset, split = self.config.subset, self.config.split
            return hub_rows(self.hub, subset=subset, split=split, revision=self._revision)
        unit = self.data.text_unit
        return chain.from_iterable(
            read_file(file, bad=bad, text_unit=unit, meter=meter) for file in self.files
        )

    def records(
        self, bad: OnBad, *, meter: Meter | None = None, check: bool = False
    ) -> Iterator[tuple[Record | Document, Row | None]]:
        """Every record as it was read, with its row: None for a conversation without an answer.

        ``check``: columns that change what a row means are refused, and those that were not read
        are noted in ``ignored``; else the record is not trained on, it is passed on.
        """
        for record in self.raw(bad, meter=meter):
            row: Row | None = record
            try:
                if isinstance(record, Record):
                    row, unread = format_of(self.form).read(
                        record,
                        self.reading,
                        self.row_type,
                        ignore=self.data.ignore_columns if check else None,
                    )
                    if len(self.ignored) < MOST_IGNORED:
                        self.ignored.update(unread)
                elif check and self.form != "text":
                    raise DataError(
                        f"{record.where}: a text file has no columns, and data.form={self.form} "
                        "needs them. Give a JSON, TSV or CSV file, or set data.form=text."
                    )
            except RecordError as error:
                bad(error)
            else:
                yield record, row

    def rows(self, bad: OnBad) -> Iterator[Row | None]:
        """Every row to train on."""
        return (row for _, row in self.records(bad, check=True))


def no_rows(path: str, rejected: Sequence[RecordError] = ()) -> DataError:
    """The error for sources without a usable record, with the fault of the first."""
    if not rejected:
        return DataError(f"{printable(path)}: there is no row in it. Check data.path.")
    return DataError(
        f"{printable(path)}: no row of it can be used; {plural(len(rejected), 'row')} rejected "
        f"(data.on_bad_row=skip). The first: {rejected[0]}"
    )


Numbered = tuple[int, Record | Document, Row | None, int]
"""The number of a record, the record, its row, and which copy of its source it is in."""


def in_copy(seed: int, number: int, weight: float) -> Iterator[bool]:
    """For each record of source ``number``, whether it is in a copy of which only the fraction
    ``weight`` is taken."""
    if weight >= 1:
        yield from repeat(True)
    import numpy as np

    generator = np.random.Generator(np.random.Philox(key=_key("weight", seed, number)))
    while True:
        yield from (generator.random(4096) < weight).tolist()


def held_out(repeated: np.ndarray, amount: float, *, seed: int, path: str) -> set[int]:
    """The records of the evaluation: ``amount`` of them, below 1 the fraction of those that are not
    ``repeated``. They are those with the smallest of one random draw a record, so that they are a
    function of (seed, number of records) alone.

    Raises ConfigError where nothing would be left.
    """
    import numpy as np

    different = int((~repeated).sum())
    count = int(amount) if amount >= 1 else max(1, round(amount * different))
    if count >= different:
        key = "samples" if amount >= 1 else "fraction"
        raise ConfigError(
            f"data.eval_{key}={amount:g} of {different} rows in {path} leaves "
            "nothing to train on. Hold out fewer, or give data.eval_path."
        )
    draws = np.random.Philox(key=_key("held out", seed)).random_raw(len(repeated))
    order = np.argsort(draws, kind="stable")
    return set(order[~repeated[order]][:count].tolist())


def _key(*parts: object) -> np.ndarray:
    import numpy as np

    digest = hashlib.sha256(json.dumps(parts).encode()).digest()[:16]
    return np.frombuffer(digest, np.uint64)


SPLITS = ("train", "eval")


@dataclass(frozen=True)
class DatasetSplit:
    """One split of the experiment's data. Nothing is read before it is asked for."""

    data: DataConfig
    seed: int
    name: str
    """``train`` or ``eval``."""
    takes: tuple[type, ...] = TAKEN
    """The types of records that are wanted (``Encoding.takes``)."""
    turn_weights: bool = False
    """Whether the weight of a turn is read (``Encoding.turn_weights``)."""
    rejects: RejectedRecords = field(default_factory=RejectedRecords, compare=False)
    """Records that ``rows()`` passed over, when ``data.on_bad_row=skip``."""
    left_out: Counter[str] = field(default_factory=Counter, compare=False)
    """Good records that ``rows()`` left out, by reason."""
    meter: Meter = field(default_factory=Meter, compare=False)
    """Counts the bytes that ``rows()`` has read."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a split that the experiment has not."""
        if self.name not in SPLITS:
            raise ConfigError(f"split {self.name!r} is not one of {', '.join(SPLITS)}.")
        if self.name == "eval" and not self.data.has_eval:
            raise ConfigError(
                "There is no evaluation data: set data.eval_path, or e.g. data.eval_fraction=0.05 "
                "to hold out rows of data.path."
            )

    @cached_property
    def sources(self) -> list[Source]:
        """The sources that are read for this split, in order."""
        data = self.data
        if self.name == "eval" and data.eval_path:
            configs = [SourceConfig(path=data.eval_path)]
        else:
            configs = data.sources or [SourceConfig(path=data.path)]
        for index, config in enumerate(configs):
            if not config.path:
                where = f"data.sources[{index}].path" if data.sources else "data.path"
                raise ConfigError(f"{where} is empty. Name a file, a directory or a Hub id.")
        return [
            Source.of(
                data, config, split=self.name, takes=self.takes, turn_weights=self.turn_weights
            )
            for config in configs
        ]

    @property
    def path(self) -> str:
        """The paths of its sources, for messages."""
        return ", ".join(source.path for source in self.sources)

    @property
    def held_out_rows(self) -> float:
        """Records of these sources that belong to the evaluation, below 1 the fraction of them; 0
        where it has its own."""
        has_own_source = self.data.eval_path or (self.data.path == "demo" and not self.data.sources)
        return 0 if has_own_source else self.data.eval_samples or self.data.eval_fraction

    @property
    def ignored_columns(self) -> list[str]:
        """Columns that were read up to now and not used, sorted."""
        return sorted(set().union(*(source.ignored for source in self.sources)))

    @cached_property
    def files(self) -> list[Path]:
        """All files on this machine, in the order in which they are read."""
        return [file for source in self.sources for file in source.files]

    @cached_property
    def form(self) -> str:
        """The form of the records; where sources differ, their forms joined by ``+``."""
        forms = list(dict.fromkeys(source.form for source in self.sources))
        # A task that takes no pairs learns the better answer.
        form_names = (
            {} if Preference in self.takes else {"preference": "preference (the chosen answers)"}
        )
        return "+".join(form_names.get(form, form) for form in forms)

    @property
    def has_text(self) -> bool:
        """Whether there are documents among the records."""
        return any(source.form == "text" for source in self.sources)

    @property
    def has_conversations(self) -> bool:
        return any(
            source.form != "text" and source.row_type is not TextPair for source in self.sources
        )

    @cached_property
    def source_bytes(self) -> int:
        """Bytes of the files on disk; 0 where they are not here (Hub)."""
        return sum(file.stat().st_size for file in self.files)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes that ``rows()`` reads from disk, on ``meter``; 0 where it is not known."""
        limited = any(source.config.max_rows is not None or source.hub for source in self.sources)
        if limited or self.data.max_rows is not None:
            return 0
        return sum(
            file.stat().st_size * self.copies(source)
            for source in self.sources
            for file in source.files
        )

    def copies(self, source: Source) -> int:
        """How many times a source is read."""
        return math.ceil(source.config.weight) if self.name == "train" else 1

    def digests(self, *, cache: Path) -> list[str]:
        """Names of the bytes of each file or Hub dataset; see ``digest_of`` for ``cache``."""
        return [digest for source in self.sources for digest in source.digests(cache=cache)]

    def identity(self) -> dict[str, object]:
        """Everything but the bytes of the files that decides the rows."""
        data, sources = self.data, self.sources
        draws = self.held_out_rows or any(source.config.weight != 1 for source in sources)
        return {
            "rows_version": ROWS_VERSION,
            "parts": [source.identity() for source in sources],
            "num_files": [len(source.files) for source in sources],
            "max_rows": data.max_rows,
            "on_bad_row": data.on_bad_row,
            "deduplicate": data.deduplicate,
            "held_out": [self.name, self.held_out_rows] if self.held_out_rows else None,
            "seed": self.seed if draws else None,
        }

    def rows(self) -> Iterator[Row | None]:
        """Every row of the split, in order; None for a conversation without an answer.

        Raises RecordError (a DataError) at the first record that is wrong, or notes it in
        ``rejects``; DataError when there is no record at all.
        """
        self.rejects.clear()
        self.left_out.clear()
        repeated, chosen = self.repeated, self._held_out
        self.meter.bytes = 0
        bad = self.rejects.add if self.data.on_bad_row == "skip" else refuse
        empty = True
        weighted = self.name == "train"
        for index, _, row, copy in self.numbered(bad, weighted=weighted, check=True):
            empty = False
            if repeated is not None and index < len(repeated) and repeated[index]:
                self.left_out["identical to an earlier row"] += copy == 0
            elif chosen is not None and (index in chosen) != (self.name == "eval"):
                continue
            elif isinstance(row, Document) and not row.text.strip():
                self.left_out["empty"] += copy == 0
            else:
                yield row
        if empty and not self.rejects.counts:
            raise no_rows(self.path)

    def numbered(self, bad: OnBad, *, weighted: bool, check: bool) -> Iterator[Numbered]:
        """The records of all sources (``Source.records``); ``weighted``: each source as often as
        its weight says, else once."""
        start = 0
        for number, source in enumerate(self.sources):
            limits = [] if source.config.max_rows is None else [source.config.max_rows]
            if self.data.max_rows is not None:
                limits.append(max(0, self.data.max_rows - start))
            limit = min(limits) if limits else None
            index = start - 1
            for copy in range(self.copies(source) if weighted else 1):
                records = source.records(
                    bad if copy == 0 else pass_over, meter=self.meter, check=check
                )
                draws = in_copy(self.seed, number, source.config.weight - copy if weighted else 1)
                for index, (record, row) in enumerate(islice(records, limit), start):
                    if next(draws):
                        yield index, record, row, copy
            start = index + 1

    @cached_property
    def repeated(self) -> np.ndarray | None:
        """bool [records]: whether each row is identical to an earlier one, by a digest of its
        content, 16 bytes per row; False where they are only counted. A first reading, if this or
        the number of records must be known; else None."""
        compare = self.data.deduplicate
        if not self.held_out_rows and not compare:
            return None
        import numpy as np

        bad = pass_over if self.data.on_bad_row == "skip" else refuse
        count, digests = 0, bytearray()
        for index, _, row, _ in self.read_once(
            f"Counting the rows of {self.path}", bad, check=True
        ):
            count = index + 1
            if compare:
                # A row with nothing to learn is counted as such, not as repeated.
                content = f"\0nothing to learn {index}".encode() if row is None else row.content
                digests += hashlib.blake2b(content, digest_size=16).digest()
        repeated = np.full(count, compare)
        if compare:
            repeated[np.unique(np.frombuffer(digests, "V16"), return_index=True)[1]] = False
        return repeated

    def read_once(self, title: str, bad: OnBad, *, check: bool) -> Iterator[Numbered]:
        """``numbered`` records, each once, with a line of progress."""
        self.meter.bytes = 0
        size = self.source_bytes
        with PreparationProgress(title, total_bytes=size, meter=self.meter) as progress:
            for numbered in self.numbered(bad, weighted=False, check=check):
                if numbered[0] % 1000 == 0:
                    progress.add(size=self.meter.bytes - progress.bytes)
                yield numbered

    @cached_property
    def _held_out(self) -> set[int] | None:
        amount, repeated = self.held_out_rows, self.repeated
        if not amount or repeated is None:
            return None
        return held_out(repeated, amount, seed=self.seed, path=self.path)


def pass_over(error: RecordError) -> None:
    """Ignores a bad record, which another reading of the same source records."""
