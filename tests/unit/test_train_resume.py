"""What stays of the metrics, and what a checkpoint may be resumed with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmx.checkpoint.commit import begin
from llmx.checkpoint.distributed import StorageTopology, _publish, own_files_suffice
from llmx.errors import ConfigError
from llmx.run.metrics.lines import read_metrics
from llmx.train.metrics import MetricsWriter, lines_until, truncate_metrics
from llmx.train.resume import check_identity, check_samples
from llmx.train.schedule import RunLength


def line(kind: str, step: int, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "step": step, **more}


LINES = [
    {"kind": "start", "total_steps": 9},
    line("eval", 0, loss=3.0),
    line("train", 1, loss=2.5),
    line("event", 2, event="saved"),
    line("train", 3, loss=2.0),
    line("train", 4, loss=1.9, extra=True),
    line("event", 4, event="saved"),
    line("end", 4),
]


def test_lines_after_the_step_go_with_the_end_and_with_what_was_extra() -> None:
    assert lines_until(LINES, 4) == [*LINES[:5], LINES[6]]
    assert lines_until(LINES, 3) == LINES[:5]
    assert lines_until(LINES, 2) == LINES[:4]
    assert lines_until(LINES, 0) == LINES[:2]


def test_a_torn_line_is_cut_and_a_whole_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    text = "".join(json.dumps(each) + "\n" for each in LINES[:5])
    path.write_text(text)
    inode = path.stat().st_ino
    assert truncate_metrics(path, 3) == LINES[:5]
    assert path.stat().st_ino == inode
    path.write_text(text + '{"kind": "train", "st')
    assert truncate_metrics(path, 3) == LINES[:5]
    assert path.read_text() == text
    path.write_text(text.rstrip("\n"))  # whole, but for its end: the next line would join it
    truncate_metrics(path, 3)
    assert path.read_text() == text
    path.write_bytes(text.encode() + b"\0\0\0\0")  # as a power cut leaves it
    truncate_metrics(path, 3)
    assert path.read_text() == text
    assert truncate_metrics(tmp_path / "none", 3) == []
    assert not (tmp_path / "none").exists()


def test_the_newest_value_is_known_over_a_restart(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl", enabled=True)
    assert writer.latest("eval/loss") is None
    writer.remember(LINES)
    assert writer.latest("eval/loss") == {"name": "eval/loss", "value": 3.0}
    assert writer.latest("train/loss") == {"name": "train/loss", "value": 1.9}
    writer.write("eval", step=9, loss=1.0, exact_match=None)
    writer.write("train", step=9, loss=float("nan"))
    writer.event("saved", step=9, loss=7.0)
    writer.sync()
    assert writer.latest("eval/loss") == {"name": "eval/loss", "value": 1.0}
    assert writer.latest("train/loss") == {"name": "train/loss", "value": 1.9}
    assert writer.latest("eval/exact_match") is None
    assert [each["kind"] for each in read_metrics(tmp_path / "metrics.jsonl")] == [
        "eval",
        "train",
        "event",
    ]
    writer.close()


def test_another_run_is_refused_and_all_that_differs_is_named() -> None:
    mine = {"global_batch": 8, "seq_len": 64, "seed": 0}
    check_identity({"step": 3, **mine, "world_size": 9}, mine)
    with pytest.raises(ConfigError) as caught:
        check_identity({"step": 3, "global_batch": 16, "seq_len": 64}, mine)
    assert "step 3" in str(caught.value)
    assert (
        "global_batch is 16 in the checkpoint and 8 in this run; seed is None in the checkpoint"
        in str(caught.value)
    )


def test_data_that_a_newer_llmx_prepares_otherwise_is_said_to_be_that() -> None:
    mine = {"seed": 0, "data_fingerprint": "b", "num_samples": 90, "preparation": "1.3"}
    saved = {"step": 3, **mine}
    with pytest.raises(ConfigError, match="another data format \\(1.2"):
        check_identity({**saved, "data_fingerprint": "a", "preparation": "1.2"}, mine)
    with pytest.raises(
        ConfigError, match="belongs to another run: data_fingerprint is a in the checkpoint"
    ):
        check_identity({**saved, "data_fingerprint": "a"}, mine)


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
        ({}, APART, 3, {}, False),
        ({"zero_stage": 0}, APART, 0, {}, False),  # every rank needs everything
        ({}, replace(APART, leaders=(0, 1, 2)), 2, {}, False),
        ({"buffers": {"b": {}}}, APART, 2, {}, False),
        ({"parameters": {"a": {"trained": False}}}, APART, 2, {}, False),
    ],
)
def test_when_each_rank_can_do_with_its_own_file(
    state: dict[str, Any],
    topology: StorageTopology,
    stage: int,
    lacking: dict[int, list[str]],
    wanted: bool,
) -> None:
    assert own_files_suffice({**STATE, **state}, lacking, topology, stage=stage) is wanted


def test_a_topology_knows_the_ranks_of_its_storage() -> None:
    topology = StorageTopology(Path("x"), 2, (0, 0, 2, 2))
    assert (topology.storage, topology.leads, topology.members) == (2, True, [2, 3])
    assert not replace(topology, rank=3).leads


def test_a_host_that_cannot_take_what_it_lacks_says_so_to_the_others(tmp_path: Path) -> None:
    """Raised on that rank alone, it would leave the others waiting for it."""
    topology = StorageTopology(tmp_path, rank=0, leaders=(0,))
    assert "No such file" in str(_publish(topology, 4))
    begin(tmp_path, 4)
    assert _publish(topology, 4) is None
    assert (tmp_path / "step-00000004").is_dir()


def test_a_checkpoint_behind_a_short_last_step_does_not_go_on_longer() -> None:
    short, longer = RunLength(25, 249, 10), RunLength(50, 498, 10)
    check_samples({}, short)
    check_samples({"step": 25, "samples": 249}, short)
    check_samples({"step": 24, "samples": 240}, longer)
    check_samples({"step": 20, "samples": 200}, RunLength(30, 300, 10))
    with pytest.raises(
        ConfigError, match="step 25 was saved after 249 samples.*ends at sample 250"
    ):
        check_samples({"step": 25, "samples": 249}, longer)
