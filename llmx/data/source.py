"""The rows of an experiment's source: which files, in which form, and which rows are held out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

from llmx.config import DataConfig, Experiment
from llmx.data.forms import Conversation, Document, detect_form, to_conversation, to_document
from llmx.data.read import Record, TextPiece, read_file, source_files
from llmx.data.store import sha256_of_file
from llmx.data.tokenizer import DEMO_DIRECTORY
from llmx.errors import ConfigError, DataError

Row = Conversation | Document
SPLITS = ("train", "eval")


def has_eval(exp: Experiment) -> bool:
    """Whether there is anything to evaluate on: a source, held-out rows, or the demo's."""
    data = exp.data
    return bool(data.eval_path or data.eval_samples > 0 or data.path == "demo")


@dataclass(frozen=True)
class Source:
    """One split of the experiment's data. Nothing is read before it is asked for."""

    data: DataConfig
    seed: int
    split: str

    @classmethod
    def of(cls, exp: Experiment, split: str) -> Source:
        """Raises ConfigError for a split that the experiment has not."""
        if split not in SPLITS:
            raise ConfigError(f"split {split!r} is not one of {', '.join(SPLITS)}.")
        if split == "eval" and not has_eval(exp):
            raise ConfigError(
                "There is no evaluation data: set data.eval_path, or data.eval_samples to hold "
                "out that many rows of data.path."
            )
        return cls(exp.data, exp.seed, split)

    @property
    def path(self) -> str:
        """What is read: ``data.path``, or ``data.eval_path`` for a separate evaluation set."""
        name = self.data.path
        if self.split == "eval" and self.data.eval_path:
            name = self.data.eval_path
        return str(DEMO_DIRECTORY / f"{self.split}.jsonl") if name == "demo" else name

    @property
    def held_out_rows(self) -> int:
        """Rows of this file that belong to the evaluation; 0 where it has a source of its own."""
        separate = self.data.eval_path or self.data.path == "demo"
        return 0 if separate else self.data.eval_samples

    @cached_property
    def files(self) -> list[Path]:
        return source_files(self.path)

    @cached_property
    def form(self) -> str:
        """``data.form``, or what the first row shows."""
        if self.data.form != "auto":
            return self.data.form
        first = next(self._raw(), None)
        if first is None:
            raise self._empty()
        if isinstance(first, Record):
            return detect_form(first, text_key=self.data.text_key, columns=self.data.columns)
        return "text"

    def digests(self) -> list[str]:
        """SHA-256 of each file."""
        return [sha256_of_file(file) for file in self.files]

    def identity(self) -> dict[str, object]:
        """What decides which rows there are, beside the bytes of the files."""
        data = self.data
        identity: dict[str, object] = {
            "form": self.form,
            "text_key": data.text_key,
            "columns": dict(sorted(data.columns.items())),
            "max_rows": data.max_rows,
            "system": data.system,
        }
        if self.held_out_rows:
            identity["held_out"] = [self.split, self.held_out_rows, self.seed]
        return identity

    def rows(self) -> Iterator[Row | None]:
        """Every row of the split, in order; None for a conversation without an answer.

        Raises DataError at the first row that is wrong, and when there is no row at all.
        """
        held_out = self._held_out()
        empty = True
        for index, raw in enumerate(self._raw()):
            empty = False
            if held_out is not None and (index in held_out) != (self.split == "eval"):
                continue
            yield self._row(raw)
        if empty:
            raise self._empty()

    def _empty(self) -> DataError:
        return DataError(f"{self.path}: there is no row in it. Check data.path.")

    def _raw(self) -> Iterator[Record | TextPiece]:
        everything = (raw for file in self.files for raw in read_file(file))
        return islice(everything, self.data.max_rows)

    def _held_out(self) -> set[int] | None:
        """The rows of the evaluation: those with the smallest of one random draw a row, so that
        they are a function of (seed, number of rows) alone."""
        wanted = self.held_out_rows
        if not wanted:
            return None
        count = sum(1 for _ in self._raw())
        if wanted >= count:
            raise ConfigError(
                f"data.eval_samples={wanted} of {count} rows in {self.path} leaves nothing to "
                "train on. Hold out fewer, or give data.eval_path."
            )
        key = hashlib.sha256(json.dumps(["held out", self.seed]).encode()).digest()[:16]
        draws = np.random.Philox(key=np.frombuffer(key, np.uint64)).random_raw(count)
        return set(np.argsort(draws, kind="stable")[:wanted].tolist())

    def _row(self, raw: Record | TextPiece) -> Row | None:
        if isinstance(raw, TextPiece):
            if self.form != "text":
                raise DataError(
                    f"{raw.where}: a text file has no keys; data.form={self.form} needs rows "
                    "with keys. Give a JSON, TSV or CSV file, or data.form=text."
                )
            return Document(raw.text, raw.where, raw.last)
        if self.form == "text":
            return to_document(raw, text_key=self.data.text_key)
        return to_conversation(raw, self.form, columns=self.data.columns, system=self.data.system)
