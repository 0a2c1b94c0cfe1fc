"""CPU of a command that is refused after composing: as llmx does it, and with Hydra's own look at
``hydra.mode`` before, which composes everything once more.

    python benchmarks/compose.py [--rounds 9]

Both in this process, in turn; the refusal is a run directory that holds a run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

from machine import write_result

from llmx.cli import hydra_app
from llmx.cli.main import main as llmx

WORDS = ["hardware=cpu2", "zero=stage3", "dry_run=true", "run_dir=run"]


def cpu_s() -> float:
    """Of one command."""
    began = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = llmx(WORDS)
    if code != 2:
        raise SystemExit(f"{WORDS} ended with {code}, not with the refusal that is timed")
    return time.process_time() - began


def main() -> int:
    """Measure, print, write benchmarks/results/compose.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    once, twice = [], []
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        Path("run").mkdir()
        Path("run", "config.yaml").touch()
        cpu_s()
        for _ in range(options.rounds):
            once.append(cpu_s())
            nothing = contextlib.nullcontext()  # leaves Hydra.get_mode as it is
            with mock.patch.object(hydra_app, "_mode_as_typed", return_value=nothing):
                twice.append(cpu_s())
        os.chdir("/")
    ratios = [two / one for one, two in zip(once, twice, strict=True)]
    lines = [
        f"`python -m llmx {' '.join(WORDS)}`, where the directory holds a run already; "
        f"{options.rounds} rounds, medians.",
        "",
        f"Composed once {statistics.median(once):.2f} s of CPU, as Hydra does it "
        f"{statistics.median(twice):.2f} s: {statistics.median(ratios):.2f} times "
        f"({min(ratios):.2f} to {max(ratios):.2f}).",
    ]
    print(lines[-1])
    write_result("compose", "Composing a config once instead of twice", lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
