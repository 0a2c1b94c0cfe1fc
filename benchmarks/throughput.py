"""Throughput of llmx against others, both with DeepSpeed ZeRO-2: SFT against the Hugging Face
Trainer, LoRA SFT, DPO of all weights and GRPO against TRL.

    LLMX_REAL_DATA=... python benchmarks/throughput.py sft|lora|dpo [--pairs 3] [--only ...]
    python benchmarks/throughput.py grpo [--pairs 3] [--hidden 384] [--layers 6]

The same rows (``alpaca_zh_demo.json`` or ``dpo_en_demo.json``, 50k BPE), tokenized once by the same
code; the same weights to begin with (a Llama of 4 layers, width 256, 50,304 rows of vocabulary),
the same precision (fp32), learning rate and ZeRO section; two CPU ranks, one thread each. All sides
are run in turn, so that a busy machine burdens all. Counted are useful tokens: those that are not
padding; the steps of the beginning, and what is computed once before them, are not counted. Matched
are the rows (or pairs) of an optimizer step. Exits with 1 below the target.

``wrapped`` is TRL's other packing: it cuts rows at any place and lets them see each other, so that
another loss is learned. The ratio is taken of the last of the others (benchmarks/README.md).

GRPO has prompts of the bundled data, the same group size, longest completion and loss (``dapo``). A
sample is one completion that is generated, rewarded and trained on. The network is a Llama that
ends a completion with the same chance at each token, so that lengths differ as those of trained
models do: one dimension of its embedding is constant, and the stop token's row of the output
embedding looks at that. At a learning rate of 1e-6 they would grow by half in ten steps.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from machine import free_port, refuse_left_locks, shown, write_result

RANKS = 2
SEQ_LEN = 1024
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
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}
BETA = 0.1
ALPACA = "alpaca_zh_demo.json"
ALIKE = (
    "task.max_lost=1 model=hf model.init=pretrained hardware=cpu2 zero=stage2 precision=fp32 "
    "optim.schedule=constant optim.warmup_steps=0 optim.weight_decay=0 optim.betas=[0.9,0.999]"
).split()
SAVES_NOTHING = (
    "task.epochs=null task.log_every_steps=1 task.save_model=false checkpoint=none tracking=none"
).split()
STOP_CHANCE = 1 / 32
"""Of a completion of GRPO to end, at each token."""
PEERS = Path(__file__).parent / "peers"


@dataclass(frozen=True)
class Kind:
    """What is trained, against whom, and how that is set."""

    title: str
    peer: str
    target: float
    ours: tuple[str, ...]
    lr: float
    rows_per_rank: int
    """8 is TRL's own default. TRL's DPO makes the logits of all positions; with 3 pairs, the packed
    step of llmx has as many (5.9 and 6)."""
    file: str = ""
    """Of the folder of real data; the bundled rows where there is none."""
    peers: dict[str, dict[str, Any]] = field(default_factory=lambda: {"defaults": {}})
    """The last one that is no ``wrapped`` is what the ratio is taken of."""
    unit: str = "useful tokens/s"


KINDS = {
    "sft": Kind(
        "SFT", "the Hugging Face Trainer", 2.5, ("task=sft", "data=alpaca"), 1e-4, 8, ALPACA
    ),
    "lora": Kind(
        "LoRA SFT",
        "TRL",
        2.0,
        ("task=sft", "data=alpaca", "adapter=lora", "adapter.lr=null"),
        1e-3,
        8,
        ALPACA,
        {"wrapped": {"packing": True, "packing_strategy": "wrapped"}, "defaults": {}},
    ),
    "dpo": Kind(
        "DPO",
        "TRL",
        2.0,
        ("task=dpo", "data=file", f"task.options.beta={BETA}", "data.over_long=drop"),
        1e-4,
        3,
        "dpo_en_demo.json",
        {"defaults": {}, "reference once": {"precompute_ref_log_probs": True}},
    ),
    "grpo": Kind(
        "GRPO",
        "TRL",
        2.0,
        (
            *("task=grpo", "task.options.rewards=[vowels:vowels]", f"task.code_path={PEERS}"),
            *("data=file", "data.form=prompt_response"),
        ),
        1e-9,
        8,
        unit="samples/s",
    ),
}


@dataclass(frozen=True)
class Side:
    """What one run measured."""

    per_s: float
    """Useful tokens or samples a second."""
    rows_per_step: float
    trained: int
    values: list[float]
    """The loss of each step; the reward with GRPO."""
    others: str
    """Part of the machine's processor time that other processes took meanwhile; not told for llmx,
    whose ranks are no children of this process."""


def main() -> int:
    """Measure all sides in turn, print, write benchmarks/results/KIND_throughput.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of each run")
    parser.add_argument("--skip", type=int, default=3, help="steps of warming up, not counted")
    parser.add_argument("--rows-per-rank", type=int, help="the peer's batch size (8; dpo: 3)")
    parser.add_argument("--only", help="settings of the peer, separated by commas (all by default)")
    grpo = parser.add_argument_group("grpo")
    grpo.add_argument("--prompts", type=int, default=16, help="prompts of a step")
    grpo.add_argument("--group-size", type=int, default=8)
    grpo.add_argument("--max-new-tokens", type=int, default=96)
    grpo.add_argument("--hidden", type=int, default=384)
    grpo.add_argument("--layers", type=int, default=6)
    options = parser.parse_args()
    kind = KINDS[options.kind]
    source = os.environ.get("LLMX_REAL_DATA", "")
    if kind.file and not source:
        print("LLMX_REAL_DATA does not name the folder of real data sets", file=sys.stderr)
        return 2
    options.rows_per_rank = options.rows_per_rank or kind.rows_per_rank
    names = options.only.split(",") if options.only else list(kind.peers)
    with tempfile.TemporaryDirectory(prefix="llmx-bench-") as directory:
        Made = GrpoBench if options.kind == "grpo" else Bench
        bench = Made(Path(directory), data=Path(source), options=options)
        bench.prepare()
        rounds: list[dict[str, Side]] = []
        for index in range(options.pairs):
            sides = {name: bench.peer(index, name) for name in names}
            sides["llmx"] = bench.llmx(index)
            rounds.append(sides)
            measured = [
                f"{name} {shown(side.per_s)} ({side.others} others)" for name, side in sides.items()
            ]
            print(f"round {index + 1}, {kind.unit}: {'; '.join(measured)}", flush=True)
    return report(rounds, bench)


class Bench:
    """The runs of SFT, LoRA SFT or DPO, in one temporary directory."""

    def __init__(self, root: Path, *, data: Path, options: argparse.Namespace) -> None:
        self.root, self.data, self.options = root, data, options
        self.kind = KINDS[options.kind]
        self.rows = data / self.kind.file
        self.tokenizer, self.model = root / "tokenizer", root / "model"
        self.env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        self.env["LLMX_CACHE"] = str(root / "cache")
        self.micro_batch, self.rows_per_sample = 1, 1.0
        self.store = root
        self.seq_len = SEQ_LEN
        # What is computed once is computed of what is trained, and no more.
        self.num_rows = RANKS * options.rows_per_rank * options.steps
        self.section: dict[str, Any] = {}
        """What llmx sets of ZeRO, for the peer."""

    def words(self) -> list[str]:
        """What every run of llmx is called with."""
        return [
            *self.kind.ours,
            f"data.path={self.rows}",
            f"data.max_rows={self.num_rows}",
            f"data.seq_len={self.seq_len}",
            f"model.path={self.model}",
            f"model.tokenizer={self.tokenizer}",
            f"optim.lr={self.kind.lr}",
            *ALIKE,
        ]

    def batch(self) -> list[str]:
        """The micro batch, and as many rows a step as the peer has on average."""
        return [
            f"batch.global_batch={RANKS * self.micro_batch}",
            f"batch.micro_batch={self.micro_batch}",
        ]

    def prepare(self) -> None:
        """Weights, tokenizer; tokenize once for all sides; match the rows of a step."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from tests.realdata import real_tokenizer_dir

        real_tokenizer_dir(self.data, self.tokenizer)
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(self.model)
        packed = self.prepared("data.packing=best_fit")
        store = self.prepared("data.packing=none")
        self.store = store.path
        self.rows_per_sample = len(store) / len(packed)
        self.micro_batch = max(1, round(self.options.rows_per_rank / self.rows_per_sample))

    def prepared(self, *words: str) -> Any:
        """The data of a planned run."""
        plan = self.root / f"plan-{len(list(self.root.glob('plan-*')))}"
        words = (*self.words(), *words, f"run_dir={plan}", "dry_run=true")
        run([sys.executable, "-m", "llmx", *words], env=self.env, log=plan.with_suffix(".log"))
        self.section = yaml.safe_load((plan / "ds_config.json").read_text())["zero_optimization"]
        os.environ["LLMX_CACHE"] = self.env["LLMX_CACHE"]
        from llmx.run import snapshot
        from llmx.run.rundir import RunDir
        from llmx.tasks import prepare, tokenizer_of

        exp = snapshot.load(RunDir(plan))
        return prepare(exp, tokenizer_of(exp))

    def llmx(self, index: int) -> Side:
        """One run of ``python -m llmx``; its own ``metrics.jsonl`` is the measurement."""
        run_dir = self.root / f"llmx-{index}"
        words = [*self.words(), *self.batch(), *self.seed(index), *SAVES_NOTHING]
        words += [f"task.steps={self.options.steps}", f"run_dir={run_dir}"]
        command = [sys.executable, "-m", "llmx", *words]
        run(command, env=self.env, log=run_dir.with_suffix(".log"))
        text = (run_dir / "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        start = next(line for line in lines if line["kind"] == "start")
        points = [line for line in lines if line["kind"] == "train"]
        return Side(
            self.steady(points),
            RANKS * self.micro_batch * self.rows_per_sample,
            start.get("num_trained", start["num_parameters"]),
            [point.get("reward", point["loss"]) for point in points],
            "-",
        )

    def seed(self, index: int) -> list[str]:
        """All rounds train the same; what GRPO draws differs."""
        return []

    def job(self, index: int, name: str) -> dict[str, Any]:
        """What the peer is told beside what it has in common with other kinds."""
        rows = self.options.rows_per_rank
        if name == "wrapped":  # as many tokens as in the rows of the others
            rows = max(1, round(rows / self.rows_per_sample))
        return {"rows_per_rank": rows, "seq_len": SEQ_LEN, "lora": LORA, "beta": BETA}

    def peer(self, index: int, name: str) -> Side:
        """One run of the peer, with the ZeRO section that llmx writes for the same run."""
        out = self.root / f"peer-{name.replace(' ', '-')}-{index}.json"
        job = {
            "kind": self.options.kind,
            "store": str(self.store),
            "tokenizer": str(self.tokenizer),
            "model": str(self.model),
            "steps": self.options.steps,
            "lr": self.kind.lr,
            "settings": self.kind.peers[name],
            "ds_config": {**AUTO, "zero_optimization": self.section},
            "out": str(out),
            **self.job(index, name),
        }
        found, others = run_peer("trl_trainer.py", job, env=self.env)
        rows = float(RANKS * self.options.rows_per_rank)
        speed = self.steady(found["points"])
        return Side(speed, rows, found["trained"], found["values"], f"{others:.0%}")

    def steady(self, points: list[dict[str, Any]]) -> float:
        """Useful tokens a second between the end of warming up and the last step."""
        first = next(point for point in points if point["step"] >= self.options.skip)
        last = points[-1]
        return (last["tokens"] - first["tokens"]) / (last["time"] - first["time"])

    def described(self, rounds: list[dict[str, Side]], best: str) -> list[str]:
        """What was trained, in sentences."""
        ours, theirs = rounds[0]["llmx"], rounds[0][best]
        return [
            f"{self.kind.title}: Llama 4 x 256, {ours.trained:,} trained parameters; "
            f"`{self.kind.file}`, sequences of up to {SEQ_LEN} tokens; ZeRO-2, fp32, {RANKS} CPU "
            "ranks with one thread each.",
            f"Rows of an optimizer step: {self.kind.peer} {theirs.rows_per_step:.1f}, llmx "
            f"{ours.rows_per_step:.1f} (packed, on average). Steps {self.options.skip} to "
            f"{self.options.steps} counted, without what is computed once before them.",
        ]


class GrpoBench(Bench):
    """The runs of GRPO."""

    def __init__(self, root: Path, *, data: Path, options: argparse.Namespace) -> None:
        super().__init__(root, data=data, options=options)
        self.rows = root / "prompts.jsonl"
        self.seq_len, self.num_rows = 256, options.prompts * options.steps

    def words(self) -> list[str]:
        options = self.options
        return [
            *super().words(),
            f"task.options.group_size={options.group_size}",
            f"task.options.max_new_tokens={options.max_new_tokens}",
        ]

    def batch(self) -> list[str]:
        return [
            f"batch.global_batch={self.options.prompts}",
            f"batch.micro_batch={self.options.rows_per_rank}",
        ]

    def prepare(self) -> None:
        """Weights and prompts; tokenize these once for both sides."""
        from llmx.data.source.files import DEMO_DIRECTORY

        options = self.options
        lines = (DEMO_DIRECTORY / "train.jsonl").read_text().splitlines(keepends=True)
        self.rows.write_text("".join(lines[: self.num_rows]))
        shutil.copytree(DEMO_DIRECTORY / "tokenizer", self.tokenizer)
        write_stopping_model(
            self.model, self.tokenizer, hidden=options.hidden, layers=options.layers
        )
        self.store = self.prepared().path

    def seed(self, index: int) -> list[str]:
        return [f"seed={index}"]

    def job(self, index: int, name: str) -> dict[str, Any]:
        options = self.options
        samples = options.prompts * options.group_size
        return {
            "seed": index,
            "rows_per_rank": options.rows_per_rank,
            "accumulation": samples // (RANKS * options.rows_per_rank),
            "group_size": options.group_size,
            "max_new_tokens": options.max_new_tokens,
        }

    def steady(self, points: list[dict[str, Any]]) -> float:
        """Samples a second."""
        samples = self.options.prompts * self.options.group_size
        return super().steady([{**each, "tokens": each["step"] * samples} for each in points])

    def described(self, rounds: list[dict[str, Side]], best: str) -> list[str]:
        options = self.options
        return [
            f"GRPO: Llama {options.layers} x {options.hidden}, {rounds[0]['llmx'].trained:,} "
            f"parameters; {options.prompts} prompts of the bundled data a step, "
            f"{options.group_size} completions each, of up to {options.max_new_tokens} tokens, "
            f"which stop with a chance of {STOP_CHANCE:.3f} at each; ZeRO-2, fp32, {RANKS} CPU "
            f"ranks with one thread each; micro batches of {options.rows_per_rank}. Steps "
            f"{options.skip} to {options.steps} counted.",
        ]


def report(rounds: list[dict[str, Side]], bench: Bench) -> int:
    """Print and write the table; 0 where the median ratio reaches the target."""
    trained = {side.trained for sides in rounds for side in sides.values()}
    assert len(trained) == 1, f"the same trained weights: {trained}"
    kind = bench.kind
    best = [name for name in rounds[0] if name not in ("llmx", "wrapped")][-1]
    ratios = [sides["llmx"].per_s / sides[best].per_s for sides in rounds]
    value = "reward" if bench.options.kind == "grpo" else "loss"
    lines = [
        *bench.described(rounds, best),
        "",
        f"| round | side | {kind.unit} | llmx over it | {value} of the first and the last step | "
        "other processes |",
        "|---|---|---|---|---|---|",
    ]
    for index, sides in enumerate(rounds):
        for name, side in sides.items():
            ratio = sides["llmx"].per_s / side.per_s
            title = name if name == "llmx" else f"{kind.peer}, {name}"
            lines.append(
                f"| {index + 1} | {title} | {shown(side.per_s)} | {ratio:.2f} | "
                f"{side.values[0]:.4f}, {side.values[-1]:.4f} | {side.others} |"
            )
    median = statistics.median(ratios)
    reached = "reached" if median >= kind.target else "MISSED"
    said = f"Median ratio {median:.2f} of {len(ratios)}; target {kind.target:g}: {reached}."
    name = f"{bench.options.kind}_throughput"
    write_result(name, f"{kind.title} throughput against {kind.peer}", [*lines, "", said])
    return int(median < kind.target)


AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
"""DeepSpeed's JSON of a peer, beside the ZeRO section that llmx writes for the same run."""


def run_peer(program: str, job: dict[str, Any], *, env: dict[str, str]) -> tuple[Any, float]:
    """Run a program of ``peers`` on both ranks: what it has written to ``out`` of its job, and the
    part of the processors that others took."""
    out = Path(job["out"])
    path = out.with_suffix(".job.json")
    path.write_text(json.dumps(job))
    env = {**env, "TOKENIZERS_PARALLELISM": "false"}
    # A communication thread of the peer sometimes aborts at exit, after it has written.
    log = path.with_suffix(".log")
    others = run_ranks(program, str(path), env=env, log=log, proof=out)
    return json.loads(out.read_text()), others


def run_ranks(
    program: str, *arguments: str, env: dict[str, str], log: Path, proof: Path | None = None
) -> float:
    """``run`` of a program of ``peers`` on all ranks, as ``deepspeed`` starts it."""
    deepspeed = Path(sys.executable).with_name("deepspeed")
    port = str(free_port())
    words = [str(deepspeed), "--num_gpus", str(RANKS), "--no_local_rank"]
    words += ["--master_port", port, str(PEERS / program), *arguments]
    path = f"{deepspeed.parent}:{env['PATH']}"
    env = {**env, "LOCAL_SIZE": str(RANKS), "PATH": path}
    others = run(words, env=env, log=log, proof=proof)
    for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        left.unlink()  # 69 MB of RAM
    return others


def write_stopping_model(directory: Path, tokenizer: Path, *, hidden: int, layers: int) -> None:
    """Random weights that end a completion with the same chance at each token."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    ids = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(ids),
            hidden_size=hidden,
            intermediate_size=8 * hidden // 3,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 64,
            max_position_embeddings=512,
            bos_token_id=ids.bos_token_id,
            eos_token_id=ids.eos_token_id,
            pad_token_id=ids.pad_token_id,
        )
    )
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0.5
        states = model.model(torch.arange(len(ids))[None, :256]).last_hidden_state
        logit = torch.logit(torch.tensor(STOP_CHANCE)) + torch.tensor(len(ids)).log()
        stop = model.lm_head.weight[ids.eos_token_id]
        stop.zero_()
        stop[0] = logit / states[0, :, 0].mean()
    model.save_pretrained(directory)


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


def busy_s() -> float:
    """Processor seconds that all processes of the machine took since boot."""
    used = psutil.cpu_times()
    return float(used.user + used.nice + used.system + used.irq + used.softirq)


def children_s() -> float:
    """Processor seconds that the ended children of this process took, theirs included."""
    used = os.times()
    return used.children_user + used.children_system


if __name__ == "__main__":
    sys.exit(main())
