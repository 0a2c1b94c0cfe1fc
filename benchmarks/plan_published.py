"""Published speeds and memory of training on GPUs against what a plan says.

    python benchmarks/plan_published.py [--memory]

Nothing is trained: each row is planned, by the assumptions that hold before a run has taught the
plan. ``--memory`` traces a micro step of the rows whose memory is published (a minute).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from typing import Any

import yaml
from machine import ROOT, shown, write_result

from llmx.config import Experiment, experiment_from_dict
from llmx.plan import make_plan
from llmx.plan.knowledge import Knowledge
from llmx.plan.memory import memory_of
from llmx.plan.trace import Traces
from llmx.plan.types import Plan
from llmx.train.memory_trace import networks_of, trace_step

CATALOGUE = yaml.safe_load((ROOT / "conf/hardware/devices/catalogue.yaml").read_text())
NEAR = 0.15
FP32_LOGITS = 12
"""Bytes of each logit in transformers' loss of 2023: a copy in fp32, its shifted copy, the
gradient. llmx's loss takes logits in chunks."""

FOUNDRY = "llm-foundry"
QWEN = "Qwen"
LONG = "LongLoRA"
FACTORY = "LLaMA-Factory"
SOURCES = {
    FOUNDRY: "MPT, FSDP: github.com/mosaicml/llm-foundry, scripts/train/benchmarking, commit "
    "061f2c7; tokens/s by GPU",
    QWEN: "Qwen-7B, one A100-80G, LoRA of rank 64, checkpointing: github.com/QwenLM/Qwen, README, "
    "commit 03cd81f; seconds of 8 micro steps",
    LONG: "Llama-2-7B, 8 A100-80G, rows of 8,192, checkpointing: arXiv:2309.12307, table 12; "
    "memory only",
    FACTORY: "estimates for models of 7B: github.com/hiyouga/LLaMA-Factory, README, commit "
    "00409ff; planned for Llama-2-7B on one GPU, LoRA of rank 8, checkpointing",
}
LAUNCHES = "the kernels of LoRA's small products take longer to launch than to run"
GPTQ = "GPTQ's kernels, not NF4; the rows beside it suggest 6 s"
HEADS = "20 heads of one row occupy a fifth of the GPU in attention kernels of 2023"
FLAT = "the update copies gradients flat, in 16 bits and in fp32: 40 GB that it leaves out"
EXPOSED = "4,096 tokens hide little of FSDP's communication, which sums in fp32"


def gpt2(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    """MPT by its shape: GPT-2's blocks with torch's GELU."""
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "vocab_size": 50368}
    off = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)
    config = {**sizes, **off, "n_positions": 65536, "activation_function": "gelu"}
    return {"kind": "gpt2", "init": "scratch", "config": config}


def llama(vocab: int) -> dict[str, Any]:
    config = {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": vocab,
        "max_position_embeddings": 65536, "tie_word_embeddings": False,
    }  # fmt: skip
    return {"kind": "llama", "init": "scratch", "config": config}


MODELS = {
    "125M": gpt2(768, 12, 12), "350M": gpt2(1024, 24, 16), "760M": gpt2(1536, 24, 12),
    "1B": gpt2(2048, 24, 16), "3B": gpt2(2560, 32, 20), "7B": gpt2(4096, 32, 32),
    "13B": gpt2(5120, 40, 40), "30B": gpt2(7168, 48, 56),
    "Qwen-7B": llama(151936), "Llama-2-7B": llama(32000),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One published number."""

    source: str
    model: str
    device: str
    gpus: int
    seq_len: int
    micro_batch: int
    accumulation: int
    published: float = 0.0
    """0: its memory alone."""
    checkpointing: str = "full"
    stage: int = 3
    adapter: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    """Where the plan is far off: what it does not know."""
    memory_gb: float = 0.0
    """Published peak of a GPU, 10^9 bytes."""
    of_model: dict[str, Any] = field(default_factory=dict)


def foundry(model: str, device: str, *numbers: float, none: bool = False, why: str = "") -> Row:
    """Row length, micro batch, accumulation, tokens/s by GPU."""
    seq_len, micro_batch, accumulation, published = numbers
    return Row(
        FOUNDRY, model, device, 8, int(seq_len), int(micro_batch), int(accumulation), published,
        "none" if none else "full", why=why,
    )  # fmt: skip


def factory(gb: float, why: str = "", **adapter: Any) -> Row:
    """An estimate of its README, which names no row length."""
    adapter = {"kind": "lora", "targets": ["all-linear"], **adapter} if adapter else {}
    return Row(
        FACTORY, "Llama-2-7B", "a100_80g", 1, 512, 1, 1, stage=2, memory_gb=gb, why=why,
        adapter=adapter,
    )  # fmt: skip


def qwen(seq_len: int, seconds: float, gb: float = 0.0, *, nf4: bool = False, why: str = "") -> Row:
    adapter: dict[str, Any] = {"kind": "lora", "rank": 64, "targets": ["all-linear"]}
    if nf4:
        adapter |= {"quantize": "nf4"}
    return Row(
        QWEN, "Qwen-7B", "a100_80g", 1, seq_len, 1, 8, seconds, stage=2, adapter=adapter, why=why,
        memory_gb=gb,
    )  # fmt: skip


A100, H100 = "a100_80g", "h100_80g"
ROWS = (
    foundry("125M", A100, 2048, 32, 2, 141737, none=True),
    foundry("350M", A100, 2048, 32, 2, 58782, none=True),
    foundry("760M", A100, 2048, 24, 2, 32434, none=True),
    foundry("1B", A100, 2048, 14, 4, 20513, none=True),
    foundry("3B", A100, 2048, 10, 2, 10811, none=True),
    foundry("3B", A100, 16384, 1, 6, 5529, none=True, why=HEADS),
    foundry("7B", A100, 2048, 6, 2, 4641, none=True),
    foundry("7B", A100, 1024, 64, 2, 4357),
    foundry("7B", A100, 4096, 16, 2, 3684),
    foundry("7B", A100, 8192, 8, 2, 3206),
    foundry("7B", A100, 32768, 2, 2, 1672),
    foundry("13B", A100, 2048, 2, 3, 2262, none=True, why=EXPOSED),
    foundry("13B", A100, 4096, 10, 3, 2060),
    foundry("30B", A100, 2048, 3, 21, 916),
    foundry("1B", H100, 2048, 14, 1, 45455, none=True),
    foundry("3B", H100, 1024, 20, 6, 27046, none=True),
    foundry("3B", H100, 4096, 5, 6, 20964, none=True),
    foundry("7B", H100, 2048, 6, 1, 10643, none=True),
    foundry("7B", H100, 1024, 64, 2, 10203),
    foundry("7B", H100, 4096, 16, 2, 8611),
    foundry("7B", H100, 32768, 2, 2, 3318),
    foundry("13B", H100, 2048, 2, 1, 4792, none=True, why=EXPOSED),
    foundry("13B", H100, 4096, 10, 3, 4717),
    foundry("30B", H100, 2048, 3, 21, 2002),
    qwen(512, 1.5, why=LAUNCHES),
    qwen(1024, 2.8, 21.5, why=LAUNCHES),
    qwen(2048, 5.2, 23.8),
    qwen(4096, 10.1, 29.7),
    qwen(8192, 21.3, 36.6),
    qwen(1024, 3.5, 12.3, nf4=True),
    qwen(2048, 7.0, 13.9, nf4=True, why=GPTQ),
    qwen(4096, 11.6, 16.9, nf4=True),
    Row(
        LONG, "Llama-2-7B", A100, 8, 8192, 1, 8, stage=2, memory_gb=25.7,
        adapter={"kind": "lora", "rank": 16, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        of_model={"fused_loss": False},
    ),
    factory(120.0, FLAT),
    factory(16.0, rank=8),
    factory(6.0, rank=8, quantize="nf4"),
)  # fmt: skip


def experiment(row: Row) -> Experiment:
    model = {**MODELS[row.model], **row.of_model, "activation_checkpointing": row.checkpointing}
    host = {"name": "localhost", "slots": row.gpus, "device": row.device}
    return experiment_from_dict(
        {
            "model": model,
            "adapter": row.adapter,
            "data": {"seq_len": row.seq_len},
            "task": {"kind": "pretrain", "steps": 10},
            "batch": {"micro_batch": row.micro_batch, "accumulation": row.accumulation},
            "zero": {"stage": row.stage},
            "precision": "bf16",
            "hardware": {"hosts": [host], "devices": {row.device: CATALOGUE[row.device]}},
        }
    )


def planned(row: Row, plan: Plan) -> float:
    """What the source states, by the plan."""
    assert plan.time is not None, plan
    assert plan.time.step_s, plan.time.unknown
    if row.source == FOUNDRY:
        return plan.time.tokens_per_s / row.gpus
    return plan.time.step_s


def memory_gb(row: Row) -> float:
    """Peak by a traced micro step."""
    exp = experiment(row)
    plan = make_plan(exp)
    trace = trace_step(
        exp, precision="bf16", accelerator="cuda", attention=plan.attention_on(row.device),
        micro_batch=row.micro_batch,
    )  # fmt: skip
    return memory_of(exp, plan, trace, row.device).total_gib * 1.073741824


def details(row: Row, *, gpus: bool) -> str:
    """A row in words."""
    device = f" on {row.gpus} {row.device.split('_')[0].upper()}" if gpus else ""
    words = f"{row.model}{device}, {row.micro_batch} x {row.seq_len:,}"
    words += ", no checkpointing" if gpus and row.checkpointing == "none" else ""
    if row.adapter:
        words += ", QLoRA" if "quantize" in row.adapter else ", LoRA"
    return words


def note(row: Row, ratio: float) -> str:
    """Why the plan is far off, where it is."""
    return (row.why or "unexplained") if abs(ratio - 1) > NEAR else ""


def speeds() -> list[str]:
    """The table of speeds."""
    lines = [
        "| source | what | published | planned | planned / published | |",
        "|---|---|---|---|---|---|",
    ]
    for row in (row for row in ROWS if row.published):
        exp = experiment(row)
        knowledge = Knowledge(traces=Traces({}, networks=networks_of(exp)))
        value = planned(row, make_plan(exp, knowledge))
        ratio = value / row.published
        lines.append(
            f"| {row.source} | {details(row, gpus=True)} | {shown(row.published)} | {shown(value)} "
            f"| {ratio:.2f} | {note(row, ratio)} |"
        )
    return lines


def memories() -> list[str]:
    """The table of memory."""
    lines = [
        "| source | what | published GB | planned GB | with whole logits in fp32 | |",
        "|---|---|---|---|---|---|",
    ]
    fits = next(row for row in ROWS if (row.model, row.seq_len) == ("7B", 2048))
    for row in [fits, *(row for row in ROWS if row.memory_gb)]:
        value = memory_gb(row)
        stated, planned_gb, whole, why = "fits 80 GiB (85.9)", f"{value:.1f}", "", ""
        if row.memory_gb:
            stated = f"{row.memory_gb:.1f}"
            planned_gb = f"{value:.1f} ({value / row.memory_gb:.2f})"
            if row.source != FACTORY:
                vocab = MODELS[row.model]["config"]["vocab_size"]
                value += FP32_LOGITS * vocab * row.micro_batch * row.seq_len / 1e9
                whole = f"{value:.1f} ({value / row.memory_gb:.2f})"
            about_time = replace(row, why="") if row.published else row
            why = note(about_time, value / row.memory_gb)
        what = details(row, gpus=False)
        lines.append(f"| {row.source} | {what} | {stated} | {planned_gb} | {whole} | {why} |")
    return lines


def main() -> int:
    """Print the tables; write benchmarks/results/plan_published.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", action="store_true", help="also trace the memory of rows")
    options = parser.parse_args()
    lines = [f"- {name}: {text}." for name, text in SOURCES.items()]
    lines += ["", *speeds()]
    if options.memory:
        lines += ["", *memories()]
    write_result("plan_published", "Published speeds and memory against the plan", lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
