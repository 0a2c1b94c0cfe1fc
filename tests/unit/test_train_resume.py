"""``metrics.jsonl`` and what stays of it; and what a checkpoint may be resumed with."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmx.checkpoint.distributed import own_files_suffice
from llmx.errors import ConfigError
from llmx.run.metrics.lines import read_metrics
from llmx.spread import StorageTopology
from llmx.train.metrics import MetricsWriter, lines_until, truncate_metrics
from llmx.train.resume import check_identity, check_samples
from llmx.train.schedule import RunLength

LINES: list[dict[str, Any]] = [
    {"kind": "start", "total_steps": 9},
    {"kind": "eval", "step": 0, "loss": 3.0},
    {"kind": "train", "step": 1, "loss": 2.5},
    {"kind": "event", "step": 2, "event": "saved"},
    {"kind": "train", "step": 3, "loss": 2.0},
    {"kind": "train", "step": 4, "loss": 1.9, "extra": True},
    {"kind": "event", "step": 4, "event": "saved"},
    {"kind": "end", "step": 4},
]
TEXT = "".join(json.dumps(each) + "\n" for each in LINES[:5])


def test_metrics_are_one_json_object_a_line_there_at_once(tmp_path, monkeypatch) -> None:
    path, synced, real = tmp_path / "metrics.jsonl", [], os.fsync
    for enabled in (False, True):  # rank 0 alone writes
        assert not list(tmp_path.iterdir())
        writer = MetricsWriter(path, enabled=enabled)
        writer.write("start", total_steps=3)
    writer.write("train", step=1, loss=float("nan"), grad_norm=float("inf"), lr=1e-3, mfu=None)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line.pop("time") > 0 for line in lines)
    assert lines == [
        {"kind": "start", "total_steps": 3},
        {"kind": "train", "step": 1, "loss": None, "grad_norm": None, "lr": 1e-3, "mfu": None,
         "nonfinite": True},
    ]  # fmt: skip
    monkeypatch.setattr(
        os, "fsync", lambda file: [synced.append(os.fstat(file).st_ino), real(file)]
    )
    writer.sync()  # its name, too: a resumed run has replaced the file, and the old one is gone
    assert synced == [path.stat().st_ino, tmp_path.stat().st_ino]
    writer.close()
    again = MetricsWriter(path, enabled=True)
    again.write("end", step=3)
    again.close()
    assert len(path.read_text().splitlines()) == 3


def test_the_newest_value_is_known_over_a_restart(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl", enabled=True)
    assert writer.latest("eval/loss") is None
    writer.remember(LINES)
    assert writer.latest("eval/loss") == {"name": "eval/loss", "value": 3.0}
    assert writer.latest("train/loss") == {"name": "train/loss", "value": 1.9}
    writer.write("eval", step=9, loss=1.0, exact_match=None)
    writer.write("train", step=9, loss=float("nan"))
    writer.event("saved", step=9, loss=7.0)
    assert writer.latest("eval/loss") == {"name": "eval/loss", "value": 1.0}
    assert writer.latest("train/loss") == {"name": "train/loss", "value": 1.9}
    assert writer.latest("eval/exact_match") is None
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["kind"] for line in lines] == ["eval", "train", "event"]
    writer.close()


@pytest.mark.parametrize(
    ("step", "left"),
    [(4, [*LINES[:5], LINES[6]]), (3, LINES[:5]), (2, LINES[:4]), (0, LINES[:2])],
)
def test_lines_after_the_step_go_with_the_end_and_with_what_was_extra(step, left) -> None:
    assert lines_until(LINES, step) == left


@pytest.mark.parametrize(
    "damaged",
    [
        TEXT + '{"kind": "train", "st',
        TEXT.rstrip("\n"),  # whole, but for its end: the next line would join it
        TEXT + "\0\0\0\0",  # as a power cut leaves it
    ],
)
def test_a_torn_line_is_cut_and_a_whole_file_is_left_alone(damaged: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(TEXT)
    inode = path.stat().st_ino
    assert truncate_metrics(path, 3) == LINES[:5]
    assert path.stat().st_ino == inode
    path.write_text(damaged)
    assert truncate_metrics(path, 3) == LINES[:5]
    assert path.read_text() == TEXT
    assert truncate_metrics(tmp_path / "none", 3) == []
    assert not (tmp_path / "none").exists()


MINE = {"global_batch": 8, "seq_len": 64, "seed": 0}
DATA = {"seed": 0, "data_fingerprint": "b", "num_samples": 90, "preparation": "1.3"}
PREPARED_OTHERWISE = {**DATA, "data_fingerprint": "a", "preparation": "1.2"}


@pytest.mark.parametrize(
    ("mine", "saved", "message"),
    [
        (MINE, {"global_batch": 16, "seq_len": 64}, "step 3.*global_batch is 16 in the checkpoint "
         "and 8 in this run; seed is None in the checkpoint"),
        (DATA, PREPARED_OTHERWISE, r"another data format \(1.2"),
        (DATA, {**DATA, "data_fingerprint": "a"},
         "belongs to another run: data_fingerprint is a in the checkpoint"),
    ],
)  # fmt: skip
def test_another_run_is_refused_and_all_that_differs_is_named(mine, saved, message) -> None:
    check_identity({"step": 3, **mine, "world_size": 9}, mine)
    with pytest.raises(ConfigError, match=message):
        check_identity({"step": 3, **saved}, mine)


STATE = {
    "world_size": 2,
    "zero_stage": 2,
    "parameters": {"a": {"trained": True}},
    "buffers": {},
}
APART = StorageTopology(Path("x"), 0, (0, 1))


@pytest.mark.parametrize(
    ("state", "topology", "stage", "lacking", "wanted"),
    [
        ({}, APART, 2, {0: ["rank-00001.safetensors"], 1: ["rank-00000.safetensors"]}, True),
        ({}, APART, 2, {0: ["rank-00000.safetensors"]}, False),  # hosts have changed places
        ({"zero_stage": 0}, APART, 0, {}, False),  # every rank needs everything
        ({}, replace(APART, leaders=(0, 1, 2)), 2, {}, False),
        ({"buffers": {"b": {}}}, APART, 2, {}, False),
        ({"parameters": {"a": {"trained": False}}}, APART, 2, {}, False),
    ],
)
def test_when_each_rank_can_do_with_its_own_file(state, topology, stage, lacking, wanted) -> None:
    assert own_files_suffice({**STATE, **state}, lacking, topology, stage=stage) is wanted


def test_a_checkpoint_behind_a_short_last_step_does_not_go_on_longer() -> None:
    short, longer = RunLength(25, 249, 10), RunLength(50, 498, 10)
    check_samples({}, short)
    check_samples({"step": 25, "samples": 249}, short)
    check_samples({"step": 24, "samples": 240}, longer)
    check_samples({"step": 20, "samples": 200}, RunLength(30, 300, 10))
    message = "step 25 was saved after 249 samples.*ends at sample 250"
    with pytest.raises(ConfigError, match=message):
        check_samples({"step": 25, "samples": 249}, longer)
