"""The commit protocol with a fault at every system call that writes.

After each: the checkpoint before or the new one is chosen, never a torn one, never none; and
the next save succeeds.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmx.checkpoint import commit, pointers, selection
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

KINDS = ("kill", "kill after", "ENOSPC", "EIO", "ENOSPC lasting")


def make_fault(kind: str, at: int) -> Fault:
    return Fault(kind.removesuffix(" lasting"), at, lasting=kind.endswith("lasting"))


def make_storages(root: Path, hosts: int) -> list[Path]:
    return [root / f"host-{host}" / "run" / "checkpoints" for host in range(hosts)]


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
        disks = [FaultyDisk(fault) for _ in storages]
        try:
            done = save(storages, 2, disks=disks)
        except Killed:
            done = False
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
        try:
            done = save(storages, 1, disks=[FaultyDisk(fault)] * 2)
        except Killed:
            done = False
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
        try:
            done = save(storages, 2, keep_last=2, disks=[FaultyDisk(fault)])
        except Killed:
            done = False
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


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
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
        fault = make_fault(kind, at)
        try:
            done = save(storages, step, keep_last=2, disks=[FaultyDisk(fault)] * hosts)
        except Killed:
            done = False
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
