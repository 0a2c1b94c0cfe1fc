"""Which paths are brought to the other hosts.

``pytest tests/unit/test_launch_sync.py``; the copying itself is in ``tests/cluster``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from llmx.errors import ConfigError, LaunchError
from llmx.launch.render import check
from llmx.launch.spec import LaunchSpec
from llmx.launch.sync import items_to_push
from llmx.plan import make_plan
from tests.unit.test_launch_render import experiment, spec_of


def spec(tmp_path: Path, **data: object) -> LaunchSpec:
    exp = experiment("pdsh", (1, 1), sync="rsync")
    exp.data.cache_dir = str(tmp_path / "cache")
    for key, value in data.items():
        group, name = key.split("__")
        setattr(getattr(exp, group), name, value)
    return spec_of(exp)


def test_code_run_directory_and_named_paths(tmp_path: Path) -> None:
    for name in ("model", "cache"):
        (tmp_path / name).mkdir()
    for name in ("a.jsonl", "b.jsonl", "c.txt"):
        (tmp_path / name).touch()
    made = spec(
        tmp_path,
        model__path=str(tmp_path / "model"),
        model__tokenizer=str(tmp_path / "model"),
        data__path=str(tmp_path / "*.jsonl"),
        launch__sync_extra=[str(tmp_path / "c.txt")],
    )
    items = {item.path: item.what for item in items_to_push(made, run_dir=True)}
    assert items == {
        "/home/ada/llmx": "code",
        "/runs/demo": "run directory",
        str(tmp_path / "model"): "model",
        str(tmp_path / "a.jsonl"): "data",
        str(tmp_path / "b.jsonl"): "data",
        str(tmp_path / "cache"): "prepared data",
        str(tmp_path / "c.txt"): "launch.sync_extra",
    }


def test_only_what_ranks_read_of_the_run_directory(tmp_path: Path) -> None:
    """All else is written by them, or while files travel (metrics, trackers, the supervisor)."""
    made = spec(tmp_path)
    (item,) = (i for i in items_to_push(made, run_dir=True) if i.what == "run directory")
    assert set(item.only) == {
        "config.yaml", "plan.json", "ds_config.json", "run.json", "resume.json",
    }  # fmt: skip


def test_hub_ids_and_bundled_data_stay(tmp_path: Path) -> None:
    made = spec(tmp_path, model__path="meta-llama/Llama-2-7b-hf", data__path="demo")
    assert [item.what for item in items_to_push(made, run_dir=False)] == ["code"]


def test_installed_code_stays(tmp_path: Path) -> None:
    made = dataclasses.replace(spec(tmp_path), code_root=None)
    assert items_to_push(made, run_dir=False) == []


def test_excludes_of_the_user(tmp_path: Path) -> None:
    made = spec(tmp_path, launch__sync_exclude=["*.mp4"])
    (code,) = items_to_push(made, run_dir=False)
    assert {"*.mp4", ".git", ".venv", "outputs"} <= set(code.excludes)


def test_sync_extra_must_exist(tmp_path: Path) -> None:
    made = spec(tmp_path, launch__sync_extra=[str(tmp_path / "nothing")])
    with pytest.raises(LaunchError, match="nothing does not exist"):
        items_to_push(made, run_dir=False)


def test_sync_extra_must_be_absolute() -> None:
    exp = experiment("pdsh", (1, 1), sync_extra=["data/x"])
    with pytest.raises(ConfigError, match="'data/x' is not an absolute path"):
        check(exp, make_plan(exp))
