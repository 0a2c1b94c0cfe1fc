"""The samples of a step on disk: written before they are trained on, read back bit for bit, and
refused where they are not those of the step."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmx.data import Column, Sample
from llmx.run.rundir import RunDir
from llmx.tasks import GeneratedSample
from llmx.train.rollout_records import Rollout, RolloutRecords, packed, parsed, unpacked

COLUMNS = (
    Column("weight", per="token"),
    Column("old_logp", per="token"),
    Column("rank", per="sequence", dtype="int64"),
    Column("measures", per="example", shape=(2,)),
)
COURSE = {"optim": {"lr": 1e-6}, "seed": 3}
PROMPTS = np.array([5, 2])


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def sample(number: int, lengths: tuple[int, ...]) -> Sample:
    tokens = sum(lengths)
    weights = np.linspace(0, number, tokens, dtype=np.float32)
    return Sample(
        tokens=np.arange(tokens, dtype=np.uint32) + number,
        targets=weights > 0,
        sequence_starts=np.cumsum([0, *lengths[:-1]]),
        weights=weights,
        example_starts=np.zeros(1, np.int64) if len(lengths) > 1 else None,
        columns={
            "old_logp": -weights,
            "rank": np.arange(len(lengths)),
            "measures": np.array([[number, np.nan]], np.float32),
        },
    )


def rollout(number: int = 1) -> Rollout:
    shown = [GeneratedSample("2 + 2", "4", {"exact_match": 1.0, "format": None}, 0.5)]
    return Rollout([[sample(number, (3, 2)), sample(2, (4,))], []], shown)


def equal(samples: Sample, others: Sample) -> bool:
    values = [
        (samples.tokens, others.tokens),
        (samples.targets, others.targets),
        (samples.sequence_starts, others.sequence_starts),
        (samples.weights, others.weights),
        *((samples.columns[name], others.columns[name]) for name in samples.columns),
    ]
    return samples.columns.keys() == others.columns.keys() and all(
        one is not None and other is not None and one.dtype == other.dtype
        and one.tobytes() == other.tobytes()
        for one, other in values
    )  # fmt: skip


def records(directory: Path, *, lines: list[str] | None = None, **more: Any) -> RolloutRecords:
    values: dict[str, Any] = {"course": COURSE, "rank": 0, "start": 0, **more}
    log = (lambda _: None) if lines is None else lines.append
    return RolloutRecords(RunDir(directory), values.pop("course"), log=log, **values)


def write_steps(directory: Path, *, steps: range, **more: Any) -> None:
    """Train these steps: as a run does, each is asked for before it is drawn."""
    of_run = records(directory, **more)
    for step in steps:
        if of_run.read(step, PROMPTS, COLUMNS) is None:
            of_run.write(step, PROMPTS, COLUMNS, rollout(step + 1))


def steps_of(directory: Path) -> list[int]:
    return list(RunDir(directory).recorded_rollouts())


def test_samples_are_read_back_bit_for_bit(tmp_path: Path) -> None:
    write_steps(tmp_path, steps=range(2))
    lines: list[str] = []
    again = records(tmp_path, lines=lines)
    for step in range(2):
        found = again.read(step, PROMPTS, COLUMNS)
        assert found is not None
        expected = rollout(step + 1)
        assert [len(samples) for samples in found.by_prompt] == [2, 0]
        for one, other in zip(expected.by_prompt[0], found.by_prompt[0], strict=True):
            assert equal(one, other)
        assert [one.example_starts is None for one in found.by_prompt[0]] == [False, True]
        assert found.generated == expected.generated
    assert again.read(2, PROMPTS, COLUMNS) is None
    assert lines == [f"step 1: its samples are replayed from {tmp_path / 'rollouts'}"]


def test_a_step_without_samples_is_recorded(tmp_path: Path) -> None:
    of_run = records(tmp_path)
    of_run.write(0, PROMPTS, COLUMNS, Rollout([[], []]))
    found = records(tmp_path).read(0, PROMPTS, COLUMNS)
    assert found == Rollout([[], []], [])


def test_columns_without_weights() -> None:
    plain = Sample(np.array([1, 2], np.uint32), np.array([False, True]), np.zeros(1, np.int64))
    ((found,),) = unpacked(packed([[plain]], ()), ())
    assert (found.tokens.tolist(), found.targets.tolist()) == ([1, 2], [False, True])
    assert found.weights is None
    assert found.columns == {}


def test_from_a_checkpoint_on_the_later_steps_are_replayed(tmp_path: Path) -> None:
    write_steps(tmp_path, steps=range(5))
    resumed = records(tmp_path, start=3)
    assert [resumed.read(step, PROMPTS, COLUMNS) is not None for step in (3, 4, 5)] == [
        True, True, False
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"course": {"optim": {"lr": 2e-6}, "seed": 3}}, "has optim.lr=1e-06, this run has 2e-06"),
        ({"prompts": np.array([2, 5])}, "has prompts=[5, 2], this run has [2, 5]"),
        ({"columns": COLUMNS[:2]}, "has other columns than the samples of the task"),
    ],
)
def test_samples_of_another_run_are_named_and_drawn_anew(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write_steps(tmp_path, steps=range(4))
    lines: list[str] = []
    course = change.get("course", COURSE)
    resumed = records(tmp_path, lines=lines, start=1, course=course)
    prompts, columns = change.get("prompts", PROMPTS), change.get("columns", COLUMNS)
    assert resumed.read(1, prompts, columns) is None
    assert len(lines) == 1
    assert words in lines[0]
    assert lines[0].endswith("The samples of step 2 and of later steps are drawn anew.")
    assert steps_of(tmp_path) == [1]
    assert resumed.read(2, PROMPTS, COLUMNS) is None, "they come from other weights"


def test_a_setting_that_the_record_does_not_know_is_no_difference(tmp_path: Path) -> None:
    write_steps(tmp_path, steps=range(1))
    newer = {**COURSE, "optim": {"lr": 1e-6, "added_later": 0}}
    assert records(tmp_path, course=newer).read(0, PROMPTS, COLUMNS) is not None


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "text"])
def test_a_damaged_record_is_drawn_anew(damage: str, tmp_path: Path) -> None:
    write_steps(tmp_path, steps=range(3))
    path = RunDir(tmp_path).rollout(2)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    whole = path.read_bytes()
    texts = {"cut": whole[:-9], "bit": bytes(content), "empty": b"", "text": b"{}" * 40}
    path.write_bytes(texts[damage])
    lines: list[str] = []
    resumed = records(tmp_path, lines=lines)
    assert resumed.read(0, PROMPTS, COLUMNS) is not None
    assert resumed.read(1, PROMPTS, COLUMNS) is None
    assert "is damaged" in lines[1]
    assert steps_of(tmp_path) == [1]
    resumed.write(1, PROMPTS, COLUMNS, rollout(2))
    assert path.read_bytes() == whole


def test_samples_after_others_than_those_trained_on_are_not_used(tmp_path: Path) -> None:
    """A later record of an abandoned branch, brought back from a host that still had it."""
    write_steps(tmp_path, steps=range(3))
    abandoned = RunDir(tmp_path).rollout(3).read_bytes()
    changed = {**COURSE, "seed": 4}
    write_steps(tmp_path, steps=range(1, 2), start=1, course=changed)
    RunDir(tmp_path).rollout(3).write_bytes(abandoned)
    lines: list[str] = []
    assert records(tmp_path, lines=lines, start=2).read(2, PROMPTS, COLUMNS) is None
    assert "follows other samples of the step before" in lines[0]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    write_steps(tmp_path, steps=range(5), keep=2)
    assert steps_of(tmp_path) == [4, 5]
    resumed = records(tmp_path, start=3, keep=2)
    assert resumed.read(3, PROMPTS, COLUMNS) is not None, "what it follows is no longer known"


def test_none_are_kept(tmp_path: Path) -> None:
    write_steps(tmp_path, steps=range(2), keep=0)
    assert not (tmp_path / "rollouts").exists()


def test_another_rank_writes_nothing(tmp_path: Path) -> None:
    records(tmp_path, rank=1).write(0, PROMPTS, COLUMNS, rollout())
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named_and_leaves_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device.*step-00000001.safetensors"):
        records(tmp_path).write(0, PROMPTS, COLUMNS, rollout())
    assert steps_of(tmp_path) == []


def test_any_library_reads_a_record(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    write_steps(tmp_path, steps=range(1))
    path = RunDir(tmp_path).rollout(1)
    arrays = load_file(path)
    assert arrays["sequences"].tolist() == [2, 1]
    assert arrays["column.measures"].shape == (2, 2)
    header, _, _ = parsed(path.read_bytes())
    assert (header["step"], header["prompts"], header["course"]) == (1, [5, 2], COURSE)
