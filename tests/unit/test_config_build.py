"""Typed reading: nothing is lost, nothing unknown slips through, errors name the fix."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmx.config import Experiment, experiment_from_dict, known_keys, to_dict
from llmx.errors import ConfigError


def problem(**changes: object) -> str:
    values = to_dict(Experiment())
    for dotted, value in changes.items():
        node = values
        *parents, last = dotted.split("__")
        for parent in parents:
            node = node[parent]
        node[last] = value
    with pytest.raises(ConfigError) as caught:
        experiment_from_dict(values)
    return str(caught.value)


def test_defaults_survive_the_round_trip() -> None:
    assert experiment_from_dict(to_dict(Experiment())) == Experiment()


@given(
    lr=st.floats(1e-9, 1e3),
    seed=st.integers(0, 2**31),
    stage=st.integers(0, 3),
    columns=st.dictionaries(st.text(), st.text(), max_size=3),
    tags=st.lists(st.text(), max_size=3),
)
def test_values_survive_the_round_trip(lr, seed, stage, columns, tags) -> None:
    exp = Experiment(seed=seed)
    exp.optim.lr, exp.zero.stage, exp.data.columns, exp.tracking.tags = lr, stage, columns, tags
    assert experiment_from_dict(copy.deepcopy(to_dict(exp))) == exp


@pytest.mark.parametrize(("written", "meant"), [("5e8", 500_000_000), (5e8, 500_000_000), ("7", 7)])
def test_sizes_may_be_written_in_scientific_notation(written, meant) -> None:
    exp = experiment_from_dict({"zero": {"reduce_bucket_size": written}})
    assert exp.zero.reduce_bucket_size == meant
    assert isinstance(exp.zero.reduce_bucket_size, int)


def test_unknown_key_names_its_neighbour() -> None:
    message = problem(zero__stag=3)
    assert 'zero.stag: unknown key. Did you mean "stage"?' in message


def test_key_in_the_wrong_group_names_its_home() -> None:
    assert "It exists as data.seq_len" in problem(seq_len=512)


def test_every_problem_is_listed_at_once() -> None:
    message = problem(optim__lr="fast", zero__offload_param="cpuu", dry_run="yes")
    assert "optim.lr: 'fast' is not a number" in message
    assert (
        "zero.offload_param: 'cpuu' is not one of none, cpu, nvme. Did you mean \"cpu\"?" in message
    )
    assert "dry_run: 'yes' is not a boolean" in message


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("data__seq_len", 10.5, "not a whole number"),
        ("data__seq_len", True, "not a whole number"),
        ("data__seq_len", "nan", "not a whole number"),
        ("optim__lr", float("inf"), "not a number"),
        ("optim__betas", 0.9, "not a list"),
        ("model__config", [1], "not a mapping"),
        ("model", "tiny", "not a mapping"),
        ("name", ["a"], "not text"),
        ("tracking__kinds", ["wandbb"], 'Did you mean "wandb"?'),
    ],
)
def test_wrong_types_name_value_and_rule(key, value, rule) -> None:
    message = problem(**{key: value})
    assert rule in message
    assert key.replace("__", ".") in message


def test_known_keys_are_frozen(golden) -> None:
    """The public option surface: adding a key is deliberate, renaming one breaks users."""
    golden("config_keys.txt", "\n".join(known_keys()) + "\n")
