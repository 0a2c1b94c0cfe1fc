"""A run directory: its snapshot, written whole and read back equal; its name; what it exports."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from llmx.__main__ import main
from llmx.config import (
    SCHEMA_VERSION,
    Experiment,
    experiment_from_dict,
    experiment_of_snapshot,
    to_dict,
)
from llmx.errors import ConfigError
from llmx.plan.types import Plan
from llmx.run import snapshot
from llmx.run.exported import generates_no_text
from llmx.run.rundir import RunDir, claim, read_json, write_json
from tests.composing import composed
from tests.conftest import GOLDEN

# --- The snapshot ----------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path):
    done = composed(["hardware=a100x2_v100x2", "zero=stage3"], run_dir=tmp_path / "run")
    parts = (done.experiment, done.plan, done.ds_config)
    return done, snapshot.write(*parts, overrides=["zero=stage3"], environment={})


def test_everything_reads_back(written) -> None:
    done, run = written
    assert snapshot.load(run) == done.experiment
    assert Plan.from_dict(read_json(run.plan)) == done.plan
    assert read_json(run.ds_config) == done.ds_config
    assert yaml.safe_load(run.overrides.read_text()) == ["zero=stage3"]
    assert read_json(run.provenance)["overrides"] == ["zero=stage3"]
    identity = read_json(run.identity)
    assert len(identity["run_id"]) == 16
    assert identity["parent"] is None
    # An id that is there stays: every attempt of a run has the same.
    assert snapshot.write_identity(run) == identity["run_id"]
    assert read_json(run.identity) == identity


def test_a_number_that_someone_types_into_a_snapshot_is_the_text(written) -> None:
    _, run = written
    text = run.config.read_text()
    for typed in ("1:30:00", "007", "1_000"):
        run.config.write_text(re.sub("partition: null", f"partition: {typed}", text))
        assert snapshot.load(run).launch.slurm.partition == typed
    run.config.write_text(re.sub("revision: null", "revision: 1.10", text, count=1))
    with pytest.raises(ConfigError, match=r"model\.revision=1\.1: must be text"):
        snapshot.load(run)


def test_only_a_run_that_failed_before_its_first_step_makes_room(written) -> None:
    """What it has left, its logs among it, is put aside. No other run is overwritten."""
    done, run = written
    parts = (done.experiment, done.plan, done.ds_config)
    identity, config = read_json(run.identity), run.config.read_bytes()
    crash = {"outcome": "crash", "steps": 3}
    for result in (None, {"outcome": "ok"}, crash, {"outcome": "interrupted"}):
        if result is not None:
            write_json(run.result, result)
        with pytest.raises(ConfigError, match="already contains a run"):
            snapshot.write(*parts, overrides=[], environment={})
    write_json(run.result, {"outcome": "data", "steps": 0})
    run.metrics.write_text('{"kind": "train", "step": 1}\n')
    with pytest.raises(ConfigError, match="already contains a run"):
        snapshot.write(*parts, overrides=[], environment={})
    assert run.config.read_bytes() == config
    run.metrics.unlink()
    for number in (1, 2):
        write_json(run.result, {"outcome": "data", "steps": 0})
        snapshot.write(*parts, overrides=["seed=7"], environment={})
        assert not run.result.exists()
        aside = run.root.with_name(f"run.attempt-{number}")
        assert read_json(aside / "result.json")["outcome"] == "data"
    assert read_json(run.root.with_name("run.attempt-1") / "run.json") == identity
    assert read_json(run.identity) != identity


def test_what_is_no_snapshot_is_said(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with pytest.raises(ConfigError, match="no such directory|not a run directory"):
        snapshot.load(run)
    for text, message in (
        (f"schema_version: {SCHEMA_VERSION + 1}", "install the llmx that wrote it"),
        ("schema_version: 1\nmodel: {name: 'a", r"config\.yaml, line 2: the quote is not closed"),
    ):
        run.config.write_text(text)
        with pytest.raises(ConfigError, match=message):
            snapshot.load(run)


def test_values_of_another_version_are_refused() -> None:
    versions = (SCHEMA_VERSION + 1, str(SCHEMA_VERSION), True, 0, None)
    values = to_dict(Experiment(name="a"))
    for other in ({}, ["a"], *({**values, "schema_version": version} for version in versions)):
        with pytest.raises(ConfigError, match="schema_version=.*: this llmx reads only 1"):
            experiment_of_snapshot(other)


STORED = RunDir(GOLDEN / "snapshots")
OF_TODAY = ("hardware=a100x2_v100x2", "zero=stage3", "launch=rsync", "launch.env.NCCL_DEBUG=INFO",
            "tracking=all", "data.eval_samples=8", "task.steps=40")  # fmt: skip


def test_the_schema_is_the_one_of_the_stored_snapshot() -> None:
    """Fails when a key comes, goes or changes its type without a new recording."""
    path = STORED.config
    now = snapshot.dump_config(composed(list(OF_TODAY), run_dir="/runs/today").experiment)
    if os.environ.get("LLMX_RECORD_GOLDEN") == "1":
        path.write_text(now, encoding="utf-8")
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    advice = "The schema has changed: run `make golden`, after a release with a new SCHEMA_VERSION."
    assert to_dict(experiment_from_dict(values)) == values, advice
    exp = snapshot.load(STORED)
    assert [host.name for host in exp.hardware.hosts] == ["node-a", "node-b"]
    assert exp.launch.env == {"NCCL_DEBUG": "INFO"}


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)


@example(system="1e5", names={"1e5": "1_0"}, config={"a": "1e5"})
@example(system="\x85", names={"a": "a\u2028b"}, config={"\u2029": "\ufeff"})
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    system=TEXTS,
    names=st.dictionaries(TEXTS, TEXTS, max_size=3),
    config=st.dictionaries(TEXTS, NUMBERS | TEXTS | st.booleans() | st.none(), max_size=4),
)
def test_any_text_survives_yaml(system, names, config) -> None:
    exp = Experiment()
    exp.data.system, exp.data.label_names, exp.model.config = system, names, config
    assert experiment_from_dict(yaml.safe_load(snapshot.dump_config(exp))) == exp


# --- Its name --------------------------------------------------------------------------------


def test_every_claim_of_a_name_is_another_directory(tmp_path: Path) -> None:
    root = tmp_path / "2026-01-01_00-00-00_sft"
    root.mkdir()  # As Hydra leaves it: both commands find it there.
    with ThreadPoolExecutor(8) as threads:
        claimed = list(threads.map(lambda _: claim(root), range(16)))
    names = {path.name for path in claimed}
    assert claim(Path("/proc/llmx/run")) == Path("/proc/llmx/run"), "left to the snapshot"
    assert names == {root.name, *(f"{root.name}_{number}" for number in range(2, 17))}


def test_commands_of_one_second_have_directories_of_their_own(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMX_OUTPUTS", "outputs")
    # One moment for all of them, whatever this machine does meanwhile.
    stopped = SimpleNamespace(now=lambda: datetime(2026, 1, 1))
    monkeypatch.setattr("hydra.core.utils.datetime", stopped)
    for _ in range(3):
        assert main(["hardware=cpu2", "dry_run=true"]) == 0
    name = "2026-01-01_00-00-00_sft_tiny_stage2"
    assert {path.name for path in Path("outputs").iterdir()} == {name, f"{name}_2", f"{name}_3"}


# --- What it exports -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "adapter", "wanted"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, {}, None),
        ({"architectures": ["BertForMaskedLM"]}, {}, "BertForMaskedLM"),
        ({"architectures": ["BertModel"]}, {}, "BertModel"),
        ({}, {"task_type": "CAUSAL_LM"}, None),
        ({}, {"task_type": "FEATURE_EXTRACTION"}, "FEATURE_EXTRACTION"),
        ({}, {"task_type": "SEQ_CLS"}, "SEQ_CLS"),
        ({}, {"task_type": None, "base_model_name_or_path": "owner/name"}, None),
        ({}, {"task_type": None, "base_model_name_or_path": "BASE"}, "BertForMaskedLM"),
    ],
)
def test_what_writes_no_text(
    config: dict[str, Any], adapter: dict[str, Any], wanted: str | None, tmp_path: Path
) -> None:
    """By its config files alone; an adapter of a kind that has no name is as its base."""
    base, mine = tmp_path / "base", tmp_path / "mine"
    for directory, name, values in (
        (base, "config.json", {"architectures": ["BertForMaskedLM"]}),
        (mine, "config.json", config),
        (mine, "adapter_config.json", adapter),
    ):
        directory.mkdir(exist_ok=True)
        if values:
            text = json.dumps(values).replace("BASE", str(base))
            (directory / name).write_text(text)
    assert generates_no_text(mine) == wanted
