"""A command composes its config once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra

from llmx.__main__ import main


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
