"""An imported experiment has the losses of ``trl sft`` in its first steps.

``python -m pytest -m deepspeed tests/integration/test_import_loss.py``
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from llmx.compose.complete import complete, plan_experiment
from tests.chat_templates import PUBLISHED
from tests.command_runs import lines
from tests.forked_ranks import Server
from tests.rundirs import write_run
from tests.unit.test_import import imported
from tests.unit.test_import_rows import TEXTS, saved_model, settings, trl, write_rows

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
    exp = imported(yaml.safe_dump(config), "sft.yaml", "--from", "trl-sft", "hardware.slots=1")
    hardware = dataclasses.replace(exp.hardware, kind="local", name="local", hosts=[])
    exp = dataclasses.replace(exp, hardware=hardware, run_dir=str(tmp_path / "run"))
    composed = plan_experiment(*complete(exp))
    run = ranks.start(write_run(composed.experiment, plan=composed.plan), ranks=1).finish()
    ours = [line["loss"] for line in lines(run.root, "train")]
    assert len(theirs) == 4
    assert ours == pytest.approx(theirs, rel=2e-4)
