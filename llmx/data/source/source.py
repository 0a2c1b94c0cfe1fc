"""One of the places that an experiment reads records from: which files, in which form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from pathlib import Path

from llmx.config import DataConfig, SourceConfig
from llmx.data.examples import TypedRecord
from llmx.data.format.columns import ColumnCheck
from llmx.data.format.formats import (
    VERDICTS,
    Conversation,
    Document,
    Labelled,
    Preference,
    TextPair,
    UnpairedPreference,
    check_characters,
    detect_form,
    to_conversation,
    to_document,
    to_labelled,
    to_pair,
    to_preference,
    to_unpaired,
)
from llmx.data.source.digests import digest_of
from llmx.data.source.files import read_file, source_files
from llmx.data.source.hub import PREFIX, hub_id, hub_rows, revision_of
from llmx.data.source.records import Meter, OnBad, PlainText, Record, RecordError, refuse
from llmx.data.tokenize.tokenizer import DEMO_DIRECTORY
from llmx.errors import DataError
from llmx.text import plural, printable

TAKEN: tuple[type, ...] = (Conversation, Document)
"""The records of a source that is read for no task."""
CHATS: tuple[type, ...] = (UnpairedPreference, Conversation)
RECORD_TYPES: dict[str, tuple[type, ...]] = {
    "text": (Document,),
    "preference": (Preference, Conversation),
    "labelled": (Labelled, Conversation),
    "alpaca": (TextPair, *CHATS),
    "prompt_response": (TextPair, *CHATS),
    "pair": (TextPair,),
}
"""What a record of a format can be, the most particular first; of others, a conversation."""
COLUMNS_VERSION = 2
"""Raised when a record with columns, beside plain documents, becomes another record than before."""
PREFERENCE_VERSION = 2
"""The same for preference pairs alone."""
LOOKED_AT = 100
"""First records of a source that tell its form where bad ones are skipped."""


@dataclass(frozen=True)
class Source:
    """One source: a path with its own form and limits. Nothing is read before it is asked for."""

    path: str
    form_wanted: str
    text_key: str
    columns: dict[str, str]
    system: str | None
    label_names: dict[str, str]
    max_rows: int | None
    subset: str | None
    split: str | None
    skips_bad: bool
    weight: float = 1.0
    text_unit: str = "file"
    truncate_prompt: str = "left"
    ignore: tuple[str, ...] = ()
    """Columns that may be ignored whatever they hold (``data.ignore_columns``)."""
    takes: tuple[type, ...] = TAKEN
    """The types of records that are wanted (``Encoding.takes``)."""
    turn_weights: bool = False
    """Whether the weight of a turn is read (``Encoding.turn_weights``)."""
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
        """``source`` with what it leaves open taken from ``data``; ``split`` is for the demo."""
        name = source.path
        form = source.form if source.form != "auto" else data.form
        columns = {**data.columns, **data.data_map, **source.columns}
        return cls(
            path=str(DEMO_DIRECTORY / f"{split}.jsonl") if name == "demo" else name,
            form_wanted=form,
            text_key=source.text_key or columns.pop("text", data.text_key),
            columns=columns,
            system=data.system,
            label_names=data.label_names,
            max_rows=source.max_rows,
            subset=source.subset or data.subset,
            split=source.split or data.split,
            skips_bad=data.on_bad_row == "skip",
            weight=source.weight,
            text_unit=data.text_unit,
            truncate_prompt=data.truncate_prompt,
            ignore=tuple(data.ignore_columns),
            takes=takes,
            turn_weights=turn_weights,
        )

    @cached_property
    def hub(self) -> str | None:
        """The id on the Hub, or None for files."""
        return hub_id(self.path)

    @cached_property
    def files(self) -> list[Path]:
        """The files on this machine; none for a Hub id."""
        return [] if self.hub else source_files(self.path, split=self.split)

    @cached_property
    def form(self) -> str:
        """The wanted form, or what the first record shows. Where bad records are skipped, the
        first of them decides nothing: it is the form of most of the first records."""
        if self.form_wanted != "auto":
            return self.form_wanted
        if self.takes == (Record,):
            return "record"
        rejected: list[RecordError] = []
        records = self.raw(rejected.append if self.skips_bad else refuse)
        first = next(records, None)
        if first is None:
            raise self.empty(rejected)
        if isinstance(first, PlainText):
            return "text"
        if not self.skips_bad:
            return self._detected(first)
        found: Counter[str] = Counter()
        problem: DataError | None = None
        for record in chain([first], islice(records, LOOKED_AT - 1)):
            try:
                found[self._detected(record)] += 1
            except DataError as error:
                problem = problem or error
        if not found:
            assert problem is not None
            raise problem
        return found.most_common(1)[0][0]

    def _detected(self, record: Record | PlainText) -> str:
        if isinstance(record, PlainText):
            return "text"
        return detect_form(
            record,
            text_key=self.text_key,
            columns=self.columns,
            ranked=Preference in self.takes,
            paired=TextPair in self.takes,
        )

    @cached_property
    def record_type(self) -> type | None:
        """The type of the records: of those that the dataset format can be, the first that is
        wanted; None where none is."""
        found = (
            (Record,) if self.form == "record" else (*RECORD_TYPES.get(self.form, CHATS), Record)
        )
        return next((kind for kind in found if kind in self.takes), None)

    @cached_property
    def _check(self) -> ColumnCheck:
        return ColumnCheck(
            self.form,
            text_key=self.text_key,
            columns=self.columns,
            ignore=self.ignore,
            ignored=self.ignored,
            turn_weights=self.turn_weights,
            verdicts=self._verdicts,
        )

    @property
    def _verdicts(self) -> tuple[str, ...]:
        """Columns of verdicts on an answer, where they are read."""
        if self.record_type is not UnpairedPreference:
            return ()
        own = self.columns.get("desirable")
        return (own,) if own else VERDICTS

    @cached_property
    def _revision(self) -> str:
        return revision_of(self.hub or "")

    def digests(self, *, cache: Path) -> list[str]:
        """What names the bytes: SHA-256 of each file, or the commit of a Hub dataset."""
        if self.hub:
            return [f"{PREFIX}{self.hub}@{self._revision}"]
        return [self._digest(file, cache) for file in self.files]

    @staticmethod
    def _digest(file: Path, cache: Path) -> str:
        try:
            return digest_of(file, cache=cache)
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror or error}).") from error

    def identity(self) -> dict[str, object]:
        """What decides which records there are, beside the bytes."""
        also: dict[str, object] = {}
        if self.text_unit != "file":
            also["text_unit"] = self.text_unit
        if self.form != "text":
            also["columns_version"] = COLUMNS_VERSION
        if self.form == "preference":
            also["preference_version"] = PREFERENCE_VERSION
        if self.form == "labelled":
            also["truncate_prompt"] = self.truncate_prompt
        if self.ignore:
            also["ignore_columns"] = sorted(self.ignore)
        if self.record_type is not None and self.record_type not in TAKEN:
            also["row_type"] = self.record_type.__name__
        if self.turn_weights:
            also["turn_weights"] = True
        if self.record_type is Labelled:
            also["labels"] = "any"
        return {
            **also,
            "form": self.form,
            "text_key": self.text_key,
            "columns": dict(sorted(self.columns.items())),
            "system": self.system,
            "label_names": dict(sorted(self.label_names.items())),
            "max_rows": self.max_rows,
            "hub": [self.hub, self.subset, self.split] if self.hub else None,
            "weight": self.weight,
        }

    def empty(self, rejected: Sequence[RecordError] = ()) -> DataError:
        """For a source without a record that can be used."""
        return no_rows(self.path, rejected)

    def raw(self, bad: OnBad, *, meter: Meter | None = None) -> Iterator[Record | PlainText]:
        """Records and documents of text files as they are read."""
        if self.hub:
            return hub_rows(self.hub, subset=self.subset, split=self.split, revision=self._revision)
        unit = self.text_unit
        return chain.from_iterable(
            read_file(file, bad=bad, text_unit=unit, meter=meter) for file in self.files
        )

    def records(self, bad: OnBad, *, meter: Meter | None = None) -> Iterator[TypedRecord | None]:
        """Every record in its format; None for a conversation without an answer."""
        for raw in self.raw(bad, meter=meter):
            try:
                record = self._record(raw)
            except RecordError as error:
                bad(error)
                continue
            yield record

    def _record(self, raw: Record | PlainText) -> TypedRecord | None:
        if isinstance(raw, PlainText):
            if self.form != "text":
                raise self._no_columns(raw)
            return Document(raw.text, raw.where)
        if self.record_type is Record:
            for value in raw.value.values():
                if isinstance(value, str):
                    check_characters(raw, value)
            return raw
        self._check(raw)
        if self.form == "text":
            return to_document(raw, text_key=self.text_key, columns=self.columns)
        if self.form == "preference":
            pair = to_preference(raw, columns=self.columns, system=self.system)
            return pair if self.record_type is Preference else pair.chosen
        if self.record_type is TextPair:
            return to_pair(raw, self.form, columns=self.columns)
        if self.record_type is Labelled:
            return to_labelled(
                raw, columns=self.columns, label_names=self.label_names, any_label=True
            )
        found = to_conversation(
            raw,
            self.form,
            columns=self.columns,
            system=self.system,
            label_names=self.label_names,
            turn_weights=self.turn_weights,
        )
        if self.record_type is UnpairedPreference:
            return to_unpaired(raw, found, columns=self.columns)
        return found

    def _no_columns(self, raw: PlainText) -> DataError:
        return DataError(
            f"{raw.where}: a text file has no columns, and data.form={self.form} needs them. Give "
            "a JSON, TSV or CSV file, or set data.form=text."
        )


def no_rows(path: str, rejected: Sequence[RecordError] = ()) -> DataError:
    """For sources in which no record can be used, with what is wrong with the first."""
    if not rejected:
        return DataError(f"{printable(path)}: there is no row in it. Check data.path.")
    return DataError(
        f"{printable(path)}: no row of it can be used; {plural(len(rejected), 'row')} rejected "
        f"(data.on_bad_row=skip). The first: {rejected[0]}"
    )
