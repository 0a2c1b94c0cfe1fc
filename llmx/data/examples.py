"""Examples: the sequences that a task makes of a record, which belong together, and its columns.

    Example.of(conversation)                               # one sequence, as most tasks
    Example.of(chosen, rejected, margin=0.5)               # a pair: never separated, cut together
    Example.of(Tokens(ids, weight=[0, 0, 0.5, 1.0]))       # ready tokens with weights

A task gives an ``Encoding`` to ``llmx.data.prepare``. Conversations and documents are rendered and
tokenized there, in batches on all cores; ``Tokens`` are taken as they are.
"""

from __future__ import annotations

import itertools
import keyword
import math
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from llmx.data.format.rows import Conversation
from llmx.data.source.records import Document, RecordError, Rejected, Row, Where, excerpt
from llmx.errors import ConfigError, LlmxError

if TYPE_CHECKING:
    import numpy as np

    from llmx.data.split import DatasetSplit

PER = ("token", "sequence", "example")
CUTS = ("auto", "end", "start", "prompt", "none")
"""The parts of a sequence that may be cut if its example exceeds ``data.seq_len`` tokens."""
RESERVED = frozenset(
    "tokens targets lengths samples examples sequences cut input_ids labels position_ids "
    "segment_ids weights sequence_ids example_ids".split()
)
DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64",
)  # fmt: skip
"""The usual types of a column; numpy knows more names."""
IGNORE = -100
"""The label of a position that is no target."""


@dataclass(frozen=True)
class Column:
    """Values that a task stores beside the tokens, of one type and shape."""

    name: str
    """Its name in the store and in a batch, and the keyword of ``Example.of``."""
    per: str
    """``token``, ``sequence`` or ``example``: what has one value each."""
    dtype: str = "float32"
    """A number type of numpy."""
    shape: tuple[int, ...] = ()
    """The shape of one value; empty for a number."""

    def __post_init__(self) -> None:
        usable = self.name.isidentifier() and not keyword.iskeyword(self.name)
        if not usable or self.name.startswith("_") or self.name in RESERVED:
            raise ConfigError(
                f"The column {self.name!r} of a task: a name is a Python identifier, and none of "
                f"{', '.join(sorted(RESERVED))}."
            )
        if self.per not in PER:
            raise ConfigError(f"The column {self.name}: per={self.per!r} is not in {PER}.")
        if self.dtype not in DTYPES and self.numpy_dtype.kind not in "biuf":
            raise ConfigError(
                f"The column {self.name}: dtype={self.dtype!r} is not a numeric type, e.g. float32."
            )
        if self.name == WEIGHT and (self.per, self.dtype, self.shape) != ("token", "float32", ()):
            raise ConfigError(
                'The column weight is that of the targets: Column("weight", per="token").'
            )

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        import numpy as np  # the control process declares columns, and has no use for arrays

        return np.dtype(self.dtype)

    @property
    def value_bytes(self) -> int:
        """The size of one value in bytes."""
        return self.numpy_dtype.itemsize * math.prod(self.shape)


WEIGHT = "weight"
"""The column by token that takes the place of Boolean targets. A task that declares it trains each
token with a weight of its own; 0 is no target."""
TOKEN_WEIGHT = Column(WEIGHT, per="token")


@dataclass(frozen=True)
class Tokens:
    """A sequence that is tokens already."""

    ids: Sequence[int] | np.ndarray
    weight: Sequence[float] | np.ndarray | None = None
    """The weight of each token as a target; None: 1. The first token is never a target."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Columns by token, each with as many values as there are ids."""


ExampleSequence = Conversation | Document | Tokens
"""A sequence of an example."""


@dataclass(frozen=True, slots=True)
class Example:
    """Sequences that are packed, cut and counted together."""

    sequences: tuple[ExampleSequence, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Column name -> the value of the example, or a value for each of its sequences."""
    cut: str | tuple[str, ...] = "auto"
    """The place where an example that is too long is cut, for all sequences or each of them: at its
    ``end``, its ``start``, in the ``prompt`` that its conversations share, or ``none``. ``auto``:
    the end of a single sequence (of a labelled one, the prompt), the prompt of several."""
    where: Where | None = None
    """The place of its record, if the sequences are ``Tokens``; set by preparation."""

    @classmethod
    def of(
        cls, *sequences: ExampleSequence, cut: str | tuple[str, ...] = "auto", **columns: Any
    ) -> Example:
        """An example of these sequences, with columns by sequence and by example."""
        return cls(sequences, columns, cut)

    @property
    def place(self) -> Where:
        """The place of its record in the sources, for messages."""
        where = self.where or getattr(self.sequences[0], "where", None)
        return where or Where(Path("?"), 0, "row")

    @property
    def cuts(self) -> tuple[str, ...]:
        """The part of each sequence that may be cut."""
        if isinstance(self.cut, tuple):
            return self.cut
        if self.cut != "auto":
            return (self.cut,) * len(self.sequences)
        if len(self.sequences) > 1:
            return ("prompt",) * len(self.sequences)
        keeps = isinstance(only := self.sequences[0], Conversation) and only.keeps_completion
        return ("prompt" if keeps else "end",)


@dataclass(slots=True)
class TokenSequence:
    """A sequence as it is stored."""

    tokens: np.ndarray
    """uint32 [n]"""
    targets: np.ndarray
    """bool [n]: True where the token is to be predicted; or float32, its weight."""
    columns: Mapping[Column, np.ndarray] = field(default_factory=dict)
    """Columns by token, if a task gave the sequence as tokens."""
    notes: Mapping[str, int] = field(default_factory=dict)
    """What is said of its rendering in the summary -> how often."""


EncodedExample = tuple[Example, list[TokenSequence]]
"""An example and the tokens of its sequences."""


class Encoding(Protocol):
    """The interface of a task to data preparation; ``llmx.tasks.Task`` describes each part."""

    takes: ClassVar[tuple[type[Any], ...]]
    columns: tuple[Column, ...]
    turn_weights: bool
    verbatim: ClassVar[bool]
    splits_documents: ClassVar[bool]

    @property
    def name(self) -> str: ...

    @property
    def loss_on(self) -> str: ...

    @property
    def num_embeddings(self) -> int | None: ...

    def encoding_identity(self) -> dict[str, Any]: ...

    def check_source(self, split: DatasetSplit) -> None: ...

    def encode(self, row: Any) -> Example | None: ...


def encoded(encoding: Encoding, row: Row) -> Example | None:
    """The task's example of a row; None if it leaves the row out.

    Raises:
        RecordError: the task rejects it.
        ConfigError: ``encode`` fails.
    """
    try:
        return encoding.encode(row)
    except Rejected as problem:
        raise RecordError.of(problem, row.where) from problem
    except LlmxError:
        raise
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"task={encoding.name}: encode() failed for {row.where}: "
            f"{type(error).__name__}: {excerpt(str(error))} ({at.filename}, line {at.lineno}). "
            "Correct the task, or let it raise Rejected(reason) for such rows."
        ) from error


@dataclass(frozen=True)
class Schema:
    """The columns that a task declares, and checks of what it gives: what is wrong here is wrong in
    the task, not in the data, and a ConfigError."""

    columns: tuple[Column, ...] = ()
    task: str = ""
    """The name of the task."""
    method: str = "encode()"
    """The method that makes the examples: ``encode()``, or ``rollout()``."""

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if len(set(names)) != len(names):
            raise ConfigError(f"A task declares a column twice: {', '.join(names)}.")

    @cached_property
    def weighted(self) -> bool:
        """Whether targets have float weights."""
        return any(column.name == WEIGHT for column in self.columns)

    def per(self, kind: str) -> tuple[Column, ...]:
        """The columns by token (without the weight), by sequence or by example."""
        return tuple(c for c in self.columns if c.per == kind and c.name != WEIGHT)

    def checked(self, example: Example) -> Example:
        """The example, if it is one and has the declared columns."""
        if not isinstance(example, Example):
            gives = "an Example or None" if self.method == "encode()" else "lists of Examples"
            raise self._wrong(f"{self.method} gave {type(example).__name__}; it gives {gives}.")
        if not example.sequences:
            raise self._wrong(f"{self.method} gave an Example without a sequence.")
        if not all(isinstance(part, ExampleSequence) for part in example.sequences):
            raise self._wrong(
                "a sequence of an Example is a Conversation, a Document or Tokens, not "
                f"{', '.join(type(sequence).__name__ for sequence in example.sequences)}."
            )
        if example.cut != "auto" and not (
            set(example.cuts) < set(CUTS) and len(example.cuts) == len(example.sequences)
        ):
            raise self._wrong(
                f"cut={example.cut!r}: one of {', '.join(CUTS)}, or one for each sequence."
            )
        declared_names = {column.name for column in self.columns if column.per != "token"}
        if set(example.columns) != declared_names:
            raise self._wrong(
                f"{self.method} gave the columns {listed(example.columns)}, and the task declares "
                f"{listed(declared_names)} by sequence and by example. Declare them in "
                f'`{self._declared_in}`, e.g. Column("label", per="example", dtype="int64").'
            )
        return example

    def sequence(self, tokens: Tokens, *, vocab_size: int) -> TokenSequence:
        """The sequence of tokens of this vocabulary with the declared columns. Its targets are
        bool; where the schema has weights, float32."""
        import numpy as np

        ids = np.asarray(tokens.ids)
        right = ids.ndim == 1 and ids.dtype.kind in "iu" and len(ids) > 0
        if not right or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise self._wrong(
                f"Tokens are at least one id, each from 0 to {vocab_size - 1} (the last of the "
                f"vocabulary); {self.method} gave {excerpt(str(tokens.ids))}."
            )
        weight = np.ones(len(ids)) if tokens.weight is None else tokens.weight
        targets = self.array(TOKEN_WEIGHT, weight, len(ids))
        if not self.weighted:
            if not np.isin(targets, (0, 1)).all():
                raise self._wrong(
                    "Tokens have weights that are neither 0 nor 1. Declare the column: "
                    f'{self._declared_in} = (Column("weight", per="token"),).'
                )
            targets = targets != 0
        columns = {column.name: column for column in self.per("token")}
        if tokens.columns.keys() != columns.keys():
            raise self._wrong(
                f"Tokens have the columns {listed(tokens.columns)}, and the task declares "
                f"{listed(columns)} by token in `{self._declared_in}`."
            )
        by_token = {
            columns[name]: self.array(columns[name], values, len(ids))
            for name, values in tokens.columns.items()
        }
        return TokenSequence(ids.astype(np.uint32), targets, by_token)

    def values(self, examples: Sequence[EncodedExample]) -> dict[Column, np.ndarray]:
        """The columns of examples; by token 0 where the task gave no tokens, for only it knows
        their values."""
        import numpy as np

        arrays: dict[Column, np.ndarray] = {}
        for column in self.per("token"):
            values = [np.zeros((0, *column.shape), column.numpy_dtype)]
            for sequence in itertools.chain.from_iterable(parts for _, parts in examples):
                zeros = np.zeros((len(sequence.tokens), *column.shape), column.numpy_dtype)
                values.append(sequence.columns.get(column, zeros))
            arrays[column] = np.concatenate(values)
        for column in self.per("sequence") + self.per("example"):
            of_column: list[Any] = []
            for example, _ in examples:
                value, count = example.columns[column.name], len(example.sequences)
                if column.per == "example":
                    of_column.append(value)
                elif hasattr(value, "__len__") and len(value) == count:
                    of_column.extend(value)
                else:
                    raise self._wrong(
                        f"the column {column.name} has a value for each sequence of an example, "
                        f"here {count}; the task gave {value!r}."
                    )
            arrays[column] = self.array(column, of_column, len(of_column))
        return arrays

    def array(self, column: Column, values: Any, count: int) -> np.ndarray:
        """``count`` values as an array of the column's type."""
        import numpy as np

        shape = (count, *column.shape)
        if not count:
            return np.zeros(shape, column.numpy_dtype)
        try:
            array = np.asarray(values)
            cast = array.astype(column.numpy_dtype)
            if array.shape != shape:
                problem = f"{count} values have together the shape {array.shape}, not {shape}"
            elif cast.dtype.kind == "f" and not np.isfinite(cast).all():
                problem = "a value is not finite"
            elif cast.dtype.kind != "f" and not np.array_equal(cast, array):
                problem = f"{column.dtype} does not hold every value"
            else:
                return cast
        except (TypeError, ValueError, OverflowError) as error:
            problem = str(error)
        raise self._wrong(
            f"the column {column.name} (by {column.per}, {column.dtype}) got "
            f"{excerpt(str(values))}: {problem}."
        )

    @property
    def _declared_in(self) -> str:
        return "columns" if self.method == "encode()" else "rollout_columns"

    def _wrong(self, problem: str) -> ConfigError:
        return ConfigError(f"task={self.task}: {problem}")


def listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def check_task(encoding: Encoding, dataset_split: DatasetSplit) -> None:
    """ConfigError for a source, or options of it, that the task cannot be trained on."""
    encoding.check_source(dataset_split)
    schema = Schema(encoding.columns)
    for source in dataset_split.sources:
        if source.row_type is None:
            row_titles = ", ".join(kind.title for kind in encoding.takes)
            raise ConfigError(
                f"task={encoding.name} takes {row_titles}; {source.path} is in the format "
                f"{source.form}. Map the columns with data.form and data.columns, or choose "
                "another task."
            )
    stored_columns = schema.per("sequence") + schema.per("example")
    if dataset_split.data.packing == "concat" and stored_columns:
        raise ConfigError(
            f"data.packing=concat cuts examples at seq_len; task={encoding.name} stores "
            f"{', '.join(column.name for column in stored_columns)} for each of them whole. Use "
            "data.packing=best_fit."
        )


def over_long_of(split: DatasetSplit, encoding: Encoding) -> str:
    """``data.over_long``; ``truncate`` where it is ``split`` and there is nothing to split."""
    data = split.data
    splits = encoding.splits_documents and not encoding.columns and split.has_text
    splits = splits and data.packing != "concat"  # which cuts anyway
    return "truncate" if data.over_long == "split" and not splits else data.over_long
