"""A power cut after every writing call: what was not synced may be lost or torn."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from llmx.checkpoint import commit, pointers, selection
from tests.checkpoint_saves import Fault, FaultyDisk, restart, save, tree, usable_steps
from tests.power_cut import Call, RecordingDisk, materialise, states_after

RANDOM_STATES = 4
"""Beside the two extremes, at each of some hundred calls."""


def cut_everywhere(root: Path, calls: list[Call], *, first: int, scratch: Path, check) -> int:  # type: ignore[no-untyped-def]
    """``check(checkpoints, number of calls done)`` for every possible state; how many."""
    tried = 0
    seen: set[str] = set()
    for done in range(first, len(calls) + 1):
        states = states_after(root, calls[:done], random_states=RANDOM_STATES, seed=done)
        for state in states:
            if (key := f"{done}{state!r}") in seen:
                continue
            seen.add(key)
            with tempfile.TemporaryDirectory(dir=scratch) as name:
                materialise(state, Path(name))
                check(Path(name) / "checkpoints", done)
            tried += 1
    return tried


def test_a_power_cut_leaves_the_old_or_the_new(memory: Path) -> None:
    root = memory / "run"
    root.mkdir()
    disk = RecordingDisk()
    committed_at = {}
    for step in (1, 2, 3):
        assert save([root / "checkpoints"], step, disks=[disk])
        committed_at[step] = len(disk.calls)
    before = committed_at[1]
    renames = [
        number
        for number, call in enumerate(disk.calls)
        if call[0] == "sync_directory" and disk.calls[number - 1][0] == "rename"
    ]

    def check(checkpoints: Path, done: int) -> None:
        chosen = restart([checkpoints])
        older = max(step for step, at in committed_at.items() if at <= done)
        newer = min([step for step, at in committed_at.items() if at > done], default=older)
        assert chosen in (older, newer), (done, disk.calls[done - 1], tree(checkpoints))
        # Nothing that has its name is torn: all that is listed is usable.
        assert usable_steps([checkpoints]) == selection.list_steps(checkpoints), disk.calls[
            done - 1
        ]
        # The pointer is never torn, and never ahead of what is there.
        pointer = pointers.read_pointer(checkpoints, pointers.LATEST)
        assert (pointer is not None) == (checkpoints / "latest").exists()
        assert pointer is None or pointer <= chosen
        assert save([checkpoints], 4)
        assert restart([checkpoints]) == 4

    assert len(renames) >= 6  # two a save: the checkpoint's and the pointer's
    tried = cut_everywhere(root, disk.calls, first=before, scratch=memory, check=check)
    assert tried > 150


def test_a_power_cut_during_the_first_save_leaves_nothing_torn(memory: Path) -> None:
    root = memory / "run"
    root.mkdir()
    disk = RecordingDisk()
    assert save([root / "checkpoints"], 1, disks=[disk])

    def check(checkpoints: Path, done: int) -> None:
        chosen = restart([checkpoints])
        assert chosen in (None, 1)
        assert selection.list_steps(checkpoints) == ([chosen] if chosen else [])
        assert chosen == 1 or done < len(disk.calls)

    assert cut_everywhere(root, disk.calls, first=0, scratch=memory, check=check) > 50


class _Forgetful(RecordingDisk):
    """Leaves out one kind of sync: the model must notice."""

    def __init__(self, forgets: str) -> None:
        super().__init__()
        self._forgets = forgets

    def sync(self, descriptor: int) -> None:
        if self._forgets != "files":
            super().sync(descriptor)

    def sync_directory(self, path: Path) -> None:
        if self._forgets != "directories":
            super().sync_directory(path)


@pytest.mark.parametrize("forgets", ["files", "directories"])
def test_the_model_notices_a_sync_that_is_left_out(memory: Path, forgets: str) -> None:
    root = memory / "run"
    root.mkdir()
    disk = _Forgetful(forgets)
    assert save([root / "checkpoints"], 1, disks=[disk])
    assert save([root / "checkpoints"], 2, disks=[disk])
    lost = []

    def check(checkpoints: Path, done: int) -> None:
        try:
            if restart([checkpoints]) is None:
                lost.append(done)
        except (AssertionError, OSError):
            lost.append(done)

    cut_everywhere(root, disk.calls, first=len(disk.calls), scratch=memory, check=check)
    assert lost


def test_a_power_cut_while_a_damaged_one_is_replaced(memory: Path) -> None:
    root = memory / "run"
    root.mkdir()
    disk = RecordingDisk()
    checkpoints = root / "checkpoints"
    assert save([checkpoints], 1, disks=[disk], keep_last=2)
    assert save([checkpoints], 2, disks=[disk], keep_last=2)
    first = len(disk.calls)
    assert save([checkpoints], 2, disks=[disk], keep_last=2)

    def check(place: Path, done: int) -> None:
        assert restart([place]) == 2, (done, disk.calls[done - 1], tree(place))

    assert cut_everywhere(root, disk.calls, first=first, scratch=memory, check=check) > 50


def test_recovering_is_durable_before_the_next_save(memory: Path) -> None:
    """A name that came back by recovery is there after a power cut, too."""
    root = memory / "run"
    root.mkdir()
    disk = RecordingDisk()
    checkpoints = root / "checkpoints"
    assert save([checkpoints], 1, disks=[disk])
    disk.rename(checkpoints / "step-00000001", checkpoints / ".step-00000001.replaced")
    disk.sync_directory(checkpoints)
    commit.recover(checkpoints, disk=disk)
    for state in states_after(root, disk.calls, random_states=8, seed=0):
        with tempfile.TemporaryDirectory(dir=memory) as name:
            materialise(state, Path(name))
            assert selection.list_steps(Path(name) / "checkpoints") == [1]


def test_faulty_disk_counts_every_door_of_the_disk() -> None:
    """A method that is added to ``Disk`` is one that the faults must learn of."""
    from llmx.checkpoint.disk import Disk

    doors = {name for name in vars(Disk) if not name.startswith("_")}
    assert doors - {"close"} <= set(vars(FaultyDisk)), doors
    assert doors - {"close"} <= set(vars(RecordingDisk)), doors
    assert Fault("kill", 0).calls == []
