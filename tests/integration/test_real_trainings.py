"""A training of each task on real data, with the model that it leaves: learned, and exported.
Resume, reproduce and sweeps: ``test_tasks_proof``."""

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
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
)

from llmx.config import Experiment
from llmx.data.source.files import DEMO_DIRECTORY
from llmx.run import snapshot
from llmx.run.rundir import RunDir, read_json
from llmx.tasks import prepare, task_of, tokenizer_of
from tests.command_runs import lines, llmx, succeeds
from tests.forked_ranks import Server
from tests.realdata import real_tokenizer_dir
from tests.rundirs import TINY_LLAMA, experiment, write_run

pytestmark = [pytest.mark.deepspeed, pytest.mark.nightly]


def reviews(real_data: Path, directory: Path, name: str, count: int) -> Path:
    text = (real_data / f"book_review/{name}.tsv").read_text(encoding="utf-8")
    path = directory / f"{name}.tsv"
    path.write_text("".join(text.splitlines(keepends=True)[: count + 1]), encoding="utf-8")
    return path


def test_book_reviews(real_data: Path, tmp_path: Path) -> None:
    vocabulary = tmp_path / "zh"
    vocabulary.mkdir()
    (vocabulary / "vocab.txt").write_bytes((real_data / "bert_zh_vocab.txt").read_bytes())
    train, dev = (reviews(real_data, tmp_path, *each) for each in (("train", 2000), ("dev", 200)))
    words = [
        "task=classify", "data=labelled", f"data.path={train}", f"data.eval_path={dev}",
        "data.data_map.prompt=text_a",
        "data.label_names={0: negative, 1: positive}", "data.seq_len=64", "data.packing=none",
        "task.max_lost=1",
        "hardware=cpu2", "optim.lr=0.002", "batch.global_batch=32", "batch.micro_batch=16",
        f"model.tokenizer={vocabulary}", "checkpoint.metric=eval/macro_f1",
        "model.config.hidden_size=64", "model.config.intermediate_size=128",
        "task.log_every_steps=1",
    ]  # fmt: skip
    whole = tmp_path / "whole"
    out = succeeds(tmp_path, *words, "zero=stage2", "task.steps=60", f"run_dir={whole}")
    assert "Labels: negative (" in out
    assert "try it" not in out
    before, after = lines(whole, "eval")
    assert after["accuracy"] > max(0.6, before["accuracy"])
    assert after["weight"] == 200
    table = json.loads((whole / "tables.json").read_text())["tables"][0]
    assert sum(sum(row) for row in table["values"]) == 200
    right = table["values"][0][0] + table["values"][1][1]
    assert right / 200 == after["accuracy"]
    succeeds(tmp_path, "report", str(whole))
    # The exported model says what the evaluation measured.
    model = AutoModelForSequenceClassification.from_pretrained(whole / "model").eval()
    assert model.config.id2label == {0: "negative", 1: "positive"}
    tokenizer = AutoTokenizer.from_pretrained(whole / "model")
    rows = [line.split("\t") for line in (tmp_path / "dev.tsv").read_text().splitlines()[1:]]
    good = 0
    with torch.no_grad():
        for label, text in rows:
            batch = tokenizer(text, truncation=True, max_length=64, return_tensors="pt")
            logits = model(input_ids=batch["input_ids"]).logits[0]
            good += int(logits.argmax()) == int(label)
    assert good / 200 == after["accuracy"]
    succeeds(tmp_path, "export", str(whole))
    again = AutoModelForSequenceClassification.from_pretrained(next(whole.glob("export/*")))
    for name, value in again.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    refused = llmx(tmp_path, "generate", str(whole), "x").stdout
    assert "LlamaForSequenceClassification, which generates no text" in refused


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


def test_preference_pairs(real_data: Path, tmp_path: Path) -> None:
    tokenizer = real_tokenizer_dir(real_data, tmp_path / "bpe")
    words = [
        "task=reward", "data=file", f"data.path={real_data / 'dpo_en_demo.json'}",
        "data.max_rows=120", "data.eval_samples=20", "data.seq_len=512", "data.over_long=truncate",
        "task.max_lost=1",
        f"data.cache_dir={tmp_path / 'cache'}", f"model.tokenizer={tokenizer}", "hardware=cpu2",
        "zero=stage3", "model.config.hidden_size=64", "model.config.intermediate_size=128",
        "optim.lr=0.002", "batch.global_batch=8", "batch.micro_batch=2", "task.steps=6",
        "task.log_every_steps=1", "checkpoint.metric=eval/accuracy",
    ]  # fmt: skip
    whole = tmp_path / "whole"
    succeeds(tmp_path, *words, f"run_dir={whole}")
    assert lines(whole, "train")[0]["loss"] == pytest.approx(0.693, abs=0.2)
    # The exported model scores the held-out conversations as the evaluation did.
    exp = snapshot.load(RunDir(whole))
    store = prepare(exp, tokenizer_of(exp), split="eval")
    model = AutoModelForSequenceClassification.from_pretrained(whole / "model").eval()
    assert model.config.num_labels == 1
    scores = []
    with torch.no_grad():
        for number in range(len(store)):
            for tokens, _ in store[number].sequences():
                ids = torch.from_numpy(tokens.astype(np.int64))[None]
                scores.append(float(model(input_ids=ids).logits))
    pairs = np.array(scores).reshape(-1, 2)
    after = lines(whole, "eval")[-1]
    assert after["weight"] == len(pairs)
    assert after["score_chosen"] == pytest.approx(pairs[:, 0].mean(), abs=1e-4)
    assert after["score_rejected"] == pytest.approx(pairs[:, 1].mean(), abs=1e-4)
    assert after["accuracy"] == pytest.approx((pairs[:, 0] > pairs[:, 1]).mean())
    assert AutoTokenizer.from_pretrained(whole / "model").chat_template


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
