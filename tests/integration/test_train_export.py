"""A whole run of the worker: its files are those of the contract, its export is what was measured;
``export`` writes, byte for byte, the directory that the run wrote itself."""

from __future__ import annotations

import filecmp
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmx.cli.main import run_here
from llmx.config import Experiment
from llmx.run.rundir import RunDir, read_json
from llmx.tasks import prepare, tokenizer_of
from tests.checkpoint_saves import flip_bit
from tests.forked_ranks import launch
from tests.reference import naive_loss
from tests.rundirs import TINY_LLAMA, experiment, logs, write_run

pytestmark = pytest.mark.deepspeed

STEPS = 4
PADDED_TO = 96
"""1024 tokens become 1056 rows."""
WORLD = 2
METRICS = ["exact_match", "rougeL", "tests.integration.test_train_export:length"]


def length(completions: list[str], references: list[str]) -> float:
    """A metric of one's own."""
    return sum(map(len, references)) / len(completions)


RUNS = {"stage2-bf16": (2, "bf16", False), "stage3-tied": (3, "fp32", True)}


@pytest.fixture(scope="module", params=RUNS)
def finished(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Experiment, RunDir]:
    """Saved at the 2nd step and at the end."""
    stage, precision, tied = RUNS[request.param]
    # As of a large network: parameters are gathered one by one, and ahead.
    large = {"param_persistence_threshold": 0, "prefetch_bucket_size": 5_000}
    exp = experiment(
        tmp_path_factory.mktemp("run") / "run",
        ranks=WORLD,
        precision=precision,
        model={
            "pad_vocab_to_multiple_of": PADDED_TO,
            "config": {**TINY_LLAMA, "tie_word_embeddings": tied},
        },
        data={"eval_samples": 17},
        task={
            "steps": STEPS, "eval_every_steps": 2, "eval_generate": 3, "eval_max_new_tokens": 5,
            "eval_metrics": METRICS if tied else [],
        },
        optim={"lr": 1e-2, "warmup_steps": 0},
        zero={"stage": stage, **(large if stage == 3 else {})},
        checkpoint={"every_steps": 2, "at_end": True},
    )  # fmt: skip
    run_dir = write_run(exp)
    done = launch("llmx.worker", str(run_dir.root), ranks=WORLD)
    assert done.returncode == 0, done.stdout[-3000:] + logs(run_dir)
    return exp, run_dir


def metrics(run_dir: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]


@torch.no_grad()
def test_the_export_has_the_loss_of_the_last_evaluation(finished: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exp, run_dir = finished
    tokenizer = tokenizer_of(exp)
    assert len(tokenizer) % PADDED_TO, "the vocabulary is padded in memory"
    model = AutoModelForCausalLM.from_pretrained(run_dir.final_model)
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer)
    assert model.get_output_embeddings().weight.shape[0] == len(tokenizer)
    store = prepare(exp, tokenizer, split="eval")
    last = [line for line in metrics(run_dir) if line["kind"] == "eval"][-1]
    loss = float(naive_loss(model, store, np.arange(len(store)), vocab_size=len(tokenizer)))
    assert last["step"] == STEPS
    assert last["loss"] == pytest.approx(loss, rel=1e-5 if exp.precision == "fp32" else 2e-2)
    assert last["target_tokens"] == store.num_target_tokens(np.arange(len(store)))
    again = AutoTokenizer.from_pretrained(run_dir.final_model)
    assert again.get_vocab() == tokenizer.get_vocab()


def test_metrics_are_those_of_the_contract(finished: Any) -> None:
    _, run_dir = finished
    lines = metrics(run_dir)
    of_the_run = [line for line in lines if line["kind"] != "event"]
    assert [f"{line['kind']} {line.get('step', '')}".strip() for line in of_the_run] == [
        "start", "eval 0", "train 1", "train 2", "eval 2", "train 3", "train 4", "eval 4", "end 4",
    ]  # fmt: skip
    keys = {
        "start": "total_steps tokens_per_step num_parameters num_samples world_size resumed_from",
        "train": "step samples tokens target_tokens epoch loss lr grad_norm loss_scale "
        "step_time_s tokens_per_s mfu memory_gib data_wait_s",
        "eval": "step loss target_tokens exact_match",
        "end": "step",
    }
    for line in of_the_run:
        assert not set(keys[line["kind"]].split()) - set(line), line
        assert "nonfinite" not in line
    train = [line for line in lines if line["kind"] == "train"]
    assert all(len(line["memory_gib"]) == WORLD for line in train)
    assert [line["samples"] for line in train] == [8, 16, 24, 32]
    assert all(0 < line["target_tokens"] <= line["tokens"] for line in train)
    assert all(line["grad_norm"] > 0 for line in train)
    evals = [line["loss"] for line in lines if line["kind"] == "eval"]
    assert evals[0] > evals[1] > evals[2]
    # Untrained, every token of the true vocabulary is about as likely.
    exp = finished[0]
    size = len(tokenizer_of(exp))
    assert evals[0] == pytest.approx(np.log(size), rel=0.02)
    # Answers before and after only, but for metrics that were asked for.
    matched = [line["exact_match"] for line in lines if line["kind"] == "eval"]
    assert matched[0] is not None
    assert (matched[1] is None) == (not exp.task.eval_metrics)
    assert matched[2] is not None
    if exp.task.eval_metrics:
        own = [line["length"] for line in lines if line["kind"] == "eval"]
        assert own[0] == own[1] == own[2] > 0
        assert all(0 <= line["rougeL"] <= 1 for line in lines if line["kind"] == "eval")


def test_every_rank_finished_answers_are_kept_and_nothing_half_written_is_left(
    finished: Any,
) -> None:
    _, run_dir = finished
    for rank in range(WORLD):
        status = read_json(run_dir.rank_status(rank))
        assert (status["rank"], status["state"], status["step"]) == (rank, "finished", STEPS)
        assert status["error"] is None
        assert "Traceback" not in run_dir.rank_log(rank).read_text()
    rows = read_json(run_dir.samples)["rows"]
    assert len(rows) == 3
    for row in rows:
        assert row["prompt"]
        assert row["expected"]
        assert isinstance(row["before"], str)
        assert isinstance(row["after"], str)
    assert not [path for path in Path(run_dir.root).iterdir() if path.name.startswith(".")]


def test_the_export_of_the_last_step_is_the_runs_own_model(
    finished: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "run")
    shutil.copytree(finished[1].root, run.root)
    state = read_json(run.checkpoint(STEPS) / "state.json")
    assert (state["vocab_size"], state["padded_vocab_size"]) == (1024, 1056)

    def export(*words: str, code: int = 0) -> str:
        assert run_here("export", [str(run.root), *words]) == code
        said = capsys.readouterr()
        return said.out + said.err

    two, three, four = (tmp_path / name for name in ("two", "three", "four"))

    exported = run.root / "export" / f"step-{STEPS:08d}"
    assert f"{exported}: step {STEPS}, " in export()
    names = sorted(path.name for path in run.final_model.iterdir())
    assert names == sorted(path.name for path in exported.iterdir())
    assert {"model.safetensors", "README.md"} <= set(names)
    same, different, unreadable = filecmp.cmpfiles(run.final_model, exported, names, shallow=False)
    assert (sorted(same), different, unreadable) == (names, [], [])
    # An earlier step is another model in the same files.
    export("--step", "2", "--out", str(two))
    same, different, _ = filecmp.cmpfiles(run.final_model, two, names, shallow=False)
    assert sorted(different) == ["README.md", "model.safetensors"]
    # A flipped bit in the newest: it is named, the older one is taken; asked for, it is refused.
    flip_bit(run.checkpoint(STEPS) / "rank-00001.safetensors", -1)
    said = export("--out", str(three))
    assert f"step-{STEPS:08d} cannot be used: rank-00001.safetensors: damaged" in said
    assert filecmp.cmp(two / "model.safetensors", three / "model.safetensors", shallow=False)
    assert "Other steps: 2." in export("--step", str(STEPS), "--out", str(four), code=5)
    assert not four.exists()
