"""Which checkpoint is chosen: everything that is damaged is named, an older one is taken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from llmx.checkpoint import commit, pointers, selection
from llmx.checkpoint.manifest import (
    CheckpointError,
    FileEntry,
    Manifest,
    parse_manifest,
    read_manifest,
    step_of,
)
from llmx.checkpoint.retention import (
    best_steps,
    plan_removals,
    take_inventory,
    to_prune,
)
from llmx.config.schema import CheckpointConfig, KeepConfig
from tests.checkpoint_saves import assessment, flip_bit, restart, save, tree, usable_steps

RANK_FILE = "rank-00000.safetensors"


@pytest.fixture
def saved(memory: Path) -> Path:
    """``checkpoints/`` with the steps 1 and 2."""
    checkpoints = memory / "checkpoints"
    assert save([checkpoints], 1, keep_last=2)
    assert save([checkpoints], 2, keep_last=2)
    return checkpoints


def edit_manifest(path: Path) -> None:
    value = json.loads(path.read_text())
    value["files"][RANK_FILE]["bytes"] += 1
    path.write_text(json.dumps(value))


def take_other_step(path: Path) -> None:
    path.write_bytes((path.parent.parent / "step-00000001" / path.name).read_bytes())


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        (RANK_FILE, lambda path: flip_bit(path, -1), "rank-00000.safetensors: damaged, it has ha"),
        (RANK_FILE, lambda path: path.write_bytes(path.read_bytes()[:-1]), "expected 400 bytes"),
        (RANK_FILE, lambda path: path.write_bytes(path.read_bytes() + b"\0"), "expected 400 bytes"),
        (RANK_FILE, lambda path: path.write_bytes(b""), "damaged, it has 0 bytes"),
        (RANK_FILE, Path.unlink, "rank-00000.safetensors: is missing"),
        (RANK_FILE, take_other_step, "rank-00000.safetensors: damaged, it has hash"),
        ("state.json", lambda path: flip_bit(path, 3), "state.json: damaged, it has hash"),
        ("model/config.json", Path.unlink, "model/config.json: is missing"),
        ("manifest.json", Path.unlink, "manifest.json: is missing, expected the manifest of step"),
        ("manifest.json", edit_manifest, "it was changed after it was written"),
        ("manifest.json", take_other_step, "it belongs to step 1, expected the manifest of step 2"),
        ("manifest.json", lambda path: path.write_text(path.read_text()[:50]), "it is torn"),
        ("manifest.json", lambda path: path.write_text("[]"), "it is torn"),
        ("manifest.json", lambda path: path.write_bytes(b"\xff\xfe"), "manifest.json: "),
    ],
)
def test_damage_is_named_and_the_older_one_chosen(saved: Path, file, damage, words) -> None:
    damage(saved / "step-00000002" / file)
    assert selection.newest_usable(saved) == 1
    assert words in selection.describe(selection.verify(saved / "step-00000002"))
    # Over several ranks the assessment is the same.
    reports = [selection.inspect(saved, 2, part=part, parts=3) for part in range(3)]
    assert not selection.assess(reports).usable
    assert restart([saved]) == 1
    # It is left alone, and does not stand in the way of a new one of the same step.
    assert (saved / "step-00000002").is_dir()
    assert save([saved], 2, keep_last=2)
    assert restart([saved]) == 2


def test_sizes_alone_do_not_see_a_flipped_bit(saved: Path) -> None:
    flip_bit(saved / "step-00000002" / RANK_FILE, -1)
    assert selection.newest_usable(saved, hashes=False) == 2
    assert not selection.verify(saved / "step-00000002", ["state.json"])


def test_where_nothing_is(tmp_path: Path) -> None:
    assert selection.newest_usable(tmp_path / "no") is None
    assert selection.list_steps(tmp_path / "no") == []
    assert commit.recover(tmp_path / "no") == []
    (tmp_path / "step-12").mkdir()
    (tmp_path / "step-0000000x").mkdir()
    assert selection.list_steps(tmp_path) == []
    assert step_of("step-123456789") == 123456789
    assert step_of("step-012345678") is None


@pytest.fixture
def hosts(memory: Path) -> list[Path]:
    """Two hosts, each with its own disk, with the steps 1 and 2."""
    storages = [memory / name / "checkpoints" for name in ("a", "b")]
    assert save(storages, 1, keep_last=2)
    assert save(storages, 2, keep_last=2)
    return storages


def test_each_host_lacks_what_the_others_wrote_and_gets_it(hosts: list[Path], memory: Path) -> None:
    found = assessment(hosts, 2)
    assert found.usable
    assert not found.problems
    assert found.lacking == {0: ["rank-00001.safetensors"], 1: ["rank-00000.safetensors"]}
    assert found.holder["rank-00001.safetensors"] == 1
    hosts.append(memory / "c" / "checkpoints")  # a new host gets all of it
    assert len(assessment(hosts, 2).lacking[2]) == 5
    bring(hosts, 2)
    assert assessment(hosts, 2).lacking == {}
    for path in hosts:
        assert not selection.verify(path / "step-00000002")
    assert not [name for name in tree(hosts[2]) if "." in (name[0], Path(name).name[0])]


def bring(storages: list[Path], step: int) -> None:
    """Copy what each storage lacks, as the ranks do over the network."""
    found = assessment(storages, step)
    for storage, names in found.lacking.items():
        directory = commit.committed_dir(storages[storage], step)
        if not directory.is_dir():
            directory = commit.begin(storages[storage], step)
        for name in sorted(names, key=lambda name: name == "manifest.json"):
            (directory / name).parent.mkdir(exist_ok=True)
            shutil.copy(storages[found.holder[name]] / f"step-{step:08d}" / name, directory / name)
        if directory == commit.partial_dir(storages[storage], step):
            commit.publish(storages[storage], step)


def test_a_good_copy_elsewhere_makes_up_for_a_damaged_one(hosts: list[Path]) -> None:
    bring(hosts, 2)
    flip_bit(hosts[0] / "step-00000002" / RANK_FILE, -1)
    found = assessment(hosts, 2)
    assert found.usable
    assert found.lacking == {0: [RANK_FILE]}
    assert [problem.file for problem in found.problems] == [RANK_FILE]
    bring(hosts, 2)
    assert not assessment(hosts, 2).problems


def test_a_part_that_no_host_has_makes_it_unusable(hosts: list[Path]) -> None:
    shutil.rmtree(hosts[1] / "step-00000002")
    found = assessment(hosts, 2)
    assert not found.usable
    lost = "rank-00001.safetensors: is on none of the hosts, expected 304 bytes from host-1"
    assert found.reason == lost
    assert usable_steps(hosts) == [1]
    flip_bit(hosts[0] / "step-00000002" / RANK_FILE, -1)
    assert RANK_FILE in assessment(hosts, 2).reason


def test_two_checkpoints_of_one_step_are_not_mixed(hosts: list[Path]) -> None:
    """One host has a newer save of the same step: the files would fit, the manifests do not."""
    other = Manifest(2, read(hosts[1]).files, hosts=read(hosts[1]).hosts, run_id="other")
    (hosts[1] / "step-00000002" / "manifest.json").write_text(other.to_text())
    found = assessment(hosts, 2)
    assert not found.usable
    assert "2 different, expected one on all hosts" in found.reason
    assert usable_steps(hosts) == [1]


def read(checkpoints: Path) -> Manifest:
    manifest = read_manifest(checkpoints / "step-00000002")
    assert isinstance(manifest, Manifest)
    return manifest


def test_giving_up_takes_back_only_what_this_save_published(saved: Path) -> None:
    manifest = read(saved)
    other = Manifest(2, manifest.files, hosts=manifest.hosts, run_id="x")
    commit.begin(saved, 2)
    for published in (None, other):
        commit.abandon(saved, 2, published=published)
        assert not selection.verify(commit.committed_dir(saved, 2))
    commit.abandon(saved, 2, published=manifest)
    assert selection.list_steps(saved) == [1]


def test_a_manifest_names_each_file_that_is_there(saved: Path) -> None:
    commit.begin(saved, 3)
    entry = commit.add_file(saved, 3, "state.json", b"{}")
    for files in ({}, {"state.json": FileEntry(3, entry.blake2b)}):
        manifest = Manifest(3, files, hosts={}, run_id="run")
        with pytest.raises(CheckpointError, match="Nothing was committed"):
            commit.write_manifest(saved, 3, manifest)
    assert selection.newest_usable(saved) == 2


def test_a_manifest_comes_back_as_it_was() -> None:
    manifest = Manifest(7, {"ä": FileEntry(1, "00")}, hosts={"ä": "h"}, run_id="r", created=1.5)
    assert parse_manifest(manifest.to_text(), step=7) == manifest
    assert parse_manifest(manifest.to_text()).digest == manifest.digest
    with pytest.raises(CheckpointError, match="format 9"):
        parse_manifest(manifest.to_text().replace('"format": 1', '"format": 9'))


def test_pointers(saved: Path) -> None:
    assert pointers.read_pointer(saved, pointers.LATEST) == 2
    assert pointers.read_pointer(saved, pointers.BEST) is None
    pointers.set_pointer(saved, pointers.BEST, 1)
    assert (saved / "best").read_text() == "step-00000001\n"
    (saved / "latest").write_text("rubbish")
    assert pointers.read_pointer(saved, pointers.LATEST) is None


def test_pins_are_replaced_as_a_whole(tmp_path: Path) -> None:
    """What is being copied elsewhere is not pruned."""
    assert pointers.pinned(tmp_path) == set()
    pointers.pin(tmp_path, [120, 80])
    assert pointers.pinned(tmp_path) == {80, 120}
    pointers.pin(tmp_path, [160])
    assert pointers.pinned(tmp_path) == {160}
    assert [path.name for path in tmp_path.iterdir()] == ["pinned"]
    # Words that are no steps are nothing.
    (tmp_path / "pinned").write_text("step-00000040\nlatest\n\n")
    assert pointers.pinned(tmp_path) == {40}
    (tmp_path / "pinned").write_bytes(b"\xff\xfe")
    assert pointers.pinned(tmp_path) == set()


@pytest.mark.parametrize(
    ("keep", "gone"),
    [
        ({"last": 2}, [10, 20, 30]),
        ({"last": 0}, [10, 20, 30, 40]),
        ({"last": 9}, []),
        ({"last": 1, "best": 1}, [10, 30, 40]),
        ({"last": 1, "best": 2}, [10, 30]),
        ({"last": 1, "best": 1, "mode": "max"}, [20, 30, 40]),
        ({"last": 1, "every": 20}, [10, 30]),
        ({"last": 1, "every": 30, "best": 1}, [10, 40]),
    ],
)
def test_what_is_kept(keep: dict[str, Any], gone: list[int]) -> None:
    metrics = {10: 3.0, 20: 1.0, 30: float("nan"), 40: 1.5, 50: None}
    rules = dict(keep)
    config = CheckpointConfig(mode=rules.pop("mode", "min"), keep=KeepConfig(**rules))
    assert to_prune([50, 30, 10, 20, 40], config, metrics=metrics) == gone


def gone(
    storages: list[Path],
    *,
    step: int = 4,
    best: int = 1,
    damaged: Sequence[int] = (),
    metrics: Mapping[int, float | None] = MappingProxyType({}),
) -> tuple[list[int], int | None]:
    found = [
        replace(take_inventory(path, storage=n), metrics=metrics) for n, path in enumerate(storages)
    ]
    config = CheckpointConfig(mode="min", keep=KeepConfig(last=2, best=best))
    return plan_removals(found, step, damaged=damaged, config=config)


def test_all_storages_come_to_the_same_decision(memory: Path) -> None:
    storages = [memory / name / "checkpoints" for name in ("a", "b")]
    for step in (1, 2, 3, 4):
        assert save(storages, step, keep_last=9)
    metrics: dict[int, float | None] = {1: 0.1, 2: 0.5, 3: 0.7, 4: 0.8}
    assert gone(storages, metrics=metrics) == ([2], 1)
    # Of step 1 a removal that was cut short has left a part: the best is the best whole one.
    commit.prune(storages[0], [1])
    assert usable_steps(storages) == [2, 3, 4]
    assert gone(storages, metrics=metrics) == ([], 2)
    assert gone(storages, best=0) == ([1, 2], None)
    # Where it would not be kept anyway, the part goes.
    assert gone(storages, metrics={**metrics, 1: 0.9}) == ([1], 2)
    # A damaged one is neither counted nor removed; one without a manifest counts for nothing.
    assert gone(storages, best=0, damaged=[3]) == ([1], None)
    (storages[1] / "step-00000003" / "manifest.json").write_text("torn")
    assert usable_steps(storages) == [2, 4]
    # Sent back to step 2: what came later is given up.
    assert gone(storages, step=2, best=0) == ([3, 4], None)
    # All is shared: one storage holds everything, and says the same.
    shared = memory / "c" / "checkpoints"
    for step in (1, 2, 3, 4):
        assert save([shared], step, keep_last=9)
    assert gone([shared], metrics=metrics) == ([2], 1)


def test_of_equals_the_older_is_best() -> None:
    """Saved twice as often as evaluated, every second one has the value of the one before."""
    assert best_steps([3, 2, 1], {1: 1.0, 2: 1.0, 3: 2.0}) == [1, 2, 3]
    assert best_steps([3, 2, 1], {1: 1.0, 2: 1.0, 3: 2.0}, mode="max") == [3, 1, 2]
    metrics: dict[int, float | None] = {100: 1.0, 150: 1.0, 200: 1.5}
    config = CheckpointConfig(mode="min", keep=KeepConfig(last=1, best=1))
    assert to_prune([100, 150, 200, 250], config, metrics=metrics) == [150, 200]
    assert best_steps([1, 2], {}) == []


def test_what_a_broken_disk_does_not_show_counts_as_here_and_unreadable(memory: Path) -> None:
    """It must be passed over as damaged, and must not end the choice of an older one."""
    checkpoints = memory / "a" / "checkpoints"
    assert save([checkpoints], 1, keep_last=9)
    path = checkpoints / "step-00000001" / "state.json"
    path.unlink()
    path.symlink_to(path.name)  # around and around: stat fails, and not for want of a file
    assessment = selection.assess([selection.inspect(checkpoints, 1)])
    assert not assessment.usable
    assert "cannot be read (Too many levels of symbolic links)" in assessment.reason
