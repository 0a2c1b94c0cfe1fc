"""The commit protocol with a fault at every system call that writes, and a power cut after it.

After each: the checkpoint before or the new one is chosen, never a torn one, never none; and
the next save succeeds.
"""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmx.checkpoint import commit, pointers, selection
from llmx.checkpoint.disk import DISK, allocate
from llmx.checkpoint.tensors import Fragment, TensorWriter
from tests.checkpoint_saves import (
    Fault,
    FaultyDisk,
    Killed,
    flip_bit,
    restart,
    save,
    tree,
    usable_steps,
)
from tests.power_cut import RecordingDisk, materialise, states_after

KINDS = ("kill", "kill after", "ENOSPC", "EIO", "ENOSPC lasting")


def make_fault(kind: str, at: int) -> Fault:
    return Fault(kind.removesuffix(" lasting"), at, lasting=kind.endswith("lasting"))


def make_storages(root: Path, hosts: int) -> list[Path]:
    return [root / f"host-{host}" / "run" / "checkpoints" for host in range(hosts)]


def attempt(storages: list[Path], step: int, fault: Fault, **how: Any) -> bool:
    """One save on disks that share a fault; whether it was committed."""
    try:
        return save(storages, step, disks=[FaultyDisk(fault)] * len(storages), **how)
    except Killed:
        return False


@pytest.mark.parametrize(
    ("hosts", "kind"), [*((1, kind) for kind in KINDS), (2, "kill"), (2, "ENOSPC")]
)
def test_the_old_or_the_new_checkpoint_survives_every_fault(
    memory: Path, hosts: int, kind: str
) -> None:
    tried = 0
    for at in itertools.count():
        storages = make_storages(memory / str(at), hosts)
        assert save(storages, 1)
        fault = make_fault(kind, at)
        done = attempt(storages, 2, fault)
        if not fault.hit:
            assert done
            break
        tried += 1
        context = (at, fault.calls[at], [tree(path) for path in storages])
        chosen = restart(storages)
        assert chosen in (1, 2), context
        if done:
            assert chosen == 2, context
        elif not kind.startswith("kill"):
            # It said that it failed: then nothing of it is left on any host.
            assert chosen == 1, context
            assert usable_steps(storages) == [1], context
        # Old ones were removed only after the new one was there on all hosts.
        if chosen == 1:
            assert all(
                not selection.verify(commit.committed_dir(path, 1), ["state.json"])
                for path in storages
            )
        assert not [name for path in storages for name in tree(path) if name.startswith(".")]
        assert save(storages, 3), context
        assert restart(storages) == 3, context
        assert usable_steps(storages) == [3], context
        for path in storages:
            assert pointers.read_pointer(path, pointers.LATEST) == 3
    # Every call was hit once: none was added that this test does not see.
    assert tried >= (28 if hosts == 1 else 56)


@pytest.mark.parametrize("kind", ["kill", "ENOSPC"])
def test_the_first_checkpoint_is_whole_or_not_there(memory: Path, kind: str) -> None:
    for at in itertools.count():
        storages = make_storages(memory / str(at), 2)
        fault = make_fault(kind, at)
        done = attempt(storages, 1, fault)
        if not fault.hit:
            break
        chosen = restart(storages)
        assert chosen in ((1,) if done else (1, None)), (at, fault.calls[at])
        assert save(storages, 2)
        assert restart(storages) == 2
    assert at > 40


@pytest.mark.parametrize("kind", ["kill after", "EIO"])
def test_replacing_a_damaged_one_of_the_same_step_loses_nothing(memory: Path, kind: str) -> None:
    for at in itertools.count():
        storages = make_storages(memory / str(at), 1)
        assert save(storages, 1, keep_last=2)
        assert save(storages, 2, keep_last=2)
        flip_bit(storages[0] / "step-00000002" / "rank-00000.safetensors", -1)
        assert restart(storages) == 1
        fault = make_fault(kind, at)
        done = attempt(storages, 2, fault, keep_last=2)
        if not fault.hit:
            break
        chosen = restart(storages)
        assert chosen == 2 if done else chosen in (1, 2), (at, fault.calls[at])
        assert 1 in usable_steps(storages)
        assert save(storages, 3, keep_last=3)
        assert restart(storages) == 3
    assert at > 28


def test_a_fault_while_recovering_loses_nothing(memory: Path) -> None:
    """A crash at each call of the clean-up after a crash."""
    for at in itertools.count():
        storages = make_storages(memory / str(at), 1)
        assert save(storages, 1)
        assert save(storages, 2, keep_last=2)
        commit.begin(storages[0], 3)
        commit.add_file(storages[0], 3, "model/config.json", b"{}")
        # A removal and a replacement, each cut short.
        (storages[0] / "step-00000001").rename(storages[0] / ".step-00000001.pruned")
        (storages[0] / "step-00000002").rename(storages[0] / ".step-00000002.replaced")
        fault = Fault("kill", at)
        try:
            commit.recover(storages[0], disk=FaultyDisk(fault))
        except Killed:
            assert restart(storages) == 2, (at, fault.calls[at])
            continue
        break
    assert at > 8
    assert tree(storages[0])[0] == "latest"
    assert restart(storages) == 2


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    hosts=st.sampled_from([1, 2]),
    faults=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 90)), min_size=3, max_size=7),
)
def test_a_life_full_of_faults_loses_nothing_of_keep(
    memory: Path, hosts: int, faults: list[tuple[str, int]]
) -> None:
    """Save after save, each with a fault somewhere (or none), two checkpoints kept."""
    storages = make_storages(Path(tempfile.mkdtemp(dir=memory)), hosts)
    usable: list[int] = []
    for step, (kind, at) in enumerate(faults, start=1):
        done = attempt(storages, step, make_fault(kind, at), keep_last=2)
        newest, before = restart(storages), usable
        usable = usable_steps(storages)
        assert newest == (usable[-1] if usable else None)
        if done:
            assert newest == step
        # What was there stays, but for what two newer ones push out.
        came = [step] if step in usable else []
        assert set((before + came)[-2:]) <= set(usable) <= set(before + came)
    assert save(storages, 99, keep_last=2)
    assert save(storages, 100, keep_last=2)
    # No part of anything else is left on any host.
    assert [selection.list_steps(path) for path in storages] == [[99, 100]] * hosts
    assert not [name for path in storages for name in tree(path) if name.startswith(".")]


# --- Power cuts: what was not synced may be lost or torn -----------------------------------------


@pytest.fixture
def checkpoints(memory: Path) -> Path:
    (memory / "run").mkdir()
    return memory / "run" / "checkpoints"


def cut_everywhere(checkpoints: Path, disk: RecordingDisk, *, first: int, check: Callable) -> int:
    """``check(checkpoints, number of calls done)`` for every possible state; how many."""
    root = checkpoints.parent
    tried = 0
    seen: set[str] = set()
    for done in range(first, len(disk.calls) + 1):
        # The two extremes, and some between them.
        for state in states_after(root, disk.calls[:done], random_states=4, seed=done):
            if (key := f"{done}{state!r}") in seen:
                continue
            seen.add(key)
            with tempfile.TemporaryDirectory(dir=root.parent) as name:
                materialise(state, Path(name))
                check(Path(name) / "checkpoints", done)
            tried += 1
    return tried


def test_a_power_cut_leaves_the_old_or_the_new_and_at_first_none(checkpoints: Path) -> None:
    disk = RecordingDisk()
    committed_at = {}
    for step in (1, 2, 3):
        assert save([checkpoints], step, disks=[disk])
        committed_at[step] = len(disk.calls)
    kinds = [call[0] for call in disk.calls]
    renames = [pair for pair in itertools.pairwise(kinds) if pair == ("rename", "sync_directory")]
    assert len(renames) >= 6  # two a save: the checkpoint's and the pointer's

    def check(checkpoints: Path, done: int) -> None:
        chosen = restart([checkpoints])
        older = max((step for step, at in committed_at.items() if at <= done), default=None)
        newer = min([step for step, at in committed_at.items() if at > done], default=older)
        context = (done, disk.calls[done - 1], tree(checkpoints))
        assert chosen in (older, newer), context
        # Nothing that has its name is torn: all that is listed is usable.
        assert usable_steps([checkpoints]) == selection.list_steps(checkpoints), context
        # The pointer is never torn, and never ahead of what is there.
        pointer = pointers.read_pointer(checkpoints, pointers.LATEST)
        assert (pointer is not None) == (checkpoints / "latest").exists()
        assert pointer is None or pointer <= (chosen or 0)
        assert save([checkpoints], 4)
        assert restart([checkpoints]) == 4

    assert cut_everywhere(checkpoints, disk, first=0, check=check) > 200


@pytest.mark.parametrize("forgotten", ["sync", "sync_directory"])
def test_the_model_notices_a_sync_that_is_left_out(
    checkpoints: Path, forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecordingDisk, forgotten, lambda _disk, _what: None)
    disk = RecordingDisk()
    for step in (1, 2):
        assert save([checkpoints], step, disks=[disk])
    lost = []

    def check(checkpoints: Path, done: int) -> None:
        try:
            if restart([checkpoints]) is None:
                lost.append(done)
        except (AssertionError, OSError):
            lost.append(done)

    cut_everywhere(checkpoints, disk, first=len(disk.calls), check=check)
    assert lost


def test_a_power_cut_while_a_damaged_one_is_replaced(checkpoints: Path) -> None:
    disk = RecordingDisk()
    for step in (1, 2):
        assert save([checkpoints], step, disks=[disk], keep_last=2)
    first = len(disk.calls)
    assert save([checkpoints], 2, disks=[disk], keep_last=2)

    def check(place: Path, done: int) -> None:
        assert restart([place]) == 2, (done, disk.calls[done - 1], tree(place))

    assert cut_everywhere(checkpoints, disk, first=first, check=check) > 50


def test_recovering_is_durable_before_the_next_save(checkpoints: Path) -> None:
    """A name that came back by recovery is there after a power cut, too."""
    disk = RecordingDisk()
    assert save([checkpoints], 1, disks=[disk])
    disk.rename(checkpoints / "step-00000001", checkpoints / ".step-00000001.replaced")
    disk.sync_directory(checkpoints)
    commit.recover(checkpoints, disk=disk)

    def check(place: Path, _done: int) -> None:
        assert selection.list_steps(place) == [1]

    cut_everywhere(checkpoints, disk, first=len(disk.calls), check=check)


# --- Reserving bytes, on file systems that can and on one that cannot ----------------------------


def reserved(path: Path) -> int:
    """Reserve, then write; the bytes that the disk had set aside in between."""
    values = np.arange(2**18, dtype=np.float32)
    fragment = Fragment("w", "F32", values.size, values)
    with TensorWriter(path, [fragment.spec]) as writer:
        writer.reserve()
        found = path.stat().st_blocks * 512
        writer.write([fragment])
    assert path.stat().st_size == writer.num_bytes > values.nbytes
    return found


@pytest.fixture
def simple_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system without ``fallocate(2)``, as NFS before 4.2 is."""
    made = subprocess.run(["mount", "-t", "ramfs", "ramfs", str(tmp_path)], capture_output=True)
    if made.returncode != 0:
        pytest.skip(f"no ramfs can be mounted here: {made.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def refused(directory: Path, num_bytes: int) -> int | None:
    """The kernel's number."""
    descriptor = DISK.create(directory / "probe")
    with pytest.raises(OSError) as caught:  # noqa: PT011 - its number is asserted
        allocate(descriptor, num_bytes)
    DISK.close(descriptor)
    return caught.value.errno


def test_bytes_are_set_aside_where_the_file_system_can(tmp_path: Path) -> None:
    assert reserved(tmp_path / "file") >= 2**20
    assert refused(tmp_path, 2**62) in (errno.EFBIG, errno.ENOSPC)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a disk needs root")
def test_nothing_is_written_to_reserve_where_it_cannot(simple_disk: Path) -> None:
    """The C library's posix_fallocate would write to every block, over NFS one request each."""
    assert refused(simple_disk, 2**20) == errno.EOPNOTSUPP
    assert reserved(simple_disk / "file") == 0
