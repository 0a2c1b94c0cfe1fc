"""LoRA as a user trains it: real instructions, ZeRO-3, a resume, the files. Other ranks, stages and
uneven batches: ``test_state_resume``."""

from __future__ import annotations

import filecmp
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from llmx.cli.main import run_here
from llmx.config import ModelConfig
from llmx.models.adapter import load_adapted
from llmx.run.rundir import RunDir, read_json
from tests.forked_ranks import Server
from tests.resumed_runs import assert_planned_sizes, events, measurements, saving_run
from tests.rundirs import TINY_LLAMA, logs

pytestmark = pytest.mark.deepspeed

STEPS, SAVED = 4, 2
MERGED = ("--to", "merged")
COMMON = "\N{FULLWIDTH COMMA}" if os.environ.get("LLMX_REAL_DATA") else "the"
"""Texts are full of it, and no token is it alone."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained model, as far as anyone can tell."""
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("base") / "base"
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(vocab_size=1024, **TINY_LLAMA)).save_pretrained(directory)
    return directory


def adapted(directory: Path, base: Path, **groups: Any) -> RunDir:
    real = os.environ.get("LLMX_REAL_DATA")
    rows = {"path": f"{real}/alpaca_zh_demo.json", "form": "alpaca"} if real else {}
    values: dict[str, Any] = {
        "model": {
            "name": "base", "kind": "hf", "init": "pretrained", "path": str(base),
            "tokenizer": "demo", "activation_checkpointing": "full",
            "config": {**TINY_LLAMA, "model_type": "llama", "vocab_size": 1024},
        },
        "adapter": {"kind": "lora", "rank": 4, "targets": ["all-linear"], "lr": 0.01},
        "data": {**rows, "max_rows": 60, "eval_samples": 4, "seq_len": 64},
        "task": {"steps": STEPS, "log_every_steps": 1, "save_model": True,
                 "max_lost": 1.0},
        "checkpoint": {"every_steps": SAVED, "at_end": True},
        "zero": {"stage": 3},
    }  # fmt: skip
    merged = {name: {**values.get(name, {}), **group} for name, group in groups.items()}
    return saving_run(directory, **{**values, **merged})


def from_step(run: RunDir, step: int, directory: Path) -> RunDir:
    """A copy of a run as it was at a checkpoint, to go on bit for bit."""
    copy = RunDir(directory)
    shutil.copytree(run.root, directory)
    for later in copy.checkpoints.glob("step-*"):
        if later != copy.checkpoint(step):
            shutil.rmtree(later)
    return copy


def losses(run: RunDir) -> list[float]:
    return [line["loss"] for line in measurements(run) if line["kind"] == "train"]


def exported(run: RunDir, *words: str) -> Path:
    """``llmx export``: its directory."""
    assert run_here("export", [str(run.root), *words]) == 0
    suffix = "-merged" if words else ""
    return run.root / "export" / f"step-{STEPS:08d}{suffix}"


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(48).view(2, 24) * 19 % 1000
    found: torch.Tensor = model.eval()(ids).logits
    return found


def test_an_adapter_from_the_first_step_to_the_merged_model(
    ranks: Server, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    whole = ranks.start(adapted(tmp_path / "whole", base)).finish()
    train = [line for line in measurements(whole) if line["kind"] == "train"]
    assert losses(whole)[-1] < losses(whole)[0] - 0.1
    assert max(line["lr"] for line in train) == pytest.approx(0.01)  # the adapter's own
    start = measurements(whole)[0]
    assert start["num_trained"] < start["num_parameters"] / 4
    newest = whole.checkpoint(STEPS)
    state = read_json(newest / "state.json")
    assert all(".lora_" in name for name in state["parameters"])
    assert_planned_sizes(whole)

    half = ranks.start(from_step(whole, SAVED, tmp_path / "half")).finish()
    assert [event["step"] for event in events(half, "resumed")] == [SAVED]
    assert measurements(half) == measurements(whole)

    # Its files: the run's own, the exported ones, the merged model.
    plain = logits(AutoModelForCausalLM.from_pretrained(base))
    read = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), str(whole.final_model)
    )
    wanted = logits(read)
    assert (wanted - plain).abs().max() > 0.01
    written = exported(whole)
    names = sorted(path.name for path in whole.final_model.iterdir())
    assert names == sorted(path.name for path in written.iterdir())
    same, _, _ = filecmp.cmpfiles(whole.final_model, written, names, shallow=False)
    assert sorted(same) == names
    merged = AutoModelForCausalLM.from_pretrained(exported(whole, *MERGED))
    torch.testing.assert_close(logits(merged), wanted, rtol=1e-4, atol=1e-4)
    words = [str(whole.root), "Hello", "--max-new-tokens", "4", "--json"]
    assert run_here("generate", words) == 0
    assert '"completion"' in capsys.readouterr().out

    # Another base under the same name is noticed.
    other = tmp_path / "other"
    shutil.copytree(base, other)
    from_step(whole, SAVED, tmp_path / "wrong")
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.model.norm.weight[0] += 1.0
    model.save_pretrained(other)
    started = ranks.start(adapted(tmp_path / "wrong", other))
    assert set(started.wait()) != {0}
    assert "The frozen weights of the model 'policy' are others" in logs(started.dir)


def test_added_tokens_from_zero_3_to_the_exported_model(
    ranks: Server, base: Path, tmp_path: Path
) -> None:
    """Their rows are trained, saved by name, exported."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    added = {"add_tokens": [COMMON, "<new>"], "add_special_tokens": ["<|call|>"]}
    whole = ranks.start(adapted(tmp_path / "whole", base, model=added)).finish()
    written = exported(whole, *MERGED)
    network = AutoModelForCausalLM.from_pretrained(written)
    tokenizer = AutoTokenizer.from_pretrained(written)
    state = read_json(whole.checkpoint(STEPS) / "state.json")
    assert network.config.vocab_size == state["vocab_size"] >= len(tokenizer)
    assert state["padded_vocab_size"] % 64 == 0
    new, other = tokenizer.convert_tokens_to_ids([COMMON, "<new>"])
    rows = network.get_input_embeddings().weight
    assert not torch.equal(rows[new], rows[other])


def test_a_base_in_4_bits_resumes_bit_for_bit_and_is_merged(
    ranks: Server, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the refusal of CPUs: bitsandbytes computes there what it does on a GPU."""
    aside = Path(sys.prefix) / "quantized"
    if not (aside / "bitsandbytes").is_dir():
        pytest.skip("bitsandbytes is not installed; make venv puts it aside")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    groups: dict[str, Any] = {"adapter": {"quantize": "nf4"}, "zero": {"stage": 2}}
    env = {"PYTHONPATH": str(aside)}
    whole = ranks.start(adapted(tmp_path / "whole", base, **groups), **env).finish()
    start = measurements(whole)[0]
    assert losses(whole)[-1] < losses(whole)[0] - 0.1
    assert start["num_trained"] < start["num_parameters"] / 4
    state = read_json(whole.checkpoint(STEPS) / "state.json")
    assert all(".lora_" in name for name in state["parameters"])

    half = ranks.start(from_step(whole, SAVED, tmp_path / "half"), **env).finish()
    assert measurements(half) == measurements(whole)

    # Its files say how the base was kept.
    monkeypatch.setattr(sys, "path", [*sys.path, str(aside)])
    merged = AutoModelForCausalLM.from_pretrained(exported(whole, *MERGED))
    read = load_adapted(whole.final_model, ModelConfig(kind="hf", path=str(base)))
    torch.testing.assert_close(logits(merged), logits(read), rtol=1e-4, atol=1e-4)
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), str(whole.final_model)
    )
    assert (logits(merged) - logits(plain)).abs().max() > 0.01
