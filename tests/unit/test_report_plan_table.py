"""The plan on the screen: golden text at 100 and 80 columns, and nothing heavy imported."""

from __future__ import annotations

import dataclasses
import io
from datetime import datetime
from pathlib import Path

import pytest

from llmx.compose.complete import refusal
from llmx.config import Experiment, ModelConfig, OptimConfig, TaskConfig, ZeroConfig
from llmx.observe.report.plan_table import batch_line, print_plan, time_rows
from llmx.plan.choices import compared
from llmx.plan.trace import Traces
from llmx.plan.types import BatchPlan, HostPlan, MemoryPlan, Plan, RankPlan
from llmx.text import TIMES
from tests.composing import sized as composed

COMMAND = (
    "cd /runs/mixed && DS_ENV_FILE=/runs/mixed/ds_env deepspeed --hostfile /runs/mixed/hostfile "
    "--master_addr 10.0.0.1 --master_port 29512 --module --no_local_rank llmx.worker /runs/mixed\n"
)


def mixed_plan() -> Plan:
    """Two A100 and two V100, unequal micro batches, one of them too full."""
    hosts = (
        HostPlan("node-a", "10.0.0.1", 2222, None, None, 2, "a100_40g", "eth1", False),
        HostPlan("node-b", "10.0.0.2", 22, None, None, 2, "v100_32g", "eth1", False),
    )
    return Plan(
        hosts=hosts,
        ranks=(
            *(RankPlan(rank, 0, "a100_40g", 4) for rank in (0, 1)),
            *(RankPlan(rank, 1, "v100_32g", 5 - rank) for rank in (2, 3)),
        ),
        accelerator="cuda",
        precision="fp16",
        precision_reason="v100_32g has no bf16",
        batch=BatchPlan(104, 8, (4, 4, 3, 2), 4096),
        transport="pdsh",
        master_addr="10.0.0.1",
        num_parameters=6_738_415_616,
        peak_tflops=874.0,
        memory=(
            MemoryPlan("a100_40g", 10.2, 3.1, 12.0, 10.0, 0.09, 1.0, 0.0, 40.0),
            MemoryPlan("v100_32g", 10.2, 3.1, 18.8, 5.0, 0.09, 1.0, 120.0, 32.0),
        ),
        advice="These fit by the plan, the fastest first: zero=stage3_offload (21.0 GiB, about "
        "+40% time).",
    )


def experiment(**task: object) -> Experiment:
    return Experiment(
        name="mixed",
        model=ModelConfig(name="llama2_7b", activation_checkpointing="full"),
        task=TaskConfig(**task),  # type: ignore[arg-type]
        zero=ZeroConfig(stage=3, hpz_partition_size=2, offload_optimizer="cpu"),
        optim=OptimConfig(lr=1e-5, warmup_steps=100, min_lr_ratio=0.1),
    )


def rendered(plan: Plan, exp: Experiment, *, width: int, traces: Traces | None = None) -> str:
    stream = io.StringIO()
    where = Path("/runs/mixed")
    options = compared(exp, plan, traces, allows=refusal) if traces else ()
    print_plan(
        plan, exp, command=COMMAND, run_dir=where, stream=stream, width=width, traces=traces,
        options=options,
    )  # fmt: skip
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def test_golden(golden) -> None:
    golden("report/plan_100.txt", rendered(mixed_plan(), experiment(steps=600), width=100))


@pytest.mark.parametrize("width", [40, 80])
def test_fits_the_terminal_and_keeps_the_command_whole(width: int) -> None:
    for plan in (mixed_plan(), composed(["hardware=a100x2_v100x2"]).plan):
        *lines, _ = rendered(plan, experiment(steps=600), width=width).splitlines()
        assert COMMAND.strip() in lines, "the command can be copied"
        assert max(len(line) for line in lines if line != COMMAND.strip()) <= width


def test_what_is_not_known_is_said() -> None:
    plan = dataclasses.replace(mixed_plan(), num_parameters=0, memory=(), advice="")
    text = rendered(plan, experiment(epochs=1.0), width=100)
    assert "an unknown number of parameters" in text
    assert "1 epoch; steps follow from the number of samples" in text
    assert "Predicted peak memory" not in text
    text = rendered(plan, experiment(), width=100, traces=Traces({}, "it took too long"))
    assert "Predicted peak memory of one rank: not known (it took too long)" in text
    unknown = dataclasses.replace(mixed_plan().memory[0], capacity_gib=0.0)
    text = rendered(dataclasses.replace(plan, memory=(unknown,)), experiment(), width=100)
    assert "not checked" in text
    assert "give task.steps or task.epochs" in text
    shown = rendered(composed(["hardware=cpu2"]).plan, experiment(), width=100)
    assert "hardware.devices.cpu.peak_tflops.fp32 is not set" in " ".join(shown.split())
    open_ended = composed(["hardware=a100x8", "task.steps=null", "task.epochs=1"]).plan
    assert "per 1,000 steps" in dict(time_rows(open_ended))["whole run"]


def test_the_batch_of_one_rank_and_of_many() -> None:
    for sizes, said in (((3,), "3"), ((4,) * 8 + (2,), f"(8 ranks{TIMES}4 + 1 ranks{TIMES}2)")):
        total = 2 * sum(sizes)
        plan = dataclasses.replace(mixed_plan(), batch=BatchPlan(total, 2, sizes, 128))
        shown = f"{said}{TIMES}2 = {total} samples of 128 = {total * 128:,} tokens a step"
        assert batch_line(plan) == shown


def test_rates_of_layers_and_parts_are_shown() -> None:
    exp = dataclasses.replace(
        experiment(steps=600),
        model=ModelConfig(
            name="small", kind="llama", init="scratch",
            config={"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                    "num_attention_heads": 4, "vocab_size": 100},
        ),
        optim=OptimConfig(lr=0.01, layer_decay=0.5, lr_scale={"*.mlp.*": 2.0}),
    )  # fmt: skip
    text = rendered(mixed_plan(), exp, width=140)
    (line,) = (line for line in text.splitlines() if line.startswith(" rates"))
    assert "embeddings 0.00125, layer 0 0.0025, layer 1 0.005, head 0.01, *.mlp.* " in line


def test_the_predicted_time(golden) -> None:
    """All that a mixed cluster is told, with the date of the end."""
    words = ["hardware=a100x2_v100x2", "model=llama3_8b", "data.seq_len=2048", "zero=stage2"]
    words += ["batch.balance=spec", "batch.global_batch=192", "batch.micro_batch=8"]
    words += ["task.steps=600", "hardware.network_gbit_per_s=100"]
    words += ["hardware.price_per_hour={a100_40g: 1.5, v100_32g: 0.5}"]
    plan = composed(words).plan
    now = datetime(2026, 1, 31, 22, 15)
    text = "".join(f"{name:>10}  {value}\n" for name, value in time_rows(plan, now=now))
    golden("report/plan_time.txt", text)
