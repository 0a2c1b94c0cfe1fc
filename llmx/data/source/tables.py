"""Rows of Parquet and Arrow files and of ``save_to_disk`` directories, a batch at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from llmx.data.source.records import OnBad, Record, RecordError, Rejected, Where, refuse
from llmx.errors import DataError

BATCH_ROWS = 1024


def table_records(
    file: Path, stream: IO[bytes], bad: OnBad = refuse, text_unit: str = ""
) -> Iterator[Record]:
    """The records of one ``.parquet`` or ``.arrow`` file. Raises DataError where it is damaged."""
    import pyarrow as pa

    number = 0
    try:
        for batch in _batches(file):
            for value in _values(batch):
                number += 1
                where = Where(file, number, "row")
                if isinstance(value, dict):
                    yield Record(value, where, padded=True)
                else:
                    bad(RecordError.of(value, where))
    except (pa.ArrowException, OSError) as error:  # damaged content is an OSError to Arrow
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{file}, after row {number}: not a readable {file.suffix[1:]} file ({line}). It is "
            "damaged, cut off or of another kind; download it again."
        ) from error


def _batches(file: Path) -> Iterator[Any]:
    import pyarrow as pa

    if file.suffix.lower() == ".parquet":
        import pyarrow.parquet as pq

        with pq.ParquetFile(file) as parquet:
            yield from parquet.iter_batches(batch_size=BATCH_ROWS)
        return
    with pa.memory_map(str(file)) as memory:
        try:
            stream = pa.ipc.open_stream(memory)
        except pa.ArrowInvalid:  # the other of Arrow's two file formats
            reader = pa.ipc.open_file(memory)
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            batches = iter(stream)
        for batch in batches:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield batch.slice(start, BATCH_ROWS)


def _values(batch: Any) -> list[dict[str, Any] | Rejected]:
    """The records of a batch; Arrow's text may hold bytes that are none."""
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError as error:
        if batch.num_rows > 1:
            return [_values(batch.slice(row, 1))[0] for row in range(batch.num_rows)]
        around = error.object[max(0, error.start - 20) : error.start + 20]
        problem = f"a text holds bytes that are not UTF-8: {around!r}."
        return [Rejected("not UTF-8", f"{problem} Write the file again from text in UTF-8.")]


def chosen_split(
    place: Path, splits: Sequence[str], split: str | None, prefers: Sequence[str]
) -> str:
    """``split``, else the first of ``prefers`` that is there, else the only one."""
    candidates = [split] if split else [*prefers, *(splits if len(splits) == 1 else ())]
    name = next((name for name in candidates if name in splits), None)
    if name is None:
        raise DataError(
            f"{place}: there is no split {candidates[0]!r}; it has {', '.join(splits)}. "
            f"Set data.split={splits[0]}."
        )
    return name


def saved_files(
    place: Path, *, split: str | None, prefers: Sequence[str] = ("train",)
) -> list[Path]:
    """The Arrow files of a ``save_to_disk`` directory, in the dataset's order; of a ``DatasetDict``
    those of one split (``chosen_split``)."""
    if (place / "dataset_dict.json").is_file():
        splits = json.loads((place / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        return saved_files(place / chosen_split(place, splits, split, prefers), split=None)
    state = json.loads((place / "state.json").read_text(encoding="utf-8"))
    files = [place / entry["filename"] for entry in state["_data_files"]]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise DataError(f"{missing[0]}: {place / 'state.json'} names it, and it is not there.")
    return files
