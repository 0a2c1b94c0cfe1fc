"""An engine's state through files: bit for bit where the ranks stay, the same training where
they do not.

``python -m pytest -m deepspeed tests/integration/test_state_resume.py``
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked_ranks import launch
from tests.programs.state import job_experiment, task_of
from tests.reference import naive_gradient, paired_store, word_tokenizer, write_pretrained

pytestmark = pytest.mark.deepspeed

DROPOUT = {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}
OWN_TASK = "tests.programs.own_task:Everything"
PPO: dict[str, Any] = {
    "task": "ppo",
    "options": {"rewards": ["length"], "max_new_tokens": 5, "updates": 2},
}
ON_POLICY = {
    "task": "distill",
    "options": {"teacher": "pretrained", "on_policy": True, "max_new_tokens": 4},
}
GPT2: dict[str, Any] = {"kind": "gpt2", "config": DROPOUT, "clip_norm": 0.5, "accumulation": 2}
CPU = {"offload_optimizer": "cpu"}
LORA = {"kind": "lora", "rank": 4, "targets": ["all-linear"]}
WHOLE = {"modules_to_save": ["embed_tokens"], "lr": 0.05}
MUON = {"optim": "muon", "clip_norm": 0.5, "optim_keys": {"muon_lr": 0.01}}
EIGHT_BIT = {"optim": "adam8bit", "config": {"intermediate_size": 192}}
"""bitsandbytes keeps 32 bits of parameters with fewer than 4096 elements."""
ASIDE = Path(sys.prefix) / "quantized"
"""Where ``make venv`` puts bitsandbytes."""
RATES = {"layer_decay": 0.5, "lr_scale": {"*.mlp.*": 2.0, "*norm*": 0.25}}
"""``optim``: nine groups of the optimizer."""
ALL_CPU = {**CPU, "offload_param": "cpu", "param_persistence_threshold": 0}

SAME_RANKS: list[dict[str, Any]] = [
    # Plain, every stage at both precisions. 4 samples a step: step 4 is in the first epoch.
    *({"name": f"fp32-{stage}", "stage": stage} for stage in range(4)),
    *({"name": f"bf16-{stage}", "stage": stage, "precision": "bf16"} for stage in range(4)),
    # Loss scaling; one so high that the first updates are skipped.
    *({"name": f"fp16-{stage}", "stage": stage, "precision": "fp16"} for stage in range(4)),
    *(
        {"name": f"skips-{stage}", "stage": stage, "precision": "fp16", "loss_scale": 2.0**19}
        for stage in (0, 2)
    ),
    # Random numbers, clipping, accumulation; 8 samples a step: step 5 is in the second epoch.
    *({"name": f"gpt2-fp32-{stage}", "stage": stage, **GPT2} for stage in range(4)),
    *(
        {"name": f"gpt2-bf16-{stage}", "stage": stage, "precision": "bf16", "save_at": 6, **GPT2}
        for stage in (0, 3)
    ),
    {
        "name": "tied",
        "stage": 1,
        "config": {"tie_word_embeddings": True},
        "activation_checkpointing": "full",
    },
    {
        "name": "tied-3",
        "stage": 3,
        "config": {"tie_word_embeddings": True},
        "zero": {"sub_group_size": 3000, "param_persistence_threshold": 0},
        "activation_checkpointing": "selective",
        "accumulation": 2,
    },
    {"name": "offload-2", "stage": 2, "zero": CPU, "accumulation": 2},
    {"name": "offload-3", "stage": 3, "zero": ALL_CPU, "precision": "bf16", "clip_norm": 0.5},
    {"name": "offload-sub", "stage": 3, "zero": {**CPU, "sub_group_size": 3000}},
    {"name": "hpz", "stage": 3, "zero": {"hpz_partition_size": 2}, "precision": "bf16"},
    {
        "name": "hpz-0",
        "stage": 3,
        "zero": {"hpz_partition_size": 2, "param_persistence_threshold": 0},
    },
    {"name": "uneven", "stage": 1, "micro_batches": [3, 1], "precision": "bf16"},
    {"name": "sgd", "stage": 2, "optim": "sgd"},
    {"name": "lion", "stage": 2, "optim": "lion"},
    *({"name": f"muon-{stage}", "stage": stage, **MUON} for stage in (0, 2, 3)),
    {"name": "muon-bf16-1", "stage": 1, "precision": "bf16", **MUON},
    {"name": "muon-first", "stage": 2, "save_at": 0, **MUON},
    {"name": "muon-offload", "stage": 3, "zero": ALL_CPU, **MUON},
    {"name": "adafactor", "stage": 0, "optim": "adafactor"},
    {"name": "adafactor-bf16", "stage": 0, "precision": "bf16", "optim": "adafactor"},
    {"name": "adam8bit", "stage": 0, **EIGHT_BIT},
    {"name": "adam8bit-bf16", "stage": 0, "precision": "bf16", **EIGHT_BIT},
    *({"name": f"rates-{stage}", "stage": stage, "optim_keys": RATES} for stage in (2, 3)),
    # A task that uses all of the seam; equal weights generate the same samples again.
    *({"name": f"own-{stage}", "stage": stage, "task": OWN_TASK} for stage in (2, 3)),
    # Its frozen model is another network in another precision.
    *(
        {
            "name": f"source-{stage}",
            "stage": stage,
            "task": OWN_TASK,
            "options": {"reference": "pretrained", "reference_precision": "bf16"},
        }
        for stage in (2, 3)
    ),
    # Shipped tasks that generate: with a value model, and with a teacher.
    *({"name": f"ppo-{stage}", "stage": stage, **PPO} for stage in (2, 3)),
    {"name": "on-policy", "stage": 2, **ON_POLICY},
    {
        "name": "ppo-lora",
        "stage": 3,
        "task": "ppo",
        "options": {**PPO["options"], "value_model": "pretrained"},
        "adapter": LORA,
    },
    # An adapter beside frozen weights, which are drawn again as if they were loaded.
    *(
        {"name": f"lora-{stage}", "stage": stage, "adapter": LORA, **checkpointed}
        for stage, checkpointed in enumerate(
            [
                {},
                {},
                {"activation_checkpointing": "selective"},
                {"activation_checkpointing": "full"},
            ]
        )
    ),
    {"name": "lora-bf16", "stage": 1, "precision": "bf16", "adapter": LORA},
    {
        "name": "dora",
        "stage": 3,
        "precision": "bf16",
        "zero": {"param_persistence_threshold": 0},
        "adapter": {**LORA, **WHOLE, "dora": True, "rslora": True, "dropout": 0.1},
        "config": {"tie_word_embeddings": True},
        "activation_checkpointing": "full",
    },
    {"name": "lora-offload", "stage": 3, "zero": ALL_CPU, "precision": "bf16", "adapter": LORA},
    {"name": "lora-hpz", "stage": 3, "zero": {"hpz_partition_size": 2}, "adapter": LORA},
    # Two updates with the samples of each step.
    {
        "name": "lora-own",
        "stage": 3,
        "task": OWN_TASK,
        "options": {"updates": 2},
        "adapter": LORA,
    },
    {"name": "before-the-first-step", "stage": 3, "precision": "bf16", "save_at": 0},
    {"name": "before-any-step-0", "stage": 0, "precision": "bf16", "save_at": 0},
    *(
        {"name": f"frozen-{stage}", "stage": stage, "precision": "bf16", "freeze": "layers.0"}
        for stage in (0, 3)
    ),
    {
        "name": "round-robin",
        "stage": 2,
        "zero": {"extra": {"zero_optimization": {"round_robin_gradients": True}}},
    },
]

ELSEWHERE: dict[int, list[dict[str, Any]]] = {
    # (what it loads, its own stage): 2 ranks -> 1 ...
    1: [
        {"name": "one-a", "load": "fp32-2", "stage": 3, "until": 6, "accumulation": 4},
        {"name": "one-b", "load": "fp32-3", "stage": 0, "until": 6, "micro_batches": [4]},
        {"name": "one-c", "load": "fp32-0", "stage": 2, "until": 6, "micro_batches": [2]},
        {"name": "one-own", "load": "own-2", "stage": 3, "until": 6, "task": OWN_TASK},
        {"name": "one-lion", "load": "lion", "stage": 3, "until": 6, "optim": "lion"},
        {"name": "one-lora", "load": "lora-3", "stage": 1, "until": 6, "adapter": LORA},
        {"name": "one-muon", "load": "muon-2", "stage": 3, "until": 6, **MUON},
        {
            "name": "one-ada",
            "load": "adafactor",
            "stage": 0,
            "until": 6,
            "optim": "adafactor",
        },
        {"name": "one-8bit", "load": "adam8bit", "stage": 0, "until": 6, **EIGHT_BIT},
        {"name": "one-rates", "load": "rates-2", "stage": 3, "until": 6, "optim_keys": RATES},
        {"name": "one-d", "load": "bf16-1", "stage": 3, "precision": "bf16", "until": 5},
    ],
    # ... -> 3, and the rest straight from 2 to 3.
    3: [
        {"name": "three-a", "load": "one-a", "stage": 1, "until": 7},
        {"name": "three-own", "load": "one-own", "stage": 0, "until": 7, "task": OWN_TASK},
        {"name": "three-lora", "load": "one-lora", "stage": 0, "until": 7, "adapter": LORA},
        {"name": "three-muon", "load": "one-muon", "stage": 1, "until": 7, **MUON},
        {
            "name": "three-ada",
            "load": "one-ada",
            "stage": 0,
            "until": 7,
            "optim": "adafactor",
        },
        {"name": "three-8bit", "load": "one-8bit", "stage": 0, "until": 7, **EIGHT_BIT},
        {"name": "three-rates", "load": "one-rates", "stage": 1, "until": 7, "optim_keys": RATES},
        {"name": "three-b", "load": "one-b", "stage": 3, "until": 7},
        {"name": "three-c", "load": "one-c", "stage": 0, "until": 7},
        {"name": "three-d", "load": "fp32-1", "stage": 2, "until": 7, "zero": CPU},
        {"name": "three-e", "load": "one-d", "stage": 2, "precision": "bf16", "until": 7},
        {"name": "three-f", "load": "tied", "stage": 3, "until": 7, "tied": True},
        {
            "name": "three-g",
            "load": "frozen-0",
            "stage": 3,
            "precision": "bf16",
            "until": 7,
            "freeze": "layers.0",
        },
    ],
}
if not (ASIDE / "bitsandbytes").is_dir():
    SAME_RANKS = [job for job in SAME_RANKS if job.get("optim") != "adam8bit"]
    ELSEWHERE = {
        world: [job for job in jobs if job.get("optim") != "adam8bit"]
        for world, jobs in ELSEWHERE.items()
    }
Splits = dict[int, list[tuple[int, list[int], int]]]
SPLITS: Splits = {
    # Of the first step of a task that uses all of the seam: (stage, micro batches, accumulation).
    1: [(3, [8], 1), (0, [2], 4)],
    2: [(0, [4, 4], 1), (1, [3, 1], 2), (2, [1, 1], 4), (3, [3, 1], 2)],
    3: [(3, [4, 2, 2], 1), (2, [2, 1, 1], 2)],
}
PPO_SPLITS: Splits = {2: [(2, [1, 1], 4), (3, [3, 1], 2)], 3: [(0, [4, 2, 2], 1)]}
MICRO = {1: [1], 2: [2, 2], 3: [2, 1, 1]}


def split_name(kind: str, world: int, stage: int, micro: list[int], accumulation: int) -> str:
    return f"split-{kind}-{world}-{stage}-{'-'.join(map(str, micro))}x{accumulation}"


def split_jobs(kind: str, splits: Splits, world: int) -> list[dict[str, Any]]:
    """One step of plain SGD each, of the same 8 samples."""
    one_update = {"task": "ppo", "options": {**PPO["options"], "updates": 1}}
    return [
        {
            "name": split_name(kind, world, stage, micro, accumulation),
            "stage": stage,
            **(one_update if kind == "ppo" else {"task": OWN_TASK}),
            "gradient": True,
            "micro_batches": micro,
            "accumulation": accumulation,
            "optim": "sgd",
            "lr": 0.5,
            "weight_decay": 0.0,
        }
        for stage, micro, accumulation in splits.get(world, [])
    ]


def filled(job: dict[str, Any], *, world: int) -> dict[str, Any]:
    """With what most jobs have in common; always 4 samples a step, or 8."""
    job = {"world": world, "save_at": 4, "micro_batches": MICRO[world], **job}
    job.setdefault("accumulation", max(1, 4 // sum(job["micro_batches"])))
    if job.pop("tied", False):
        job["config"] = {"tie_word_embeddings": True}
    return job


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every job has run: on 2 ranks, then on 1, then on 3."""
    out = tmp_path_factory.mktemp("state")
    write_pretrained(out / "pretrained")
    for world, jobs in {2: SAME_RANKS, **ELSEWHERE}.items():
        file = out / f"jobs-{world}.json"
        jobs = [*jobs, *split_jobs("own", SPLITS, world), *split_jobs("ppo", PPO_SPLITS, world)]
        file.write_text(json.dumps([filled(job, world=world) for job in jobs]))
        words = ("tests.programs.state", str(file), str(out))
        done = launch(*words, ranks=world, timeout_s=900, PYTHONPATH=str(ASIDE))
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return out


def results(out: Path, name: str, *, world: int) -> list[dict[str, Any]]:
    return [json.loads((out / f"{name}.{rank}.json").read_text()) for rank in range(world)]


def close(found: list[list[float]], expected: list[list[float]], *, rel: float) -> bool:
    """Losses within ``rel``, norms of gradients within thirty times as much."""
    losses, norms = zip(*found, strict=True)
    wanted_losses, wanted_norms = zip(*expected, strict=True)
    return bool(
        losses == pytest.approx(wanted_losses, rel=rel)
        and norms == pytest.approx(wanted_norms, rel=30 * rel)
    )


@pytest.mark.parametrize("name", [job["name"] for job in SAME_RANKS])
def test_a_new_engine_goes_on_bit_for_bit(out: Path, name: str) -> None:
    one, other = results(out, name, world=2)
    assert (one["wrong"], other["wrong"]) == ({}, {})
    assert len(one["losses"]) == 7
    assert one["losses"] == other["losses"]
    assert one["losses"][0] != one["losses"][-1]


@pytest.mark.parametrize(
    ("world", "name", "origin"),
    [(world, job["name"], job["load"]) for world, jobs in ELSEWHERE.items() for job in jobs],
)
def test_other_ranks_and_stages_go_on_alike(out: Path, world: int, name: str, origin: str) -> None:
    found = results(out, name, world=world)
    assert [each["wrong"] for each in found] == [{}] * world
    while origin not in {job["name"] for job in SAME_RANKS}:
        origin = next(job["load"] for job in ELSEWHERE[1] if job["name"] == origin)
    uninterrupted = results(out, origin, world=2)[0]["losses"]
    first = found[0]["first"]
    expected = uninterrupted[first : first + len(found[0]["losses"])]
    # Muon makes matrices orthogonal in bf16.
    tolerance = 5e-4 if origin.startswith(("bf16", "frozen", "muon")) else 2e-6
    assert close(found[0]["losses"], expected, rel=tolerance), (found[0]["losses"], expected)


@pytest.mark.parametrize(
    ("jobs", "tolerance"),
    [
        ("own", 2e-6),
        ("ppo", 1e-4),
        ("lora", 2e-6),
        ("rates", 2e-6),
        ("muon", 1e-4),
        ("gpt2-fp32", 2e-6),
        ("gpt2-bf16", 1e-3),
        ("bf16", 1e-3),
        ("fp16", 1e-3),
    ],
)
def test_all_stages_are_the_same_training(out: Path, jobs: str, tolerance: float) -> None:
    """Stage 0 in half precision, too: DeepSpeed's wrapper there takes a step of its own before
    the first, and in fp16 divides by a loss scale that it has not multiplied by."""
    names = [job["name"] for job in SAME_RANKS if re.fullmatch(rf"{jobs}-\d", job["name"])]
    losses = [results(out, name, world=2)[0]["losses"] for name in names]
    assert len(losses) >= 2
    for other in losses[1:]:
        assert close(other, losses[0], rel=tolerance), (other, losses[0])


@pytest.mark.parametrize(
    ("kind", "splits", "trained"),
    [("own", SPLITS, {"policy", "scorer"}), ("ppo", PPO_SPLITS, {"policy", "value"})],
)
def test_every_split_has_the_same_gradient(
    out: Path, kind: str, splits: Splits, trained: set[str]
) -> None:
    """The gradient of plain PyTorch, one generated example after the other: whatever the ranks,
    the stage, the micro batches and the accumulation."""
    job = filled(split_jobs(kind, {1: [(0, [2], 4)]}, 1)[0], world=1)
    exp, _ = job_experiment(job, out)
    loss, wanted = naive_gradient(
        exp, task_of(exp), paired_store(out / "pairs"), word_tokenizer(), global_batch=8
    )
    assert {name.split(".")[0] for name in wanted} == trained
    wrong = []
    for world in splits:
        for each in splits[world]:
            name = split_name(kind, world, *each)
            gradient = torch.load(out / f"{name}.pt")
            frozen = {key: values for key, values in gradient.items() if key not in wanted}
            assert {key.split(".")[0] for key in frozen} == {"reference"}
            assert not any(values.any() for values in frozen.values())
            apart = norm({key: gradient[key] - wanted[key] for key in wanted}) / norm(wanted)
            ((found, _),) = results(out, name, world=world)[0]["losses"]
            if apart > 2e-5 or abs(found / loss - 1) > 1e-5:
                wrong.append((name, apart, found, loss))
    assert not wrong, "\n".join(map(str, wrong))


def norm(tensors: dict[str, torch.Tensor]) -> float:
    """The 2-norm over all tensors together."""
    return float(sum(values.double().square().sum() for values in tensors.values()) ** 0.5)


@pytest.mark.parametrize("stage", [0, 2])
def test_skipped_updates_are_counted_across_a_restart(out: Path, stage: int) -> None:
    state = json.loads((out / f"skips-{stage}" / "state.json").read_text())
    skipped = state["engine"]["skipped_steps"]
    assert 0 < skipped < 4
    assert state["optimizer"]["scalars"] == {"step": 4 - skipped}
    assert state["loss_scaler"]["last_overflow_iter"] >= 0
    assert state["loss_scaler"]["cur_scale"] < 2**19


def test_a_checkpoint_with_an_adapter_has_the_whole_head_of_the_value_model(out: Path) -> None:
    """Its other weights are those of its source, as the policy's are: neither is in it."""
    state = json.loads((out / "ppo-lora" / "state.json").read_text())
    names = [name for name in state["parameters"] if ".lora_" not in name]
    assert names == ["value.score.weight"]
    assert {name.split(".")[0] for name in state["parameters"]} == {"policy", "value"}
    assert sorted(state["frozen"]) == ["policy", "value"]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_holds_the_trained_models_by_name(out: Path, stage: int) -> None:
    """And nothing of the frozen one, which comes from its source again."""
    state = json.loads((out / f"own-{stage}" / "state.json").read_text())
    assert {name.split(".")[0] for name in state["parameters"]} == {"policy", "scorer"}
    assert all(entry["trained"] for entry in state["parameters"].values())
    assert "scorer.score.weight" in state["parameters"]
    assert list(state["frozen"]) == ["reference"]


def test_a_frozen_model_has_a_source_and_a_precision_of_its_own(out: Path) -> None:
    """The same weights at every stage; its bf16 forward is rounded otherwise under ZeRO-3, so that
    from the first update on other samples are drawn."""
    found, firsts = [], []
    for name in ("source-2", "source-3", "own-2"):
        state = json.loads((out / name / "state.json").read_text())
        assert {key.split(".")[0] for key in state["parameters"]} == {"policy", "scorer"}
        found.append(state["frozen"]["reference"])
        firsts.append(results(out, name, world=2)[0]["losses"][0][0])
    assert found[0] == found[1] != found[2]
    assert firsts[0] == pytest.approx(firsts[1], rel=1e-3)
    assert firsts[0] != pytest.approx(firsts[2], rel=1e-3)


@pytest.mark.parametrize("stage", range(4))
def test_a_checkpoint_of_an_adapter_holds_nothing_else(out: Path, stage: int) -> None:
    directory = out / f"lora-{stage}"
    state = json.loads((directory / "state.json").read_text())
    assert state["parameters"]
    assert all(".lora_" in name for name in state["parameters"])
    assert all(entry["trained"] for entry in state["parameters"].values())
    assert list(state["frozen"]) == ["policy"]
    kept = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    whole = sum(file.stat().st_size for file in (out / f"fp32-{stage}").glob("*.safetensors"))
    assert kept < 0.7 * whole  # a network of 32 dimensions; rank 4 is much of it
