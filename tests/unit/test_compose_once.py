"""A command composes its config once, and where ``hydra.mode`` may be set, Hydra asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra

from llmx.__main__ import main
from llmx.config.groups import CONF


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The words of every composing."""
    monkeypatch.chdir(tmp_path)
    found: list[list[str]] = []
    compose = ConfigLoaderImpl.load_configuration

    def counted(self, config_name, overrides, *words, **options):
        found.append(list(overrides))
        return compose(self, config_name, overrides, *words, **options)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", counted)
    return found


def test_a_run_is_composed_once(composed: list[list[str]]) -> None:
    before = Hydra.get_mode
    assert main(["hardware=cpu2", "dry_run=true", "run_dir=run"]) == 0
    assert len(composed) == 1
    assert Hydra.get_mode is before


def test_a_mode_that_is_typed_counts(composed: list[list[str]]) -> None:
    words = ["hydra.mode=MULTIRUN", "seed=1,2", "hardware=cpu2", "dry_run=true"]
    assert main(words) == 0
    assert len(list(Path("outputs/sweeps").glob("*/sweep.json"))) == 1
    assert "hydra.mode=MULTIRUN" in composed[0]


def test_a_mode_of_ones_own_files_counts(composed: list[list[str]], tmp_path: Path) -> None:
    file = tmp_path / "mine" / "experiment" / "many.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(
        "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params: {seed: '1,2'}\n"
    )
    words = ["experiment=many", "data=demo", "hardware=cpu2", "dry_run=true"]
    assert main(["--config-dir", "mine", *words]) == 0
    assert len(list(Path("outputs/sweeps").glob("*/sweep.json"))) == 1


def test_no_shipped_config_sets_the_mode() -> None:
    files = [*CONF.rglob("*.yaml")]
    assert len(files) > 50
    for file in files:
        lines = [line.split("#")[0].strip() for line in file.read_text().splitlines()]
        assert not [line for line in lines if line.startswith(("mode:", "hydra.mode"))], file
