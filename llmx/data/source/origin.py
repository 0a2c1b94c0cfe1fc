"""What an experiment's rows are read from: which sources, in which form, how large, how named."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from llmx.config import DataConfig, SourceConfig
from llmx.data.format.preferences import Preference
from llmx.data.source.part import TAKEN, Part
from llmx.errors import ConfigError

FORMS_VERSION = 3
"""Raised when a text becomes another row than before; for rows with columns it is enough to
raise ``part.COLUMNS_VERSION``, which leaves prepared text as it is."""


@dataclass(frozen=True)
class Origin:
    """The sources of one split of the experiment's data. Nothing is read before it is asked for."""

    data: DataConfig
    seed: int
    split: str
    takes: tuple[type, ...] = field(default=TAKEN, kw_only=True)
    """The types of rows that are wanted (``Encoding.takes``)."""

    @cached_property
    def parts(self) -> list[Part]:
        """The sources that are read for this split, in order."""
        data = self.data
        if self.split == "eval" and data.eval_path:
            sources = [SourceConfig(path=data.eval_path)]
        else:
            sources = data.sources or [SourceConfig(path=data.path)]
        for index, source in enumerate(sources):
            if not source.path:
                where = f"data.sources[{index}].path" if data.sources else "data.path"
                raise ConfigError(f"{where} is empty. Name a file, a directory or a Hub id.")
            if not source.weight > 0:
                raise ConfigError(
                    f"data.sources[{index}].weight={source.weight}: a weight is positive; leave "
                    "out a source that is not wanted."
                )
        return [Part.of(data, source, split=self.split, takes=self.takes) for source in sources]

    @property
    def path(self) -> str:
        """What is read, for messages: one path, or several."""
        return ", ".join(part.path for part in self.parts)

    @property
    def held_out_rows(self) -> int:
        """Rows of these sources that belong to the evaluation; 0 where it has its own."""
        own = self.data.eval_path or (self.data.path == "demo" and not self.data.sources)
        return 0 if own else self.data.eval_samples

    @property
    def ignored_columns(self) -> list[str]:
        """Columns that were read up to now and not used, sorted."""
        return sorted(set().union(*(part.ignored for part in self.parts)))

    @cached_property
    def files(self) -> list[Path]:
        """All files on this machine, in the order in which they are read."""
        return [file for part in self.parts for file in part.files]

    @cached_property
    def form(self) -> str:
        """The form of the rows; where sources differ, their forms joined by ``+``."""
        forms = list(dict.fromkeys(part.form for part in self.parts))
        # A task that takes no pairs learns the better answer.
        named = (
            {} if Preference in self.takes else {"preference": "preference (the chosen answers)"}
        )
        return "+".join(named.get(form, form) for form in forms)

    @property
    def has_text(self) -> bool:
        """Whether there are documents among the rows."""
        return any(part.form == "text" for part in self.parts)

    @property
    def has_conversations(self) -> bool:
        return any(part.form != "text" for part in self.parts)

    @cached_property
    def source_bytes(self) -> int:
        """Bytes of the files on disk; 0 where they are not here (Hub)."""
        return sum(file.stat().st_size for file in self.files)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes that ``rows()`` reads from disk, on ``meter``; 0 where nobody knows."""
        limited = any(part.max_rows is not None or part.hub for part in self.parts)
        if limited or self.data.max_rows is not None:
            return 0
        return sum(
            file.stat().st_size * self.copies(part) for part in self.parts for file in part.files
        )

    def copies(self, part: Part) -> int:
        """How often a source is read for its rows."""
        return math.ceil(part.weight) if self.split == "train" else 1

    def digests(self, *, cache: Path) -> list[str]:
        """What names the bytes of each file or Hub data set; see ``digest_of`` for ``cache``."""
        return [digest for part in self.parts for digest in part.digests(cache=cache)]

    def identity(self) -> dict[str, object]:
        """What decides which rows there are, beside the bytes of the files."""
        data = self.data
        identity: dict[str, object] = {
            "forms_version": FORMS_VERSION,
            "parts": [part.identity() for part in self.parts],
            "num_files": [len(part.files) for part in self.parts],
            "max_rows": data.max_rows,
            "on_bad_row": data.on_bad_row,
            "deduplicate": data.deduplicate,
        }
        if self.held_out_rows:
            identity["held_out"] = [self.split, self.held_out_rows, self.seed]
        if any(part.weight != 1 for part in self.parts):
            identity["seed"] = self.seed
        return identity

    @property
    def divisible(self) -> bool:
        """Whether each row is taken or not whatever its number: then files can be read apart."""
        data = self.data
        return not (
            any(p.hub or p.max_rows is not None or p.weight % 1 for p in self.parts)
            or self.held_out_rows
            or data.deduplicate
            or data.max_rows is not None
        )
