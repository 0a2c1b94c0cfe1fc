"""``python -m llmx data out=FILE.jsonl``: the sources of a config as one file, without the rows
that should not be trained on.

Two readings: the first decides on every row, with a signature of each row that is kept in memory;
the second writes the records as they were read. Without ``out=`` nothing is written.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import llmx
from llmx.config import DataConfig, Experiment, SourceConfig
from llmx.config.build import shown
from llmx.config.file_formats import PROVENANCE
from llmx.data.format.rows import Conversation, Labelled, Preference, TextPair
from llmx.data.similar import (
    SHORTEST,
    EvalTexts,
    NearDuplicates,
    check_installed,
    texts_of,
    words_of,
)
from llmx.data.source.files import sha256_of_file
from llmx.data.source.hub import check_exists
from llmx.data.source.records import (
    Document,
    Record,
    RejectedRecords,
    Row,
    Where,
    counted,
    excerpt,
    json_line,
    refuse,
)
from llmx.data.split import (
    DatasetSplit,
    Numbered,
    Source,
    held_out,
    no_rows,
    pass_over,
)
from llmx.data.store.spec import cache_directory
from llmx.errors import ConfigError
from llmx.run.rundir import replacing, write_json
from llmx.tasks import task_class
from llmx.text import percent, plural, printable

if TYPE_CHECKING:
    from rich.console import Console

WORDS = ("out", "near", "decontaminate", "ngram")
"""Own words of ``data`` for this."""
ROWS = (Conversation, Document, Labelled, Preference)
"""The kinds of rows that records are read as, to compare their texts."""
SHINGLE = 3
"""Words in a row that rows are compared by."""
EXAMPLES = 2
"""Removed rows that are shown for each reason."""
IDENTICAL, SIMILAR, CONTAMINATED = "identical to an earlier row", "near duplicates", "contaminated"


@dataclass(frozen=True)
class Options:
    """The own words of the command."""

    out: Path | None
    near: float | None
    decontaminate: str
    ngram: int

    @classmethod
    def of(cls, words: Mapping[str, str]) -> Options:
        """Raises ConfigError for words that do not go together, and where ``out`` is there."""
        near = float(words["near"]) if "near" in words else None
        ngram = int(words.get("ngram", "13"))
        if "ngram" in words and not words.get("decontaminate"):
            raise ConfigError("ngram is for decontaminate=FILE, which is not set.")
        if near is not None:
            check_installed("near")
        if "out" not in words:
            return cls(None, near, words.get("decontaminate", ""), ngram)
        out = Path(os.path.abspath(Path(words["out"]).expanduser()))
        if out.suffix != ".jsonl":
            raise ConfigError(f"out={shown(words['out'])}: must end in .jsonl, e.g. out=rows.jsonl")
        for path in (out, eval_file(out)):
            if path.exists():
                raise ConfigError(f"{path} exists already. Remove it, or set out to another name.")
        return cls(out, near, words.get("decontaminate", ""), ngram)


def eval_file(out: Path) -> Path:
    """The file of the rows that are held out: ``rows.eval.jsonl`` beside ``rows.jsonl``."""
    return out.with_suffix(".eval.jsonl")


@dataclass
class Outcome:
    """What the first reading decides."""

    removed: dict[int, str] = field(default_factory=dict)
    """Number of a row -> the reason."""
    examples: dict[str, list[str]] = field(default_factory=dict)
    num_rows: int = 0

    def remove(self, number: int, reason: str, example: str) -> None:
        """Note a removed row; ``example`` describes it."""
        self.removed[number] = reason
        examples = self.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES:
            examples.append(example)

    @property
    def counts(self) -> dict[str, int]:
        """Rows that were removed, by reason."""
        return dict(Counter(self.removed.values()))


def run(exp: Experiment, words: Mapping[str, str]) -> int:
    """Read, decide, write, report; the exit code."""
    options = Options.of(words)
    takes = task_class(exp.task.kind).takes
    kinds = takes if TextPair in takes else ROWS
    # What a split leaves out by itself is decided here: rows are held out of those that are left.
    data = dataclasses.replace(
        exp.data, eval_path=None, eval_samples=0, eval_fraction=0.0, deduplicate=False
    )
    split = DatasetSplit(data, exp.seed, "train", takes=kinds)
    _check_formats(split)
    eval_texts = _eval_texts(data, options, kinds) if options.decontaminate else None
    rejected = RejectedRecords()
    bad = rejected.add if data.on_bad_row == "skip" else refuse
    rows = split.read_once(f"Reading {split.path}", bad, check=False)
    identical = exp.data.deduplicate or options.near is not None
    outcome = _decide(rows, options, eval_texts, identical=identical)
    if not outcome.num_rows:
        raise no_rows(split.path)
    chosen = _held_out(outcome, exp, split.path)
    lines = {"rejected": counted(rejected.counts)} if rejected.counts else {}
    out = options.out
    if out is None:
        lines["written"] = "nothing; out=FILE.jsonl writes the rows that are left"
        _report(outcome, options, eval_texts, lines)
        return 0
    provenance = _provenance(exp, split, options, outcome)
    provenance |= {"rows_rejected": dict(rejected.counts), "files": {}}
    rest = set(range(outcome.num_rows)) - chosen
    outputs = [(out, True), (eval_file(out), False)] if chosen else [(out, True)]
    for path, trained in outputs:
        records = split.numbered(pass_over, weighted=trained, check=False)
        with replacing(path) as stream:
            count = _write(stream, records, outcome.removed.keys() | (chosen if trained else rest))
        provenance["files"][path.name] = {"rows": count, "sha256": sha256_of_file(path)}
        lines["written" if trained else "held out"] = f"{plural(count, 'row')}: {path}"
    write_json(out.with_suffix(PROVENANCE), provenance)
    _report(outcome, options, eval_texts, lines)
    return 0


def _check_formats(split: DatasetSplit) -> None:
    """ConfigError where the sources would not be read in the same way from one file."""
    forms = {
        (source.form, source.reading.text_key, tuple(sorted(source.reading.columns.items())))
        for source in split.sources
    }
    if len(forms) > 1:
        raise ConfigError(
            f"out: the sources have different formats or columns ({split.form}), and one file has "
            "one. Mix them in the training instead (data.sources, docs/data.md), or write each "
            "source to a file of its own."
        )


def _eval_texts(data: DataConfig, options: Options, takes: tuple[type, ...]) -> EvalTexts:
    check_exists("decontaminate=", options.decontaminate)
    config = dataclasses.replace(data, path=options.decontaminate, sources=[], max_rows=None)
    source = Source.of(config, SourceConfig(path=config.path), split="eval", takes=takes)
    rows = (texts_of(row, record) for record, row in source.records(refuse))
    return EvalTexts(rows, length=options.ngram)


def _decide(
    rows: Iterator[Numbered], options: Options, eval_texts: EvalTexts | None, *, identical: bool
) -> Outcome:
    """Read every row once. ``identical``: whether a row equal to an earlier one is removed."""
    outcome = Outcome()
    contents: set[bytes] = set()
    near = None if options.near is None else NearDuplicates(options.near, shingle=SHINGLE)
    places: dict[int, Where] = {}
    for number, record, row, _ in rows:
        outcome.num_rows = number + 1
        place = f"{record.where.file.name}, {record.where.unit} {record.where.number}"
        if identical:
            digest = hashlib.blake2b((row or record).content, digest_size=16).digest()
            if digest in contents:
                outcome.remove(number, IDENTICAL, f"{place}: {_start(row, record)}")
                continue
            contents.add(digest)
        words = [word for text in texts_of(row, record) for word in words_of(text)]
        if eval_texts is not None and (match := eval_texts.match(words)):
            outcome.remove(number, CONTAMINATED, f"{place}: {excerpt(match)}")
        elif near is not None:
            if similar := near.add(number, words):
                earlier = places[similar[0]]
                like = f"like {earlier.unit} {earlier.number}, {similar[1]:.2f}"
                text = f"{place} ({like}): {_start(row, record)}"
                outcome.remove(number, SIMILAR, text)
            else:
                places[number] = record.where
    return outcome


def _start(row: Row | None, record: Record | Document) -> str:
    return excerpt(" ".join(text[:200] for text in texts_of(row, record)), limit=60)


def _held_out(outcome: Outcome, exp: Experiment, path: str) -> set[int]:
    """The numbers of the rows for the evaluation file."""
    import numpy as np

    amount = exp.data.eval_samples or exp.data.eval_fraction
    if not amount:
        return set()
    removed = np.zeros(outcome.num_rows, np.bool_)
    removed[list(outcome.removed)] = True
    return held_out(removed, amount, seed=exp.seed, path=path)


def _write(stream: IO[bytes], records: Iterator[Numbered], left_out: Set[int]) -> int:
    """Write the other records as lines of JSON; returns how many."""
    count = 0
    for number, record, _, _ in records:
        if number not in left_out:
            value = {"text": record.text} if isinstance(record, Document) else record.value
            stream.write(json_line(value))
            count += 1
    return count


def _provenance(
    exp: Experiment, split: DatasetSplit, options: Options, outcome: Outcome
) -> dict[str, Any]:
    cache = cache_directory(exp.data).absolute()
    sources = []
    for source in split.sources:
        names = [str(file) for file in source.files] or [source.path]
        files = dict(zip(names, source.digests(cache=cache), strict=True))
        sources.append({"path": source.path, **source.identity(), "sha256": files})
    eval_files = []
    if options.decontaminate:
        config = dataclasses.replace(exp.data, path=options.decontaminate)
        source = Source.of(config, SourceConfig(path=config.path), split="eval")
        eval_files = source.digests(cache=cache)
    return {
        "made_by": f"llmx {llmx.__version__} data",
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seed": exp.seed,
        "sources": sources,
        "deduplicate": exp.data.deduplicate,
        "near": options.near,
        "decontaminate": {
            "path": options.decontaminate, "ngram": options.ngram, "sha256": eval_files
        } if options.decontaminate else None,
        "rows_read": outcome.num_rows,
        "rows_removed": outcome.counts,
    }  # fmt: skip


def _report(
    outcome: Outcome, options: Options, eval_texts: EvalTexts | None, lines: Mapping[str, str]
) -> None:
    """Print what was read and removed, with examples, and ``lines``."""
    num_left = outcome.num_rows - len(outcome.removed)
    rows = [("rows read", f"{outcome.num_rows:,}")]
    for reason, count in outcome.counts.items():
        share = percent(count / outcome.num_rows)
        rows.append((reason, "\n".join([f"{count:,} ({share})", *outcome.examples[reason]])))
    if eval_texts is not None:
        compared = (
            f"{plural(eval_texts.num_rows, 'row')}; {plural(eval_texts.short, 'text')} of fewer "
            f"than {SHORTEST} words compared with whole rows alone; {eval_texts.common:,} runs of "
            "words left out as a template"
        )
        rows.append((f"compared with {options.decontaminate}", compared))
    print_table([*rows, ("rows left", f"{num_left:,}"), *lines.items()])


def print_table(rows: Iterable[tuple[str, str]], *, title: str | None = None) -> Console:
    """Print names with their values; returns the console."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows:
        table.add_row(printable(name), Text(printable(value)))
    console = Console(highlight=False)
    console.print(table, soft_wrap=not console.is_terminal)
    return console
