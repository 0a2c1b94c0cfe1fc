"""A picture of the rows' lengths, beside the store: where ``seq_len`` cuts, how long rows are."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw_histogram(meta: dict[str, Any], path: Path) -> bool:
    """Write the picture to ``path``; False for a store of an earlier llmx, which kept no
    counts."""
    histogram = meta.get("row_length_histogram")
    if histogram is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    edges, rows = histogram["edges"], histogram["rows"]
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
        f"{sum(rows):,} rows, {meta['split']}: median {lengths['50']:,}, 90 % up to "
        f"{lengths['90']:,}, longest {lengths['100']:,} tokens",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return True
