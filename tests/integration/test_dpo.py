"""task=dpo on real preference pairs: ZeRO 2 and 3, a stored and a live reference, export.
Resume: ``test_tasks_proof``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from llmx.config import Experiment
from llmx.run.rundir import RunDir
from tests.command_runs import lines
from tests.forked_ranks import Server
from tests.rundirs import experiment, write_run

pytestmark = [pytest.mark.deepspeed, pytest.mark.nightly]

STEPS = 8


def test_pairs_are_learned_and_exported(real_data: Path, tmp_path: Path, ranks: Server) -> None:
    pairs = str(real_data / "dpo_en_demo.json")

    def run(
        name: str, *, stage: int, reference: str = "stored", adapter: Any = None, **task: Any
    ) -> Experiment:
        return experiment(
            tmp_path / name,
            # What it has seen: how random weights prefer new pairs, a few steps decide not.
            data={"path": pairs, "eval_path": pairs, "seq_len": 512, "over_long": "truncate",
                  "max_rows": 60},
            task={"kind": "dpo", "steps": STEPS, "max_lost": 1.0, **task,
                  "options": {"beta": 0.2, "reference": reference}},
            zero={"stage": stage},
            adapter=adapter or {},
            optim={"lr": 3e-3},
            batch={"micro_batch": 2},
            checkpoint={"at_end": True},
        )  # fmt: skip

    whole = ranks.start(write_run(run("whole", stage=2))).finish()
    log = whole.rank_log(0).read_text()
    assert "Precomputing reference_logp (train): done in" in log
    assert "Precomputing reference_logp (eval): done in" in log
    (start,) = lines(whole.root, "start")
    train, (before, after) = lines(whole.root, "train"), lines(whole.root, "eval")
    # The policy begins as the reference: no pair is preferred.
    assert train[0]["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert before["margin"] == pytest.approx(0.0, abs=1e-3)
    assert after["margin"] > 0.02
    assert after["accuracy"] > 0.5
    assert after["loss"] < before["loss"]
    # One model in memory, and no reference in the checkpoint.
    assert start["num_parameters"] == num_parameters(whole)

    # ZeRO-3 finds the columns, and trains the same.
    at_stage_3 = ranks.start(write_run(run("stage3", stage=3, steps=2))).finish()
    assert "reference_logp found in" in at_stage_3.rank_log(0).read_text()
    for ours, theirs in zip(lines(at_stage_3.root, "train"), train[:2], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-4)

    # A live reference in the same engine has the same losses; computed at ZeRO-3, the columns too.
    live = ranks.start(write_run(run("live", stage=2, steps=3, reference="live"))).finish()
    assert "Precomputing" not in live.rank_log(0).read_text()
    for ours, theirs in zip(lines(live.root, "train"), train[:3], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-4)
        assert ours["margin"] == pytest.approx(theirs["margin"], abs=2e-3)
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    again = ranks.start(write_run(run("again", stage=3, steps=1))).finish()
    assert "Precomputing reference_logp (train): done in" in again.rank_log(0).read_text()
    assert lines(again.root, "train")[0]["loss"] == pytest.approx(0.6931, abs=1e-4)

    # With an adapter the reference is the trained network without it: no other one is built.
    (tmp_path / "cache").rename(tmp_path / "of_a_frozen_model")
    lora = {"kind": "lora", "rank": 2, "targets": ["all-linear"]}
    adapted = ranks.start(write_run(run("lora", stage=3, steps=1, adapter=lora))).finish()
    assert "Precomputing reference_logp (train): done in" in adapted.rank_log(0).read_text()
    assert lines(adapted.root, "train")[0]["loss"] == pytest.approx(0.6931, abs=1e-4)
    computed = sorted((tmp_path / "cache").rglob("reference_logp.bin"))
    assert computed
    for file in computed:
        other = tmp_path / "of_a_frozen_model" / file.relative_to(tmp_path / "cache")
        assert file.read_bytes() == other.read_bytes()

    model = AutoModelForCausalLM.from_pretrained(whole.final_model)
    assert torch.isfinite(model(input_ids=torch.arange(5)[None]).logits).all()


def num_parameters(run: RunDir) -> int:
    """Of the checkpoint: as many as training has."""
    state = json.loads(next(run.checkpoints.glob("step-*/state.json")).read_text())
    names = state["parameters"]
    assert not any("reference" in name for name in names)
    return sum(int(torch.tensor(each["shape"]).prod()) for each in names.values())
