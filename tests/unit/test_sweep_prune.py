"""Which trials of a sweep need not run: the same, impossible, more than one that ran out."""

from __future__ import annotations

import dataclasses

import pytest

from llmx.config import Experiment, known_keys
from llmx.sweep.prune import NO_MEMORY, OutOfMemory, impossible, key_of, needs_more
from tests.composing import composed

A100 = ["model=llama2_7b", "data=demo", "hardware=a100x2_v100x2"]
SMALL = ["hardware=cpu2", "model.config.num_hidden_layers=1", "batch.global_batch=32"]


def failed(*words: str) -> OutOfMemory:
    made = composed([*SMALL, *words])
    return OutOfMemory(0, made.experiment, made.plan)


def why(known: OutOfMemory, *words: str) -> str:
    made = composed([*SMALL, *words])
    return needs_more(made.experiment, made.plan, [known])


def test_names_and_settings_of_the_sweep_make_no_other_trial() -> None:
    one = composed([*SMALL, "zero=stage2"], run_dir="/runs/a").experiment
    other = composed([*SMALL, "zero=stage2", "sweep.fail_fast=true"], run_dir="/runs/b").experiment
    assert key_of(one) == key_of(other)
    assert key_of(one) != key_of(composed([*SMALL, "zero=stage3"]).experiment)
    assert key_of(one) != key_of(composed([*SMALL, "zero=stage2", "seed=1"]).experiment)


@pytest.mark.parametrize(
    "words",
    [
        ("zero=stage2", "batch.micro_batch=4"),
        ("zero=stage2", "batch.micro_batch=8"),
        ("zero=stage1", "batch.micro_batch=4"),
        ("zero=stage0", "batch.micro_batch=16"),
        ("zero=stage1", "batch.micro_batch=8", "optim.lr=0.5", "tracking.project=other"),
    ],
)
def test_what_needs_as_much_or_more_is_left_out(words: tuple[str, ...]) -> None:
    known = failed("zero=stage2", "batch.micro_batch=4")
    assert why(known, *words).startswith("trial 0 ran out of memory and needs no more")


@pytest.mark.parametrize(
    "words",
    [
        ("zero=stage2", "batch.micro_batch=2"),
        ("zero=stage3", "batch.micro_batch=4"),
        ("zero=stage3", "batch.micro_batch=16"),
        ("zero=stage1", "batch.micro_batch=2"),
        ("zero=stage1", "batch.micro_batch=8", "model.activation_checkpointing=full"),
        ("zero=stage1", "batch.micro_batch=8", "data.seq_len=64"),
        ("zero=stage1", "batch.micro_batch=8", "seed=1"),
        ("zero=stage1", "batch.micro_batch=8", "optim=sgd"),
    ],
)
def test_what_may_need_less_is_run(words: tuple[str, ...]) -> None:
    known = failed("zero=stage2", "batch.micro_batch=4")
    assert why(known, *words) == ""


def test_a_smaller_micro_batch_is_run_also_where_the_plan_knows_no_memory() -> None:
    known = failed("zero=stage2", "batch.micro_batch=4")
    known = dataclasses.replace(known, plan=dataclasses.replace(known.plan, memory=()))
    for micro_batch, runs in ((2, True), (8, False)):
        made = composed([*SMALL, "zero=stage2", f"batch.micro_batch={micro_batch}"])
        plan = dataclasses.replace(made.plan, memory=())
        assert (needs_more(made.experiment, plan, [known]) == "") is runs


def test_fewer_micro_steps_may_need_less_although_the_micro_batch_is_larger() -> None:
    """One micro step sums no gradients in fp32: the plan says that it needs less."""
    known = failed("zero=stage2", "batch.micro_batch=4")
    made = composed([*SMALL, "zero=stage2", "batch.micro_batch=8"])
    (part,) = made.plan.memory
    less = dataclasses.replace(part, gradients_gib=0.0, activations_gib=0.0, logits_gib=0.0)
    plan = dataclasses.replace(made.plan, memory=(less,))
    assert needs_more(made.experiment, made.plan, [known])
    assert needs_more(made.experiment, plan, [known]) == ""


def test_model_states_that_no_device_holds_are_never_started() -> None:
    made = composed([*A100, "zero=stage0", "precision=fp32"])
    said = impossible(made.experiment, made.plan)
    assert said.startswith("parameters, gradients and optimizer states alone take")
    assert "v100" in said or "a100" in said


def test_what_only_the_activations_forbid_is_tried() -> None:
    """The plan's prediction of activations is no proof."""
    words = [*A100, "zero=stage3", "zero.offload_optimizer=cpu", "batch.micro_batch=64"]
    words += ["batch.balance=even"]  # any other takes what fits
    made = composed([*words, "batch.global_batch=256", "data.seq_len=4096"])
    assert not all(part.fits for part in made.plan.memory), "the plan itself says it does not fit"
    assert impossible(made.experiment, made.plan) == ""


def test_every_key_that_takes_no_memory_exists() -> None:
    names = known_keys(Experiment)
    for pattern in NO_MEMORY:
        stem = pattern.removesuffix("*").removesuffix(".").removesuffix("_")
        assert any(name.startswith(stem) for name in names), pattern
