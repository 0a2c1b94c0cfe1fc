"""SFT throughput of llmx against the Hugging Face Trainer, both with DeepSpeed ZeRO-2.

    LLMX_REAL_DATA=... python benchmarks/sft_throughput.py [--pairs 3] [--rows-per-rank 8]

The same rows (``alpaca_zh_demo.json``, 50k BPE), the same Llama (4 layers, width 256, 50,304
rows of vocabulary), two CPU ranks, one thread each, fp32, the same ZeRO section. Both sides
are run in turn, A B A B, so that a busy machine burdens both. Counted are useful tokens: those
that are not padding. The Trainer pads each batch to its longest row; llmx packs rows, isolated
from each other, and computes logits where there is a target. Matched are the rows of an
optimizer step. Prints every pair's ratio and the median; exits with 1 below the target.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from machine import refuse_left_locks, write_result

TARGET = 2.5
FEWEST_PAIRS = 3
RANKS = 2
SEQ_LEN = 1024
LR = 1e-4
LLAMA = {
    "vocab_size": 50_304,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": SEQ_LEN,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Side:
    """What one run measured."""

    tokens_per_s: float
    rows_per_step: float
    num_parameters: int
    others: float
    """Part of the machine's processor time that other processes took meanwhile."""


def main() -> int:
    """Measure both in turn, print, write benchmarks/results/sft_throughput.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of each run")
    parser.add_argument("--skip", type=int, default=3, help="steps of warming up, not counted")
    # 8 is the Trainer's own default of per_device_train_batch_size.
    parser.add_argument("--rows-per-rank", type=int, default=8, help="the Trainer's batch size")
    options = parser.parse_args()
    source = os.environ.get("LLMX_REAL_DATA")
    if not source:
        print("LLMX_REAL_DATA does not name the folder of real data sets", file=sys.stderr)
        return 2
    data = Path(source)
    with tempfile.TemporaryDirectory(prefix="llmx-bench-") as directory:
        bench = Bench(Path(directory), data=data, options=options)
        bench.prepare()
        pairs = []
        for index in range(options.pairs):
            peer, ours = bench.hf_trainer(index), bench.llmx(index)
            pairs.append((peer, ours))
            print(
                f"pair {index + 1}: HF Trainer {peer.tokens_per_s:,.0f}, "
                f"llmx {ours.tokens_per_s:,.0f} useful tokens/s, "
                f"ratio {ours.tokens_per_s / peer.tokens_per_s:.2f} "
                f"(other processes took {peer.others:.0%} and {ours.others:.0%})",
                flush=True,
            )
    return report(pairs, bench)


class Bench:
    """The runs, in one temporary directory."""

    def __init__(self, root: Path, *, data: Path, options: argparse.Namespace) -> None:
        self.root, self.data, self.options = root, data, options
        self.rows = data / "alpaca_zh_demo.json"
        self.tokenizer = root / "tokenizer"
        self.env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        self.env["LLMX_CACHE"] = str(root / "cache")
        self.micro_batch = 1
        self.rows_per_sample = 1.0
        self.store = root

    def prepare(self) -> None:
        """Tokenize once for both sides; match the rows of a step as nearly as they can be."""
        write_tokenizer(self.data / "gpt2_bpe", self.tokenizer)
        os.environ["LLMX_CACHE"] = self.env["LLMX_CACHE"]
        from llmx.config import DataConfig, Experiment, ModelConfig
        from llmx.tasks import prepare, tokenizer_of

        stores = {}
        for packing in ("none", "best_fit"):
            exp = Experiment(
                model=ModelConfig(tokenizer=str(self.tokenizer)),
                data=DataConfig(path=str(self.rows), seq_len=SEQ_LEN, packing=packing),
            )
            stores[packing] = prepare(exp, tokenizer_of(exp))
        self.store = stores["none"].path
        # Every row is packed, so the samples of both stores hold the same rows.
        samples = {packing: store.meta["num_samples"] for packing, store in stores.items()}
        self.rows_per_sample = samples["none"] / samples["best_fit"]
        self.micro_batch = max(1, round(self.options.rows_per_rank / self.rows_per_sample))

    def llmx(self, index: int) -> Side:
        """One run of ``python -m llmx``; its own ``metrics.jsonl`` is the measurement."""
        run_dir = self.root / f"llmx-{index}"
        model = [f"++model.config.{key}={value}" for key, value in LLAMA.items()]
        words = [
            "task=sft",
            "data=alpaca",
            f"data.path={self.rows}",
            f"data.seq_len={SEQ_LEN}",
            "task.max_lost=1",
            "model=tiny",
            f"model.tokenizer={self.tokenizer}",
            *model,
            "hardware=cpu2",
            "zero=stage2",
            "precision=fp32",
            f"batch.global_batch={RANKS * self.micro_batch}",
            f"batch.micro_batch={self.micro_batch}",
            f"optim.lr={LR}",
        ]
        lines, others = train(words, run_dir, steps=self.options.steps, env=self.env)
        start = next(line for line in lines if line["kind"] == "start")
        points = [line for line in lines if line["kind"] == "train"]
        rows = RANKS * self.micro_batch * self.rows_per_sample
        return Side(self.steady(points), rows, start["num_parameters"], others)

    def hf_trainer(self, index: int) -> Side:
        """One run of the peer, with the ZeRO section that llmx writes for the same run."""
        out = self.root / f"hf-{index}.json"
        job = {
            "store": str(self.store),
            "rows_per_rank": self.options.rows_per_rank,
            "steps": self.options.steps,
            "lr": LR,
            "pad_id": 1,
            "model": {"model_type": "llama", **LLAMA},
            "ds_config": {
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
                "train_batch_size": "auto",
                "gradient_clipping": "auto",
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "zero_optimization": self.zero_section(),
            },
            "out": str(out),
        }
        path = self.root / f"hf-{index}.job.json"
        path.write_text(json.dumps(job))
        program = Path(__file__).parent / "peers" / "hf_trainer.py"
        deepspeed = Path(sys.executable).with_name("deepspeed")
        words = [str(deepspeed), "--num_gpus", str(RANKS), "--no_local_rank"]
        words += ["--master_port", str(free_port())]
        env = {**self.env, "LOCAL_SIZE": str(RANKS)}
        env["PATH"] = f"{deepspeed.parent}:{env['PATH']}"
        command = [*words, str(program), str(path)]
        # A communication thread of the peer sometimes aborts at exit, after it has written.
        others = run(command, env=env, log=path.with_suffix(".log"), proof=out)
        measured = json.loads(out.read_text())
        rows = float(RANKS * self.options.rows_per_rank)
        return Side(self.steady(measured["points"]), rows, measured["num_parameters"], others)

    def zero_section(self) -> dict[str, Any]:
        """``zero_optimization`` as llmx plans it for this run (a dry run writes it)."""
        run_dir = self.root / "plan"
        if not run_dir.exists():
            words = ["task=sft", "data=alpaca", f"data.path={self.rows}", "model=tiny"]
            words += [f"++model.config.{key}={value}" for key, value in LLAMA.items()]
            words += ["hardware=cpu2", "zero=stage2", f"data.seq_len={SEQ_LEN}", "dry_run=true"]
            words += [f"model.tokenizer={self.tokenizer}", f"run_dir={run_dir}"]
            run([sys.executable, "-m", "llmx", *words], env=self.env, log=self.root / "plan.log")
        section: dict[str, Any] = yaml.safe_load((run_dir / "ds_config.json").read_text())
        return dict(section["zero_optimization"])

    def steady(self, points: list[dict[str, Any]]) -> float:
        """Useful tokens a second between the end of warming up and the last step."""
        first = next(point for point in points if point["step"] >= self.options.skip)
        last = points[-1]
        return (last["tokens"] - first["tokens"]) / (last["time"] - first["time"])


def report(pairs: list[tuple[Side, Side]], bench: Bench) -> int:
    """Print and write the table; 0 where the median ratio reaches the target."""
    assert len({side.num_parameters for pair in pairs for side in pair}) == 1, "the same network"
    ratios = [ours.tokens_per_s / peer.tokens_per_s for peer, ours in pairs]
    median = statistics.median(ratios)
    peer, ours = pairs[0]
    lines = [
        f"Llama 4 x 256, {peer.num_parameters:,} parameters; `alpaca_zh_demo.json`, 1,000 rows, "
        f"rows of up to {SEQ_LEN} tokens; ZeRO-2, fp32, {RANKS} CPU ranks with one thread each.",
        f"Rows of an optimizer step: HF Trainer {peer.rows_per_step:.1f}, "
        f"llmx {ours.rows_per_step:.1f} (packed, on average). "
        f"Steps {bench.options.skip} to {bench.options.steps} counted.",
        "",
        "| pair | HF Trainer, useful tokens/s | llmx, useful tokens/s | ratio | other processes |",
        "|---|---|---|---|---|",
    ]
    for index, (pair, ratio) in enumerate(zip(pairs, ratios, strict=True)):
        speeds = " | ".join(f"{side.tokens_per_s:,.0f}" for side in pair)
        others = " and ".join(f"{100 * side.others:.0f} %" for side in pair)
        lines.append(f"| {index + 1} | {speeds} | {ratio:.2f} | {others} |")
    verdict = "reached" if median >= TARGET else "MISSED"
    if len(pairs) < FEWEST_PAIRS:
        verdict += f" (of {len(pairs)}: too few to count; take --pairs {FEWEST_PAIRS})"
    lines += ["", f"Median ratio {median:.2f}; target {TARGET:g}: {verdict}."]
    print("\n".join(lines[-2:]))
    write_result("sft_throughput", "SFT throughput against the Hugging Face Trainer", lines)
    return 0 if median >= TARGET else 1


def write_tokenizer(source: Path, directory: Path) -> None:
    """A tokenizer directory from ``vocab.json`` and ``merges.txt`` (RoBERTa's ids)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    files = (str(source / "vocab.json"), str(source / "merges.txt"))
    backend = Tokenizer(models.BPE.from_file(*files))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    ).save_pretrained(str(directory))


def run(words: list[str], *, env: dict[str, str], log: Path, proof: Path | None = None) -> float:
    """Run to the end; the part of the processors that others took. A failure shows the log.

    ``proof``: written only when everything is measured; then the exit code does not matter.
    """
    refuse_left_locks()
    begun, busy, own = time.monotonic(), busy_s(), children_s()
    with log.open("w") as stream:
        done = subprocess.run(words, env=env, stdout=stream, stderr=stream, check=False)
    if done.returncode != 0 and not (proof and proof.exists()):
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise RuntimeError(f"{words[:4]} ended with {done.returncode}:\n{tail}")
    wall_s = time.monotonic() - begun
    cores = os.cpu_count() or 1
    return max(0.0, (busy_s() - busy - (children_s() - own)) / (wall_s * cores))


def train(
    words: list[str], run_dir: Path, *, steps: int, env: dict[str, str]
) -> tuple[list[dict[str, Any]], float]:
    """One run of ``python -m llmx`` that saves nothing: the lines of its ``metrics.jsonl``, and the
    part of the processors that others took."""
    words = [
        *words,
        f"task.steps={steps}",
        "task.epochs=null",
        "task.log_every_steps=1",
        "task.save_model=false",
        "checkpoint=none",
        "tracking=none",
        f"run_dir={run_dir}",
    ]
    command = [sys.executable, "-m", "llmx", *words]
    others = run(command, env=env, log=run_dir.with_suffix(".log"))
    text = (run_dir / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()], others


def busy_s() -> float:
    """Processor seconds that all processes of the machine took since boot."""
    fields = [int(text) for text in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    user, nice, system, _idle, _iowait, irq, softirq = fields[:7]
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def children_s() -> float:
    """Processor seconds that the ended children of this process took, theirs included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
