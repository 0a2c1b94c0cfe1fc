"""``reproduce``: a wrong command line, and what says that two runs are equal."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from llmx.compose.apply_overrides import parse_run_command
from llmx.compose.complete import plan_experiment
from llmx.errors import ConfigError
from llmx.lifecycle.reproduce import (
    OWN,
    _record_of,
    main,
    next_experiment,
    other_inputs,
    reproduce,
)
from llmx.run import snapshot
from llmx.run.metrics.equality import weight_hashes
from llmx.run.rundir import RunDir, write_json
from tests.composing import composed


def test_a_config_alone_starts_and_says_what_is_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On this machine, whatever the other one had; its global batch stays."""
    done = composed(["hardware=local", "batch.global_batch=null"], run_dir=tmp_path / "theirs")
    hardware = done.experiment.hardware
    hosts = [dataclasses.replace(hardware.hosts[0], slots=8, device="a100_80g")]
    exp = dataclasses.replace(done.experiment, hardware=dataclasses.replace(hardware, hosts=hosts))
    run = RunDir(tmp_path / "theirs")
    run.root.mkdir()
    run.config.write_text(snapshot.dump_config(exp))
    words = parse_run_command("reproduce", [str(run.root), "dry_run=true"], own_keys=OWN)
    assert reproduce(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "not compared: code, packages, devices and inputs (there is no provenance.json)" in said
    assert "nothing differs" not in said
    assert list(run.root.iterdir()) == [run.config]
    plan = plan_experiment(exp).plan
    mine, _ = next_experiment(exp, plan, words, target=tmp_path / "mine", to_step=None)
    assert (mine.hardware, mine.batch.global_batch) == (hardware, plan.batch.global_batch)


def test_hashes_of_weights_are_of_the_end_and_of_checkpoints(tmp_path) -> None:
    run = RunDir(tmp_path)
    write_json(run.checkpoint(4) / "state.json", {"step": 4, "weights_hash": "a"})
    write_json(run.checkpoint(8) / "state.json", {"step": 8})
    run.metrics.write_text('{"kind": "end", "step": 9, "weights_hash": "b"}\n')
    assert weight_hashes(run) == {4: "a", 9: "b"}
    assert weight_hashes(RunDir(tmp_path / "none")) == {}


def test_inputs_that_the_ranks_read_otherwise_are_named(tmp_path) -> None:
    one, two = RunDir(tmp_path / "one"), RunDir(tmp_path / "two")
    write_json(one.inputs, {"data": "a", "eval_data": None, "tokenizer": "t"})
    assert other_inputs(one, two) == []
    write_json(two.inputs, {"data": "b", "eval_data": None, "tokenizer": "t"})
    assert other_inputs(one, two) == ["data"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "no such directory"),
        ([], "takes one run directory"),
        ([".", "strict=perhaps"], "not a run directory|strict=perhaps"),
    ],
)
def test_a_wrong_command_line_is_told(words, said, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        main(words)


@pytest.mark.parametrize(
    ("text", "damage"),
    [
        ('{"git": {"untracked": "NaN"}}', "git.untracked is 'NaN'"),
        ('{"fingerprints": {"data": "x"}}', "fingerprints.data is 'x'"),
        ("{", "cannot be read"),
    ],
)
def test_a_damaged_record_is_named(text: str, damage: str, tmp_path: Path) -> None:
    (tmp_path / "provenance.json").write_text(text)
    with pytest.raises(ConfigError, match=f"nothing can be compared with this run: .*{damage}"):
        _record_of(RunDir(tmp_path))
