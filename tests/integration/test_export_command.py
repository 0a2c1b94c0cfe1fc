"""``export`` of real runs: byte for byte the directory that the run wrote itself.

``python -m pytest -m deepspeed tests/integration/test_export_command.py``
"""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import Any

import pytest

from llmx.run.rundir import RunDir, read_json
from tests.checkpoint_saves import flip_bit
from tests.command_runs import llmx
from tests.forked_ranks import Server
from tests.resumed_runs import saving_run
from tests.rundirs import TINY_LLAMA

pytestmark = pytest.mark.deepspeed

STEPS = 4
PADDED_TO = 96
"""1024 tokens become 1056 rows."""

KINDS: dict[str, dict[str, Any]] = {
    "stage0-fp32-tied": {"zero": {"stage": 0}, "precision": "fp32", "tied": True},
    "stage2-bf16": {"zero": {"stage": 2}, "precision": "bf16", "tied": False},
    "stage3-bf16-tied": {"zero": {"stage": 3}, "precision": "bf16", "tied": True},
}


def trained(ranks: Server, directory: Path, *, tied: bool, **groups: Any) -> RunDir:
    """A run of 4 steps, saved at the 2nd and at the end, its final model written too."""
    model = {
        "name": "tiny",
        "kind": "llama",
        "init": "scratch",
        "tokenizer": "demo",
        "pad_vocab_to_multiple_of": PADDED_TO,
        "config": {**TINY_LLAMA, "tie_word_embeddings": tied},
    }
    task = {"steps": STEPS, "eval_every_steps": 2, "save_model": True, "eval_generate": 0}
    checkpoint = {"every_steps": 2, "at_end": True}
    run = saving_run(directory, model=model, task=task, checkpoint=checkpoint, **groups)
    return ranks.start(run).finish()


@pytest.mark.parametrize("kind", KINDS)
def test_the_export_of_the_last_step_is_the_runs_own_model(
    ranks: Server, tmp_path: Path, kind: str
) -> None:
    run = trained(ranks, tmp_path / "run", **KINDS[kind])
    state = read_json(run.checkpoint(STEPS) / "state.json")
    assert (state["vocab_size"], state["padded_vocab_size"]) == (1024, 1056)
    done = llmx(tmp_path, "export", str(run.root))
    assert done.returncode == 0, done.stdout
    exported = run.root / "export" / f"step-{STEPS:08d}"
    assert f"{exported}: step {STEPS}, " in done.stdout
    names = sorted(path.name for path in run.final_model.iterdir())
    assert names == sorted(path.name for path in exported.iterdir())
    assert {"model.safetensors", "README.md"} <= set(names)
    same, different, unreadable = filecmp.cmpfiles(run.final_model, exported, names, shallow=False)
    assert (sorted(same), different, unreadable) == (names, [], [])
    # An earlier step is another model in the same files.
    done = llmx(tmp_path, "export", str(run.root), "--step", "2", "--out", "two")
    assert done.returncode == 0, done.stdout
    same, different, _ = filecmp.cmpfiles(run.final_model, tmp_path / "two", names, shallow=False)
    assert sorted(different) == ["README.md", "manifest.json", "model.safetensors"]
    # A flipped bit in the newest: it is named, the older one is taken; asked for, it is refused.
    flip_bit(run.checkpoint(STEPS) / "rank-00001.safetensors", -1)
    done = llmx(tmp_path, "export", str(run.root), "--out", "three")
    assert done.returncode == 0, done.stdout
    assert f"step-{STEPS:08d} cannot be used: rank-00001.safetensors: damaged" in done.stdout
    assert filecmp.cmp(tmp_path / "two" / "model.safetensors",
                       tmp_path / "three" / "model.safetensors", shallow=False)  # fmt: skip
    done = llmx(tmp_path, "export", str(run.root), "--step", str(STEPS), "--out", "four")
    assert done.returncode == 5
    assert "Other steps: 2." in done.stdout
    assert not (tmp_path / "four").exists()
