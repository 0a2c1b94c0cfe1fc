"""``reproduce``: a wrong command line, and what says that two runs are equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmx.errors import ConfigError
from llmx.lifecycle.reproduce import _record_of, main, other_inputs
from llmx.run.metrics.equality import weight_hashes
from llmx.run.rundir import RunDir, write_json


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
        (None, "provenance.json is missing"),
    ],
)
def test_a_damaged_record_is_named(text: str | None, damage: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "provenance.json").write_text(text)
    with pytest.raises(ConfigError, match=f"nothing can be compared with this run: .*{damage}"):
        _record_of(RunDir(tmp_path))
