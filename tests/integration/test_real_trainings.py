"""Trainings on real data, with the model that they leave: learned, and exported. Resume, reproduce
and sweeps of every task: ``test_tasks_proof``; exported classifiers and reward models:
``tests/unit/test_tasks_{classify,reward}.py``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
)

from llmx.config import Experiment
from llmx.data.source.files import DEMO_DIRECTORY
from llmx.run import snapshot
from llmx.run.rundir import RunDir, read_json
from llmx.tasks import prepare, task_of, tokenizer_of
from tests.command_runs import lines, succeeds
from tests.forked_ranks import Server
from tests.rundirs import TINY_LLAMA, experiment, write_run

pytestmark = [pytest.mark.deepspeed, pytest.mark.nightly]


HELD_OUT = 60


def test_questions_find_their_answers(real_data: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    shutil.copy(real_data / "bert_zh_vocab.txt", tmp_path / "tokenizer" / "vocab.txt")
    words = (
        "task=embed", "task.options.query_prompt='question: '", "model=bert_tiny",
        "model.tokenizer=tokenizer", "model.config.num_hidden_layers=2",
        "model.config.hidden_size=64", "model.config.intermediate_size=128", "data=alpaca",
        f"data.path={real_data / 'alpaca_zh_demo.json'}", f"data.eval_samples={HELD_OUT}",
        "data.seq_len=128", "data.packing=none", "data.over_long=truncate", "hardware=cpu2",
        "task.max_lost=1",
        "batch.global_batch=32", "batch.micro_batch=8", "optim.lr=0.002", "task.steps=16",
        "task.log_every_steps=1", "zero=stage3",
    )  # fmt: skip
    succeeds(tmp_path, *words, "run_dir=whole")
    whole = tmp_path / "whole"
    before, after = lines(whole, "eval")[0], lines(whole, "eval")[-1]
    assert after["weight"] == HELD_OUT
    # A guess is right once in 60; a network that was drawn finds equal characters.
    assert after["accuracy"] > max(10 / HELD_OUT, before["accuracy"] + 0.1)
    assert after["mrr"] > before["mrr"]
    succeeds(tmp_path, "eval", "whole")
    measured = read_json(whole / "eval-alpaca_zh_demo.json")["metrics"]
    for name in ("loss", "accuracy", "mrr", "recall"):
        assert measured[name] == pytest.approx(after[name], abs=1e-4)
    succeeds(tmp_path, "export", "whole")
    check_vectors(whole, next((whole / "export").iterdir()), accuracy=after["accuracy"])


def check_vectors(run: Path, exported: Path, *, accuracy: float) -> None:
    """Held-out texts as sentence-transformers embeds them."""
    library = pytest.importorskip("sentence_transformers")
    exp = snapshot.load(RunDir(run))
    tokenizer = tokenizer_of(exp)
    store = prepare(exp, tokenizer, split="eval")
    assert len(store) == HELD_OUT
    texts = [
        tokenizer.decode(tokens, skip_special_tokens=True)
        for number in range(HELD_OUT)
        for tokens, _ in store[number].sequences()
    ]
    model = library.SentenceTransformer(str(exported), device="cpu")
    assert model.prompts["query"] == "question: "
    vectors = model.encode(texts).reshape(HELD_OUT, 2, -1)
    found = (vectors[:, 0] @ vectors[:, 1].T).argmax(axis=1) == np.arange(HELD_OUT)
    # A text that was cut within a word has other tokens once it is read anew.
    assert found.mean() == pytest.approx(accuracy, abs=2.5 / HELD_OUT)
    assert task_of(exp, tokenizer).name == "embed"


CORPUS = "CLUECorpusSmall_sampled.txt"


def test_bert_from_scratch_learns(real_data: Path, tmp_path: Path) -> None:
    corpus = real_data / CORPUS
    (tmp_path / "corpus.txt").write_text(
        "".join(line for line in corpus.read_text("utf-8").splitlines(True)[:1200]), "utf-8"
    )
    data = ("data=text", "data.path=corpus.txt", "data.text_unit=line")
    succeeds(
        tmp_path,
        "tokenizer",
        *data,
        "tokenizer.kind=wordpiece",
        "tokenizer.vocab_size=3000",
        "tokenizer.output=tokenizer",
    )
    words = (
        "task=mlm", "task.options.whole_words=true",
        "model=bert_tiny", "model.tokenizer=tokenizer", "model.config.num_hidden_layers=2",
        "model.config.hidden_size=64", "model.config.intermediate_size=128", *data,
        "data.packing=best_fit", "data.seq_len=64", "data.eval_samples=32", "hardware=cpu2",
        "batch.global_batch=16", "batch.micro_batch=4", "optim.lr=0.003", "task.steps=12",
        "task.log_every_steps=1",
    )  # fmt: skip
    succeeds(tmp_path, *words, "zero=stage2", "run_dir=run")
    run = tmp_path / "run"
    first, last = (lines(run, "eval")[at]["loss"] for at in (0, -1))
    assert isinstance(first, float)
    assert isinstance(last, float)
    assert last < first - 0.5
    check_filling(run)


def check_filling(run: Path) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    model = AutoModelForMaskedLM.from_pretrained(run / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    config = json.loads((run / "model" / "config.json").read_text("utf-8"))
    assert config["architectures"] == ["BertForMaskedLM"]
    assert config["vocab_size"] == len(tokenizer) == model.get_input_embeddings().weight.shape[0]
    found = tokenizer(f"中国{tokenizer.mask_token}民", return_tensors="pt")
    with torch.no_grad():
        logits = model(**found).logits
    assert logits.shape[-1] == len(tokenizer)
    assert torch.isfinite(logits).all()


PAIR_STEPS = 8


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
            task={"kind": "dpo", "steps": PAIR_STEPS, "max_lost": 1.0, **task,
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


STUDENT_STEPS, TOP = 6, 32


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
    tokenizer = DEMO_DIRECTORY / "tokenizer"
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
            task={
                "kind": "distill", "steps": STUDENT_STEPS, "options": {**teacher, **options}, **task
            },
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
