"""Samples per second of GRPO: llmx against TRL, both with DeepSpeed ZeRO-2, and what they learn.

    python benchmarks/grpo_throughput.py [--pairs 3] [--seeds 3]

The same weights to begin with, prompts (of the bundled data), group size, longest completion, loss
(``dapo``), learning rate, precision (fp32) and ZeRO section; two CPU ranks, one thread each. Both
sides are run in turn. A sample is one completion that is generated, rewarded and trained on; the
first steps are not counted. Exits with 1 below the target.

The network is a Llama that ends a completion with the same chance at each token, so that lengths
differ as those of trained models do, and stay so at the default learning rate of GRPO: one
dimension of its embedding is constant, and the stop token's row of the output embedding looks at
that. What both sides learn is compared apart: a smaller network learns to write vowels, with a
seed for each of ``--seeds`` runs of both.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from machine import write_result
from throughput import AUTO, RANKS, run, run_peer, train, verdict

TARGET = 2.0
MICRO_BATCH = 8
"""Samples of one forward pass in training, on both sides."""
LR, LEARNING_LR = 1e-6, 4e-3
PEERS = Path(__file__).parent / "peers"


@dataclass(frozen=True)
class Side:
    """What one run measured."""

    samples_per_s: float
    rewards: list[float]
    tokens: float
    """Mean length of a completion in the counted steps."""
    others: float
    """Part of the machine's processor time that other processes took meanwhile."""


def main() -> int:
    """Measure both in turn, print the tables and write them as a result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each side that learn")
    parser.add_argument("--steps", type=int, default=8, help="steps of each pair")
    parser.add_argument("--skip", type=int, default=2, help="steps of warming up, not counted")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--stop-chance", type=float, default=1 / 32, help="0: none stops early")
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args()
    small = {"hidden": 64, "layers": 1, "prompts": 4, "max_new_tokens": 16, "steps": 24, "skip": 1}
    learning = argparse.Namespace(**{**vars(options), **small})
    with tempfile.TemporaryDirectory(prefix="llmx-bench-") as directory:
        bench = Bench(Path(directory) / "throughput", options, lr=LR)
        pairs = []
        for seed in range(options.pairs):
            peer, ours = bench.trl(seed), bench.llmx(seed)
            pairs.append((peer, ours))
            print(
                f"pair {seed + 1}: TRL {peer.samples_per_s:.1f}, llmx {ours.samples_per_s:.1f} "
                f"samples/s, ratio {ours.samples_per_s / peer.samples_per_s:.2f}",
                flush=True,
            )
        curves = []
        if options.seeds:
            small_bench = Bench(Path(directory) / "learning", learning, lr=LEARNING_LR)
            curves = [(small_bench.trl(n), small_bench.llmx(n)) for n in range(options.seeds)]
        lines, code = throughput(pairs, bench)
        lines += rewards(curves)
        print("\n".join(lines))
        write_result("grpo_throughput", "GRPO throughput against TRL", lines)
        return code


class Bench:
    """The runs, in one temporary directory."""

    def __init__(self, root: Path, options: argparse.Namespace, *, lr: float) -> None:
        self.root, self.options, self.lr = root, options, lr
        self.model, self.rows = root / "model", root / "prompts.jsonl"
        self.num_parameters = 0
        self.env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        self.env["LLMX_CACHE"] = str(root / "cache")
        self.store = root
        self.zero: dict[str, Any] = {}
        self.prepare()

    def words(self) -> list[str]:
        """What every run of llmx is called with."""
        options = self.options
        return [
            "task=grpo",
            "task.options.rewards=[vowels:vowels]",
            f"task.code_path={PEERS}",
            f"task.options.group_size={options.group_size}",
            f"task.options.max_new_tokens={options.max_new_tokens}",
            "data=file",
            f"data.path={self.rows}",
            "data.form=prompt_response",
            "data.seq_len=256",
            "model=hf",
            f"model.path={self.model}",
            "hardware=cpu2",
            "zero=stage2",
            "precision=fp32",
            f"batch.global_batch={options.prompts}",
            f"batch.micro_batch={MICRO_BATCH}",
            f"optim.lr={self.lr}",
            "optim.schedule=constant",
            "optim.warmup_steps=0",
            "optim.weight_decay=0",
            "optim.betas=[0.9,0.999]",
        ]

    def prepare(self) -> None:
        """Weights and prompts; tokenize these once for both sides."""
        from llmx.data.source.files import DEMO_DIRECTORY

        options = self.options
        self.root.mkdir()
        self.num_parameters = write_model(self.model, options)
        lines = (DEMO_DIRECTORY / "train.jsonl").read_text().splitlines(keepends=True)
        self.rows.write_text("".join(lines[: options.prompts * options.steps]))
        plan = self.root / "plan"
        command = [sys.executable, "-m", "llmx", *self.words(), f"run_dir={plan}", "dry_run=true"]
        run(command, env=self.env, log=self.root / "plan.log")
        self.zero = yaml.safe_load((plan / "ds_config.json").read_text())["zero_optimization"]
        os.environ["LLMX_CACHE"] = self.env["LLMX_CACHE"]
        from llmx.run import snapshot
        from llmx.run.rundir import RunDir
        from llmx.tasks import prepare, tokenizer_of

        exp = snapshot.load(RunDir(plan))
        self.store = prepare(exp, tokenizer_of(exp)).path

    def llmx(self, seed: int) -> Side:
        """One run of ``python -m llmx``; its own ``metrics.jsonl`` is the measurement."""
        run_dir = self.root / f"llmx-{seed}"
        words = [*self.words(), f"seed={seed}"]
        lines, others = train(words, run_dir, steps=self.options.steps, env=self.env)
        points = [
            {**line, "tokens": line["completion_tokens"]}
            for line in lines
            if line["kind"] == "train"
        ]
        return self.side(points, others)

    def trl(self, seed: int) -> Side:
        """One run of the peer, with the ZeRO section that llmx writes for the same run."""
        options, out = self.options, self.root / f"trl-{seed}.json"
        job = {
            "store": str(self.store),
            "tokenizer": str(self.model),
            "model": str(self.model),
            "seed": seed,
            "micro_batch": MICRO_BATCH,
            "accumulation": options.prompts * options.group_size // (RANKS * MICRO_BATCH),
            "group_size": options.group_size,
            "max_new_tokens": options.max_new_tokens,
            "steps": options.steps,
            "lr": self.lr,
            "ds_config": {**AUTO, "zero_optimization": self.zero},
            "out": str(out),
        }
        points, others = run_peer("trl_grpo.py", job, env=self.env)
        return self.side(points, others)

    def side(self, points: list[dict[str, Any]], others: float) -> Side:
        """What the steps behind those of warming up took."""
        options = self.options
        assert len(points) == options.steps
        counted = points[options.skip :]
        seconds = points[-1]["time"] - points[options.skip - 1]["time"]
        samples = len(counted) * options.prompts * options.group_size
        tokens = statistics.mean(point["tokens"] for point in counted)
        return Side(samples / seconds, [point["reward"] for point in points], tokens, others)


def write_model(directory: Path, options: argparse.Namespace) -> int:
    """Random weights with the chance of a stop token, and the bundled tokenizer; the number of
    parameters."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from llmx.data.source.files import DEMO_DIRECTORY

    shutil.copytree(DEMO_DIRECTORY / "tokenizer", directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=options.hidden,
            intermediate_size=8 * options.hidden // 3,
            num_hidden_layers=options.layers,
            num_attention_heads=options.hidden // 64,
            num_key_value_heads=options.hidden // 64,
            max_position_embeddings=512,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0.5
        hidden = model.model(torch.arange(len(tokenizer))[None, :256]).last_hidden_state
        chance = max(options.stop_chance, 1e-9)
        logit = torch.logit(torch.tensor(chance)) + torch.tensor(len(tokenizer)).log()
        stop = model.lm_head.weight[tokenizer.eos_token_id]
        stop.zero_()
        stop[0] = logit / hidden[0, :, 0].mean()
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def last(side: Side) -> float:
    """The mean reward of the last quarter of the steps."""
    return statistics.mean(side.rewards[-max(1, len(side.rewards) // 4) :])


def throughput(pairs: list[tuple[Side, Side]], bench: Bench) -> tuple[list[str], int]:
    """The table of samples a second; and 0 where the median ratio reaches the target."""
    options = bench.options
    ratios = [ours.samples_per_s / peer.samples_per_s for peer, ours in pairs]
    lines = [
        f"Llama {options.layers} x {options.hidden}, {bench.num_parameters:,} parameters; "
        f"{options.prompts} prompts of the bundled data a step, {options.group_size} completions "
        f"each, of up to {options.max_new_tokens} tokens, which stop with a chance of "
        f"{options.stop_chance:.3f} at each; ZeRO-2, fp32, {RANKS} CPU ranks with one thread each; "
        f"micro batches of {MICRO_BATCH}. Steps {options.skip} to {options.steps} counted.",
        "",
        "| pair | TRL, samples/s | llmx, samples/s | ratio | tokens of a completion | other "
        "processes |",
        "|---|---|---|---|---|---|",
    ]
    for number, ((peer, ours), ratio) in enumerate(zip(pairs, ratios, strict=True)):
        lines.append(
            f"| {number + 1} | {peer.samples_per_s:.1f} | {ours.samples_per_s:.1f} | {ratio:.2f} | "
            f"{peer.tokens:.1f} and {ours.tokens:.1f} | {peer.others:.0%} |"
        )
    said, code = verdict(ratios, TARGET)
    return [*lines, "", said], code


def rewards(curves: list[tuple[Side, Side]]) -> list[str]:
    """The table of what both sides learn."""
    if not curves:
        return []
    steps = len(curves[0][0].rewards)
    shown = sorted({1, *range(4, steps, 4), steps})
    lines = [
        "",
        f"Mean reward of a step, the share of vowels (Llama 1 x 64, learning rate {LEARNING_LR:g}; "
        "4 prompts, 8 completions each, of up to 16 tokens):",
        "",
        f"| seed | side | {' | '.join(f'step {step}' for step in shown)} |",
        f"|---|---|{'---|' * len(shown)}",
    ]
    for seed, sides in enumerate(curves):
        for name, side in zip(("TRL", "llmx"), sides, strict=True):
            values = " | ".join(f"{side.rewards[step - 1]:.3f}" for step in shown)
            lines.append(f"| {seed} | {name} | {values} |")
    ends = [[last(side) for side in sides] for sides in zip(*curves, strict=True)]
    described = [f"{statistics.mean(end):.3f} ({min(end):.3f} to {max(end):.3f})" for end in ends]
    return [*lines, "", f"Over the last quarter: TRL {described[0]}, llmx {described[1]}."]


if __name__ == "__main__":
    sys.exit(main())
