"""``python -m llmx data``: prepare, say what became of every row, show what is trained on.

    python -m llmx data task=sft data=file data.path=chats.jsonl model=...
    python -m llmx data preview=3 ...      # samples token by token
    python -m llmx data split=eval preview=1 ...

Run as ``python -m llmx.data.command CONFIG.yaml [preview=N] [split=train|eval]``. A histogram of
the rows' lengths is written beside each store.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmx.config import Experiment, experiment_from_dict
from llmx.data import SampleStore, has_eval, load_tokenizer, prepare
from llmx.data.histogram import draw_histogram
from llmx.data.preview import print_samples
from llmx.data.progress import MIB, clock
from llmx.errors import ConfigError, LlmxError


def main(argv: Sequence[str]) -> int:
    """Exit code 0, or that of the error, which is printed."""
    try:
        return _run(Path(argv[0]), dict(_pair(word) for word in argv[1:]))
    except LlmxError as error:
        print(f"llmx: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("llmx: stopped; the next preparation goes on from here.", file=sys.stderr)
        return 130


def _run(config: Path, own: dict[str, str]) -> int:
    import yaml

    exp = experiment_from_dict(yaml.safe_load(config.read_text(encoding="utf-8")))
    splits = ["train", "eval"] if has_eval(exp) else ["train"]
    wanted = own.get("split")
    if wanted is not None and wanted not in splits:
        raise ConfigError(f"split={wanted}: there is {' and '.join(splits)}.")
    preview = _count(own.get("preview", "0"))
    tokenizer = load_tokenizer(exp)
    for split in [wanted] if wanted else splits:
        store = _prepared(exp, tokenizer, split)
        if preview and (wanted or split == "train"):
            print()
            print_samples(store, tokenizer, count=preview)
    return 0


def _prepared(exp: Experiment, tokenizer: Any, split: str) -> SampleStore:
    from rich.console import Console
    from rich.table import Table

    before = time.time()
    store = prepare(exp, tokenizer, split=split)
    found = (store.path / "meta.json").stat().st_mtime < before
    picture = store.path.with_name(f"{store.path.name}.png")
    draw_histogram(store.meta, picture)
    table = Table(title=f"{split}: {store.path.name}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in report(store.meta, found=found):
        table.add_row(name, value)
    table.add_row("store", str(store.path))
    table.add_row("lengths", str(picture))
    console = Console(highlight=False)
    console.print(table, soft_wrap=not console.is_terminal)
    return store


def report(meta: dict[str, Any], *, found: bool) -> list[tuple[str, str]]:
    """(name, value) lines about a store, from its meta.json."""
    tokens, samples = meta["num_tokens"], meta["num_samples"]
    lengths = meta["row_length_percentiles"]
    names = {"0": "shortest", "50": "median", "100": "longest"}
    lines = [
        ("sources", ", ".join(meta["sources"][:3]) + (" ..." if meta["sources"][3:] else "")),
        ("form", f"{meta['form']}, template {meta['template'] or 'none'}"),
        ("rows", f"{meta['rows_read']:,} read, {meta['num_rows']:,} in samples"),
        ("left out", _reasons(meta)),
        ("truncated", f"{meta['truncated']:,} to {meta['seq_len']:,} tokens"),
        ("tokens", f"{tokens:,}, of which {meta['num_target_tokens']:,} are learned"),
        (
            "samples",
            f"{samples:,} of up to {meta['seq_len']:,} tokens, "
            f"{tokens / max(1, samples * meta['seq_len']):.1%} full",
        ),
        (
            "row length",
            ", ".join(f"{names.get(rank, rank + ' %')} {n:,}" for rank, n in lengths.items()),
        ),
    ]
    if "encoder" not in meta:  # prepared by an earlier llmx
        return lines
    seconds = meta["tokenize_seconds"]
    rate = meta["text_bytes"] / MIB / max(seconds, 1e-3)
    lines.append(("encoder", f"{meta['encoder']}, {meta['workers']} threads"))
    lines.append(
        (
            "time",
            f"{'found again; it took' if found else 'took'} {clock(seconds)} for "
            f"{meta['text_bytes'] / MIB:,.1f} MiB of text ({rate:,.1f} MiB/s)"
            + (f", from row {meta['resumed_at_row']:,} on" if meta["resumed_at_row"] else ""),
        )
    )
    return lines


def _reasons(meta: dict[str, Any]) -> str:
    """How many rows are not in the store, by reason."""
    groups = (meta["dropped"], meta.get("left_out", {}), meta.get("rejected", {}))
    parts = [f"{count:,} {reason}" for group in groups for reason, count in group.items()]
    if meta.get("rejected_file"):
        parts.append(f"rejected rows are in {meta['rejected_file']}")
    return "; ".join(parts) or "nothing"


def _pair(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    return name, value


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"preview={text}: it is the number of samples to show, e.g. preview=3.")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
