"""The manifest of a model directory: every export writes it, every load checks it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from llmx.checkpoint import selection
from llmx.checkpoint.manifest import MANIFEST, CheckpointError, parse_manifest
from llmx.checkpoint.model_files import check_sealed, seal
from llmx.cli.export import export
from llmx.cli.main import run_here
from llmx.run.rundir import RunDir
from llmx.run.snapshot import dump_config
from tests.checkpoint_saves import flip_bit
from tests.rundirs import experiment
from tests.unit.test_checkpoint_export import make_model, save_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    seal(directory)
    return directory


def flip(path: Path) -> None:
    """Change one bit of the weights, and nothing that ``stat`` shows but the time."""
    flip_bit(path, path.stat().st_size - 8)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "removed": (lambda path: (path / "chat_template.jinja").unlink(), "chat_template.jinja: is"),
    "flipped": (lambda path: flip(path / "model.safetensors"), "model.safetensors: damaged"),
    "truncated": (lambda path: os.truncate(path / "model.safetensors", 900), "it has 900 bytes"),
    "manifest": (lambda path: os.truncate(path / MANIFEST, 100), "manifest.json: it is torn"),
}


@pytest.mark.parametrize("seen_before", [False, True])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_model_is_refused_in_one_line(
    model: Path, damage: str, seen_before: bool, capsys
) -> None:
    if seen_before:
        assert run_here("serve", ["--print", str(model)]) == 0
    break_it, words = DAMAGE[damage]
    break_it(model)
    capsys.readouterr()
    for name, *typed in (("serve", "--print", str(model)), ("export", str(model), "--check")):
        assert run_here(name, typed) == CheckpointError.exit_code
        shown = capsys.readouterr()
        assert words in shown.out + shown.err
        assert "python -m llmx export RUN" in shown.out + shown.err


def test_verified_files_are_not_hashed_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_sealed(model, fix="")
    hashed: list[str] = []

    def hash_file(path: Path, **options: object) -> str:
        hashed.append(path.name)
        return ""

    monkeypatch.setattr(selection, "hash_file", hash_file)
    check_sealed(model, fix="")
    assert hashed == []
    with pytest.raises(CheckpointError):
        check_sealed(model, fix="", rehash=True)
    assert "model.safetensors" in hashed


def test_a_directory_without_a_manifest_and_an_edited_card_are_loaded(model: Path) -> None:
    (model / "README.md").write_text("mine")
    assert run_here("serve", ["--print", str(model)]) == 0
    (model / MANIFEST).unlink()
    flip(model / "model.safetensors")
    assert run_here("serve", ["--print", str(model)]) == 0


def test_a_run_names_the_checkpoint_to_export(tmp_path: Path, capsys) -> None:
    run = RunDir(tmp_path / "run")
    save_model(run, make_model(), 7)
    directory = export(run)
    assert "model.safetensors" in parse_manifest((directory / MANIFEST).read_text()).files
    assert run_here("export", [str(run.root), "--check"]) == 0
    assert "export/step-00000007  as it was written" in capsys.readouterr().out
    directory.rename(run.final_model)
    flip(run.final_model / "model.safetensors")
    assert run_here("export", [str(run.root), "--check"]) == CheckpointError.exit_code
    assert "model  damaged" in capsys.readouterr().out
    run.config.write_text(dump_config(experiment(run.root)))
    assert run_here("serve", ["--print", str(run.root)]) == CheckpointError.exit_code
    assert f"export {run.root} --step 7" in capsys.readouterr().err
