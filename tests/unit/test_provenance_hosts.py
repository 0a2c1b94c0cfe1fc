"""The hosts of a run, then and now: asked with the real program, compared by name."""

from __future__ import annotations

import dataclasses
import sys

from llmx.hardware.survey import survey
from llmx.lifecycle.hosts import (
    ask_hosts,
    host_differences,
    hosts_then_and_now,
    of_this_machine,
)
from llmx.run.provenance.differences import BREAKS, HARMLESS, MAY, Difference
from llmx.run.rundir import RunDir, write_json
from tests.composing import composed


def test_every_host_is_asked_and_one_out_of_reach_is_said(tmp_path) -> None:
    done = composed(["hardware=cpu2"], run_dir=tmp_path)
    away = dataclasses.replace(
        done.plan.hosts[0], name="away.invalid", address="away.invalid", is_local=False
    )
    plan = dataclasses.replace(done.plan, hosts=(*done.plan.hosts, away))
    found = ask_hosts(done.experiment, plan)
    here = found["localhost"]
    assert here["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert here["packages"]["torch"]
    assert "away.invalid" in found["away.invalid"]["error"]

    run = RunDir(tmp_path)
    assert hosts_then_and_now(run, done.experiment, plan) == []  # nothing was recorded
    then = {"localhost": survey("/"), "away.invalid": survey("/")}
    then["localhost"]["packages"] = {**then["localhost"]["packages"], "torch": "1.0"}
    write_json(run.hosts, then)
    rows = {row.what: row for row in hosts_then_and_now(run, done.experiment, plan)}
    assert set(rows) == {"localhost: torch", "away.invalid: cannot be asked"}
    assert rows["localhost: torch"].severity == BREAKS
    assert rows["away.invalid: cannot be asked"].severity == MAY
    # A run on one host has nothing to ask.
    assert hosts_then_and_now(run, done.experiment, done.plan) == []


def test_a_host_is_compared_with_itself_and_not_with_others() -> None:
    facts = survey("/")
    assert host_differences({"a": facts}, {"a": facts}) == []
    assert host_differences({"a": facts}, {"b": {**facts, "cpu": "other"}}) == []
    (row,) = host_differences({"a": facts}, {"a": {**facts, "cpu": "other"}})
    assert row.what == "a: CPU"
    # A survey of before names, drivers and CPUs were asked for.
    old = {key: facts[key] for key in ("python", "packages", "nccl", "gpus")}
    assert host_differences({"a": old}, {"a": facts}) == []


def test_where_no_rank_runs_packages_compute_nothing() -> None:
    rows = [
        Difference(BREAKS, "torch", "1", "2", "pip install torch==1"),
        Difference(BREAKS, "data", "1", "2"),
        Difference(MAY, "code that trains: train/loop.py", "1", "2"),
    ]
    here, away = composed(["hardware=cpu2"]).plan, composed(["hardware=a100x2_v100x2"]).plan
    assert of_this_machine(rows, here) == rows
    judged = of_this_machine(rows, away)
    assert [row.severity for row in judged] == [HARMLESS, BREAKS, MAY]
    assert judged[0].advice == ""
