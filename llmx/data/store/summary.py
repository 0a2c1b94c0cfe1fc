"""What became of the records: a paragraph for a log, lines for a table, a histogram of lengths."""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path
from typing import Any

from llmx import text as human
from llmx.data.source.records import names
from llmx.data.source.rejected import counted
from llmx.data.store.samples import SampleStore
from llmx.data.store.truncation import LENGTH_REASONS, LENGTH_STEP
from llmx.text import clock, plural, printable


def summary(store: SampleStore) -> str:
    """One paragraph about a store: rows, tokens, what was dropped and how full samples are."""
    meta = store.meta
    lengths = meta["row_length_percentiles"]
    lost = []
    if meta["dropped"]:
        lost.append(f"left out: {counted(meta['dropped'])}")
    if meta["rejected"]:
        listed = printable(str(meta["rejected_file"]))
        lost.append(f"rejected (see {listed}): {counted(meta['rejected'])}")
    if meta["truncated"]:
        lost.append(f"{plural(meta['truncated'], 'row')} truncated to {meta['seq_len']} tokens")
    if unanswered := meta["unanswered_turns"]:
        lost.append(f"{_unanswered(unanswered)} left out")
    fill = meta["num_tokens"] / (meta["num_samples"] * meta["seq_len"])
    fate = "; ".join(lost) or "no row left out or truncated"
    if ignored := meta["ignored_columns"]:
        fate += f"; ignored columns: {names(ignored)}"
    return (
        f"{_rows(meta)} in {plural(meta['num_samples'], 'sample')} of up to "
        f"{meta['seq_len']} tokens ({fill:.1%} full); {plural(meta['num_tokens'], 'token')}, "
        f"of which {plural(meta['num_target_tokens'], 'target token')}; row length median "
        f"{lengths['50']}, p90 {lengths['90']}, longest {lengths['100']}; format "
        f"{meta['form']}, template {meta['template'] or 'none'}; {fate}."
    )


WARN_FROM = 0.02
"""Part of the rows, or of the tokens, whose loss is a warning."""
NOT_LOST = ("identical to an earlier row",)
"""Reasons for which rows are left out because it was asked for (``data.deduplicate``)."""


def lost_rows(meta: dict[str, Any]) -> list[str]:
    """A warning for each cause that loses more than 2 % of the rows or tokens of a store."""
    read = meta["rows_read"]
    too_long = {name: n for name, n in meta["dropped"].items() if name in LENGTH_REASONS}
    others = {**meta["dropped"], **meta["rejected"]}
    for reason in (*too_long, *NOT_LOST):
        others.pop(reason, None)
    dropped = sum(too_long.values())
    rows = meta["truncated"] + dropped
    cut_off = meta["truncated_tokens"]
    part = cut_off / max(1, cut_off + meta["num_tokens"])
    warnings = []
    if rows > WARN_FROM * read or part > WARN_FROM:
        fates = [f"{n:,} dropped ({reason})" for reason, n in too_long.items()]
        if meta["truncated"]:
            fates.append(f"{meta['truncated']:,} truncated ({part:.1%} of the tokens cut off)")
        warnings.append(
            f"{rows:,} of {plural(read, 'row')} ({rows / read:.1%}) exceed data.seq_len="
            f"{meta['seq_len']}: {', '.join(fates)}.{_advice(meta, dropped)}"
        )
    unused = sum(others.values())
    if unused > WARN_FROM * read:
        warning = f"{unused:,} of {plural(read, 'row')} ({unused / read:.1%}) are not used: "
        warning += f"{counted(others)}."
        if meta["rejected"]:
            warning += f" Rejected rows are listed in {meta['rejected_file']}."
        warnings.append(warning)
    return [f"WARNING: {meta['split']} data: {warning}" for warning in warnings]


def _advice(meta: dict[str, Any], dropped: int) -> str:
    """The ``data.seq_len`` with which 95 % and 99 % of the rows stay whole, and of the tokens."""
    seq_len = meta["seq_len"]
    lengths = {int(length): count for length, count in meta["overflow"].items()}
    if not lengths:
        return ""

    def over(limit: int) -> int:
        return sum(count * max(0, length - limit) for length, count in lengths.items())

    tokens = int(meta["num_tokens"]) + dropped * seq_len + over(seq_len)

    def lost(limit: int) -> float:
        rows = sum(count for length, count in lengths.items() if length > limit)
        return float(max(rows / meta["rows_read"], over(limit) / tokens))

    limits = range(seq_len, max(lengths) + LENGTH_STEP, LENGTH_STEP)
    keeps = {
        f"{kept} %": limits[bisect_left(limits, kept / 100 - 1, key=lambda limit: -lost(limit))]
        for kept in (95, 99)
    }
    listed = [f"data.seq_len={n} keeps {part}" for part, n in keeps.items() if n > seq_len]
    return f" {', '.join(listed)} of the rows and tokens." if listed else ""


def report(meta: dict[str, Any], *, found: bool) -> list[tuple[str, str]]:
    """(name, value) lines about a store, from its meta.json."""
    tokens, samples = meta["num_tokens"], meta["num_samples"]
    lengths = meta["row_length_percentiles"]
    ranks = {"0": "shortest", "50": "median", "100": "longest"}
    lines = [
        ("sources", ", ".join(meta["sources"][:3]) + (" ..." if meta["sources"][3:] else "")),
        ("format", _form(meta)),
        ("rows", _rows_read(meta)),
        ("left out", counted(meta["dropped"]) or "none"),
        ("rejected", _rejected(meta)),
        ("truncated", _truncated(meta)),
        ("tokens", f"{tokens:,}, of which {plural(meta['num_target_tokens'], 'target token')}"),
        (
            "samples",
            f"{samples:,}, each of up to {meta['seq_len']:,} tokens, "
            f"{tokens / max(1, samples * meta['seq_len']):.1%} full",
        ),
        (
            "row length",
            ", ".join(f"{ranks.get(rank, rank + ' % up to')} {n:,}" for rank, n in lengths.items())
            + (" (as cut)" if meta["truncated"] else ""),
        ),
    ]
    if stored := meta["columns"]:
        listed = ", ".join(f"{column['name']} by {column['per']}" for column in stored)
        lines.insert(6, ("columns", listed))
    if ignored := meta["ignored_columns"]:
        lines.insert(3, ("ignored columns", names(ignored)))
    if unanswered := meta["unanswered_turns"]:
        lines.insert(3, ("left-out turns", _unanswered(unanswered)))
    seconds = meta["tokenize_seconds"]
    took = "less than a second" if seconds < 1 else clock(seconds)
    rate = f" ({human.size(meta['text_bytes'] / seconds)}/s)" if seconds >= 1 else ""
    lines.append(("encoder", f"{meta['encoder']}, {plural(meta['workers'], 'core')}"))
    lines.append(
        (
            "time",
            f"{'found prepared; preparing took' if found else 'preparing took'} {took} for "
            f"{human.size(meta['text_bytes'])} of text{rate}"
            + (f", resumed at row {meta['resumed_at_row']:,}" if meta["resumed_at_row"] else ""),
        )
    )
    return lines


def _unanswered(turns: int) -> str:
    return f"{plural(turns, 'turn')} after the last answer of a row"


def _form(meta: dict[str, Any]) -> str:
    if meta["template"] is None:
        return f"{meta['form']}, no template"
    own = "the tokenizer's own template"
    return f"{meta['form']}, {own if meta['template'] == 'own' else meta['template']}"


def _truncated(meta: dict[str, Any]) -> str:
    """What ``seq_len`` costs."""
    if not meta["truncated"]:
        return "none"
    cut_off = meta["truncated_tokens"]
    part = cut_off / (cut_off + meta["num_tokens"])
    lost = f"; {plural(cut_off, 'token')} ({part:.1%} of all) cut off" if cut_off else ""
    return f"{plural(meta['truncated'], 'row')} to {meta['seq_len']:,} tokens{lost}"


def _rejected(meta: dict[str, Any]) -> str:
    if not meta["rejected"]:
        return "none"
    return f"{counted(meta['rejected'])}; listed with the reasons in {meta['rejected_file']}"


def _rows(meta: dict[str, Any]) -> str:
    """``12 rows``; ``12 rows, cut into 30 pieces`` where samples cut them."""
    count = meta["num_examples"]
    if _is_cut(meta):
        lost = sum(meta["dropped"].values()) + sum(meta["rejected"].values())
        return f"{plural(meta['rows_read'] - lost, 'row')}, cut into {plural(count, 'piece')},"
    if meta["num_sequences"] != count:
        return f"{plural(count, 'example')} of {plural(meta['num_sequences'], 'sequence')}"
    return plural(count, "row")


def _is_cut(meta: dict[str, Any]) -> bool:
    """Whether a row may be several examples."""
    return bool(meta["identity"]["packing"] == "concat" or meta["split_sequences"])


def _rows_read(meta: dict[str, Any]) -> str:
    if not _is_cut(meta):
        several = meta["num_sequences"] != meta["num_examples"]
        of = f" (of {plural(meta['num_sequences'], 'sequence')})" if several else ""
        return f"{meta['rows_read']:,} read, {meta['num_examples']:,}{of} in samples"
    return f"{meta['rows_read']:,} read; cut into {plural(meta['num_examples'], 'piece')}"


def draw_histogram(meta: dict[str, Any], path: Path) -> None:
    """Write a picture of the rows by length to ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    edges, rows = (meta["row_length_histogram"][key] for key in ("edges", "rows"))
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    axes.bar(edges[:-1], rows, width=edges[1] - edges[0], align="edge", color="#4c78a8")
    if edges[-1] >= meta["seq_len"]:
        axes.axvline(meta["seq_len"], color="#e45756", linestyle="--")
        axes.text(
            meta["seq_len"], 0.98, f" seq_len {meta['seq_len']:,}", color="#e45756",
            transform=axes.get_xaxis_transform(), va="top",
        )  # fmt: skip
    axes.set_xlim(left=0)
    axes.set_xlabel("tokens of a row")
    axes.set_ylabel("rows")
    lengths = meta["row_length_percentiles"]
    axes.set_title(
        f"{sum(rows):,} rows, {meta['split']}: median {lengths['50']:,}, p90 "
        f"{lengths['90']:,}, longest {lengths['100']:,} tokens",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
