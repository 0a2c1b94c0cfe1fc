"""Weights: the same from scratch wherever they are drawn, whole when loaded, right in exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.forked_ranks import launch
from tests.programs.models import digest
from tests.reference import VOCABULARY
from tests.rundirs import PARITY_MODELS
from tests.small_models import converted_model, small_model

pytestmark = pytest.mark.deepspeed

CONVERSIONS = ("mixtral", "deepseek_v3", "gpt_neox")
"""Files have their weights otherwise than memory."""
TIED = {"tie_word_embeddings": True}
SCRATCH: list[dict[str, Any]] = [
    *({"kind": kind, "precision": "fp32", "config": {}} for kind in PARITY_MODELS),
    {"kind": "llama", "precision": "bf16", "config": {}},
    {"kind": "llama", "precision": "fp32", "config": TIED},
]


def wanted(world: int) -> list[dict[str, Any]]:
    """Everything at two ranks, at the stages that draw otherwise; at one and three what could come
    out differently there."""
    if world == 2:
        return [{**job, "stage": stage} for job in SCRATCH for stage in (0, 3)]
    plain = [job for job in SCRATCH if job["kind"] in ("llama", "gpt2")]
    return [{**job, "stage": 3} for job in plain]


def name_of(job: dict[str, Any]) -> str:
    tied = "-tied" if job.get("config") else ""
    return f"{job['kind']}-{job['precision']}{tied}-{job['stage']}"


def start(jobs: list[dict[str, Any]], out: Path, *, world: int) -> None:
    for job in jobs:
        job["name"] = job.get("name") or name_of(job)
    (out / "jobs.json").write_text(json.dumps(jobs))
    done = launch("tests.programs.models", str(out / "jobs.json"), str(out), ranks=world)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]


NIGHTLY_SPLITS = [pytest.param(world, marks=pytest.mark.nightly) for world in (1, 3)]


@pytest.fixture(scope="module", params=[2, *NIGHTLY_SPLITS])
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, Path, list[dict[str, Any]]]:
    """(world, directory, jobs) of models from scratch, trained and exported."""
    world = request.param
    out = tmp_path_factory.mktemp(f"ranks{world}")
    jobs = wanted(world)
    start(jobs, out, world=world)
    return world, out, jobs


BY_VOCABULARY = ("embed_tokens.weight", "wte.weight", "lm_head.weight")

DIGESTS: dict[str, set[str]] = {}
"""First weights by model, over all worlds that ran in this session."""


def test_first_weights_depend_on_the_seed_alone(built: Any) -> None:
    _, out, jobs = built
    for job in jobs:
        model = name_of(job).rsplit("-", 1)[0]
        report = json.loads((out / f"{job['name']}.json").read_text())
        DIGESTS.setdefault(model, set()).add(report["digest"])
        # Half-precision rotary frequencies would turn far positions wrongly.
        rotary = [d for name, d in report["buffers"].items() if "inv_freq" in name]
        assert set(rotary) <= {"torch.float32"}
    assert {model: len(found) for model, found in DIGESTS.items()} == dict.fromkeys(DIGESTS, 1)


def exported(out: Path, job: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What transformers loads, without a complaint, and the index of its files."""
    from transformers import AutoModelForCausalLM

    directory = out / job["name"]
    model, loading = AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", output_loading_info=True
    )
    assert not any(loading.values()), (job, loading)
    return model, json.loads((directory / "model.safetensors.index.json").read_text())


@torch.no_grad()
def test_the_export_is_the_trained_model(built: Any) -> None:
    from transformers import AutoTokenizer

    _, out, jobs = built
    for job in jobs:
        directory = out / job["name"]
        trained = torch.load(out / f"{job['name']}.pt")
        model, index = exported(out, job)
        assert model.config.vocab_size == VOCABULARY
        assert model.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[job["precision"]]
        loaded = dict(model.named_parameters())
        assert loaded.keys() == trained.keys()
        for name, value in trained.items():
            padded = name.endswith(BY_VOCABULARY)
            assert not padded or value.shape[0] == 128
            assert torch.equal(loaded[name], value[:VOCABULARY] if padded else value), (job, name)
        tied = loaded.get("lm_head.weight") is None
        assert tied == (job["kind"] in ("gpt2", "opt") or bool(job["config"]))
        answer = model.generate(torch.arange(3, 13)[None], max_new_tokens=4, do_sample=False)
        assert answer.shape[1] > 10
        assert AutoTokenizer.from_pretrained(directory)("w5 w6").input_ids == [5, 6]
        assert_files(directory, index)
    assert not list(out.glob(".*partial"))


def assert_files(directory: Path, index: dict[str, Any]) -> None:
    """Several, readable by all, with each weight where the index says."""
    files = sorted({*index["weight_map"].values()})
    assert len(files) > 1
    assert files == sorted(path.name for path in directory.glob("*.safetensors"))
    size = 0
    for file in files:
        assert (directory / file).stat().st_mode & 0o777 == 0o644
        with safe_open(str(directory / file), framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            for name in list(opened.keys()):
                assert index["weight_map"][name] == file
                tensor = opened.get_tensor(name)
                size += tensor.numel() * tensor.element_size()
    assert index["metadata"]["total_size"] == size


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """Checkpoints as they are found: (directory, digest of the weights in it) by name."""
    root = tmp_path_factory.mktemp("published")
    found = {}
    for kind in PARITY_MODELS:
        model = small_model(kind, vocab_size=VOCABULARY)
        model.save_pretrained(root / kind, max_shard_size="20KB")
        found[kind] = (root / kind, digest(dict(model.named_parameters())))
    tied = small_model("llama", vocab_size=VOCABULARY, tie_word_embeddings=True)
    tied.save_pretrained(root / "tied")
    found["tied"] = (root / "tied", digest(dict(tied.named_parameters())))
    # GPT-2 on the Hub: saved from the base model, without its prefix.
    gpt2 = small_model("gpt2", vocab_size=VOCABULARY)
    gpt2.transformer.save_pretrained(root / "bare")
    found["bare"] = (root / "bare", digest(dict(gpt2.named_parameters())))
    # OPT on the Hub: one pickle.
    opt = small_model("opt", vocab_size=VOCABULARY)
    opt.config.save_pretrained(root / "pickle")
    torch.save(opt.state_dict(), root / "pickle" / "pytorch_model.bin")
    found["pickle"] = (root / "pickle", digest(dict(opt.named_parameters())))
    for kind in CONVERSIONS:
        model = converted_model(kind, vocab_size=VOCABULARY)
        model.save_pretrained(root / kind, max_shard_size="20KB")
        persistent = {n: b for n, b in model.named_buffers() if n in model.state_dict()}
        found[kind] = (root / kind, digest({**dict(model.named_parameters()), **persistent}))
    return found


def test_pretrained_weights_arrive_whole(published: Any, tmp_path: Path) -> None:
    jobs = [
        # Of others the files say which kind it is.
        {"name": f"{name}-{stage}", "kind": name if name in PARITY_MODELS else "llama",
         "precision": "fp32", "stage": stage, "path": str(path),
         "trained": name in CONVERSIONS}
        for name, (path, _) in published.items()
        for stage in (1, 3)
    ]  # fmt: skip
    start(jobs, tmp_path, world=2)
    for job in jobs:
        report = json.loads((tmp_path / f"{job['name']}.json").read_text())
        assert report["digest"] == published[job["name"].rpartition("-")[0]][1], job["name"]
        if job["trained"]:
            assert_exported(tmp_path, job)


@torch.no_grad()
def assert_exported(out: Path, job: dict[str, Any]) -> None:
    """What was trained is in files as the Hub has them, for transformers as for llmx."""
    trained = torch.load(out / f"{job['name']}.pt")
    model, index = exported(out, job)
    weights = dict(model.named_parameters())
    assert all(torch.equal(weights[name], trained[name]) for name in weights)
    published = json.loads((Path(job["path"]) / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == published["weight_map"].keys()
