"""Predicted against measured time of a step: ``python benchmarks/plan_time.py``.

Two real ranks on the CPUs of this machine, which should do nothing else. The first configuration
is run once and teaches (``learned.json``, in a cache of its own); of each other one the step is
predicted from that one run, by ``plan``, and then measured by a run that teaches nothing. The
median of a run's logged lines is its step time, the first line left out. At the end the first one
runs again: how far it is off is the noise. Each round begins anew: it knows one run, its own.
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
from throughput import run

BASE = [
    "hardware=cpu2", "task.steps=16", "task.log_every_steps=3", "task.eval_generate=0",
    "data.eval_samples=0", "checkpoint.every_steps=null", "zero=stage1", "batch.global_batch=32",
]  # fmt: skip
WIDER = "{hidden_size: 256, intermediate_size: 704}"
GRID = [
    ["zero=stage0"],
    ["zero=stage2"],
    ["zero=stage3"],
    ["batch.global_batch=16"],
    ["batch.global_batch=64"],
    ["batch.micro_batch=4"],
    ["batch.micro_batch=16"],
    ["data.seq_len=64"],
    ["data.seq_len=256"],
    ["model.activation_checkpointing=full"],
    ["zero=stage2", "batch.micro_batch=4", "batch.global_batch=64"],
    ["zero=stage3", "batch.global_batch=64"],
    ["model.config.num_hidden_layers=8"],
    [f"model.config={WIDER}"],
    ["optim=lion"],
]


def llmx(words: list[str], environment: dict[str, str], *, log: Path) -> None:
    run([sys.executable, "-m", "llmx", *words], env={**os.environ, **environment}, log=log)


def measured_s(run_dir: Path) -> float:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    paces = [line["step_time_s"] for line in lines if line["kind"] == "train"]
    return statistics.median(paces[1:])


def one(words: list[str], root: Path, number: int, *, teaches: bool) -> dict[str, Any]:
    """Predicted by what the cache knows, and measured."""
    environment = {"LLMX_CACHE": str(root / "cache"), "LLMX_LEARNED": "on"}
    planned, run_dir = root / f"plan-{number}", root / f"run-{number}"
    typed, log = [*BASE, *words], root / f"log-{number}"
    llmx(["plan", *typed, f"run_dir={planned}"], environment, log=log)
    time = json.loads((planned / "plan.json").read_text())["time"]
    if not teaches:
        environment["LLMX_LEARNED"] = "off"
    llmx([*typed, f"run_dir={run_dir}"], environment, log=log)
    return {"words": words, "predicted": time["step_s"], "measured": measured_s(run_dir)}


def one_round(grid: list[list[str]], root: Path) -> tuple[list[dict[str, Any]], float]:
    """Each configuration with its relative error; and how far the first one is off, run again."""
    taught = one([], root, 0, teaches=True)
    print(f"taught by {' '.join(BASE)}: {taught['measured']:.3f} s a step", flush=True)
    found = []
    for number, words in enumerate(grid, start=1):
        case = one(words, root, number, teaches=False)
        case["error"] = case["predicted"] / case["measured"] - 1
        found.append(case)
        print(
            f"{' '.join(words):60} {case['predicted']:.3f} s, measured {case['measured']:.3f} "
            f"s, {case['error']:+.1%}",
            flush=True,
        )
    again = one([], root, len(grid) + 1, teaches=False)
    return found, again["measured"] / taught["measured"] - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=len(GRID), help="so many configurations")
    parser.add_argument("--rounds", type=int, default=3)
    typed = parser.parse_args()
    rounds, noise = [], []
    for _ in range(typed.rounds):
        with tempfile.TemporaryDirectory(prefix="llmx-plan-time-") as name:
            found, again = one_round(GRID[: typed.limit], Path(name))
        rounds.append(found)
        noise.append(again)
    errors = [abs(case["error"]) for found in rounds for case in found]
    rows = []
    for cases in zip(*rounds, strict=True):  # one configuration in all rounds
        measured, predicted = (
            " ".join(f"{1000 * case[key]:.0f}" for case in cases)
            for key in ("measured", "predicted")
        )
        shown = " ".join(f"{case['error']:+.1%}" for case in cases)
        rows.append(f"| {' '.join(cases[0]['words'])} | {measured} | {predicted} | {shown} |")
    lines = [
        f"{len(rows)} configurations, {len(rounds)} rounds: median error "
        f"{statistics.median(errors):.1%}, worst {max(errors):.1%}. The run that taught, again at "
        f"the end of its round: {', '.join(f'{one:+.1%}' for one in noise)}.",
        "",
        f"Taught by one run in each round: `{' '.join(BASE)}`; each row changes what it names.",
        "",
        "| configuration | measured, ms | predicted, ms | error |",
        "|---|---|---|---|",
        *rows,
    ]
    write_result("plan_time", "Predicted against measured time of a step", lines)


if __name__ == "__main__":
    main()
