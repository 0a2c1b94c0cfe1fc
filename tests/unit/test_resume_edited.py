"""A ``config.yaml`` that was edited by hand is noticed, key by key where a copy is left."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from llmx.lifecycle.resume.changes import edited_config
from llmx.run import snapshot
from llmx.run.provenance.differences import BREAKS, HARMLESS, not_recorded
from llmx.run.rundir import RunDir, read_json
from tests import tracked_run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = tracked_run.write_start(tmp_path / "run")
    snapshot.write_provenance(run, {"git": None})
    (run.checkpoint(20)).mkdir(parents=True)
    shutil.copy(run.config, run.checkpoint(20) / "config.yaml")
    return run


def edit(run: RunDir, group: str, key: str, value: object) -> None:
    values = yaml.safe_load(run.config.read_text())
    values[group][key] = value
    run.config.write_text(yaml.safe_dump(values))


def test_as_it_was_written(run: RunDir) -> None:
    assert edited_config(run, read_json(run.provenance)) == []
    # Comments and order are no values.
    values = yaml.safe_load(run.config.read_text())
    run.config.write_text("# mine\n" + yaml.safe_dump(values, sort_keys=True))
    assert edited_config(run, read_json(run.provenance)) == []


def test_each_edited_key_is_named_with_what_it_does_to_the_numbers(run: RunDir) -> None:
    edit(run, "optim", "lr", 0.5)
    edit(run, "tracking", "project", "mine")
    rows = edited_config(run, read_json(run.provenance))
    assert [(row.severity, row.what, row.now) for row in rows] == [
        (BREAKS, "config.yaml was edited: optim.lr", "0.5"),
        (HARMLESS, "config.yaml was edited: tracking.project", "mine"),
    ]
    assert rows[0].advice == "checkpoints/step-00000020/config.yaml has it as it was"


def test_without_a_copy_that_it_was_edited_is_said(run: RunDir) -> None:
    shutil.rmtree(run.checkpoints)
    edit(run, "optim", "lr", 0.5)
    (row,) = edited_config(run, read_json(run.provenance))
    assert (row.severity, row.what) == (BREAKS, "config.yaml was edited by hand")


def test_a_run_of_an_older_llmx_cannot_be_checked(run: RunDir) -> None:
    edit(run, "optim", "lr", 0.5)
    assert edited_config(run, {"git": None}) == []
    assert "whether config.yaml was edited since" in not_recorded({"git": None})
    assert "whether config.yaml was edited since" not in not_recorded(read_json(run.provenance))
