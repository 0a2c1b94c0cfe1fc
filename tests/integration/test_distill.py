"""task=distill on real text: ZeRO 3 and 2, a teacher whose top tokens are stored and a live one.
Resume: ``test_tasks_proof``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import llmx
from llmx.config import Experiment
from llmx.run.rundir import RunDir
from tests.command_runs import lines
from tests.forked_ranks import Server
from tests.rundirs import TINY_LLAMA, experiment, write_run

pytestmark = [pytest.mark.deepspeed, pytest.mark.nightly]

STEPS, TOP = 6, 32


def save_teacher(tokenizer: Path, target: Path) -> None:
    """Twice as wide as the student, with distributions that are not flat, and a vocabulary that is
    padded to another size."""
    found = AutoTokenizer.from_pretrained(tokenizer)
    size = -(-len(found) // 256) * 256
    torch.manual_seed(1)
    config = LlamaConfig(**{**TINY_LLAMA, "hidden_size": 128, "vocab_size": size})
    teacher = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        teacher.get_output_embeddings().weight.mul_(30)
    teacher.save_pretrained(target)
    found.save_pretrained(target)


def test_a_student_nears_its_teacher(real_data: Path, tmp_path: Path, ranks: Server) -> None:
    tokenizer = Path(llmx.__file__).parent / "assets" / "demo" / "tokenizer"
    save_teacher(tokenizer, tmp_path / "teacher")

    def run(name: str, *, stage: int, options: dict[str, Any], **task: Any) -> Experiment:
        teacher = {"teacher": str(tmp_path / "teacher"), "temperature": 2.0, "alpha": 0.2}
        return experiment(
            tmp_path / name,
            model={"tokenizer": str(tokenizer)},
            data={
                "path": str(real_data / "c4_demo.jsonl"), "packing": "concat", "seq_len": 64,
                "max_rows": 40, "eval_samples": 8,
            },
            task={"kind": "distill", "steps": STEPS, "options": {**teacher, **options}, **task},
            zero={"stage": stage},
            optim={"lr": 5e-3},
            batch={"micro_batch": 2},
            checkpoint={"at_end": True},
        )  # fmt: skip

    stored = {"teacher_logits": "stored", "top_k": TOP}
    whole = ranks.start(write_run(run("whole", stage=3, options=stored))).finish()
    log = whole.rank_log(0).read_text()
    for split in ("train", "eval"):
        assert f"Precomputing teacher_ids, teacher_logps ({split}): done in" in log
    before, after = lines(whole.root, "eval")
    assert after["divergence"] < before["divergence"]
    assert {"divergence", "agreement", "hard_loss"} <= {*lines(whole.root, "train")[0]}

    # A live teacher: its whole distributions, of which the top tokens are a part.
    live = ranks.start(write_run(run("live", stage=2, options={"teacher_logits": "live"}))).finish()
    assert "Precomputing" not in live.rank_log(0).read_text()
    for ours, theirs in zip(lines(live.root, "train"), lines(whole.root, "train"), strict=True):
        assert ours["divergence"] >= theirs["divergence"]
    first, also = lines(live.root, "train")[0], lines(whole.root, "train")[0]
    assert first["hard_loss"] == pytest.approx(also["hard_loss"], abs=1e-4)
    assert first["agreement"] == pytest.approx(also["agreement"], abs=1e-3)
    for each in (whole, live):
        state = json.loads(next(each.checkpoints.glob("step-*/state.json")).read_text())
        assert not any("teacher" in name for name in state["parameters"])
        assert any("teacher" in name for name in state["frozen"])
        student = AutoModelForCausalLM.from_pretrained(RunDir(each.root).final_model)
        assert student.config.hidden_size == TINY_LLAMA["hidden_size"]
