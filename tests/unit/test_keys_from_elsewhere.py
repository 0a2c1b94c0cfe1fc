"""Keys as other projects call them."""

from __future__ import annotations

import pytest

from llmx.config.groups import _KEYS, GROUPS, elsewhere, key_problem


@pytest.mark.parametrize("key", sorted(set(_KEYS.values())))
def test_each_answer_is_a_key_or_a_group(key) -> None:
    name = key.partition("=")[0]
    assert name in GROUPS or not key_problem(name)


def test_no_name_is_a_key_of_its_own() -> None:
    assert [name for name in _KEYS if not key_problem(name)] == []


def test_a_prefix_and_dashes_change_nothing() -> None:
    assert (
        elsewhere("--learning-rate")
        == elsewhere("training.learning_rate")
        == " Here it is optim.lr."
    )
