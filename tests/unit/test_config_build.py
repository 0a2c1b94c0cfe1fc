"""Typed reading: nothing is lost, nothing unknown slips through, errors name the fix."""

from __future__ import annotations

import copy
import dataclasses
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmx.config import Experiment, experiment_from_dict, known_keys, to_dict
from llmx.errors import ConfigError

WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=64)


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


@given(
    lr=st.floats(1e-9, 1e3),
    seed=st.integers(0, 2**31),
    stage=st.integers(0, 3),
    columns=st.dictionaries(WORDS, WORDS, max_size=3),
    tags=st.lists(WORDS, max_size=3),
)
def test_values_survive_the_round_trip(lr, seed, stage, columns, tags) -> None:
    exp = Experiment(seed=seed)
    exp.optim.lr, exp.zero.stage, exp.data.columns, exp.tracking.tags = lr, stage, columns, tags
    assert experiment_from_dict(copy.deepcopy(to_dict(exp))) == exp


def test_sizes_may_be_written_in_scientific_notation() -> None:
    for written, meant in (("5e8", 500_000_000), (5e8, 500_000_000), ("7", 7)):
        size = experiment_from_dict(
            {"zero": {"reduce_bucket_size": written}}
        ).zero.reduce_bucket_size
        assert (size, type(size)) == (meant, int)


def test_every_problem_is_listed_at_once() -> None:
    message = problem(optim__lr="fast", zero__offload_param="cpuu", dry_run="yes")
    assert message.splitlines() == [
        "dry_run=yes: must be true or false.",
        'zero.offload_param=cpuu: must be one of none, cpu, nvme. Did you mean "cpu"?',
        "optim.lr=fast: must be a number above 0 and at most 1000, or auto. Set e.g. "
        "optim.lr=0.0001.",
    ]


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("data__seq_len", 10.5, "=10.5: must be a whole number from 2 to 16777216. Set e.g."),
        ("data__seq_len", True, "=true: must be a whole number"),
        ("data__seq_len", 10**400, "=(a whole number of about 400 digits): must be a whole number"),
        ("optim__lr", float("inf"), "=inf: must be a number above 0"),
        ("optim__betas", 0.9, "=0.9: must be a list. Set e.g. 'optim.betas=[0.9,0.999]'."),
        ("optim__betas", [0.9, 1], "optim.betas[1]=1: must be a number from 0 to below 1."),
        ("optim__betas", [0.9], "optim.betas: must have 2 entries (it has 1)."),
        ("model__config", {"a": {"b": 10**30}}, "model.config.a.b=1000000"),
        ("model__config", {"a": float("nan")}, "model.config.a=nan: must be a finite number."),
        ("model", "tiny", "model=tiny: must be a mapping with the keys name, kind"),
        ("name", ["a"], "name=[a]: must be text"),
        ("launch__env", {"a": 0.5}, "launch.env.a=0.5: must be text"),
        ("launch__env", {True: "a"}, "launch.env: the name true must be text. Quote it."),
        ("name", "a\nb", r"name='a\nb': must be text on one line, without control characters"),
        ("name", "\ud800", r"name='\ud800': must be valid Unicode text"),
        ("run_dir", "x" * 5000, "must have at most 4096 characters (it has 5000)"),
        ("tracking__kinds", ["wandbb"], 'Did you mean "wandb"'),
        ("tracking__kinds", ["csv", "csv"], "tracking.kinds: has csv twice"),
        ("hardware__hosts", [{"slots": 0}], "hosts[0].slots=0: must be a whole number from 1 to"),
        ("launch__env", ["a"], "launch.env=[a]: must be a mapping. Set e.g. 'launch.env={NCCL"),
        ("launch__slurm", {"time_limit": "soon"}, "must be a time as Slurm writes it"),
        ("checkpoint__metric", "loss", "checkpoint.metric=loss: must be auto, or eval/NAME"),
        ("zero__stag", 3, 'zero.stag: unknown key. Did you mean "stage"?'),
        ("seq_len", 512, "It exists as data.seq_len"),
        ("seed", 1e40, "must be a whole number from 0 to 9223372036854775807"),
    ],
)
def test_wrong_types_name_value_and_rule(key, value, rule) -> None:
    message = problem(**{key: value})
    assert rule in message
    assert key.replace("__", ".") in message


def every_field(cls: type = Experiment, path: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted key, type, metadata) of every field of the schema, those of list entries too."""
    found = []
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint, where = hints[field.name], f"{path}{field.name}"
        found.append((where, hint, field.metadata))
        for part in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(part):
                found += every_field(part, f"{where}.")
    return found


def kinds_of(hint: Any) -> set[Any]:
    parts = {typing.get_origin(hint) or hint}
    return parts.union(*(kinds_of(part) for part in typing.get_args(hint)))


def test_every_number_has_a_range_and_every_list_a_length() -> None:
    for where, hint, metadata in every_field():
        kinds = kinds_of(hint)
        limits = metadata.get("range")
        if kinds & {int, float}:
            assert limits, f"{where}: give it number(...), numbers(...) or values=Range(...)"
            assert limits.minimum is not None or limits.above is not None, where
            assert limits.maximum is not None or limits.below is not None, where
        if kinds & {list, dict}:
            assert metadata.get("length"), f"{where}: give it items(...) or mapping(...)"


def test_known_keys_are_frozen(golden) -> None:
    """The public option surface: adding a key is deliberate, renaming one breaks users."""
    golden("config_keys.txt", "\n".join(known_keys()) + "\n")
