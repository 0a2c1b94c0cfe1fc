"""Options of ``task=sft``: weights of turns, from the data to the loss."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmx.config import DataConfig, Experiment, TaskConfig
from llmx.errors import ConfigError, DataError
from llmx.tasks import prepare, task_of
from llmx.tasks.sft import Sft
from tests.data_rows import TEMPLATE
from tests.small_tokenizers import byte_tokenizer

TOKENIZER = byte_tokenizer("<|end|>", chat_template=TEMPLATE)


def chat(*weights: Any) -> dict[str, Any]:
    """Answers with these weights; None: no such key."""
    turns = []
    for number, weight in enumerate(weights):
        turns.append({"role": "user", "content": f"q{number}"})
        answer = {"role": "assistant", "content": f"answer {number}"}
        turns.append(answer if weight is None else {**answer, "weight": weight})
    return {"messages": turns}


def experiment(tmp_path: Path, rows: list[dict[str, Any]], options: Any = None, **data: Any):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return replace(
        Experiment(),
        task=TaskConfig(kind="sft", options={"turn_weights": True} if options is None else options),
        data=DataConfig(
            path=str(path), seq_len=256, cache_dir=str(tmp_path / "cache"), num_workers=1,
            packing="none", **data,
        ),
    )  # fmt: skip


def weights_of(store: Any) -> list[list[tuple[float, int]]]:
    """(weight, tokens) of the answers that are learned, by sample."""
    return [
        [(key, len(list(run))) for key, run in groupby(store[index].weights.tolist()) if key]
        for index in range(len(store))
    ]


def test_turns_weigh_what_the_data_says(tmp_path: Path) -> None:
    rows = [chat(0.5, 2), chat(None, 0), chat(True, False, 1), chat(None)]
    exp = experiment(tmp_path, rows)
    store = prepare(exp, TOKENIZER)
    # "answer N" in bytes, and the token that ends the turn.
    wanted = [[(0.5, 9), (2.0, 9)], [(1.0, 9)], [(1.0, 9), (1.0, 9)], [(1.0, 9)]]
    assert weights_of(store) == wanted
    # What follows the last target is not stored.
    assert store[1].weights[-1] == 1.0
    one = store[0]
    assert store.weight_of(0) == pytest.approx(float(one.weights.sum()))
    assert store.weight_of(np.arange(4)) == pytest.approx(
        sum(float(store[i].weights.sum()) for i in range(4))
    )
    assert one.weights.dtype == np.float32


def test_only_the_last_answer_is_asked_with_loss_on_last(tmp_path: Path) -> None:
    exp = experiment(tmp_path, [chat(0, 0.25), chat(1, 0)], loss_on="last")
    store = prepare(exp, TOKENIZER)
    assert weights_of(store) == [[(0.25, 9)]]


def test_a_row_of_which_nothing_is_learned_is_left_out(tmp_path: Path) -> None:
    exp = experiment(tmp_path, [chat(0), chat(1)])
    store = prepare(exp, TOKENIZER)
    assert len(store) == 1


@pytest.mark.parametrize("wrong", [-1, "high", 1001, float("nan"), [1]])
def test_a_wrong_weight_is_a_bad_row(tmp_path: Path, wrong: Any) -> None:
    exp = experiment(tmp_path, [chat(wrong)])
    with pytest.raises(DataError, match=r'turn 2 of "messages" has the weight .* from 0 to 1000'):
        prepare(exp, TOKENIZER)


def test_a_loss_weight_of_a_turn_is_its_weight(tmp_path: Path) -> None:
    row = {
        "messages": [
            {"role": "user", "content": "q", "loss_weight": 0.0},
            {"role": "assistant", "content": "a", "loss_weight": 0.5},
        ]
    }
    ((weight, _),) = weights_of(prepare(experiment(tmp_path, [row]), TOKENIZER))[0]
    assert weight == 0.5
    row["messages"][1]["weight"] = 1
    with pytest.raises(DataError, match='a "weight" and another "loss_weight": 1 / 0.5'):
        prepare(experiment(tmp_path, [row]), TOKENIZER)


def test_without_the_option_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    exp = experiment(tmp_path, [chat(0.5)], options={})
    with pytest.raises(DataError, match=r'"weight" is 0.5.*task.options.turn_weights=true'):
        prepare(exp, TOKENIZER)
    ignoring = experiment(tmp_path, [chat(0.5)], options={}, ignore_columns=["weight"])
    store = prepare(ignoring, TOKENIZER)
    assert store[0].weights is None
    assert store[0].targets.any()


def test_the_options_are_checked_and_decide_the_store(tmp_path: Path) -> None:
    exp = experiment(tmp_path, [chat(1)], options={"neftune_alpha": -1})
    with pytest.raises(ConfigError, match=r"task.options.neftune_alpha=-1: must be .* from 0"):
        Sft(exp, TOKENIZER)
    plain = experiment(tmp_path, [chat(1)], options={})
    noisy = experiment(tmp_path, [chat(1)], options={"neftune_alpha": 5, "dft": True})
    same = [prepare(one, TOKENIZER).fingerprint for one in (plain, noisy)]
    assert same[0] == same[1]
    assert prepare(experiment(tmp_path, [chat(1)]), TOKENIZER).fingerprint != same[0]
    assert task_of(noisy, TOKENIZER).draws
    assert not task_of(plain, TOKENIZER).draws
