"""Activation checkpointing by type of device: what is refused, and a plan that counts each type's
own memory, time and speed; advice and ``auto`` that take it where it makes room."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from llmx.config import experiment_from_dict, to_dict
from llmx.errors import ConfigError
from llmx.observe.report.plan_table import device_lines
from llmx.plan.balance import identity, is_of
from llmx.plan.by_device import checkpointing_by_device, in_words, on_device
from llmx.plan.trace import wanted_traces
from llmx.plan.types import Plan
from tests.composing import planned

OWN = "hardware.devices.v100_32g.activation_checkpointing"
HOW = "model.activation_checkpointing"
WORDS = [
    *("model=opt_1_3b", "hardware=a100x2_v100x2", "data.seq_len=2048"),
    *("batch.global_batch=64", "zero=stage1", "batch.micro_batch=8"),
]
MIXED = [*WORDS, f"{OWN}=full"]
SMALL = [
    *(*WORDS, "zero=stage2", "batch.micro_batch=4"),
    "hardware.devices.v100_32g.memory_gib=11",
    "hardware.network_gbit_per_s=200",  # a slow one would decide everything
]


pytestmark = pytest.mark.usefixtures("made_up_traces")


def test_the_key_is_of_the_ranks_on_that_type() -> None:
    exp = planned(MIXED).experiment
    assert checkpointing_by_device(exp) == {"a100_40g": "none", "v100_32g": "full"}
    assert on_device(exp, "v100_32g").model.activation_checkpointing == "full"
    assert on_device(exp, "a100_40g") is exp
    alike = checkpointing_by_device(planned([*WORDS, f"{HOW}=full"]).experiment)
    assert alike == {"a100_40g": "full", "v100_32g": "full"}
    flag = planned([*WORDS, f"{HOW}=true", f"{OWN}=false"]).experiment
    assert in_words(checkpointing_by_device(flag)) == "full, none on v100_32g"
    assert experiment_from_dict(to_dict(exp)) == exp
    before = to_dict(exp)
    for device in before["hardware"]["devices"].values():  # a snapshot of an older llmx
        del device["activation_checkpointing"]
    assert in_words(checkpointing_by_device(experiment_from_dict(before))) == "none"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["zero=stage3"], "zero.stage=3: what is computed again gathers its weights again"),
        (["model.compile=true"], "model.compile=true: a compiled block hands over"),
    ],
)
def test_where_ranks_cannot_differ_it_is_refused(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError) as error:
        planned([*MIXED, *words])
    assert f"{OWN}=full, {why}" in str(error.value)
    planned([*MIXED, *words, f"{HOW}=full"])  # the same for all


def test_a_word_that_it_does_not_take_and_a_type_that_no_host_has() -> None:
    with pytest.raises(ConfigError, match=rf"{OWN}.*none, selective, full"):
        planned([*WORDS, f"{OWN}=some"])
    for words in (WORDS, ["hardware=local"]):
        with pytest.raises(ConfigError) as error:
            planned([*words, "hardware.devices.v100_32gb.activation_checkpointing=full"])
        assert "hardware.devices.v100_32gb: no host has this device type" in str(error.value)
        assert 'Did you mean "v100_32g"?' in str(error.value)
    # Data sheets of llmx may wait for hosts, and whole ones of the user's own.
    planned([*WORDS, "hardware.devices.t4.activation_checkpointing=full"])
    planned([*WORDS, "hardware.devices.cpu.memory_gib=8"])
    planned([*WORDS, "hardware.devices.mine={memory_gib: 48, compute_capability: 8.9}"])


def test_memory_time_and_speed_are_of_each_type() -> None:
    cases = (WORDS, MIXED, [*WORDS, f"{HOW}=full"])
    even = ["batch.balance=even", "zero.grad_accum_dtype=fp32"]
    plain, mixed, both = (planned([*words, *even]).plan for words in cases)
    assert mixed.checkpointing == (("a100_40g", "none"), ("v100_32g", "full"))
    # An A100 and a V100.
    assert mixed.memory == (plain.memory[0], both.memory[1])
    assert mixed.memory[1].total_gib < plain.memory[1].total_gib
    assert mixed.time.computing_s == pytest.approx(plain.time.computing_s * 4 / 3, rel=0.02)
    assert mixed.time.flops == plain.time.flops  # what MFU counts
    # A V100 that computes a third more is a third slower beside an A100; where both do, nothing is.
    shared = [planned(words).plan.balance for words in cases]
    ratios = [one.speeds[-1].token_fs / one.speeds[0].token_fs for one in shared]
    assert ratios == pytest.approx([ratios[0], ratios[0] * 4 / 3, ratios[0]], rel=1e-6)
    # It has room for more: no type takes more than its own memory plan allows.
    limits = [one.limits for one in shared[:2]]
    assert limits[0][0] == limits[1][0] == 8
    assert limits[0][-1] < limits[1][-1] == 8


def test_files_traces_and_speeds_are_of_what_is_computed() -> None:
    """The speeds of a run are not taken for another checkpointing."""
    plain, mixed = planned(WORDS), planned(MIXED)
    values = json.loads(json.dumps(mixed.plan.to_dict()))
    assert Plan.from_dict(values) == mixed.plan
    assert values["checkpointing"] == [["a100_40g", "none"], ["v100_32g", "full"]]
    assert planned([*WORDS, f"{HOW}=full"]).plan.checkpointing == ()
    keys = wanted_traces(mixed.experiment, mixed.plan, alternatives=False)
    ways = {(key.attention, key.checkpointing) for key in keys}
    assert ways == {("varlen", "none"), ("segments", "full")}
    same = dataclasses.replace(mixed.plan, balance=plain.plan.balance)
    for one, other in ((plain.plan, same), (same, plain.plan)):
        assert is_of(identity(one), one)
        assert not is_of(identity(one), other)


def test_auto_and_advice_keep_what_a_type_has_of_its_own() -> None:
    advised = planned([*SMALL, "batch.micro_batch=4"])
    (text,) = [text for text in advised.plan.warnings if "These fit by the plan" in text]
    typed = text.partition("first: ")[2].split("; ")[0].partition(" (")[0]
    assert "% time" in text
    fitting = planned([*SMALL, *typed.split()])
    assert all(part.fits for part in fitting.plan.memory)
    found = planned([*SMALL, f"{HOW}=auto"])
    assert len(set(checkpointing_by_device(found.experiment).values())) == 1
    again = planned([*SMALL, *found.plan.chosen.words])  # as it would be typed
    assert again.experiment == found.experiment
    own = planned([*SMALL, f"{HOW}=auto", f"{OWN}=full"])
    assert checkpointing_by_device(own.experiment) == {"a100_40g": "none", "v100_32g": "full"}


def test_the_plan_says_what_each_type_does_and_why() -> None:
    found = planned([*MIXED, "batch.micro_batch=16"])
    lines = device_lines(found.plan, found.experiment)
    assert re.fullmatch(
        r"a100_40g: micro batch \d+ \(.*at most 8 by memory\), nothing recomputed", lines[0]
    )
    assert lines[1].endswith("full activation checkpointing")
    assert lines[2].startswith("all alike: offload (none), since DeepSpeed")
    assert len(lines) == 3
    even = planned([*WORDS, "batch.balance=even", "zero=stage3_offload"])
    lines = device_lines(even.plan, even.experiment)
    assert "micro batch 8 (batch.balance=even: one for all)" in lines[0]
    assert "offload (optimizer on cpu, parameters on cpu)" in lines[2]
    assert lines[2].endswith("activation checkpointing, since at stage 3 all ranks gather together")
    alone = planned([*WORDS, "hardware=a100x8"])
    assert device_lines(alone.plan, alone.experiment) == []
