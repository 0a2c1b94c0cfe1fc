"""The losses of the first steps are those of ``trl sft`` with the same settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chat_templates import PUBLISHED
from tests.command_runs import lines
from tests.composing import composed
from tests.forked_ranks import Server
from tests.rundirs import write_run
from tests.unit.test_rows_of_trl import TEXTS, saved_model, settings, trl, write_rows

pytestmark = pytest.mark.deepspeed


def test_first_losses(tmp_path: Path, ranks: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved_model(PUBLISHED["qwen2.5"].tokenizer())
    write_rows(TEXTS)
    # A step has both rows, so that their order decides nothing.
    config = settings(
        max_steps=4, learning_rate=1e-3, logging_steps=1, lr_scheduler_type="cosine",
        weight_decay=0.1, save_strategy="no",
    )  # fmt: skip
    trainer = trl("sft", config)
    trainer.train()
    theirs = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    planned = composed(
        ["model.path=model", "data.path=rows", "data.form=prompt_response", "data.template=plain",
         "data.seq_len=256", "data.packing=none", "data.loss_on=last", "precision=fp32",
         "optim.lr=1e-3", "optim.weight_decay=0.1", "optim.betas=[0.9,0.999]",
         "optim.warmup_steps=0", "optim.min_lr_ratio=0", "task.steps=4", "task.log_every_steps=1",
         "batch.micro_batch=2", "batch.accumulation=1", "hardware.slots=1",
         "checkpoint.every_minutes=null"],
        run_dir=tmp_path / "run",
    )  # fmt: skip
    run = ranks.start(write_run(planned.experiment, plan=planned.plan), ranks=1).finish()
    ours = [line["loss"] for line in lines(run.root, "train")]
    assert len(theirs) == 4
    assert ours == pytest.approx(theirs, rel=2e-4)
