"""Noise on embeddings, the terms of the loss and early stopping, in real runs: interrupted and not,
and on another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmx.run.metrics.lines import read_metrics
from llmx.run.rundir import RunDir
from tests.forked_ranks import Server
from tests.resumed_runs import events, measurements, saving_run

pytestmark = pytest.mark.deepspeed

TASK = {
    "options": {"neftune_alpha": 5.0, "dft": True, "z_loss": 1e-3},
    "eval_every_steps": 8,
    # Nothing is ever so much better: the evaluations at 0, 8 and 16 end it.
    "early_stopping": {"patience": 2, "min_delta": 100.0},
}
OPTIM = {"schedule": "wsd", "decay_fraction": 0.75}


def run_of(directory: Path, *, stop: int | None = None, **groups: Any) -> RunDir:
    return saving_run(
        directory,
        task={**TASK, "stop_at_step": stop},
        optim={**OPTIM, "kind": "adamw", "lr": 1e-3, "warmup_steps": 2},
        checkpoint={"every_steps": 8, "at_end": True},
        **groups,
    )


def test_noise_terms_and_an_early_end_survive_a_resume_and_other_ranks(
    tmp_path: Path, ranks: Server
) -> None:
    whole = ranks.start(run_of(tmp_path / "whole")).finish()
    halves = ranks.start(run_of(tmp_path / "halves", stop=12)).finish()
    assert read_metrics(halves.metrics)[-1]["step"] == 12
    ranks.start(run_of(tmp_path / "halves")).finish()
    again = ranks.start(run_of(tmp_path / "halves")).finish()  # it has ended: nothing is left
    single = run_of(tmp_path / "single", ranks=1, batch={"micro_batch": 4})
    ranks.start(single, ranks=1).finish()
    plain = run_of(tmp_path / "plain", stop=3)
    config = plain.config.read_text().replace("neftune_alpha: 5.0", "neftune_alpha: 0.0")
    plain.config.write_text(config)
    ranks.start(plain).finish()
    assert measurements(halves) == measurements(whole) == measurements(again)
    lines = measurements(whole)
    assert (lines[-1]["kind"], lines[-1]["step"]) == ("end", 16)
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [0, 8, 16]
    (early,) = events(halves, "early_stopped")
    assert (early["step"], early["best_step"]) == (16, 0)
    assert "eval/loss has not improved in 2 evaluations" in early["reason"]
    assert whole.final_model.is_dir()

    def losses(run: RunDir, kind: str) -> list[float]:
        return [line["loss"] for line in measurements(run) if line["kind"] == kind]

    for kind in ("train", "eval"):
        assert losses(single, kind) == pytest.approx(losses(whole, kind), rel=1e-4)
    # The noise is there, and not in an evaluation.
    assert losses(plain, "train")[0] != losses(whole, "train")[0]
    assert losses(plain, "eval")[0] == losses(whole, "eval")[0]
