"""Shows a store: lines for a table or a log, a histogram of lengths, and samples token by token."""

from __future__ import annotations

import contextlib
import json
from bisect import bisect_left
from collections import Counter
from typing import Any

import numpy as np

from llmx import text as human
from llmx.data.format.templates import special_tokens
from llmx.data.source.records import counted, names
from llmx.data.store.samples import Sample, SampleStore
from llmx.data.tokenize.truncation import LENGTH_REASONS, LENGTH_STEP
from llmx.errors import DataError
from llmx.text import clock, plural, printable
from llmx.tolerance import rule, too_much


def summary(store: SampleStore) -> str:
    """One paragraph about a store, for a log."""
    lines = report(store.meta, was_prepared=True)
    listed = [line for line in lines if line[0] not in NOT_IN_LOGS and line[1] != "none"]
    return "; ".join(f"{name}: {value}" for name, value in listed) + "."


NOT_IN_LOGS = ("sources", "encoder", "time")
WARN_FROM = 0.02
"""Part of the rows, or of the tokens, whose loss is a warning."""
NOT_LOST = ("identical to an earlier row",)
"""Reasons for which rows are left out because it was asked for (``data.deduplicate``)."""


def lost_rows(meta: dict[str, Any], *, longest: int | None = None) -> list[str]:
    """A warning for each cause that loses more than 2 % of the rows or tokens of a store.
    ``longest``: the most tokens that the model takes."""
    read = meta["rows_read"]
    too_long = {name: n for name, n in meta["dropped"].items() if name in LENGTH_REASONS}
    unused_reasons = {**meta["dropped"], **meta["rejected"]}
    for reason in (*too_long, *NOT_LOST):
        unused_reasons.pop(reason, None)
    dropped = sum(too_long.values())
    rows = meta["truncated"] + dropped
    part = _cut_share(meta)
    warnings = []
    if rows > WARN_FROM * read or part > WARN_FROM:
        fates = [f"{n:,} dropped ({reason})" for reason, n in too_long.items()]
        if meta["truncated"]:
            fates.append(f"{meta['truncated']:,} truncated ({part:.1%} of the tokens cut off)")
        warnings.append(
            f"{rows:,} of {plural(read, 'row')} ({rows / read:.1%}) exceed data.seq_len="
            f"{meta['seq_len']}: {', '.join(fates)}.{_advice(meta, dropped, longest)}"
        )
    unused = sum(unused_reasons.values())
    if unused > WARN_FROM * read:
        warning = f"{unused:,} of {plural(read, 'row')} ({unused / read:.1%}) are not used: "
        warning += f"{counted(unused_reasons)}."
        if meta["rejected_file"]:
            warning += f" Rejected rows are listed in {meta['rejected_file']}."
        warnings.append(warning)
    return [f"WARNING: {meta['split']} data: {warning}" for warning in warnings]


def check_lost(meta: dict[str, Any], *, max_lost: float, longest: int | None = None) -> None:
    """Raise DataError where more of the rows or tokens of a store is lost than ``max_lost``."""
    fates = Counter(meta["dropped"]) + Counter(meta["rejected"])
    rows = fates.total() - sum(fates[reason] for reason in NOT_LOST)
    losses = [(rows / max(1, meta["rows_read"]), rows), (_cut_share(meta), meta["truncated"])]
    if any(too_much(*loss, max_lost=max_lost) for loss in losses):
        causes = [text.removeprefix("WARNING: ") for text in lost_rows(meta, longest=longest)]
        raise DataError("\n".join([*causes, rule(max(losses)[0], max_lost=max_lost)]))


def _cut_share(meta: dict[str, Any]) -> float:
    """The fraction of the tokens that was cut off."""
    cut_off = meta["truncated_tokens"]
    return float(cut_off / max(1, cut_off + meta["num_tokens"]))


def _advice(meta: dict[str, Any], dropped: int, longest: int | None) -> str:
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
        limits[bisect_left(limits, percent / 100 - 1, key=lambda limit: -lost(limit))]: percent
        for percent in (95, 99)
    }
    possible = {n: part for n, part in keeps.items() if seq_len < n <= (longest or n)}
    listed = [f"data.seq_len={n} keeps {part} %" for n, part in possible.items()]
    advice = f" {', '.join(listed)} of the rows and tokens." if listed else ""
    if longest is not None and max(keeps) > longest:
        advice += f" The model takes at most {longest} tokens: shorten the longer rows first."
    return advice


def report(meta: dict[str, Any], *, was_prepared: bool) -> list[tuple[str, str]]:
    """(name, value) lines about a store, from its meta.json."""
    tokens, samples, seq_len = meta["num_tokens"], meta["num_samples"], meta["seq_len"]
    notes = "; ".join(f"{note}: {value}" for note, value in meta.get("notes", {}).items())
    unanswered = meta["unanswered_turns"]
    rejected = counted(meta["rejected"]) or "none"
    if meta["rejected"]:
        rejected += f"; listed with the reasons in {meta['rejected_file']}"
    ranks = {"0": "shortest", "50": "median", "100": "longest"}
    lengths = ", ".join(
        f"{ranks.get(rank, rank + ' % up to')} {length:,}"
        for rank, length in meta["row_length_percentiles"].items()
    )
    seconds = meta["tokenize_seconds"]
    took = "less than a second" if seconds < 1 else clock(seconds)
    rate = f" ({human.size(meta['text_bytes'] / seconds)}/s)" if seconds >= 1 else ""
    lines = [
        ("sources", ", ".join(meta["sources"][:3]) + (" ..." if meta["sources"][3:] else "")),
        ("format", _form(meta)),
        ("rows", _rows(meta)),
        ("notes", notes),
        (
            "left-out turns",
            f"{plural(unanswered, 'turn')} after the last answer of a row" if unanswered else "",
        ),
        ("ignored columns", names(meta["ignored_columns"])),
        ("left out", counted(meta["dropped"]) or "none"),
        ("rejected", rejected),
        ("truncated", _truncated(meta)),
        (
            "columns",
            ", ".join(f"{stored['name']} by {stored['per']}" for stored in meta["columns"]),
        ),
        ("tokens", f"{tokens:,}, of which {plural(meta['num_target_tokens'], 'target token')}"),
        (
            "samples",
            f"{samples:,}, each of up to {seq_len:,} tokens, "
            f"{tokens / max(1, samples * seq_len):.1%} full",
        ),
        ("row length", lengths + (" (as cut)" if meta["truncated"] else "")),
        ("encoder", f"{meta['encoder']}, {plural(meta['workers'], 'core')}"),
        (
            "time",
            f"{'found prepared; preparing took' if was_prepared else 'preparing took'} {took} for "
            f"{human.size(meta['text_bytes'])} of text{rate}",
        ),
    ]
    return [(name, value) for name, value in lines if value]


def _form(meta: dict[str, Any]) -> str:
    if meta["template"] is None:
        return f"{meta['form']}, no template"
    template = "the tokenizer's own template" if meta["template"] == "own" else meta["template"]
    return f"{meta['form']}, {template}"


def _rows(meta: dict[str, Any]) -> str:
    """The rows that were read, and the examples in samples that they became."""
    read, examples = f"{meta['rows_read']:,} read", meta["num_examples"]
    if meta["identity"]["packing"] == "concat" or meta["split_sequences"]:
        return f"{read}; cut into {plural(examples, 'piece')}"
    is_grouped = meta["num_sequences"] != examples
    of_sequences = f" (of {plural(meta['num_sequences'], 'sequence')})" if is_grouped else ""
    return f"{read}, {examples:,}{of_sequences} in samples"


def _truncated(meta: dict[str, Any]) -> str:
    """The rows that were truncated to ``seq_len``, and the tokens cut off."""
    if not meta["truncated"]:
        return "none"
    cut_off, part = meta["truncated_tokens"], _cut_share(meta)
    lost = f"; {plural(cut_off, 'token')} ({part:.1%} of all) cut off" if cut_off else ""
    return f"{plural(meta['truncated'], 'row')} to {meta['seq_len']:,} tokens{lost}"


def draw_histogram(meta: dict[str, Any]) -> str:
    """A bar for the rows of each step of length, in a line with its longest and its number."""
    edges, rows = (meta["row_length_histogram"][key] for key in ("edges", "rows"))
    highest = max(rows)
    return "\n".join(
        f"up to {edge - 1:>9,}  {'█' * round(BAR * count / highest):{BAR}}  {count:,}"
        for edge, count in zip(edges[1:], rows, strict=True)
    )


BAR = 30
"""Characters of the longest bar."""


# Samples token by token: which are target tokens, which are special, where sequences meet. On a
# terminal, target tokens are green, special tokens have a background, and neighbours differ in
# shade; elsewhere runs of target tokens stand between « and », special tokens between ⟨ and ⟩, and
# a | between tokens. What the data holds cannot steer the terminal.

STYLES = {
    # (target, special): at even places, at odd ones, so that each token can be seen
    (True, False): ("bold green", "green"),
    (False, True): ("black on yellow", "black on yellow"),
    (True, True): ("black on green", "black on green"),
    (False, False): ("", "dim"),
}
SHOWN_SEQUENCES = 6
"""Sequences that are shown of a sample; a packed one may have hundreds."""
BYTES_OF_A_CHARACTER = 4
"""A character may be so many tokens, none of which can be shown alone."""


def print_samples(store: SampleStore, tokenizer: Any, *, count: int) -> None:
    """Print the first ``count`` samples of a store."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    colour = console.is_terminal
    if colour:
        names = ("target", "special", "both")
        styled = [(name, even) for name, (even, _) in zip(names, STYLES.values(), strict=False)]
        console.print(Text.assemble("Tokens: ", *((f"{name} ", style) for name, style in styled)))
    else:
        console.print("Tokens: «target», ⟨special⟩, a|b are two")
    for index in range(min(count, len(store))):
        sample = store[index]
        contents = plural(
            len(sample.sequence_starts), "example" if sample.example_starts is None else "sequence"
        )
        if sample.example_starts is not None:
            contents = f"{plural(len(sample.example_starts), 'example')} of {contents}"
        console.print(
            f"\nsample {index}: {plural(len(sample.tokens), 'token')}, "
            f"{plural(int(sample.targets.sum()), 'target token')}, {contents}"
        )
        lines = sample_lines(sample, tokenizer, colour=colour)  # two of each sequence
        for line in lines[: 2 * SHOWN_SEQUENCES]:
            console.print(Text.assemble(*line), soft_wrap=True)
        if (num_hidden := len(lines) // 2 - SHOWN_SEQUENCES) > 0:
            console.print(f"... and {num_hidden} more")
        for column in store.columns:
            if column.per != "token":
                values = _values(sample.columns[column.name])
                name = f"{column.name} by {column.per}: "
                console.print(Text(name + printable(values)), soft_wrap=True)


def _values(values: np.ndarray) -> str:
    """Values as JSON; zero-padded rows of bytes that are text become texts."""
    if values.dtype == np.uint8 and values.ndim == 2:
        with contextlib.suppress(UnicodeDecodeError):
            texts = [row.tobytes().rstrip(b"\0").decode("utf-8") for row in values]
            return json.dumps(texts, ensure_ascii=False)
    return json.dumps(values.tolist())


def sample_lines(sample: Sample, tokenizer: Any, *, colour: bool) -> list[list[tuple[str, str]]]:
    """Lines of (text, style): a line that marks the beginning of each sequence, with its
    weights where it has such, then its tokens."""
    special_ids = set(special_tokens(tokenizer).values())
    lines: list[list[tuple[str, str]]] = []
    spans = zip(_titles(sample), sample.bounds(), sample.sequences(), strict=True)
    for name, (first, last), (tokens, targets) in spans:
        title = f"── {name}, {plural(len(tokens), 'token')}"
        if sample.weights is not None:
            title += f", weight {sample.weights[first:last].astype(float).sum():g}"
        title += " ──"
        lines.append([(title, "dim" if colour else "")])
        line: list[tuple[str, str]] = []
        target_before = False
        ids = tokens.tolist()
        for place, (text, start, stop) in enumerate(_shown(ids, tokenizer)):
            target, special = bool(targets[start:stop].any()), ids[start] in special_ids
            if colour:
                line.append((text, STYLES[target, special][place % 2]))
            else:
                edge = "«" if target else "»"
                mark = edge if target != target_before else "|" if place else ""
                line.append((mark + (f"⟨{text}⟩" if special else text), ""))
            target_before = target
        if target_before and not colour:
            line.append(("»", ""))
        lines.append(line)
    return lines


def _titles(sample: Sample) -> list[str]:
    """``example 2``; of an example with several sequences, ``example 2, sequence 1 of 2``."""
    if sample.example_starts is None:
        return [f"example {number}" for number in range(1, len(sample.sequence_starts) + 1)]
    return [
        f"example {number}, sequence {place} of {size}"
        for number, size in enumerate(sample.example_sizes(), start=1)
        for place in range(1, size + 1)
    ]


def _shown(ids: list[int], tokenizer: Any) -> list[tuple[str, int, int]]:
    """(text, start, stop) of each token, or of tokens that are a character only together.

    A token is shown as what it adds to the text before it: alone, some lose their space.
    """

    def decoded(start: int, stop: int) -> str:
        return str(tokenizer.decode(ids[start:stop], clean_up_tokenization_spaces=False))

    pieces: list[tuple[str, int, int]] = []
    before, start = 0, 0
    for stop in range(1, len(ids) + 1):
        text = decoded(before, stop)
        if text.endswith("\ufffd") and stop - start < BYTES_OF_A_CHARACTER and stop < len(ids):
            continue
        text = printable(text[len(decoded(before, start)) :]).replace("\n", "↵\n")
        pieces.append((text, start, stop))
        before, start = start, stop
    return pieces
