"""The same commands on CUDA: what only a GPU can show. Skipped, saying so, without one.

``python -m pytest -m gpu tests/gpu``
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmx.hardware.detect import detect_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not detect_gpus(), reason="no CUDA device on this machine"),
]


def llmx(directory: Path, *words: str) -> None:
    command = [sys.executable, "-m", "llmx", *words]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def run(tmp_path: Path, *words: str) -> tuple[Path, list[dict[str, Any]]]:
    """Run ``python -m llmx`` on this machine's GPUs; its directory and its train records."""
    target = tmp_path / "run"
    tmp_path.mkdir(exist_ok=True)
    llmx(tmp_path, f"run_dir={target}", *words)
    return target, [record for record in lines_of(target) if record["kind"] == "train"]


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def check_resume(tmp_path: Path, records: list[dict[str, Any]], *words: str) -> Path:
    """A run that stops half way and goes on has the losses of the whole one; its directory."""
    target, _ = run(tmp_path, *words, "task.stop_at_step=10", "checkpoint.at_end=true")
    llmx(tmp_path, "resume", str(target), "task.stop_at_step=null")
    losses = [line["loss"] for line in lines_of(target) if line["kind"] == "train"]
    assert losses == [record["loss"] for record in records]
    return target


def test_the_demo_learns_on_the_gpu(tmp_path) -> None:
    target, records = run(tmp_path)
    plan = json.loads((target / "plan.json").read_text())
    assert plan["accelerator"] == "cuda"
    assert plan["precision"] in ("bf16", "fp16")
    assert records[-1]["loss"] < 0.2
    assert json.loads((target / "result.json").read_text())["exact_match"] > 0.9
    assert max(records[-1]["memory_gib"]) > 0


@pytest.mark.parametrize("zero", ["stage1", "stage2", "stage3", "stage2_offload", "stage3_offload"])
def test_every_stage_trains_and_exports(zero, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    target, records = run(tmp_path, f"zero={zero}", "task.steps=20", "task.eval_generate=0")
    assert records[-1]["loss"] < 0.7 * records[0]["loss"]
    model = AutoModelForCausalLM.from_pretrained(target / "model")
    assert sum(p.numel() for p in model.parameters()) > 0


def test_stages_agree_in_fp32(tmp_path) -> None:
    words = ("precision=fp32", "task.steps=5", "task.eval_generate=0", "task.log_every_steps=1")
    curves = {}
    for zero in ("stage1", "stage3"):
        _, records = run(tmp_path / zero, f"zero={zero}", "optim=sgd", *words)
        curves[zero] = [record["loss"] for record in records]
    assert curves["stage1"] == pytest.approx(curves["stage3"], rel=1e-4)


def test_the_loop_does_not_wait_for_data(tmp_path) -> None:
    _, records = run(tmp_path, "task.steps=100", "task.eval_generate=0")
    late = records[len(records) // 2 :]
    waited = sum(record["data_wait_s"] for record in late)
    assert waited < 0.05 * sum(record["step_time_s"] for record in late)


@pytest.mark.parametrize("zero", ["stage2", "stage3", "stage2_offload"])
def test_a_resumed_run_is_the_same_bit_for_bit(zero, tmp_path) -> None:
    words = (f"zero={zero}", "deterministic=true", "task.steps=20", "task.log_every_steps=1")
    quick = (*words, "task.eval_generate=0", "task.save_model=false")
    whole, records = run(tmp_path / "whole", *quick, "checkpoint.every_steps=5")
    saved = lines_of(whole)
    assert [line["step"] for line in saved if line.get("event") == "saved"] == [5, 10, 15, 20]
    target = check_resume(tmp_path, records, *quick)
    assert lines_of(target)[-1]["weights_hash"] == saved[-1]["weights_hash"]


def test_copies_of_a_state_are_page_locked_whole_and_used_again() -> None:
    import torch

    from llmx.checkpoint.save import BLOCK_BYTES, HostCopies
    from llmx.checkpoint.state.engine_state import StateTensor

    live = torch.arange(BLOCK_BYTES // 4 + 1000, dtype=torch.int32, device="cuda")
    copies, places = HostCopies(), []
    for _ in range(2):
        copied = copies.copy([StateTensor("master", "a", 0, live)])
        live += 1  # at once: the copy must be over
        assert [each.start for each in copied] == [0, BLOCK_BYTES // 4]
        assert all(each.tensor.is_pinned() for each in copied)
        assert torch.equal(torch.cat([each.tensor for each in copied]), live.cpu() - 1)
        places.append([each.tensor.data_ptr() for each in copied])
    assert places[0] == places[1]
    assert copies.held_bytes == 2 * BLOCK_BYTES


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained model: the demo's, after a few steps."""
    target, _ = run(tmp_path_factory.mktemp("base"), "task.steps=60", "task.eval_generate=0")
    return target / "model"


@pytest.mark.parametrize("zero", ["stage0", "stage1", "stage2"])
def test_a_base_in_4_bits_trains_resumes_and_is_merged(zero, base, tmp_path) -> None:
    pytest.importorskip("bitsandbytes", reason="pip install llmx[qlora]")
    import torch
    from transformers import AutoModelForCausalLM

    from llmx.config import ModelConfig
    from llmx.models.adapter import load_adapted

    words = ["adapter=qlora", "model=hf", f"model.path={base}", f"zero={zero}", "optim.lr=1e-3"]
    words += ["deterministic=true", "task.steps=20", "task.log_every_steps=1"]
    words += ["task.eval_generate=0", "checkpoint.at_end=true"]
    whole, records = run(tmp_path / "whole", *words)
    assert records[-1]["loss"] < records[0]["loss"]
    check_resume(tmp_path, records, *words)
    llmx(tmp_path, "export", str(whole), "--to", "merged")
    (merged,) = (whole / "export").glob("*-merged")
    ids = torch.arange(3, 51, device="cuda")[None]
    read = load_adapted(whole / "model", ModelConfig(kind="hf", path=str(base)))
    with torch.no_grad():
        wanted, found = (
            model.to("cuda", torch.float32).eval()(ids).logits
            for model in (read, AutoModelForCausalLM.from_pretrained(merged))
        )
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adam_in_8_bits_trains_and_resumes(precision, tmp_path) -> None:
    pytest.importorskip("bitsandbytes", reason="pip install llmx[qlora]")
    words = ["optim=adam8bit", "zero=stage0", "optim.lr=1e-3", f"precision={precision}"]
    words += ["deterministic=true", "task.steps=20", "task.log_every_steps=1"]
    words += ["task.eval_generate=0", "task.save_model=false", "checkpoint.at_end=true"]
    _, records = run(tmp_path / "whole", *words)
    assert records[-1]["loss"] < 0.7 * records[0]["loss"]
    check_resume(tmp_path, records, *words)


def test_a_trial_out_of_memory_spares_the_larger_one(tmp_path: Path) -> None:
    """Each token takes about 1 MiB in each layer: 512 rows of 40 tokens need some 300 GiB."""
    words = [
        "model.config.hidden_size=64", "model.config.intermediate_size=131072",
        "model.config.num_hidden_layers=16", "data.packing=none", "data.eval_samples=0",
        "batch.global_batch=null", "batch.accumulation=1", "batch.micro_batch=2,512,1024",
        "sweep.trial_steps=3", "hardware.slots=1", "tracking=none",
        f"hydra.sweep.dir={tmp_path}/sweep",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "llmx", "-m", "experiment=demo", *words],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0, "a trial has failed"
    trials = json.loads((tmp_path / "sweep/sweep.json").read_text())["trials"]
    assert [trial["outcome"] for trial in trials] == ["ok", "oom", "pruned"], done.stdout
    assert "out of memory" in trials[1]["cause"]
    assert trials[2]["cause"].startswith("trial 1 ran out of memory and needs no more")
    best = (tmp_path / "sweep/best.yaml").read_text()
    assert "- batch.micro_batch=2\n" in best
