"""Predicted against measured peak memory: ``python benchmarks/plan_validation.py``.

Each configuration is trained for three steps by two real ranks (gloo, forked), in the engine of a
run, with a hook under PyTorch's CPU allocator (``allocations.c``, compiled and preloaded) that
counts every byte it holds; the most at a time is the measured peak. Beside it the plan's
prediction, DeepSpeed's estimators and ``accelerate
estimate-memory``. Published in docs/development/predictions.md.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from machine import forked, free_port, rank_of, wait, write_result

from llmx.config import Experiment, experiment_from_dict

WORLD = 2
STEPS = 3


@dataclass(frozen=True)
class Case:
    """One configuration of the grid."""

    name: str
    kind: str
    config: dict[str, Any]
    stage: int
    micro_batch: int = 2
    seq_len: int = 256
    accumulation: int = 1
    precision: str = "fp32"
    checkpointing: str = "none"
    adapter: dict[str, Any] = field(default_factory=dict)
    optim: str = "adamw"
    zero: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    vocab: int = 4000
    world: int = WORLD
    drawn: dict[str, int] = field(default_factory=dict)
    """Options of ``task=grpo``, which draws its samples; else it is pretraining."""


LLAMA = {
    "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 1024,
}  # fmt: skip
SMALL = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 1024,
}  # fmt: skip
QWEN = {
    "hidden_size": 320, "intermediate_size": 960, "num_hidden_layers": 5,
    "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 64,
    "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip
GPT2 = {"n_embd": 320, "n_layer": 5, "n_head": 5, "n_positions": 1024}
OPT = {
    "hidden_size": 320, "word_embed_proj_dim": 320, "ffn_dim": 1280, "num_hidden_layers": 5,
    "num_attention_heads": 5, "max_position_embeddings": 1024,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
    "num_experts_per_tok": 2, "max_position_embeddings": 1024,
}  # fmt: skip
LORA = {"kind": "lora", "rank": 8, "targets": ["all-linear"]}


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA), "qwen3": ("qwen3", QWEN), "gpt2": ("gpt2", GPT2),
    "opt": ("opt", OPT), "mixtral": ("hf", MIXTRAL),
}  # fmt: skip
"""Kind of the model, its config."""


def case(shape: str, stage: int, what: str = "", *numbers: Any, **more: Any) -> Case:
    """Micro batch, row length, accumulation and precision, where they are others than usual."""
    name = " ".join([shape, "stage", str(stage), *([what] if what else [])])
    return Case(name, *SHAPES[shape], stage, *numbers, **more)


def grid() -> list[Case]:
    """Architectures x stages, and one thing varied at a time."""
    dense = ("llama", "qwen3", "gpt2", "opt")
    found = [case(shape, stage) for shape in dense for stage in range(4)]
    for shape, stage, how in itertools.product(dense, (2, 3), ("selective", "full")):
        found.append(case(shape, stage, how, 4, checkpointing=how))
    for stage in range(4):
        found += [
            case("llama", stage, "micro batch 1", 1, 128),
            case("llama", stage, "micro batch 8", 8, 128),
            case("llama", stage, "accumulation 2", 2, 128, 2),
            case("llama", stage, "lora", adapter=LORA),
            case("mixtral", stage),
            case("llama", stage, "vocabulary 16000", 1, 128, vocab=16000),
        ]
    found += [case("llama", stage, "bf16", precision="bf16") for stage in range(4)]
    optimizer = {"offload_optimizer": "cpu"}
    both = {**optimizer, "offload_param": "cpu"}
    hpz = {"hpz_partition_size": 2}
    in_bf16 = (2, 128, 2, "bf16")
    found += [
        case("llama", 1, "offload", zero=optimizer),
        case("llama", 1, "bf16 accumulation 2", *in_bf16),
        case("llama", 3, "bf16 accumulation 2", *in_bf16),
        case("llama", 2, "long", 1, 1024),
        case("llama", 2, "bf16 accumulation 2", *in_bf16),
        case("llama", 2, "fused loss", model={"fused_loss": True}),
        case("gpt2", 2, "long", 1, 768),
        case("gpt2", 1, "lora", adapter=LORA),
        case("llama", 1, "lion", optim="lion"),
        case("llama", 2, "muon", optim="muon"),
        case("llama", 2, "sgd", optim="sgd"),
        case("llama", 3, "small buckets", zero={"max_reuse_distance": 0}),
        case("llama", 2, "offload", zero=optimizer),
        case("opt", 2, "offload accumulation 2", 2, 128, 2, zero=optimizer),
        case("llama", 2, "offload bf16", precision="bf16", zero=optimizer),
        case("llama", 2, "offload bf16 accumulation 2", *in_bf16, zero=optimizer),
        case("llama", 2, "offload lora", adapter=LORA, zero=optimizer),
        case("llama", 3, "offload", zero=optimizer),
        case("opt", 3, "offload accumulation 2", 2, 128, 2, zero=optimizer),
        case("llama", 3, "offload of all", zero=both),
        case("gpt2", 3, "offload of all", zero=both),
        case("llama", 3, "offload of all lora", adapter=LORA, zero=both),
        case("llama", 3, "offload of all bf16 accumulation 2", *in_bf16, zero=both),
        case("llama", 3, "hpZ", zero=hpz),
        case("opt", 3, "hpZ", zero=hpz),
        case("llama", 3, "hpZ accumulation 2", 2, 128, 2, zero=hpz),
        case("llama", 3, "hpZ bf16", precision="bf16", zero=hpz),
        case("llama", 3, "hpZ lora", adapter=LORA, zero=hpz),
        case("llama", 3, "hpZ micro batch 8", 8, 128, zero=hpz),
        case("llama", 3, "hpZ of 4 ranks", 1, 128, zero=hpz, world=4),
    ]
    sizes = {"long": (4, 16, 128), "many": (40, 2, 24)}
    for stage, precision, name in itertools.product(range(4), ("fp32", "bf16"), sizes):
        prompts, group, new = sizes[name]
        drawn = {"group_size": group, "max_new_tokens": new}
        one = case("llama", stage, f"{precision} drawing {name}", 1, 192, prompts, precision)
        found.append(dataclasses.replace(one, config=SMALL, vocab=1000, drawn=drawn))
    return found


def experiment_of(case: Case, root: Path) -> Experiment:
    """As a run of it has it."""
    model = {
        "name": case.kind,
        "kind": case.kind,
        "init": "scratch",
        "config": {**case.config, "vocab_size": case.vocab},
        "tokenizer": str(tokenizer_directory(root, case.vocab)),
        "activation_checkpointing": case.checkpointing,
        **case.model,
    }
    if case.kind == "hf":
        directory = root / case.config["model_type"]
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(model.pop("config")))
        model |= {"path": str(directory), "config": {}}
    return experiment_from_dict(
        {
            "name": "validation",
            "run_dir": str(root / "run"),
            "precision": case.precision,
            "model": model,
            "data": {
                "path": "demo",
                "seq_len": case.seq_len,
                "eval_samples": 0,
                "packing": "none" if case.drawn else "auto",
            },
            "task": {
                "kind": "grpo" if case.drawn else "pretrain",
                "steps": STEPS,
                "options": case.drawn,
            },
            "zero": {"stage": case.stage, "pin_memory": False, **case.zero},
            "adapter": case.adapter,
            "hardware": {
                "name": "cpu",
                "hosts": [{"name": "localhost", "slots": case.world, "device": "cpu"}],
                "devices": {"cpu": {"accelerator": "cpu", "precisions": ["fp32", "bf16", "fp16"]}},
            },
            "optim": {"kind": case.optim, "lr": 1e-3, "warmup_steps": 1, "weight_decay": 0.1},
            "batch": {"micro_batch": case.micro_batch, "accumulation": case.accumulation},
            "launch": {"transport": "local"},
        }
    )


def tokenizer_directory(root: Path, size: int) -> Path:
    """Of a tokenizer with so many words."""
    directory = root / f"tokenizer-{size}"
    if not directory.exists():
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(3, size))]
        backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "<pad>"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
        ).save_pretrained(directory)
    return directory


def on_host(engine: Any) -> int:
    """Bytes of what an offload has in host memory between two steps: on CPU ranks, whose device
    is host memory too, the tensors that DeepSpeed puts there by name."""
    import torch

    optimizer, found = engine.optimizer, []
    if getattr(optimizer, "cpu_offload", False):  # stages 1 and 2
        found += optimizer.single_partition_of_fp32_groups
        found += optimizer.param_buffer_of_bit16_for_cpu_offload_groups
        found += [optimizer.temp_grad_buffer_for_cpu_offload]
        found += optimizer.accumulated_grads_in_cpu.values()
    if getattr(optimizer, "offload_optimizer", False):  # stage 3
        found += optimizer.fp32_partitioned_groups_flat
        found += [optimizer.grad_partitions_flat_buffer]
    found += [one.grad for one in found if one.grad is not None]
    if found:
        for state in optimizer.optimizer.state.values():
            found += [value for value in state.values() if torch.is_tensor(value)]
    if getattr(optimizer, "offload_param", False):
        found += [one.ds_tensor for one in engine.module.parameters() if not one.ds_persist]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in found}
    return sum(storage.nbytes() for storage in storages.values())


class Prompts(list[Any]):
    """A store of samples without columns."""

    columns = ()


def measured(exp: Experiment, plan: Any, rank: int) -> dict[str, Any]:
    """Peak bytes of the CPU allocator of this rank, from before the network is built on."""
    import numpy as np

    from llmx.data import collate
    from llmx.data.store.samples import Sample
    from llmx.plan import ds_config
    from llmx.tasks import task_of, tokenizer_of
    from llmx.train.batches import Layout, Step
    from llmx.train.engine.build import build_engine
    from llmx.train.rollout import rollout_step
    from llmx.train.step import train_step

    tokenizer = tokenizer_of(exp)
    task = task_of(exp, tokenizer)
    length = exp.data.seq_len
    draw = np.random.Generator(np.random.Philox(key=rank))
    prompts = Prompts()
    if plan.drawn is not None:
        same = np.random.Generator(np.random.Philox(key=0))
        size = length - plan.drawn.new_tokens
        for _ in range(STEPS * plan.batch.global_batch):
            tokens = same.integers(3, tokenizer.vocab_size, size + 1).astype(np.uint32)
            prompts.append(Sample(tokens, np.arange(size + 1) == size, np.array([0])))
    allocator = ctypes.CDLL(None)
    allocator.llmx_live.restype = allocator.llmx_peak.restype = ctypes.c_long
    before = allocator.llmx_live()
    allocator.llmx_restart()
    engine = build_engine(
        exp,
        plan,
        ds_config(exp.model, exp.zero, exp.optim, plan),
        tokenizer=tokenizer,
        specs=task.models(),
    )
    phases = {"build": allocator.llmx_peak() - before}
    for number in range(STEPS - 1 if plan.drawn else STEPS):
        micro_batches = []
        for _ in range(plan.batch.accumulation):
            targets = np.ones(length, dtype=bool)
            starts = np.array([0, length // 2])
            targets[starts] = False
            samples = [
                Sample(
                    draw.integers(3, tokenizer.vocab_size, length).astype(np.uint32),
                    targets,
                    starts,
                )
                for _ in range(plan.ranks[rank].micro_batch)
            ]
            micro_batches.append(collate(samples, seq_len=length, pad_id=0, layout=engine.layout))
        allocator.llmx_restart()
        engine.set_lr(1e-3)
        step = Step(number, tuple(micro_batches), 1000, 1000, tokens=1000, square_tokens=1)
        if plan.drawn is not None:
            phases[f"resting {number}"] = allocator.llmx_live() - before
            engine.main.rows = plan.drawn.rows
            layout = Layout(seq_len=length, pad_id=0, layout=engine.layout)
            step = rollout_step(
                engine, task, prompts, number, batch=plan.batch, rank=rank, seed=1, layout=layout
            )
            phases[f"drawing {number}"] = allocator.llmx_peak() - before
        train_step(
            engine,
            step,
            task,
            world=plan.world_size,
            before_update=lambda number=number: phases.update(
                {f"backward {number}": allocator.llmx_peak() - before}
            ),
        )
        phases[f"step {number}"] = allocator.llmx_peak() - before
    return {
        "peak": max(phases.values()),
        "phases": phases,
        "host": on_host(engine.engine),
    }


def predicted(exp: Experiment, plan: Any) -> dict[str, Any]:
    """As the plan predicts it, without what a process has beside tensors."""
    from llmx.plan.memory import memory_of, rules_of
    from llmx.plan.step_memory import peak_of
    from llmx.train.memory_trace import trace_step

    trace = trace_step(
        exp,
        precision=plan.precision,
        accelerator="cpu",
        attention="sdpa",
        micro_batch=max(plan.batch.micro_batches),
    )
    network = next(network for network in trace.networks.values() if network.num_trained)
    plan = dataclasses.replace(plan, network=network)
    peaks = peak_of(trace, rules_of(exp, plan))
    drawing = round(memory_of(exp, plan, trace, "cpu").drawing_gib * 2**30)
    return {
        "peak": peaks.total + peaks.host + drawing,
        "parts": {**peaks.at, "drawing": drawing, "resting": peaks.current},
        "moment": peaks.moment,
        "host": peaks.host,
        "parameters": network.num_parameters,
    }


def others(exp: Experiment, plan: Any, parameters: int, largest: int) -> dict[str, float]:
    """What DeepSpeed's estimators and accelerate say of it, bytes a rank."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    stage, world = exp.zero.stage, plan.world_size
    optimizer, params = (
        where != "none" for where in (exp.zero.offload_optimizer, exp.zero.offload_param)
    )
    found = {}
    if stage == 2:
        cpu, gpu = estimate_zero2_model_states_mem_needs(
            parameters, num_gpus_per_node=world, num_nodes=1, cpu_offload=optimizer
        )
        found["deepspeed"] = gpu + optimizer * cpu / world
    elif stage == 3:
        cpu, gpu, _ = estimate_zero3_model_states_mem_needs(
            parameters, largest, num_gpus_per_node=world, num_nodes=1,
            cpu_offload=optimizer, cpu_offload_params=params, zero_init=True,
        )  # fmt: skip
        found["deepspeed"] = gpu + optimizer * cpu / world
    # accelerate.commands.estimate: "Training using Adam" is four times the weights.
    found["accelerate"] = 4 * parameters * (4 if exp.precision == "fp32" else 2)
    return found


def run_case(case: Case, root: Path) -> dict[str, Any]:
    """Both, in forked processes; raises where a rank fails."""
    out = root / "answers"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    port = free_port()
    wait([forked(partial(answer, case, root, out, rank, port)) for rank in range(case.world)])
    wait([forked(partial(answer, case, root, out))])
    ranks = [json.loads((out / f"{rank}.json").read_text()) for rank in range(case.world)]
    return {
        "case": dataclasses.asdict(case),
        "date": time.strftime("%Y-%m-%d"),
        "measured": max(ranks, key=lambda one: one["peak"]),
        **json.loads((out / "predicted.json").read_text()),
    }


def answer(case: Case, root: Path, out: Path, rank: int | None = None, port: int = 0) -> None:
    """Write what a rank measures, or (without a rank) what is predicted."""
    if rank is not None:
        os.environ.update(rank_of(rank, world=case.world, port=port))
    from llmx.compose.task_rules import drawn_samples
    from llmx.plan import make_plan
    from llmx.plan.knowledge import Knowledge
    from llmx.train.engine.process_group import join_process_group

    exp = experiment_of(case, root)
    plan = make_plan(exp, Knowledge(drawn=drawn_samples(exp)))
    if rank is not None:
        join_process_group(plan)
        (out / f"{rank}.json").write_text(json.dumps(measured(exp, plan, rank)))
        return
    found = predicted(exp, plan)
    beside = others(exp, plan, found["parameters"], case.vocab * 384)
    (out / "predicted.json").write_text(json.dumps({"predicted": found, "others": beside}))


def write_table(found: list[dict[str, Any]]) -> None:
    """``benchmarks/results/plan_validation.md``."""

    def error(value: float | None, real: float) -> str:
        return "" if value is None else f"{value / real - 1:+.1%}"

    def of_host(one: dict[str, Any]) -> str:
        sizes = one["measured"]["host"], one["predicted"]["host"]
        return " / ".join(f"{size / 2**20:.1f}" for size in sizes) if any(sizes) else ""

    rows, errors, others_errors = [], [], {"deepspeed": [], "accelerate": []}
    for one in found:
        real, others = one["measured"]["peak"], one["others"]
        errors.append(one["predicted"]["peak"] / real - 1)
        for name, values in others_errors.items():
            if others.get(name):
                values.append(others[name] / real - 1)
        rows.append(
            f"| {one['case']['name']} | {real / 2**20:.1f} | "
            f"{one['predicted']['peak'] / 2**20:.1f} | {error(one['predicted']['peak'], real)} | "
            f"{of_host(one)} | "
            + " | ".join(error(others.get(name), real) for name in others_errors)
            + " |"
        )
    lines = [
        "| | configurations | median error | worst | under the measured peak |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {len(values)} | {statistics.median(map(abs, values)):.1%} | "
            f"{max(map(abs, values)):.1%} | {min(values):+.1%} |"
            for name, values in [("the plan", errors), *others_errors.items()]
        ),
        "",
        "Two ranks (four where the name says so), three steps; MiB of the fuller rank. `in host "
        "RAM`: of it what an offload has there between steps, measured / predicted. `accelerate`: "
        "four times the weights.",
        "",
        "| configuration | measured | predicted | error | in host RAM | DeepSpeed | accelerate |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]
    write_result("plan_validation", "Predicted against measured peak memory of a rank", lines)


def with_hook(command: list[str], directory: Path) -> int:
    """Run it with the hook under its allocator; returns its exit code."""
    library = directory / "allocations.so"
    source = Path(__file__).with_name("allocations.c")
    words = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl", "-lpthread"]
    subprocess.run(words, check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    return subprocess.run(command, env=environment, check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="configurations whose name has this pattern")
    parser.add_argument("--out", type=Path, help="where the numbers go, as JSON lines")
    parser.add_argument("--table", type=Path, help="only write the results of such JSON lines")
    words = parser.parse_args()
    if words.table:
        write_table([json.loads(line) for line in words.table.read_text().splitlines()])
        return
    if "allocations.so" not in os.environ.get("LD_PRELOAD", ""):
        with tempfile.TemporaryDirectory(prefix="llmx-hook-") as name:
            sys.exit(with_hook([sys.executable, *sys.argv], Path(name)))
    warnings.simplefilter("ignore")
    import deepspeed  # noqa: F401, imported for the children
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    torch.set_num_threads(1)
    errors = []
    with tempfile.TemporaryDirectory(prefix="llmx-plan-") as name:
        root = Path(name)
        for case in (case for case in grid() if re.search(words.only, case.name)):
            tokenizer_directory(root, case.vocab)
            started = time.monotonic()
            try:
                found = run_case(case, root)
            except RuntimeError as error:
                print(f"{case.name:42} FAILED {error}", flush=True)
                continue
            real, mine = found["measured"]["peak"], found["predicted"]["peak"]
            error = mine / real - 1
            errors.append(abs(error))
            print(
                f"{case.name:42} {real / 2**20:8.1f} MiB {mine / 2**20:8.1f} {error:+7.1%} "
                f"{found['predicted']['moment']:14} "
                + " ".join(f"{n} {v / real - 1:+.0%}" for n, v in found["others"].items())
                + f" {time.monotonic() - started:.0f} s",
                flush=True,
            )
            if words.out:
                with words.out.open("a") as stream:
                    stream.write(json.dumps(found) + "\n")
    if errors:
        print(
            f"{len(errors)} configurations: median {statistics.median(errors):.1%}, "
            f"worst {max(errors):.1%}"
        )


if __name__ == "__main__":
    main()
