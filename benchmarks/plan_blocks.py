"""CPU of tracing a network of 80 blocks (70 billion parameters): by five of them, as a plan does,
and with all of them run (docs/development/predictions.md).

    python benchmarks/plan_blocks.py [--rounds 3]

Both in this process, in turn; the traces are equal.
"""

from __future__ import annotations

import argparse
import statistics
import time
from unittest import mock

from machine import write_result

from llmx.config import experiment_from_dict
from llmx.plan.trace import StepTrace
from llmx.train import memory_trace

EXPERIMENT = {
    "model": {
        "kind": "llama",
        "init": "pretrained",
        "config": {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
        },
    },
    "data": {"seq_len": 4096},
    "task": {"kind": "pretrain"},
}


def traced() -> tuple[float, StepTrace]:
    """Seconds of CPU, and the trace."""
    exp = experiment_from_dict(EXPERIMENT)
    began = time.process_time()
    found = memory_trace.trace_step(
        exp, precision="bf16", accelerator="cuda", attention="varlen", micro_batch=1
    )
    return time.process_time() - began, found


def main() -> int:
    """Measure, print, write benchmarks/results/plan_blocks.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    few, every = [], []
    traced()  # what is imported and made once
    for _ in range(options.rounds):
        seconds, found = traced()
        few.append(seconds)
        with mock.patch.object(memory_trace, "stack_of", return_value=None):
            seconds, whole = traced()
        every.append(seconds)
        if found != whole:
            raise SystemExit("the traces differ")
    ratios = [all_s / few_s for few_s, all_s in zip(few, every, strict=True)]
    lines = [
        f"A Llama of 80 blocks, {found.num_parameters / 1e9:.1f} billion parameters, bf16, 4,096 "
        f"tokens; {options.rounds} rounds, medians.",
        "",
        f"By five blocks {statistics.median(few):.1f} s of CPU, all blocks run "
        f"{statistics.median(every):.1f} s: {statistics.median(ratios):.1f} times "
        f"({min(ratios):.1f} to {max(ratios):.1f}). The traces are equal.",
    ]
    print(lines[-1])
    write_result("plan_blocks", "Tracing a few blocks instead of all", lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
