"""task=reward: the loss of Bradley and Terry on real pairs of data, and the scores of
transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForSequenceClassification

from llmx.errors import DataError
from llmx.models.model import Models
from llmx.models.pooling import give_pooled_forward
from tests.chat_templates import PUBLISHED
from tests.data_rows import assert_rejected, batch_of, experiment_on, prepared, sequences_of
from tests.rundirs import TINY_LLAMA
from tests.unit.test_models_classification import model_of

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


def network(vocab_size: int = 2000, pad_token_id: int | None = None) -> Any:
    config = AutoConfig.for_model(
        "llama", **TINY_LLAMA, vocab_size=vocab_size, num_labels=1, pad_token_id=pad_token_id
    )
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config)


@pytest.mark.parametrize("options", [{}, {"margin": 0.3, "center": 0.05}])
def test_the_loss_is_that_of_the_scores(options: dict[str, float], tmp_path: Path) -> None:
    """``-log sigmoid(chosen - rejected - margin)``, as TRL's RewardTrainer has it; scores are of
    each sequence alone, as others run the exported model."""
    rows = [{**row, "margin": 0.5 * (n % 3)} for n, row in enumerate(TEXTS)]
    task, store = prepared(experiment_on(tmp_path, "reward", rows, options))
    model = network().eval()
    with torch.no_grad():
        found = [float(model(input_ids=torch.tensor([t])).logits) for t in sequences_of(store)]
    scores = torch.tensor(found).view(-1, 2)
    margins = torch.tensor(store.values_of("margin").tolist())
    assert sorted(margins.tolist()) == sorted(0.5 * (n % 3) for n in range(12))
    wanted = -torch.nn.functional.logsigmoid(
        scores[:, 0] - scores[:, 1] - margins - options.get("margin", 0.0)
    )
    wanted += options.get("center", 0.0) * (scores[:, 0] + scores[:, 1]) ** 2
    give_pooled_forward(model)
    models = Models(policy=model_of(model, "mask", "packed"))
    loss = task.loss(models, batch_of(store))
    assert loss.weight == 12
    assert float(loss.sum.detach()) == pytest.approx(float(wanted.sum()), rel=1e-4)
    right = int((scores[:, 0] > scores[:, 1]).sum())
    assert int(loss.metrics["accuracy"]) == right
    assert float(loss.metrics["score_chosen"]) == pytest.approx(float(scores[:, 0].sum()), abs=1e-4)
    assert loss.metrics.keys() == task.metrics.keys()
    loss.sum.backward()


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
def test_pairs_that_are_none_are_rejected_and_counted(wrong, tmp_path) -> None:
    exp = experiment_on(tmp_path, "reward", [*TEXTS[:3], wrong, *TEXTS[3:]])
    assert len(assert_rejected(exp, line=4).values_of("margin")) == 12


@pytest.mark.parametrize("margin", ["much", 10**400])
def test_a_margin_that_is_no_number(margin: Any, tmp_path: Path) -> None:
    rows = [*TEXTS, {**TEXTS[0], "margin": margin}]
    with pytest.raises(DataError, match=f"margin\" is '{str(margin)[:60]}', not a finite number"):
        prepared(experiment_on(tmp_path, "reward", rows))


@pytest.mark.parametrize("name", PUBLISHED)
def test_sequences_are_exactly_what_the_template_renders(name: str, tmp_path: Path) -> None:
    """The head looks at the last token, so what follows the answer is there in training, too."""
    tokenizer = PUBLISHED[name].tokenizer()
    exp = experiment_on(tmp_path, "reward", MESSAGES, seq_len=1024)
    sides = [row[side] for row in MESSAGES for side in ("chosen", "rejected")]
    rendered = [tokenizer.apply_chat_template(one, return_dict=True)["input_ids"] for one in sides]
    assert {*sequences_of(prepared(exp, tokenizer)[1])} == {*map(tuple, rendered)}


def test_the_loss_is_that_of_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    tokenizer = PUBLISHED["qwen2.5"].tokenizer()
    task, store = prepared(experiment_on(tmp_path, "reward", MESSAGES, seq_len=1024), tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    ours, theirs = (network(len(tokenizer), tokenizer.pad_token_id) for _ in range(2))
    give_pooled_forward(ours)
    found = task.loss(Models(policy=model_of(ours, "mask", "packed")), batch_of(store))
    trainer = trl.RewardTrainer(
        theirs,
        trl.RewardConfig(
            str(tmp_path / "trl"), per_device_train_batch_size=len(MESSAGES), max_length=None,
            report_to="none", use_cpu=True, bf16=False,
        ),
        train_dataset=Dataset.from_list(MESSAGES),
        processing_class=tokenizer,
    )  # fmt: skip
    wanted = trainer.compute_loss(theirs, next(iter(trainer.get_train_dataloader())))
    assert float(found.sum.detach()) / found.weight == pytest.approx(float(wanted), abs=1e-5)
