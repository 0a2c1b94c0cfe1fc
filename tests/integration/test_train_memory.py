"""Under ZeRO-3 no rank holds the whole model, drawn or loaded; broken checkpoints are named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.reference import VOCABULARY
from tests.rundirs import PARITY_MODELS, launch
from tests.small_models import small_model

pytestmark = pytest.mark.deepspeed

LARGE = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 64,
}  # fmt: skip
WORLD = 2


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A Llama of 0.4 GB in one file, and its size in bytes."""
    directory = tmp_path_factory.mktemp("large") / "model"
    model = small_model("llama", vocab_size=VOCABULARY, **LARGE)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(directory, max_shard_size="2GB")
    return directory, size


def broken_checkpoints(root: Path) -> dict[str, Path]:
    """A small Llama that lacks a weight, has one too many, or one of another shape."""
    whole = root / "whole"
    small_model("llama", vocab_size=VOCABULARY).save_pretrained(whole)
    weights = load_file(whole / "model.safetensors")
    key = "model.layers.1.mlp.up_proj.weight"
    for name, changed in (
        ("missing", {name: weight for name, weight in weights.items() if name != key}),
        ("unexpected", {**weights, key.replace("1", "2"): weights[key].clone()}),
        ("shape", {**weights, key: weights[key][:-1].contiguous()}),
    ):
        shutil.copytree(whole, root / name)
        save_file(changed, root / name / "model.safetensors", metadata={"format": "pt"})
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="module")
def reports(large: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each rank says, by job."""
    out = tmp_path_factory.mktemp("memory")
    jobs: list[dict[str, Any]] = [
        {"name": "warm", "stage": 3, "config": PARITY_MODELS["llama"]},
        {"name": "scratch", "stage": 3, "config": LARGE},
        {"name": "pretrained", "stage": 3, "config": {}, "path": str(large[0])},
        {"name": "unsharded", "stage": 0, "config": {}, "path": str(large[0])},
    ]
    for name, path in broken_checkpoints(out / "broken").items():
        jobs.append({"name": name, "stage": 3, "config": {}, "path": str(path)})
    (out / "jobs.json").write_text(json.dumps(jobs))
    done = launch(
        "tests.programs.memory",
        str(out / "jobs.json"),
        str(out),
        ranks=WORLD,
        # Large blocks go back to the system when freed, so that one job's memory is not the
        # next one's, and what is counted is what is held.
        MALLOC_MMAP_THRESHOLD_="1048576",
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return {
        job["name"]: [
            json.loads((out / f"{job['name']}-{rank}.json").read_text()) for rank in range(WORLD)
        ]
        for job in jobs
    }


@pytest.mark.parametrize("job", ["scratch", "pretrained"])
def test_no_rank_holds_the_whole_model(job: str, large: Any, reports: Any) -> None:
    size = large[1]
    assert size > 400e6
    for rank in range(WORLD):
        assert reports[job][rank]["error"] is None
        growth = reports[job][rank]["growth"] / size
        # Its half, and what is gathered at a time. Rank 0 is the one that reads.
        assert 0.5 <= growth < 0.75, f"rank {rank}: {growth:.0%} of the model"


def test_the_measure_sees_a_whole_model(large: Any, reports: Any) -> None:
    """Without sharding every rank does hold it: the numbers above could have been large."""
    for report in reports["unsharded"]:
        assert report["growth"] >= large[1]


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ("missing", "lacks 1 of 21 weights of LlamaForCausalLM, e.g. model.layers.1.mlp.up_proj"),
        ("unexpected", "has 1 weights that LlamaForCausalLM does not, e.g. model.layers.2.mlp.up"),
        ("shape", "model.layers.1.mlp.up_proj.weight is (47, 32) in the checkpoint and (48, 32)"),
    ],
)
def test_every_rank_names_what_is_wrong(job: str, said: str, reports: Any) -> None:
    assert [report["error"] for report in reports["whole"]] == [None] * WORLD
    for report in reports[job]:
        assert said in report["error"], report["error"]
