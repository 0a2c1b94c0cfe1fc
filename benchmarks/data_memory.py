"""Preparing text: time and peak memory of llmx against the size of the corpus.

    LLMX_REAL_DATA=DIR python benchmarks/data_memory.py [--size-gb 0.1 0.5 1 2 5] [--place DIR]

Memory is the sum of the proportional set sizes (PSS) of the preparing process and all of its
children, read five times a second from before it imports anything. PSS counts pages of mapped
files too, each once. Fails above 600 MB, and where the time grows by more than a fifth faster
than the size. The corpus lies in a temporary directory and needs, with what is prepared from it,
three times its size; corpora above 0.1 GB repeat their first 0.1 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from data_corpora import MIB, ROOT, make_tokenizers, write_corpus

PEAK_MB = 600
EVERY_S = 0.2
ROOM = 3.0
"""Disk space that is needed, in sizes of the largest corpus."""
SLOWER = 1.2
"""How much more time a MiB may take in the largest corpus than in the smallest."""


def main() -> int:
    """Measure, print, write benchmarks/results/data_memory.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size-gb", type=float, nargs="+", default=[0.1, 0.5, 1, 2, 5])
    parser.add_argument("--place", help="directory for the corpora (default: the system's)")
    options = parser.parse_args()
    source = os.environ.get("LLMX_REAL_DATA")
    if not source:
        parser.error("set LLMX_REAL_DATA to the folder of real data (see benchmarks/README.md)")
    with tempfile.TemporaryDirectory(prefix="llmx-memory-", dir=options.place) as directory:
        place = Path(directory)
        free_gb = shutil.disk_usage(place).free / 1e9
        needed_gb = ROOM * max(options.size_gb)
        if free_gb < needed_gb:
            parser.error(
                f"{place.parent} has {free_gb:.1f} GB free, {needed_gb:.1f} GB are needed. Give "
                "another directory with --place, or smaller sizes."
            )
        return curve(Path(source), place, sorted(options.size_gb))


def curve(real_data: Path, place: Path, sizes_gb: list[float]) -> int:
    """One line for each size; 0 where the targets are met."""
    from machine import write_result

    name = "byte-level BPE"
    tokenizer = make_tokenizers(real_data, place, {name})[name]
    head = (
        "| corpus GB | text MiB | s | MiB/s | core-s | ms of a core a MiB | peak PSS MB | samples |"
    )
    lines = [head, "|" + "---|" * 8]
    costs, peaks = [], []
    for size_gb in sizes_gb:
        corpus = place / "corpus.jsonl"
        text_mib = write_corpus(real_data, corpus, size=int(size_gb * 1e9)) / MIB
        found = watched(corpus, tokenizer, place)
        corpus.unlink()
        # What is done once (the proof of the tokenizer) is no cost of size.
        costs.append(1000 * found["cpu_seconds"] / text_mib)
        peaks.append(found["peak_mb"])
        lines.append(
            f"| {size_gb:g} | {text_mib:,.0f} | {found['seconds']:.1f} "
            f"| {text_mib / found['seconds']:.1f} | {found['cpu_seconds']:.1f} | {costs[-1]:.0f} "
            f"| {peaks[-1]:.0f} | {found['samples']:,} |"
        )
        print(lines[-1], flush=True)
    small, linear = max(peaks) < PEAK_MB, costs[-1] <= SLOWER * costs[0]
    lines += [
        "",
        f"Peak memory under {PEAK_MB} MB: {'met' if small else 'MISSED'}.",
        f"Core time a MiB, largest against smallest: {costs[-1] / costs[0]:.2f} "
        f"(at most {SLOWER:g}): {'met' if linear else 'MISSED'}.",
    ]
    print("\n".join(lines[-2:]))
    write_result("data_memory", "Preparing text: time and memory against size", lines)
    return 0 if small and linear else 1


def watched(corpus: Path, tokenizer: Path, place: Path) -> dict[str, Any]:
    """One preparation in a process of its own, with the peak of its and its children's PSS."""
    program = Path(__file__).with_name("tokenization.py")
    command = [sys.executable, str(program), "--one", "c", str(corpus), str(tokenizer)]
    environment = {**os.environ, "TMPDIR": str(place)}
    with (place / "said").open("w+") as said, (place / "errors").open("w+") as errors:
        process = subprocess.Popen(command, stdout=said, stderr=errors, cwd=ROOT, env=environment)
        root = psutil.Process(process.pid)
        peak = 0
        while process.poll() is None:
            peak = max(peak, tree_pss(root))
            time.sleep(EVERY_S)  # the period of the measurement
        said.seek(0)
        errors.seek(0)
        if process.returncode or not peak:
            raise SystemExit(f"the preparation failed:\n{errors.read()[-3000:]}")
        return {**json.loads(said.read().splitlines()[-1]), "peak_mb": peak / 1e6}


def tree_pss(root: psutil.Process) -> int:
    """Bytes of a process and all of its children; 0 for one that has just ended."""
    total = 0
    try:
        for process in [root, *root.children(recursive=True)]:
            try:
                total += process.memory_full_info().pss
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
    except psutil.NoSuchProcess:
        return total
    return total


if __name__ == "__main__":
    sys.exit(main())
