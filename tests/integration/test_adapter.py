"""LoRA as a user trains it: real instructions, ZeRO-3, an interruption, other ranks, the files."""

from __future__ import annotations

import filecmp
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from llmx.config import ModelConfig
from llmx.models.adapter import load_adapted
from llmx.plan import Plan
from llmx.run.rundir import RunDir, read_json, write_json
from tests.command_runs import llmx
from tests.forked_ranks import Server
from tests.resumed_runs import assert_planned_sizes, measurements, saving_run
from tests.rundirs import TINY_LLAMA, logs, with_batch

pytestmark = pytest.mark.deepspeed

STEPS = 6
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


def adapted(
    directory: Path, base: Path, *, ranks: int = 2, stop: int | None = None, **groups: Any
) -> RunDir:
    real = os.environ.get("LLMX_REAL_DATA")
    rows = {"path": f"{real}/alpaca_zh_demo.json", "form": "alpaca"} if real else {}
    values: dict[str, Any] = {
        "model": {
            "name": "base", "kind": "hf", "init": "pretrained", "path": str(base),
            "tokenizer": "demo", "activation_checkpointing": "full",
            "config": {**TINY_LLAMA, "model_type": "llama", "vocab_size": 1024},
        },
        "adapter": {"kind": "lora", "rank": 4, "targets": ["all-linear"], "lr": 0.01},
        "data": {**rows, "max_rows": 120, "eval_samples": 8, "seq_len": 128},
        "task": {"steps": STEPS, "stop_at_step": stop, "log_every_steps": 1, "save_model": True,
                 "max_lost": 1.0},
        "checkpoint": {"every_steps": 2, "at_end": True},
        "zero": {"stage": 3},
    }  # fmt: skip
    merged = {name: {**values.get(name, {}), **group} for name, group in groups.items()}
    return saving_run(directory, ranks=ranks, **{**values, **merged})


def losses(run: RunDir) -> list[float]:
    return [line["loss"] for line in measurements(run) if line["kind"] == "train"]


def exported(run: RunDir, *words: str, **env: str) -> Path:
    """``llmx export``: its directory."""
    done = llmx(run.root.parent, "export", str(run.root), *words, **env)
    assert done.returncode == 0, done.stdout
    suffix = "-merged" if words else ""
    return run.root / "export" / f"step-{STEPS:08d}{suffix}"


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(48).view(2, 24) * 19 % 1000
    found: torch.Tensor = model.eval()(ids).logits
    return found


def test_an_adapter_from_the_first_step_to_the_merged_model(
    ranks: Server, base: Path, tmp_path: Path
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

    # Stopped half way, it goes on bit for bit; on one rank at another stage all but.
    ranks.start(adapted(tmp_path / "half", base, stop=2)).finish()
    shutil.copytree(tmp_path / "half", tmp_path / "alone")
    half = ranks.start(adapted(tmp_path / "half", base)).finish()
    assert half.checkpoint(STEPS).is_dir()
    assert measurements(half)[-1]["weights_hash"] == measurements(whole)[-1]["weights_hash"]
    alone = adapted(tmp_path / "alone", base, ranks=1, zero={"stage": 2}, batch={"accumulation": 4})
    alone = ranks.start(alone, ranks=1).finish()
    assert losses(alone) == pytest.approx(losses(whole), rel=1e-4)

    # As on devices of unequal speed: of a step three samples on one and one on the other, twice.
    mixed = adapted(tmp_path / "mixed", base, stop=3)
    split = with_batch(Plan.from_dict(read_json(mixed.plan)), (3, 1), 2)
    write_json(mixed.plan, split.to_dict())
    mixed = ranks.start(mixed).finish()
    assert losses(mixed) == pytest.approx(losses(whole)[:3], rel=1e-4)

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
    done = llmx(tmp_path, "generate", str(whole.root), "Hello", "--max-new-tokens", "4", "--json")
    assert done.returncode == 0, done.stdout
    assert '"completion"' in done.stdout

    # Another base under the same name is noticed.
    other = tmp_path / "other"
    shutil.copytree(base, other)
    shutil.copytree(tmp_path / "half", tmp_path / "wrong")
    shutil.rmtree(RunDir(tmp_path / "wrong").checkpoint(STEPS))  # that of step 4 is left
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.model.norm.weight[0] += 1.0
    model.save_pretrained(other)
    started = ranks.start(adapted(tmp_path / "wrong", other))
    assert set(started.wait()) != {0}
    assert "The frozen weights of the model 'policy' are others" in logs(started.dir)


@pytest.mark.parametrize("adapter", [pytest.param("none", marks=pytest.mark.nightly), "lora"])
def test_added_tokens_from_zero_3_to_the_exported_model(
    ranks: Server, base: Path, tmp_path: Path, adapter: str
) -> None:
    """Their rows are trained, saved by name, resumed on other ranks at another stage, exported."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    added = {"add_tokens": [COMMON, "<new>"], "add_special_tokens": ["<|call|>"]}
    tokens: dict[str, Any] = {"model": added, "adapter": {"kind": adapter}}
    whole = ranks.start(adapted(tmp_path / "whole", base, **tokens)).finish()
    if adapter == "none":
        ranks.start(adapted(tmp_path / "half", base, stop=2, **tokens)).finish()
        tokens |= {"zero": {"stage": 2}, "batch": {"accumulation": 4}}
        alone = ranks.start(adapted(tmp_path / "half", base, ranks=1, **tokens), ranks=1).finish()
        assert losses(alone) == pytest.approx(losses(whole), rel=1e-4)

    written = exported(whole, *([] if adapter == "none" else MERGED))
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

    ranks.start(adapted(tmp_path / "half", base, stop=2, **groups), **env).finish()
    half = ranks.start(adapted(tmp_path / "half", base, **groups), **env).finish()
    assert measurements(half)[-1]["weights_hash"] == measurements(whole)[-1]["weights_hash"]

    # Its files say how the base was kept.
    merged = AutoModelForCausalLM.from_pretrained(exported(whole, *MERGED, **env))
    monkeypatch.setattr(sys, "path", [*sys.path, str(aside)])
    read = load_adapted(whole.final_model, ModelConfig(kind="hf", path=str(base)))
    torch.testing.assert_close(logits(merged), logits(read), rtol=1e-4, atol=1e-4)
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), str(whole.final_model)
    )
    assert (logits(merged) - logits(plain)).abs().max() > 0.01
