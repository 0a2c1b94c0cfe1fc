"""Options of ``task=sft``: weights of turns, from the data to the loss."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmx.config import Experiment
from llmx.data import SampleStore
from llmx.errors import DataError
from tests.data_rows import TEMPLATE, Row, experiment_on, prepared
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


def experiment_of(tmp_path: Path, rows: list[Row], options: Any = None, **data: Any) -> Experiment:
    options = {"turn_weights": True} if options is None else options
    return experiment_on(tmp_path, "sft", rows, options, packing="none", seq_len=256, **data)


def stored(*chosen: Any, **data: Any) -> SampleStore:
    """Of an experiment with these rows and options."""
    return prepared(experiment_of(*chosen, **data), TOKENIZER)[1]


def weights_of(store: Any) -> list[list[tuple[float, int]]]:
    """(weight, tokens) of the answers that are learned, by sample."""
    return [
        [(key, len(list(run))) for key, run in groupby(store[index].weights.tolist()) if key]
        for index in range(len(store))
    ]


def test_turns_weigh_what_the_data_says(tmp_path: Path) -> None:
    rows = [chat(0.5, 2), chat(None, 0), chat(True, False, 1), chat(None)]
    store = stored(tmp_path, rows)
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
    store = stored(tmp_path, [chat(0, 0.25), chat(1, 0)], loss_on="last")
    assert weights_of(store) == [[(0.25, 9)]]


def test_a_row_of_which_nothing_is_learned_is_left_out(tmp_path: Path) -> None:
    assert len(stored(tmp_path, [chat(0), chat(1)])) == 1


@pytest.mark.parametrize("wrong", [-1, "high", 1001, float("nan"), [1]])
def test_a_wrong_weight_is_a_bad_row(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(DataError, match=r'turn 2 of "messages" has the weight .* from 0 to 1000'):
        stored(tmp_path, [chat(wrong)])


def test_a_loss_weight_of_a_turn_is_its_weight(tmp_path: Path) -> None:
    row = chat(None)
    question, answer = row["messages"]
    question["loss_weight"], answer["loss_weight"] = 0.0, 0.5
    assert weights_of(stored(tmp_path, [row])) == [[(0.5, 9)]]
    answer["weight"] = 1
    with pytest.raises(DataError, match='a "weight" and another "loss_weight": 1 / 0.5'):
        stored(tmp_path, [row])


def test_without_the_option_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r'"weight" is 0.5.*task.options.turn_weights=true'):
        stored(tmp_path, [chat(0.5)], {})
    store = stored(tmp_path, [chat(0.5)], {}, ignore_columns=["weight"])
    assert store[0].weights is None
    assert store[0].targets.any()


def test_options_of_the_loss_do_not_decide_the_store(tmp_path: Path) -> None:
    plain, noisy = (
        prepared(experiment_of(tmp_path, [chat(1)], options), TOKENIZER)
        for options in ({}, {"neftune_alpha": 5, "dft": True})
    )
    assert plain[1].fingerprint == noisy[1].fingerprint
    assert stored(tmp_path, [chat(1)]).fingerprint != plain[1].fingerprint
    assert noisy[0].draws
    assert not plain[0].draws
