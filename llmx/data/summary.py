"""What became of the rows of a source: one paragraph for a log, lines for a table."""

from __future__ import annotations

from typing import Any

from llmx.data.progress import MIB, clock, size_text
from llmx.data.store import SampleStore


def summary(store: SampleStore) -> str:
    """One paragraph about a store: rows, tokens, what was dropped and how full samples are."""
    meta = store.meta
    lengths = meta["row_length_percentiles"]
    lost = [f"{count:,} {reason}" for reason, count in meta["dropped"].items()]
    if meta["rejected"]:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in meta["rejected"].items())
        lost.append(f"rejected, see {meta['rejected_file']}: {reasons}")
    if meta["truncated"]:
        lost.append(f"{meta['truncated']:,} truncated to {meta['seq_len']} tokens")
    fill = meta["num_tokens"] / (meta["num_samples"] * meta["seq_len"])
    fate = ", ".join(lost) or "no row dropped or truncated"
    return (
        f"{_rows(meta)} in {meta['num_samples']:,} samples of up to "
        f"{meta['seq_len']} tokens ({fill:.1%} full); {meta['num_tokens']:,} tokens, "
        f"{meta['num_target_tokens']:,} of them learned; row length median {lengths['50']}, "
        f"90 % {lengths['90']}, longest {lengths['100']}; form {meta['form']}, template "
        f"{meta['template'] or 'none'}; {fate}."
    )


def report(meta: dict[str, Any], *, found: bool) -> list[tuple[str, str]]:
    """(name, value) lines about a store, from its meta.json."""
    tokens, samples = meta["num_tokens"], meta["num_samples"]
    lengths = meta["row_length_percentiles"]
    names = {"0": "shortest", "50": "median", "100": "longest"}
    lines = [
        ("sources", ", ".join(meta["sources"][:3]) + (" ..." if meta["sources"][3:] else "")),
        ("form", _form(meta)),
        ("rows", _rows_read(meta)),
        ("left out", _reasons(meta)),
        ("truncated", _truncated(meta)),
        ("tokens", f"{tokens:,}, of which {meta['num_target_tokens']:,} are learned"),
        (
            "samples",
            f"{samples:,} of up to {meta['seq_len']:,} tokens, "
            f"{tokens / max(1, samples * meta['seq_len']):.1%} full",
        ),
        (
            "row length",
            ", ".join(f"{names.get(rank, rank + ' % up to')} {n:,}" for rank, n in lengths.items())
            + (" (as cut)" if meta["truncated"] else ""),
        ),
    ]
    if "encoder" not in meta:  # prepared by an earlier llmx
        return lines
    seconds = meta["tokenize_seconds"]
    took = "less than a second" if seconds < 1 else clock(seconds)
    rate = f" ({meta['text_bytes'] / MIB / seconds:,.1f} MiB/s)" if seconds >= 1 else ""
    hosts = meta.get("hosts", 1)
    workers = f"{meta['workers']} cores" + (f" on {hosts} hosts" if hosts > 1 else "")
    lines.append(("encoder", f"{meta['encoder']}, {workers}"))
    lines.append(
        (
            "time",
            f"{'found again; it took' if found else 'took'} {took} for "
            f"{size_text(meta['text_bytes'])} of text{rate}"
            + (f", from row {meta['resumed_at_row']:,} on" if meta["resumed_at_row"] else ""),
        )
    )
    return lines


def _form(meta: dict[str, Any]) -> str:
    if meta["template"] is None:
        return f"{meta['form']}, no template"
    own = "the tokenizer's own template"
    return f"{meta['form']}, {own if meta['template'] == 'own' else meta['template']}"


def _truncated(meta: dict[str, Any]) -> str:
    """What ``seq_len`` costs; rows are cut at their end."""
    if not meta["truncated"]:
        return "nothing"
    cut_off = meta.get("truncated_tokens", 0)
    part = cut_off / (cut_off + meta["num_tokens"])
    lost = f"; {cut_off:,} tokens ({part:.1%} of all) are cut off" if cut_off else ""
    rows = "1 row" if meta["truncated"] == 1 else f"{meta['truncated']:,} rows"
    return f"{rows} to {meta['seq_len']:,} tokens{lost}"


def _reasons(meta: dict[str, Any]) -> str:
    """How many rows are not in the store, by reason."""
    groups = (meta["dropped"], meta.get("left_out", {}), meta.get("rejected", {}))
    parts = [f"{count:,} {reason}" for group in groups for reason, count in group.items()]
    if meta.get("rejected_file"):
        parts.append(f"rejected rows are in {meta['rejected_file']}")
    return "; ".join(parts) or "nothing"


def _rows(meta: dict[str, Any]) -> str:
    """``12 rows``; ``12 rows, cut into 30 pieces`` where samples cut them."""
    count = meta["num_rows"]
    if meta["identity"]["packing"] != "concat":
        return f"{count:,} rows"
    return f"{meta['rows_read']:,} rows, cut into {count:,} pieces,"


def _rows_read(meta: dict[str, Any]) -> str:
    if meta["identity"]["packing"] != "concat":
        return f"{meta['rows_read']:,} read, {meta['num_rows']:,} in samples"
    return f"{meta['rows_read']:,} read; samples cut them into {meta['num_rows']:,} pieces"
