"""Makes one store on this host: read, tokenize, spool, pack; after a kill it goes on.

A disk that fills up loses nothing either: what was noted by then stays, and is gone on from.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import time
from collections import Counter
from itertools import islice

from llmx import text as human
from llmx.data.blocks import RowEncoder
from llmx.data.encode import parallel_tokenizers
from llmx.data.finish import Tally, finish
from llmx.data.fit import Fit
from llmx.data.progress import Progress
from llmx.data.rejects import Rejects, RejectsUnwritten
from llmx.data.spool import Spool
from llmx.data.store import SampleStore, cannot_write
from llmx.data.wanted import Wanted
from llmx.data.workers import worker_count
from llmx.errors import DataError, LlmxError


def make_store(wanted: Wanted) -> SampleStore:
    """Prepare ``wanted``; the caller holds its lock."""
    partial = wanted.path.with_name(f"{wanted.path.name}.partial")
    try:
        spool = Spool(partial)
    except OSError as error:
        raise cannot_write(partial.parent, error) from error
    progress = progress_of(wanted, f"Preparing {wanted.path.name}")
    try:
        store = _filled(wanted, spool, progress)
    except (LlmxError, OSError) as error:
        if isinstance(error, RejectsUnwritten):
            raise DataError(f"{error} {_kept(spool)}") from error
        if is_full(error):
            raise _disk_full(wanted, spool, progress) from error
        # A row that is wrong: nothing to go on from. After a kill there is.
        spool.remove()
        if isinstance(error, OSError):
            raise cannot_write(partial.parent, error) from error
        raise
    spool.remove()
    return store


def _filled(wanted: Wanted, spool: Spool, progress: Progress) -> SampleStore:
    started = time.monotonic()
    note, source = spool.note, wanted.source
    counts: Counter[str] = Counter(note.get("counts", {}))
    resumed_rows = counts["rows"]
    refused = Rejects(spool.directory / "refused.jsonl", state=note.get("refused"))
    workers = worker_count(wanted.data.num_workers)
    with parallel_tokenizers(workers), progress:
        encoder = _encode(wanted, spool, progress, counts, refused, workers=workers)
    tally = Tally(counts, source.left_out, (source.rejects, refused), source.ignored_columns)
    how = {
        "encoder": encoder,
        "workers": workers,
        "hosts": 1,
        "text_bytes": progress.bytes,
        "tokenize_seconds": round(time.monotonic() - started, 3),
        "resumed_at_row": resumed_rows,
    }
    try:
        return finish(wanted, spool, tally, how=how, split=source.split)
    finally:
        refused.close()


def _encode(
    wanted: Wanted,
    spool: Spool,
    progress: Progress,
    counts: Counter[str],
    refused: Rejects,
    *,
    workers: int,
) -> str:
    """All rows into the spool, from where it stands; what they were encoded with.

    A function of its own, so that its tables are gone when samples are put together.
    """
    source, note = wanted.source, spool.note
    encoder = RowEncoder(source, wanted.renderer, workers=workers, refused=refused)
    fit = Fit(wanted.data, counts, state=note.get("fit"))
    source.look_ahead()
    rows = source.rows()
    if counts["rows"]:
        next(islice(rows, counts["rows"], counts["rows"]), None)
        progress.begin_here()
    for encoded in encoder.blocks(rows, begins=not fit.state[0]):
        counts.update(encoded.counts)
        block, joins = fit(encoded.rows, encoded.block)
        spool.append(block, joins=joins)
        progress.add(size=encoded.size, tokens=len(encoded.block.tokens))
        spool.keep({"counts": dict(counts), "fit": fit.state, "refused": refused.state})
    return encoder.description


def progress_of(wanted: Wanted, title: str) -> Progress:
    """Progress of reading all of a source."""
    source = wanted.source
    return Progress(title, total_bytes=source.total_bytes, read=lambda: source.meter.bytes)


def is_full(error: BaseException | None) -> bool:
    """Whether a full disk (or a quota) is behind an error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False


def _disk_full(wanted: Wanted, spool: Spool, progress: Progress) -> DataError:
    """Names the path, what is kept and how much is needed. What was noted stays."""
    partial = spool.directory
    # Samples that are put together from anywhere are written beside the rows.
    times = 1 if wanted.data.packing == "concat" else 2
    written = times * sum(file.stat().st_size for file in partial.iterdir())
    done = progress.fraction()
    need = f"about {human.size(written / done)}" if done else f"more than {human.size(written)}"
    directory = partial.parent
    stays = _kept(spool)
    free = human.size(shutil.disk_usage(directory).free)
    return DataError(
        f"The disk of {directory} is full: {wanted.path.name} needs {need} in all, "
        f"{free} are free now. {stays} What was prepared earlier is untouched. Free some space, or "
        "set data.cache_dir to another disk."
    )


def _kept(spool: Spool) -> str:
    """Closes the spool at what was noted last, and says what that is."""
    partial = spool.directory
    for _ in ("tokens", "targets"):  # the last bytes cannot be flushed, and nobody wants them
        with contextlib.suppress(OSError):
            spool.close()
    spool = Spool(partial)  # cuts off what was not noted
    rows = spool.note.get("counts", {}).get("rows", 0)
    if rows:
        spool.close()
        return (
            f"The first {rows:,} rows are kept in {partial}; the next preparation resumes "
            "there. Remove the directory to begin anew."
        )
    spool.remove()
    return "Nothing of it is kept."
