"""A training step at ZeRO-3 after an evaluation: llmx's engine against one of DeepSpeed alone.

    python benchmarks/zero3_after_eval.py [--rounds 7] [--hidden 256] [--layers 6]

Two CPU ranks with one thread each hold two engines (Llama, fp32) in one process run. Both have
evaluated; then they train in turn, A B, B A. One knows the order of training apart from that of
evaluations (``llmx.train.engine.patches``), the other one is as DeepSpeed makes it. Prints the
ratio of their step times, and how often and how much each step gathers. Losses must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from machine import forked, free_port, rank_of, refuse_left_locks, wait, write_result

WORLD = 2
STEPS = 5
"""Steps of an engine in a row. The first one of them is not counted."""


def main() -> int:
    """Measure, print, write benchmarks/results/zero3_after_eval.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args()
    refuse_left_locks()
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", LOCAL_SIZE=str(WORLD))
    import deepspeed  # noqa: F401, imported for the children
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="llmx-zero3-") as name:
        out, port = Path(name), free_port()
        ranks = [partial(be_rank, rank, port, out, options) for rank in range(WORLD)]
        wait([forked(rank) for rank in ranks])
        return report(json.loads((out / "found.json").read_text()), options)


def be_rank(rank: int, port: int, out: Path, options: argparse.Namespace) -> None:
    """Measure; rank 0 writes it."""
    os.environ.update(rank_of(rank, world=WORLD, port=port))
    found = measure(out, options)
    if rank == 0:
        (out / "found.json").write_text(json.dumps(found))


def measure(out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """By engine: seconds of each step, round by round; the losses; what one step gathers."""
    import torch

    import llmx.train.engine.build as build_module
    from llmx.plan import make_plan
    from llmx.train.engine.process_group import join_process_group
    from tests.programs.engines import Built, evaluated
    from tests.programs.state import build, job_experiment, store_of, train
    from tests.rundirs import experiment

    join_process_group(make_plan(experiment(out, ranks=WORLD)))
    job = {
        "name": "x",
        "world": WORLD,
        "stage": 3,
        "micro_batches": [4, 4],
        "accumulation": 1,
        "lr": 1e-4,
        "zero": {"param_persistence_threshold": 0},
        "config": {
            "hidden_size": options.hidden,
            "intermediate_size": options.hidden * 11 // 4,
            "num_hidden_layers": options.layers,
        },
    }
    exp, plan = job_experiment(job, out)
    store = store_of(job, out)
    engines, found = {}, {}
    for name in ("deepspeed", "llmx"):
        known = build_module.know_passes_apart if name == "llmx" else lambda engine: None
        with mock.patch.object(build_module, "know_passes_apart", known):
            engines[name] = build(job, exp, plan, first_weights=exp.seed)
        evaluated(Built(exp, plan, engines[name], store))
        train(engines[name], exp, plan, store, steps=range(3))  # it learns the order
        found[name] = {"seconds": [], "losses": [], **gathered(engines[name], exp, plan, store)}
    step = 4
    for number in range(options.rounds):
        for name in sorted(engines, reverse=bool(number % 2)):
            seconds = []
            for each in range(step, step + STEPS):
                torch.distributed.barrier()
                started = time.perf_counter()
                loss = train(engines[name], exp, plan, store, steps=range(each, each + 1))
                seconds.append(time.perf_counter() - started)
                found[name]["losses"].append(loss[0][0])
            found[name]["seconds"].append(statistics.median(seconds[1:]))
        step += STEPS
    found["parameters"] = sum(p.ds_numel for p in engines["llmx"].module.parameters())
    return found


def gathered(engine: Any, exp: Any, plan: Any, store: Any) -> dict[str, int]:
    """All-gathers of one step, and the elements that they give to a rank."""
    from deepspeed.runtime.zero import partition_parameters

    from tests.programs.state import train

    real = partition_parameters._dist_allgather_fn
    with mock.patch.object(partition_parameters, "_dist_allgather_fn", wraps=real) as calls:
        train(engine, exp, plan, store, steps=range(3, 4))
    return {
        "gathers": calls.call_count,
        "elements": sum(call.args[1].numel() for call in calls.call_args_list),
    }


def report(found: dict[str, Any], options: argparse.Namespace) -> int:
    """Print and write the ratio."""
    theirs, ours = found["deepspeed"], found["llmx"]
    if theirs["losses"] != ours["losses"]:
        print("the engines have trained differently", file=sys.stderr)
        return 1
    ratios = [one / other for one, other in zip(theirs["seconds"], ours["seconds"], strict=True)]
    whole = found["parameters"]
    ratio = statistics.median(ratios)
    lines = [
        f"Two CPU ranks (gloo, one machine), a Llama of {options.layers} layers and width "
        f"{options.hidden} ({whole / 1e6:.1f} million parameters), fp32; {options.rounds} rounds "
        f"of {STEPS} steps each, in turn. Every loss is equal, bit for bit.",
        "",
        "| after an evaluation | all-gathers in a step | parameters gathered | ms a step |",
        "|---|---|---|---|",
        *(
            f"| {label} | {one['gathers']} | {one['elements'] / whole:.2f} times | "
            f"{1000 * statistics.median(one['seconds']):.0f} |"
            for label, one in (("DeepSpeed alone", theirs), ("llmx", ours))
        ),
        "",
        f"A step takes {ratio:.2f} times as long with DeepSpeed alone ({min(ratios):.2f} to "
        f"{max(ratios):.2f}).",
    ]
    write_result("zero3_after_eval", "ZeRO-3 after an evaluation", lines)
    return 0 if ratio > 1 else 1


if __name__ == "__main__":
    sys.exit(main())
