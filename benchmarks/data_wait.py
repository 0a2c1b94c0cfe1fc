"""Whether training waits for data: two short runs of ``python -m llmx``, text and chats.

    LLMX_REAL_DATA=DIR python benchmarks/data_wait.py [--steps 30] [--hardware cpu2]

Each run prepares its real data and trains a small Llama in the real 50k vocabulary. What is
compared is in its ``metrics.jsonl``: the seconds in which the slowest rank waited for its next
batch (``data_wait_s``) against the seconds of all steps. Fails at 1 % or more. On a GPU
(``--hardware local``), where steps are shorter, give more steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from data_corpora import ROOT

AT_MOST = 0.01
SKIPPED = 2
"""Steps of warming up, in which workers start and files are first touched; shown, not judged."""


def main() -> int:
    """Measure, print, write benchmarks/results/data_wait.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--hardware", default="cpu2", help="two CPU ranks, or local for a GPU")
    options = parser.parse_args()
    source = os.environ.get("LLMX_REAL_DATA")
    if not source:
        parser.error("set LLMX_REAL_DATA to the folder of real data (see benchmarks/README.md)")
    if options.steps <= 2 * SKIPPED:
        parser.error(f"--steps {options.steps}: more than {2 * SKIPPED} are needed")
    data = Path(source)
    kinds = {
        "text, concatenated": ["task=pretrain", "data=text", f"data.path={data}/c4_demo.jsonl"],
        "chats, packed by best fit": [
            "task=sft",
            "data=alpaca",
            f"data.path={data}/alpaca_zh_demo.json",
        ],
    }
    from machine import write_result

    lines = [
        f"`hardware={options.hardware}`, a Llama of 2 layers and width 64, 50k vocabulary, samples "
        f"of 256 tokens, 2 a rank and step; {options.steps} steps, the first {SKIPPED} not judged.",
        "",
        "| data | ms a step | waited, ms a step | waited | slowest step waited, ms |",
        "|---|---|---|---|---|",
    ]
    good = True
    with tempfile.TemporaryDirectory(prefix="llmx-wait-") as directory:
        place = Path(directory)
        sys.path.insert(0, str(ROOT))
        from tests.realdata import real_tokenizer_dir

        tokenizer = real_tokenizer_dir(data, place / "tokenizer")
        for number, (name, words) in enumerate(kinds.items()):
            run_dir = place / f"run-{number}"
            points = trained([*words, f"model.tokenizer={tokenizer}"], run_dir, options)
            step_s = sum(point["step_time_s"] for point in points) / len(points)
            wait_s = sum(point["data_wait_s"] for point in points) / len(points)
            good = good and wait_s < AT_MOST * step_s
            worst = max(point["data_wait_s"] for point in points)
            lines.append(
                f"| {name} | {1e3 * step_s:.0f} | {1e3 * wait_s:.2f} | {wait_s / step_s:.2%} "
                f"| {1e3 * worst:.2f} |"
            )
            print(lines[-1], flush=True)
    lines += ["", f"Under {AT_MOST:.0%} of the time of the steps: {'met' if good else 'MISSED'}."]
    print(lines[-1])
    write_result("data_wait", "Training: waiting for data", lines)
    return 0 if good else 1


def trained(words: list[str], run_dir: Path, options: argparse.Namespace) -> list[dict[str, float]]:
    """One run; its lines of ``metrics.jsonl`` for the steps that are judged, one a step."""
    command = [sys.executable, "-m", "llmx", *words, "model=tiny", "tracking=none"]
    command += ["++model.config.vocab_size=50304", f"hardware={options.hardware}"]
    command += [
        "data.seq_len=256",
        "task.max_lost=1",
        "batch.micro_batch=2",
        "batch.accumulation=1",
    ]
    command += ["batch.global_batch=null", "task.log_every_steps=1"]
    command += [f"task.steps={options.steps}", "task.save_model=false", f"run_dir={run_dir}"]
    command += ["data.eval_samples=0", "task.eval_generate=0", "checkpoint=none"]
    environment = {
        **os.environ,
        "LLMX_CACHE": str(run_dir.parent / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    points = [line for line in lines if line["kind"] == "train"]
    if len(points) != options.steps:
        raise SystemExit(f"{run_dir}: {len(points)} lines for {options.steps} steps")
    return points[SKIPPED:]


if __name__ == "__main__":
    sys.exit(main())
