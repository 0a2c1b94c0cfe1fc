"""The snapshot: written whole, read back equal, never over another run."""

from __future__ import annotations

import dataclasses
import re

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmx.config import SCHEMA_VERSION, Experiment, experiment_from_dict
from llmx.errors import ConfigError
from llmx.plan.types import Plan
from llmx.run import snapshot
from llmx.run.rundir import RunDir, read_json
from tests.composing import composed


@pytest.fixture
def written(tmp_path):
    done = composed(["hardware=a100x2_v100x2", "zero=stage3"], run_dir=tmp_path / "run")
    run = snapshot.write(
        done.experiment, done.plan, done.ds_config, overrides=["zero=stage3"], environment={}
    )
    return done, run


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


def test_a_run_is_never_overwritten(written) -> None:
    done, run = written
    before = run.config.read_bytes()
    other = dataclasses.replace(done.experiment, seed=7)
    with pytest.raises(ConfigError, match="already contains a run"):
        snapshot.write(other, done.plan, done.ds_config, overrides=[], environment={})
    assert run.config.read_bytes() == before


def test_a_newer_snapshot_is_refused(written) -> None:
    _, run = written
    text = run.config.read_text()
    run.config.write_text(
        text.replace(f"schema_version: {SCHEMA_VERSION}", f"schema_version: {SCHEMA_VERSION + 1}")
    )
    with pytest.raises(ConfigError, match="install the llmx that wrote it"):
        snapshot.load(run)


def test_no_run_directory(tmp_path) -> None:
    with pytest.raises(ConfigError, match="no such directory|not a run directory"):
        snapshot.load(RunDir(tmp_path))


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@example(system="1e5", names={"1e5": "1_0"}, config={"a": "1e5"})
@example(system="\x85", names={"a": "a\u2028b"}, config={"\u2029": "\ufeff"})
@settings(max_examples=40, deadline=None)
@given(
    system=TEXTS,
    names=st.dictionaries(TEXTS, TEXTS, max_size=3),
    config=st.dictionaries(
        TEXTS,
        st.one_of(
            st.integers(-(2**63), 2**63 - 1),
            st.floats(allow_nan=False, allow_infinity=False),
            TEXTS,
            st.booleans(),
            st.none(),
        ),
        max_size=4,
    ),
)
def test_any_text_survives_yaml(system, names, config) -> None:
    exp = Experiment()
    exp.data.system, exp.data.label_names, exp.model.config = system, names, config
    assert experiment_from_dict(yaml.safe_load(snapshot.dump_config(exp))) == exp
