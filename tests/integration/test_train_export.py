"""A whole run of the worker: its files are those of the contract, its export is what was measured.

``python -m pytest -m deepspeed tests/integration/test_train_export.py``
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmx.config import Experiment
from llmx.run.rundir import RunDir, read_json
from llmx.tasks import prepare, tokenizer_of
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


@pytest.fixture(scope="module", params=[(1, False), (3, True)], ids=["stage1", "stage3-tied"])
def finished(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Experiment, RunDir]:
    stage, tied = request.param
    root = tmp_path_factory.mktemp("run")
    exp = experiment(
        root / "run",
        ranks=WORLD,
        model={
            "name": "tiny",
            "kind": "llama",
            "init": "scratch",
            "tokenizer": "demo",
            "pad_vocab_to_multiple_of": PADDED_TO,
            "config": {**TINY_LLAMA, "tie_word_embeddings": tied},
        },
        data={"eval_samples": 17},
        task={
            "kind": "sft",
            "steps": STEPS,
            "log_every_steps": 1,
            "eval_every_steps": 2,
            "eval_generate": 3,
            "eval_max_new_tokens": 5,
            "eval_metrics": METRICS if tied else [],
        },
        optim={"lr": 1e-2, "warmup_steps": 0},
        # As of a large network: parameters are gathered one by one, and ahead.
        zero={"stage": stage, "param_persistence_threshold": 0, "prefetch_bucket_size": 5_000}
        if tied
        else {"stage": stage},
    )
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
    assert last["loss"] == pytest.approx(loss, rel=1e-5)
    assert last["target_tokens"] == store.num_target_tokens(np.arange(len(store)))
    again = AutoTokenizer.from_pretrained(run_dir.final_model)
    assert again.get_vocab() == tokenizer.get_vocab()


def test_metrics_are_those_of_the_contract(finished: Any) -> None:
    _, run_dir = finished
    lines = metrics(run_dir)
    assert [(line["kind"], line.get("step")) for line in lines] == [
        ("start", None),
        ("eval", 0),
        ("train", 1),
        ("train", 2),
        ("eval", 2),
        ("train", 3),
        ("train", 4),
        ("eval", 4),
        ("end", 4),
    ]
    keys = {
        "start": "total_steps tokens_per_step num_parameters num_samples world_size resumed_from",
        "train": "step samples tokens target_tokens epoch loss lr grad_norm loss_scale "
        "step_time_s tokens_per_s mfu memory_gib data_wait_s",
        "eval": "step loss target_tokens exact_match",
        "end": "step",
    }
    for line in lines:
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


def test_every_rank_finished_and_said_so(finished: Any) -> None:
    _, run_dir = finished
    for rank in range(WORLD):
        status = read_json(run_dir.rank_status(rank))
        assert (status["rank"], status["state"], status["step"]) == (rank, "finished", STEPS)
        assert status["error"] is None
        assert "Traceback" not in run_dir.rank_log(rank).read_text()


def test_answers_are_kept(finished: Any) -> None:
    _, run_dir = finished
    samples = read_json(run_dir.samples)
    assert len(samples["rows"]) == 3
    for row in samples["rows"]:
        assert row["prompt"]
        assert row["expected"]
        assert isinstance(row["before"], str)
        assert isinstance(row["after"], str)


def test_nothing_half_written_is_left(finished: Any) -> None:
    _, run_dir = finished
    assert not [path for path in Path(run_dir.root).iterdir() if path.name.startswith(".")]
