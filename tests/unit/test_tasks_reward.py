"""task=reward: the loss of Bradley and Terry on real pairs of data, and the scores of
transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from llmx import data
from llmx.config import Experiment
from llmx.data import SampleStore
from llmx.errors import DataError
from llmx.models.model import Models
from llmx.models.pooling import give_pooled_forward
from llmx.tasks import prepare, task_of, tokenizer_of
from llmx.tasks.reward import Reward
from tests.chat_templates import PUBLISHED
from tests.rundirs import TINY_LLAMA, experiment
from tests.unit.test_models_classification import model_of
from tests.unit.test_tasks_classify import batch_of

TEXTS = [
    {"prompt": f"Say {n}.", "chosen": f"It is {n}.", "rejected": f"No {n} from me, never."}
    for n in range(12)
]


def chat(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]


MESSAGES = [
    {"chosen": chat(row["prompt"], row["chosen"]), "rejected": chat(row["prompt"], row["rejected"])}
    for row in TEXTS
]


def experiment_of(
    tmp_path: Path, rows: list[dict[str, Any]], options: dict[str, Any] | None = None
) -> Experiment:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return experiment(
        tmp_path / "run",
        data={"path": str(path), "max_rows": None},
        task={"kind": "reward", "options": options or {}},
    )


def prepared(exp: Experiment) -> tuple[Reward, SampleStore]:
    tokenizer = tokenizer_of(exp)
    task = task_of(exp, tokenizer)
    assert isinstance(task, Reward)
    return task, prepare(exp, tokenizer)


def network() -> Any:
    config = AutoConfig.for_model(
        "llama", **TINY_LLAMA, vocab_size=2000, num_labels=1, pad_token_id=None
    )
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config).eval()


def scores_of(store: SampleStore, model: Any) -> torch.Tensor:
    """[pairs, 2]: each sequence alone, as others run the exported model."""
    found = []
    for number in range(len(store)):
        for tokens, _ in store[number].sequences():
            ids = torch.from_numpy(tokens.astype(np.int64))[None]
            with torch.no_grad():
                found.append(float(model(input_ids=ids).logits))
    return torch.tensor(found).view(-1, 2)


@pytest.mark.parametrize("options", [{}, {"margin": 0.3, "center": 0.05}])
def test_the_loss_is_that_of_the_scores(options: dict[str, float], tmp_path: Path) -> None:
    """``-log sigmoid(chosen - rejected - margin)``, as TRL's RewardTrainer has it."""
    rows = [{**row, "margin": 0.5 * (n % 3)} for n, row in enumerate(TEXTS)]
    task, store = prepared(experiment_of(tmp_path, rows, options))
    model = network()
    scores = scores_of(store, model)
    margins = torch.tensor(np.array(store.values_of("margin")))
    assert sorted(margins.tolist()) == sorted(0.5 * (n % 3) for n in range(12))
    wanted = -torch.nn.functional.logsigmoid(
        scores[:, 0] - scores[:, 1] - margins - options.get("margin", 0.0)
    )
    wanted += options.get("center", 0.0) * (scores[:, 0] + scores[:, 1]) ** 2
    give_pooled_forward(model)
    models = Models(policy=model_of(model, "mask", "packed"))
    loss = task.loss(models, batch_of(store, *range(len(store))))
    assert loss.weight == 12
    assert float(loss.sum.detach()) == pytest.approx(float(wanted.sum()), rel=1e-4)
    right = int((scores[:, 0] > scores[:, 1]).sum())
    assert int(loss.metrics["accuracy"]) == right
    assert float(loss.metrics["score_chosen"]) == pytest.approx(float(scores[:, 0].sum()), abs=1e-4)
    assert loss.metrics.keys() == task.metrics.keys()
    loss.sum.backward()


def test_both_layouts_give_the_same_pairs(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    _, texts = prepared(experiment_of(tmp_path / "a", TEXTS))
    _, messages = prepared(experiment_of(tmp_path / "b", MESSAGES))
    ours, theirs = (
        sorted(
            tuple(tokens.tolist())
            for number in range(len(store))
            for tokens, _ in store[number].sequences()
        )
        for store in (texts, messages)
    )
    assert ours == theirs
    assert len(ours) == 24


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": "Say.", "rejected": "No."},
        {"prompt": "Say.", "chosen": "", "rejected": "No."},
        {"prompt": "Say.", "chosen": "No.", "rejected": "No."},
        {"chosen": chat("Say."), "rejected": chat("Say.", "No.")},
    ],
    ids=["no chosen", "an empty side", "equal", "no answer"],
)
def test_pairs_that_are_none_are_rejected_and_counted(
    wrong: dict[str, Any], tmp_path: Path
) -> None:
    exp = experiment_of(tmp_path, [*TEXTS[:3], wrong, *TEXTS[3:]])
    with pytest.raises(DataError, match=r"pairs\.jsonl, line 4"):
        prepared(exp)
    exp.data.on_bad_row = "skip"
    _, store = prepared(exp)
    assert sum(store.meta["rejected"].values()) == 1
    assert len(store.values_of("margin")) == 12


def test_a_margin_that_is_no_number(tmp_path: Path) -> None:
    exp = experiment_of(tmp_path, [*TEXTS, {**TEXTS[0], "margin": "much"}])
    with pytest.raises(DataError, match="margin\" is 'much'"):
        prepared(exp)


@pytest.mark.parametrize("name", PUBLISHED)
def test_sequences_are_exactly_what_the_template_renders(name: str, tmp_path: Path) -> None:
    """The head looks at the last token, so what follows the answer is there in training, too."""
    tokenizer = PUBLISHED[name].tokenizer()
    exp = experiment_of(tmp_path, MESSAGES)
    exp.data.seq_len = 1024
    store = data.prepare(exp.data, exp.seed, tokenizer, task_of(exp, tokenizer))
    trained = {
        tuple(tokens.tolist()) for n in range(len(store)) for tokens, _ in store[n].sequences()
    }
    used = {
        tuple(tokenizer.apply_chat_template(row[side], return_dict=True)["input_ids"])
        for row in MESSAGES
        for side in ("chosen", "rejected")
    }
    assert trained == used


def test_a_model_that_has_learned_its_pairs_tells_them_apart_where_it_is_used(
    tmp_path: Path,
) -> None:
    """As docs/tasks.md says: the tokenizer's template, and transformers' own forward; the loss is
    that of TRL's RewardTrainer."""
    trl = pytest.importorskip("trl")
    tokenizer = PUBLISHED["qwen2.5"].tokenizer()
    exp = experiment_of(tmp_path, MESSAGES)
    exp.data.seq_len = 1024
    task = task_of(exp, tokenizer)
    store = data.prepare(exp.data, exp.seed, tokenizer, task)
    tokenizer.pad_token = tokenizer.eos_token
    config = AutoConfig.for_model(
        "llama", **TINY_LLAMA, vocab_size=len(tokenizer), num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    forward = model.forward
    give_pooled_forward(model)
    models = Models(policy=model_of(model, "mask", "packed"))
    batch = batch_of(store, *range(len(store)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    first = None
    for _ in range(15):
        loss = task.loss(models, batch)
        first = first or float(loss.sum.detach()) / loss.weight
        optimizer.zero_grad()
        (loss.sum / loss.weight).backward()
        optimizer.step()
    model.forward = forward

    def score(messages: list[dict[str, str]]) -> float:
        inputs = tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt")
        with torch.no_grad():
            return float(model(**inputs).logits)

    assert all(score(row["chosen"]) > score(row["rejected"]) for row in MESSAGES)

    from datasets import Dataset

    torch.manual_seed(0)
    untrained = AutoModelForSequenceClassification.from_config(config)
    trainer = trl.RewardTrainer(
        untrained,
        trl.RewardConfig(
            str(tmp_path / "trl"), per_device_train_batch_size=len(MESSAGES), max_length=None,
            report_to="none", use_cpu=True, bf16=False,
        ),
        train_dataset=Dataset.from_list(MESSAGES),
        processing_class=tokenizer,
    )  # fmt: skip
    theirs = trainer.compute_loss(untrained, next(iter(trainer.get_train_dataloader())))
    assert first == pytest.approx(float(theirs), abs=1e-5)
