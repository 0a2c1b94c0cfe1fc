"""Older snapshots stay loadable: a stored one of every version, each with its behaviour."""

from __future__ import annotations

import copy
import dataclasses
import os

import pytest
import yaml

from llmx.config import SCHEMA_VERSION, Experiment, experiment_from_dict, migrate, to_dict
from llmx.config.migrate import MIGRATIONS
from llmx.errors import ConfigError
from llmx.plan import make_plan
from llmx.run import snapshot
from llmx.run.rundir import RunDir
from tests.composing import composed
from tests.conftest import GOLDEN

STORED = GOLDEN / "snapshots"
OF_TODAY = ("hardware=a100x2_v100x2", "zero=stage3", "launch=rsync", "launch.env.NCCL_DEBUG=INFO",
            "tracking=all", "data.eval_samples=8", "task.steps=40")  # fmt: skip


def stored(version: int) -> RunDir:
    return RunDir(STORED / f"v{version}")


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION + 1))
def test_a_stored_snapshot_of_every_version_loads(version: int) -> None:
    exp = snapshot.load(stored(version))
    assert exp.schema_version == SCHEMA_VERSION
    assert [host.name for host in exp.hardware.hosts] == ["node-a", "node-b"]
    assert exp.launch.env == {"NCCL_DEBUG": "INFO"}
    assert exp.task.steps == 40
    notes = snapshot.migrations(stored(version))
    assert len(notes) == SCHEMA_VERSION - version


def test_version_1_keeps_its_behaviour() -> None:
    exp = snapshot.load(stored(1))
    assert exp.launch.max_restarts == 0
    assert exp.launch.hang_timeout_s == 0
    assert exp.launch.stop_grace_s == 10.0
    assert exp.checkpoint.every_steps is None
    assert exp.checkpoint.every_minutes is None
    assert not exp.checkpoint.at_end
    assert not exp.checkpoint.on_signal
    assert exp.task.stop_at_step is None
    note, _ = snapshot.migrations(stored(1))
    assert note.startswith("schema 1 -> 2: no checkpoints")


def test_version_2_keeps_its_behaviour() -> None:
    exp = snapshot.load(stored(2))
    assert exp.precision == "auto"
    exp.zero.stage = 2  # where auto sums in fp32 whenever that fits
    plan = make_plan(exp)
    assert (plan.precision, plan.grad_accum_dtype) == ("fp16", "fp16")
    new = dataclasses.replace(exp.zero, grad_accum_dtype="auto")
    assert make_plan(dataclasses.replace(exp, zero=new)).grad_accum_dtype == "fp32"
    assert exp.model.attention == "sdpa"
    assert exp.model.activation_checkpointing == "none"
    assert exp.model.fused_loss is False
    assert exp.model.liger_kernel is False
    assert not exp.model.compile
    assert (exp.data.layout, exp.data.pad_to_multiple_of) == ("packed", 8)
    (note,) = snapshot.migrations(stored(2))
    assert note.startswith("schema 2 -> 3: gradients are summed in the run's precision")


def test_what_version_2_said_stays() -> None:
    values = yaml.safe_load(stored(2).config.read_text())
    values["model"].update(attention="eager", activation_checkpointing=True)
    values["data"]["layout"] = "padded"
    moved = migrate(values).values
    assert moved["model"]["attention"] == "eager"
    assert moved["model"]["activation_checkpointing"] == "full"
    assert moved["data"]["layout"] == "padded"


def test_what_was_written_between_version_2_and_3_stays() -> None:
    """Versions of the repository with today's keys that still said 2."""
    values = to_dict(Experiment(name="a"))
    assert migrate({**values, "schema_version": 2}).values == values


def test_the_argument_of_migrate_stays_as_it_is() -> None:
    values = yaml.safe_load(stored(1).config.read_text())
    before = copy.deepcopy(values)
    migrate(values)
    assert values == before


def test_every_version_but_todays_has_a_migration() -> None:
    assert sorted(MIGRATIONS) == list(range(1, SCHEMA_VERSION))


def test_the_schema_is_the_one_of_the_stored_snapshot() -> None:
    """Fails when a key comes, goes or changes its type without a new version."""
    path = stored(SCHEMA_VERSION).config
    now = snapshot.dump_config(composed(list(OF_TODAY), run_dir="/runs/today").experiment)
    if os.environ.get("LLMX_RECORD_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(now, encoding="utf-8")
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    advice = (
        f"The schema has changed since version {SCHEMA_VERSION} was stored. Where that version "
        "was released: raise SCHEMA_VERSION, write its migration (llmx/config/migrate.py), then "
        "`make golden`. Where it was not: `make golden`."
    )
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


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"schema_version": SCHEMA_VERSION + 1}, "or a newer one"),
        ({"schema_version": "2"}, "must be a whole number from 1"),
        ({"schema_version": True}, "must be a whole number from 1"),
        ({"schema_version": 0}, "must be a whole number from 1"),
        ({}, "schema_version=null"),
        (["a"], "must be a whole number from 1"),
        (None, "must be a whole number from 1"),
    ],
)
def test_what_is_no_snapshot_is_refused(values: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        migrate(values)


def test_torn_yaml_is_named(tmp_path) -> None:
    run = RunDir(tmp_path)
    run.config.write_text("schema_version: 2\nmodel: {name: 'a")
    with pytest.raises(ConfigError, match=r"config\.yaml, line 2: the quote is not closed"):
        snapshot.load(run)


def test_todays_values_pass_unchanged() -> None:
    values = to_dict(Experiment(name="a"))
    assert migrate(values).values == values
    assert migrate(values).notes == ()
