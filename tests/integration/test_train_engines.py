"""What DeepSpeed computes, by stage and precision, held against what it should."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked_ranks import launch
from tests.programs.engines import CLIPPED

pytestmark = pytest.mark.deepspeed

FP16, BF16 = torch.finfo(torch.float16).eps, torch.finfo(torch.bfloat16).eps
"""What one rounding may be off by, relative: about 1e-3 and 8e-3, on any processor."""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every check of ``tests.programs.engines``, answered by two ranks."""
    out = tmp_path_factory.mktemp("engines")
    done = launch("tests.programs.engines", str(out), ranks=2, timeout_s=1500)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return out


def answers(out: Path, name: str) -> list[Any]:
    return [json.loads((out / f"{name}.{rank}.json").read_text()) for rank in range(2)]


def test_a_growing_loss_scale_changes_no_update(out: Path) -> None:
    """DeepSpeed alone halves the update at which the scale doubles.

    Gradients below fp16's normal range are rounded otherwise at another scale.
    """
    steps, update = 6, 1.4e-3
    for one in (one for found in answers(out, "growing_loss_scale") for one in found.values()):
        assert one["scales"] == [256.0, 1024.0]
        assert one["apart"] < steps * update * FP16  # half an update is a hundred times as much
        still, growing = one["numbers"]
        for expected, got in zip(still, growing, strict=True):
            assert got == pytest.approx(expected, rel=FP16)


def test_gradients_of_many_micro_steps_are_summed_in_fp32(out: Path) -> None:
    """Against the same bf16 passes summed in fp64. What is left is the rounding of one reduction:
    at stage 1 of the whole sum, at the others of each micro step's gradient."""
    for found in answers(out, "gradient_sums"):
        assert found["1-bf16"] > 0.005, "sums in bf16 are told apart"
        assert found["1-fp32"] < 0.003
        for where in ("3", "2-offload", "3-offload"):
            assert found[f"{where}-fp32"] < 0.0012, where


def test_clipping_bounds_the_update(out: Path) -> None:
    """The update is ``lr * gradient``, scaled to the norm ``lr * limit``; so the two results lie
    ``lr * (norm - limit)`` apart, where ``norm`` is the one reported before clipping."""
    for found in answers(out, "clipping"):
        free, clipped = found["norms"]
        assert free > 4 * CLIPPED
        assert clipped == pytest.approx(free, rel=1e-5)
        assert found["apart"] == pytest.approx(0.5 * (free - CLIPPED), rel=1e-3)


def test_a_loss_over_the_whole_step_is_the_same_for_every_split(out: Path) -> None:
    for found in answers(out, "joint_steps"):
        for task, by_split in found.items():
            two_passes, uneven = by_split.pop("evaluated")
            assert len(by_split) == 4
            assert uneven[0]["loss"] == pytest.approx(two_passes[0]["loss"], rel=1e-4), task
            wanted = by_split["0: [4, 4] x 1"]
            for name, numbers in by_split.items():
                for expected, got in zip(wanted, numbers, strict=True):
                    assert got == pytest.approx(expected, rel=2e-5), (task, name)


def test_a_network_that_is_used_twice_in_a_backward_pass_trains_as_one_that_is_used_once(
    out: Path,
) -> None:
    """Both passes of it count, at every stage, also in bf16 with a bucket for all gradients."""
    for found in answers(out, "used_twice"):
        assert len(found) == 5
        for name, (once, twice) in found.items():
            tolerance = 2 * BF16 if "bf16" in name else 1e-5  # of two passes that are summed
            for expected, got in zip(once, twice, strict=True):
                assert got == pytest.approx(expected, rel=tolerance), name


def test_dpo_trains_as_its_reference_is_computed(out: Path) -> None:
    for found in answers(out, "dropout_of_dpo"):
        assert found["False"] == pytest.approx(math.log(2), abs=1e-5)
        assert abs(found["True"] - math.log(2)) > 1e-3


def test_other_ways_of_computing_train_alike(out: Path) -> None:
    """Head and loss together, activation checkpointing, what ``zero.extra`` takes."""
    for found in answers(out, "same_training"):
        assert len(found) == 14
        for name, one in found.items():
            assert one["fused"] == name.endswith("fused loss")
            # AdamW turns the rounding of a tiny gradient into a part of a step of 0.02.
            tolerance, apart = (2 * FP16, 5e-3) if "fp16" in name else (2e-6, 1e-4)
            assert one["apart"] < apart, name
            for plain, other in zip(*one["numbers"], strict=True):
                assert other == pytest.approx(plain, rel=tolerance), name


def test_ranks_that_compute_again_add_up_the_same_parameters(out: Path) -> None:
    """Bit for bit, of a model and of an adapter; at stage 2 with several buckets."""
    for found in answers(out, "mixed_checkpointing"):
        assert len(found) == 3
        for name, one in found.items():
            assert one["as_told"], name
            assert one["numbers"] == [one["numbers"][0]] * 2, name
            assert one["same"] == [True] * 2, name
        # Beside a norm and a loss, a bucket at stage 0, and many at stage 2.
        assert found["0"]["reductions"] < 10 < 20 < found["2"]["reductions"]


def test_a_step_after_an_evaluation_gathers_as_little_as_before_it(out: Path) -> None:
    """DeepSpeed alone gathers each parameter once more from then on, and one at a time."""
    for found in answers(out, "gatherings"):
        plain = found["plain"]
        # Once the order of modules is known, all are fetched ahead together.
        assert plain["counts"][0] > plain["parameters"]
        assert plain["counts"][1:] == [1] * 3
        for name in ("evaluated", "completed"):
            assert found[name]["counts"] == plain["counts"], name
            assert found[name]["numbers"] == plain["numbers"], name
        # What the pass within a step uses is released by it, and gathered again; nothing else is.
        assert found["within"]["numbers"] == plain["numbers"]
        assert max(found["within"]["counts"][1:]) <= plain["parameters"] + 1
        # Two passes before a backward pass are one order with it.
        assert found["twice"]["counts"][1:] == plain["counts"][1:]
        assert found["twice"]["numbers"] == plain["numbers"]
        assert max(found["networks"]["counts"][1:]) <= found["networks"]["parameters"]
        # Two micro steps, each with two passes: all of them are known.
        assert found["joint"]["counts"][1:] == [4] * 3
        assert {name: one["left"] for name, one in found.items()} == {name: [] for name in found}


def test_ranks_whose_gradients_come_in_another_order_do_not_train(out: Path) -> None:
    for said in answers(out, "another_order"):
        assert "Rank 1 and rank 0 differ" in said
        assert "gradient 1 is model.embed_tokens.weight there and " in said
        assert "Set one model.activation_checkpointing" in said


@pytest.mark.parametrize("task", ["pretrain", "tests.programs.own_task:Everything"])
def test_completions_between_steps_are_the_same_under_every_stage(out: Path, task: str) -> None:
    """Greedy and sampled, of one model and of several; and training goes on as it would have."""
    for found in answers(out, "generation"):
        runs, without = found[task]["runs"], found[task]["without"]
        wanted = runs["0"]["completions"]
        assert {one["ended"] for one in wanted["sampled policy"]} == {"stop", "length"}
        assert ("sampled reference" in wanted) == (task != "pretrain")
        writers = {kind.split()[1] for kind in wanted}
        for name, one in runs.items():
            frozen = {"reference": False} if task != "pretrain" else {}
            assert one["whole"] == ({n: [n] for n in writers} if name == "3-whole" else {}), name
            assert one["training"] == {**dict.fromkeys(one["training"], True), **frozen}, name
            for kind, completions in one["completions"].items():
                for got, expected in zip(completions, wanted[kind], strict=True):
                    assert got["tokens"] == expected["tokens"], (name, kind)
                    assert got["ended"] == expected["ended"]
                    assert got["logps"] == pytest.approx(expected["logps"], abs=1e-4)
            for got, expected in zip(one["numbers"], without, strict=True):
                assert got == pytest.approx(expected, rel=1e-4), name


def test_a_trial_that_fails_leaves_the_engine_as_it_was(out: Path) -> None:
    """At ZeRO-3 a forward that has failed leaves weights that cannot be freed."""
    assert answers(out, "fused_loss_that_fails") == [{"2": False, "3": False}] * 2


def test_the_base_of_an_adapter_is_a_frozen_model(out: Path) -> None:
    """As a copy of its own would be, without one: no dropout, no graph, and not moved by steps."""
    for found in answers(out, "base_of_an_adapter"):
        assert len(found) == 4
        for name, one in found.items():
            assert max(one["apart"]) <= 1e-6, name
            assert one["moved"] > 1e-3, name
            assert not one["graph"], name
            assert one["parameters"] == found["0-none"]["parameters"], name
            assert one["fingerprints"] == ["policy"], name
            assert ".lora_" in one["saved"][0], name
