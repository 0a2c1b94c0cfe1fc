"""Learning rate and batch by task: the table of docs/training.md, and what wins over it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from llmx.compose.task_rules import defaults_of, origin_of_batch, origin_of_lr
from llmx.config.groups import CONF
from llmx.config.tasks import shipped_tasks
from tests.composing import composed

MODEL = ["model=llama3_8b", "hardware=a100x8"]


def test_the_docs_have_the_table() -> None:
    page = Path(__file__).parents[2].joinpath("docs/training.md").read_text()
    rows = re.findall(
        r"^\| `(\w+)` \| (\S+) \| (\S+) \| (\S+) \| (\d+) \| (\S+) \| (\d+) \|", page, re.M
    )
    written = {
        name: tuple(None if number == "-" else float(number) for number in numbers)
        for name, *numbers in rows
    }
    epochs = {
        path.stem: yaml.safe_load(path.read_text())["epochs"]
        for path in (CONF / "task").glob("*.yaml")
    }
    assert written == {
        name: (row.full, row.adapter, row.scratch, row.batch, row.scratch_batch, epochs[name])
        for name, row in ((name, defaults_of(name)) for name in shipped_tasks())
    }


@pytest.mark.parametrize(
    ("words", "rate", "adapter_rate", "origin"),
    [
        (MODEL, 2e-5, None, "default of task=sft, pretrained"),
        ([*MODEL, "task=dpo"], 1e-6, None, "default of task=dpo, pretrained"),
        ([*MODEL, "adapter=lora"], 2e-5, 2e-4, "default of task=sft, adapter"),
        ([*MODEL, "adapter=lora", "optim.lr=5e-7"], 5e-7, None, "typed: optim.lr=5e-7"),
        ([*MODEL, "adapter=lora", "adapter.lr=3e-4"], 2e-5, 3e-4, "typed: adapter.lr=3e-4"),
        ([*MODEL, "optim=lion"], 5e-6, None, "default of task=sft, pretrained"),
        (["model=tiny"], 3e-4, None, "default of task=sft, from scratch"),
        ([*MODEL, "optim=muon"], 3e-4, None, "set by optim=muon"),
        (["experiment=demo"], 6e-3, None, "set by experiment=demo"),
    ],
)
def test_the_learning_rate_and_what_set_it(words, rate, adapter_rate, origin) -> None:
    exp = composed(words).experiment
    assert exp.optim.lr == pytest.approx(rate)
    assert exp.adapter.lr == adapter_rate
    assert origin_of_lr(exp, words) == origin


STEP = "default of task=sft, pretrained"
SCRATCH = ["model=tiny", "hardware=a100x8"]


@pytest.mark.parametrize(
    ("words", "samples", "origin"),
    [
        (MODEL, 32, f"{STEP}; micro batch: default"),
        (
            [*MODEL, "batch.micro_batch=16"],
            128,
            f"{STEP}; micro batch: typed: batch.micro_batch=16",
        ),
        ([*MODEL, "batch.micro_batch=auto"], 32, f"{STEP}; micro batch: chosen by the plan"),
        (
            [*MODEL, "batch.global_batch=16"],
            16,
            "typed: batch.global_batch=16; micro batch: default",
        ),
        (
            [*MODEL, "batch=tokens_2m", "data.seq_len=2048"],
            1024,
            "set by batch=tokens_2m; micro batch: set by batch=tokens_2m",
        ),
        (
            SCRATCH,
            8,
            "one micro step of all ranks, since batch.global_batch is not set; "
            "micro batch: default",
        ),
        (
            [*SCRATCH, "task=pretrain", "batch.micro_batch=3"],
            264,
            "default of task=pretrain, from scratch; micro batch: typed: batch.micro_batch=3",
        ),
    ],
)
def test_the_batch_and_what_set_it(words, samples, origin) -> None:
    done = composed(words)
    assert done.plan.batch.global_batch == samples
    assert origin_of_batch(done.experiment, words) == origin
