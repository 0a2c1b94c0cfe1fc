"""How long training waits for a checkpoint: llmx's background save against DeepSpeed's own.

    python benchmarks/checkpoint_stall.py [--rounds 6] [--hidden 512] [--layers 5]

One engine (Llama, ZeRO-2, fp32, two CPU ranks with one thread each) saves its state both ways
in turn, A B, B A, in one process run: DeepSpeed's synchronous ``save_checkpoint``, and llmx's
saver as in a run. Every byte of llmx's files is compared with what was live at that step, and
DeepSpeed's files with the same values. Prints each round's ratio and the median; exits with 1
above the target. Also printed: what the steps meanwhile took more, while the file was written.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import write_result
from throughput import RANKS, run, run_ranks

TARGET = 0.20


def main() -> int:
    """Measure, print, write benchmarks/results/checkpoint_stall.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="llmx-bench-") as directory:
        rounds = measure(Path(directory), options)
    return report(rounds, options)


def measure(root: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rounds, as rank 0 saw them."""
    env = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "LLMX_CACHE": str(root / "cache"),
    }
    run_dir, out = root / "run", root / "rounds.json"
    model = {
        "hidden_size": options.hidden,
        "intermediate_size": options.hidden * 43 // 16,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.hidden // 64,
        "num_key_value_heads": options.hidden // 64,
    }
    words = (
        "experiment=demo hardware=cpu2 zero=stage2 precision=fp32 data.seq_len=128 "
        "batch.micro_batch=1 batch.global_batch=2 task.steps=1000 task.eval_generate=0 "
        "checkpoint.every_steps=1 checkpoint.keep.last=1 checkpoint.background=always "
        "tracking=none dry_run=true"
    ).split()
    words += [f"run_dir={run_dir}"]
    words += [f"++model.config.{key}={value}" for key, value in model.items()]
    run([sys.executable, "-m", "llmx", *words], env=env, log=root / "plan.log")
    arguments = (str(run_dir), str(options.rounds), str(out))
    run_ranks("checkpoint_stall.py", *arguments, env=env, log=root / "ranks.log")
    return list(json.loads(out.read_text()))


def report(rounds: list[dict[str, Any]], options: argparse.Namespace) -> int:
    """Print and write the table; 0 where the median ratio is within the target."""
    ratios = [one["own_s"] / one["peer_s"] for one in rounds]
    median = statistics.median(ratios)
    whole = statistics.median((one["own_s"] + one["slower_s"]) / one["peer_s"] for one in rounds)
    first = rounds[0]
    lines = [
        f"Llama {options.layers} x {options.hidden}, ZeRO-2, fp32, {RANKS} CPU ranks with one "
        f"thread each: {RANKS * first['bytes'] / 2**20:,.0f} MiB of state in llmx's files, "
        f"{first['peer_bytes'] / 2**20:,.0f} MiB in DeepSpeed's (which has the weights twice). "
        f"A step usually takes {first['usual_s']:.2f} s. Every byte compared.",
        "",
        "| round | DeepSpeed waits, s | llmx waits, s | ratio | steps while it was written "
        "| which took longer by, s |",
        "|---|---|---|---|---|---|",
    ]
    for number, (one, ratio) in enumerate(zip(rounds, ratios, strict=True), start=1):
        lines.append(
            f"| {number} | {one['peer_s']:.3f} | {one['own_s']:.3f} | {ratio:.2f} "
            f"| {one['steps']} | {one['slower_s']:.2f} |"
        )
    verdict = "reached" if median <= TARGET else "MISSED"
    lines += [
        "",
        f"Median ratio {median:.2f}; target at most {TARGET:g}: {verdict}. With what the steps "
        "meanwhile took more (here the writing thread shares the cores with the ranks): "
        f"{whole:.2f}.",
    ]
    write_result("checkpoint_stall", "How long training waits for a checkpoint", lines)
    return 0 if median <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
