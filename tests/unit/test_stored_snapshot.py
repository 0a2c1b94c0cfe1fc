"""A snapshot is read back as it was written; one of another version of the schema is refused."""

from __future__ import annotations

import os

import pytest
import yaml

from llmx.config import (
    SCHEMA_VERSION,
    Experiment,
    experiment_from_dict,
    experiment_of_snapshot,
    to_dict,
)
from llmx.errors import ConfigError
from llmx.run import snapshot
from llmx.run.rundir import RunDir
from tests.composing import composed
from tests.conftest import GOLDEN

STORED = RunDir(GOLDEN / "snapshots")
OF_TODAY = ("hardware=a100x2_v100x2", "zero=stage3", "launch=rsync", "launch.env.NCCL_DEBUG=INFO",
            "tracking=all", "data.eval_samples=8", "task.steps=40")  # fmt: skip


def test_the_stored_snapshot_loads() -> None:
    exp = snapshot.load(STORED)
    assert exp.schema_version == SCHEMA_VERSION
    assert [host.name for host in exp.hardware.hosts] == ["node-a", "node-b"]
    assert exp.launch.env == {"NCCL_DEBUG": "INFO"}
    assert exp.task.steps == 40


def test_the_schema_is_the_one_of_the_stored_snapshot() -> None:
    """Fails when a key comes, goes or changes its type without a new recording."""
    path = STORED.config
    now = snapshot.dump_config(composed(list(OF_TODAY), run_dir="/runs/today").experiment)
    if os.environ.get("LLMX_RECORD_GOLDEN") == "1":
        path.write_text(now, encoding="utf-8")
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    advice = "The schema has changed: run `make golden`, after a release with a new SCHEMA_VERSION."
    assert keys(values) == keys(to_dict(experiment_from_dict(values))), advice
    assert to_dict(experiment_from_dict(values)) == values, advice


def keys(values: object, prefix: str = "") -> list[str]:
    if isinstance(values, list):
        return [key for item in values for key in keys(item, f"{prefix}[]")]
    if not isinstance(values, dict):
        return []
    return sorted(
        {found for name, value in values.items() for found in
         [f"{prefix}.{name}", *keys(value, f"{prefix}.{name}")]}
    )  # fmt: skip


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, str(SCHEMA_VERSION), True, 0, None])
def test_another_version_is_refused(version: object) -> None:
    values = {**to_dict(Experiment(name="a")), "schema_version": version}
    with pytest.raises(ConfigError, match="this llmx reads only 1"):
        experiment_of_snapshot(values)


@pytest.mark.parametrize("values", [{}, ["a"], None])
def test_what_is_no_snapshot_is_refused(values: object) -> None:
    with pytest.raises(ConfigError, match="schema_version=null"):
        experiment_of_snapshot(values)


def test_torn_yaml_is_named(tmp_path) -> None:
    run = RunDir(tmp_path)
    run.config.write_text("schema_version: 1\nmodel: {name: 'a")
    with pytest.raises(ConfigError, match=r"config\.yaml, line 2: the quote is not closed"):
        snapshot.load(run)


def test_todays_values_pass_unchanged() -> None:
    exp = Experiment(name="a")
    assert experiment_of_snapshot(to_dict(exp)) == exp
