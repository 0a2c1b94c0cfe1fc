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
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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


def grid() -> list[Case]:
    """Architectures x stages, and one thing varied at a time."""
    shapes = {"llama": LLAMA, "qwen3": QWEN, "gpt2": GPT2, "opt": OPT}
    found = [
        Case(f"{kind} stage {stage}", kind, config, stage)
        for kind, config in shapes.items()
        for stage in range(4)
    ]
    for kind, config in shapes.items():
        for stage in (2, 3):
            for how in ("selective", "full"):
                found.append(
                    Case(f"{kind} stage {stage} {how}", kind, config, stage, 4, checkpointing=how)
                )
    for stage in range(4):
        found += [
            Case(f"llama stage {stage} micro batch 1", "llama", LLAMA, stage, 1, 128),
            Case(f"llama stage {stage} micro batch 8", "llama", LLAMA, stage, 8, 128),
            Case(f"llama stage {stage} accumulation 2", "llama", LLAMA, stage, 2, 128, 2),
            Case(f"llama stage {stage} lora", "llama", LLAMA, stage, adapter=LORA),
            Case(f"mixtral stage {stage}", "hf", MIXTRAL, stage),
            Case(
                f"llama stage {stage} vocabulary 16000", "llama", LLAMA, stage, 1, 128, vocab=16000
            ),
        ]
    for stage in range(4):
        found.append(Case(f"llama stage {stage} bf16", "llama", LLAMA, stage, precision="bf16"))
    found += [
        Case("llama stage 1 offload", "llama", LLAMA, 1, zero={"offload_optimizer": "cpu"}),
        Case("llama stage 1 bf16 accumulation 2", "llama", LLAMA, 1, 2, 128, 2, "bf16"),
        Case("llama stage 3 bf16 accumulation 2", "llama", LLAMA, 3, 2, 128, 2, "bf16"),
        Case("llama stage 2 long", "llama", LLAMA, 2, 1, 1024),
        Case("llama stage 2 bf16 accumulation 2", "llama", LLAMA, 2, 2, 128, 2, "bf16"),
        Case("llama stage 2 fused loss", "llama", LLAMA, 2, model={"fused_loss": True}),
        Case("gpt2 stage 2 long", "gpt2", GPT2, 2, 1, 768),
        Case("gpt2 stage 1 lora", "gpt2", GPT2, 1, adapter=LORA),
        Case("llama stage 1 lion", "llama", LLAMA, 1, optim="lion"),
        Case("llama stage 2 muon", "llama", LLAMA, 2, optim="muon"),
        Case("llama stage 2 sgd", "llama", LLAMA, 2, optim="sgd"),
        Case("llama stage 3 small buckets", "llama", LLAMA, 3, zero={"max_reuse_distance": 0}),
    ]
    optimizer = {"offload_optimizer": "cpu"}
    both = {**optimizer, "offload_param": "cpu"}
    hpz = {"hpz_partition_size": 2}
    found += [
        Case("llama stage 2 offload", "llama", LLAMA, 2, zero=optimizer),
        Case("opt stage 2 offload accumulation 2", "opt", OPT, 2, 2, 128, 2, zero=optimizer),
        Case("llama stage 2 offload bf16", "llama", LLAMA, 2, precision="bf16", zero=optimizer),
        Case(
            "llama stage 2 offload bf16 accumulation 2", "llama", LLAMA, 2, 2, 128, 2, "bf16",
            zero=optimizer,
        ),
        Case("llama stage 2 offload lora", "llama", LLAMA, 2, adapter=LORA, zero=optimizer),
        Case("llama stage 3 offload", "llama", LLAMA, 3, zero=optimizer),
        Case("opt stage 3 offload accumulation 2", "opt", OPT, 3, 2, 128, 2, zero=optimizer),
        Case("llama stage 3 offload of all", "llama", LLAMA, 3, zero=both),
        Case("gpt2 stage 3 offload of all", "gpt2", GPT2, 3, zero=both),
        Case("llama stage 3 offload of all lora", "llama", LLAMA, 3, adapter=LORA, zero=both),
        Case(
            "llama stage 3 offload of all bf16 accumulation 2", "llama", LLAMA, 3, 2, 128, 2,
            "bf16", zero=both,
        ),
        Case("llama stage 3 hpZ", "llama", LLAMA, 3, zero=hpz),
        Case("opt stage 3 hpZ", "opt", OPT, 3, zero=hpz),
        Case("llama stage 3 hpZ accumulation 2", "llama", LLAMA, 3, 2, 128, 2, zero=hpz),
        Case("llama stage 3 hpZ bf16", "llama", LLAMA, 3, precision="bf16", zero=hpz),
        Case("llama stage 3 hpZ lora", "llama", LLAMA, 3, adapter=LORA, zero=hpz),
        Case("llama stage 3 hpZ micro batch 8", "llama", LLAMA, 3, 8, 128, zero=hpz),
        Case("llama stage 3 hpZ of 4 ranks", "llama", LLAMA, 3, 1, 128, zero=hpz, world=4),
    ]  # fmt: skip
    for stage in range(4):
        for precision in ("fp32", "bf16"):
            found += [
                Case(
                    f"llama stage {stage} {precision} drawing {name}", "llama", SMALL, stage, 1,
                    192, prompts, precision, vocab=1000,
                    drawn={"group_size": group, "max_new_tokens": new},
                )
                for name, prompts, group, new in (("long", 4, 16, 128), ("many", 40, 2, 24))
            ]  # fmt: skip
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
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "layout": engine.layout,
        "method": [engine.main.attention.implementation, engine.main.attention.isolation],
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
    out.mkdir(exist_ok=True)
    for old in out.iterdir():
        old.unlink()
    port = free_port()
    jobs = [*range(case.world), "predicted"]
    pids = {}
    for job in jobs[:-1]:
        pids[job] = forked(lambda job=job: answer_of_rank(case, root, job, port, out))
    wait(pids)
    wait({"predicted": forked(lambda: answer_predicted(case, root, out))})
    read = {job: json.loads((out / f"{job}.json").read_text()) for job in jobs}
    for job in jobs:
        if "error" in read[job]:
            raise RuntimeError(f"{case.name}: {job}: {read[job]['error']}")
    most = max((read[rank] for rank in range(case.world)), key=lambda one: one["peak"])
    return {
        "case": dataclasses.asdict(case),
        "date": time.strftime("%Y-%m-%d"),
        "measured": most,
        **read["predicted"],
    }


def answer_of_rank(case: Case, root: Path, rank: int, port: int, out: Path) -> None:
    place = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.world, "LOCAL_SIZE": case.world,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in place.items()})
    from llmx.compose.task_rules import drawn_samples
    from llmx.plan import make_plan
    from llmx.plan.knowledge import Knowledge
    from llmx.train.engine.process_group import join_process_group

    exp = experiment_of(case, root)
    plan = make_plan(exp, Knowledge(drawn=drawn_samples(exp)))
    join_process_group(plan)
    (out / f"{rank}.json").write_text(json.dumps(measured(exp, plan, rank)))


def answer_predicted(case: Case, root: Path, out: Path) -> None:
    from llmx.compose.task_rules import drawn_samples
    from llmx.plan import make_plan
    from llmx.plan.knowledge import Knowledge

    exp = experiment_of(case, root)
    plan = make_plan(exp, Knowledge(drawn=drawn_samples(exp)))
    found = predicted(exp, plan)
    answer = {
        "predicted": found,
        "others": others(exp, plan, found["parameters"], case.vocab * 384),
    }
    (out / "predicted.json").write_text(json.dumps(answer))


def forked(run: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 0
    try:
        run()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def wait(pids: dict[Any, int]) -> None:
    codes = {job: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for job, pid in pids.items()}
    if any(codes.values()):
        raise RuntimeError(f"ended with {codes}")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def write_table(found: list[dict[str, Any]]) -> None:
    """``benchmarks/results/plan_validation.md``."""
    from machine import write_result

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
    summary = [
        "| | configurations | median error | worst | under the measured peak |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {len(values)} | {statistics.median(map(abs, values)):.1%} | "
            f"{max(map(abs, values)):.1%} | {min(values):+.1%} |"
            for name, values in [("the plan", errors), *others_errors.items()]
        ),
    ]
    lines = [
        *summary,
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
    print("\n".join(summary))


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
    parser.add_argument("--only", default="", help="configurations with this in their name")
    parser.add_argument("--cases", default="", help="the names of configurations, with commas")
    parser.add_argument("--out", type=Path, help="where the numbers go, as JSON lines")
    parser.add_argument("--parts", action="store_true", help="print the predicted parts")
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
        for case in grid():
            named = words.cases.split(",") if words.cases else [case.name]
            if words.only not in case.name or case.name not in named:
                continue
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
            if words.parts:
                parts = {k: round(v / 2**20, 1) for k, v in found["predicted"]["parts"].items()}
                phases = {k: round(v / 2**20, 1) for k, v in found["measured"]["phases"].items()}
                host = found["predicted"]["host"] / 2**20
                resident = found["measured"]["resident"] / 2**20
                print(
                    f"   {parts} host {host:.1f}, really {found['measured']['host'] / 2**20:.1f} "
                    f"{phases} {found['measured']['method']} "
                    f"resident {resident:.0f}",
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
