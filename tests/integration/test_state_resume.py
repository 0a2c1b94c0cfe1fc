"""An engine's state through files: bit for bit where the ranks stay, the same training where
they do not.

``python -m pytest -m deepspeed tests/integration/test_state_resume.py`` builds DeepSpeedCPUAdam at
first (a minute). States on a disk (ZeRO-Infinity) are tried where ``libaio-dev`` is installed and
``python -c 'from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load()'`` has
built DeepSpeed's extension (minutes).
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from llmx.checkpoint.state.layout import Owner
from llmx.checkpoint.state.values import read_scalars, replay_cpu_adam, write_scalars
from tests.forked_ranks import launch
from tests.programs.state import TOTAL, job_experiment, task_of
from tests.reference import naive_gradient, paired_store, word_tokenizer, write_pretrained

pytestmark = pytest.mark.deepspeed

DROPOUT = {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}
OWN_TASK = "tests.programs.own_task:Everything"
REWARDED = {"rewards": ["length"], "max_new_tokens": 5, "updates": 2}
PPO: dict[str, Any] = {"task": "ppo", "options": REWARDED}
ON_POLICY = {"teacher": "pretrained", "on_policy": True, "max_new_tokens": 4}
OTHER_NETWORK = {"reference": "pretrained", "reference_precision": "bf16"}
GPT2: dict[str, Any] = {"kind": "gpt2", "config": DROPOUT, "clip_norm": 0.5, "accumulation": 2}
CPU = {"offload_optimizer": "cpu"}
ALL_CPU = {**CPU, "offload_param": "cpu", "param_persistence_threshold": 0}
IN_PARTS = {"sub_group_size": 3000, "param_persistence_threshold": 0}
HPZ: dict[str, Any] = {"hpz_partition_size": 2}
ROUND_ROBIN = {"extra": {"zero_optimization": {"round_robin_gradients": True}}}
LORA = {"kind": "lora", "rank": 4, "targets": ["all-linear"]}
WHOLE = {"modules_to_save": ["embed_tokens"], "lr": 0.05}
DORA = {**LORA, **WHOLE, "dora": True, "rslora": True, "dropout": 0.1}
MUON = {"optim": "muon", "clip_norm": 0.5, "optim_keys": {"muon_lr": 0.01}}
EIGHT_BIT = {"optim": "adam8bit", "config": {"intermediate_size": 192}}
"""bitsandbytes keeps 32 bits of parameters with fewer than 4096 elements."""
ASIDE = Path(sys.prefix) / "quantized"
"""Where ``make venv`` puts bitsandbytes."""
RATES = {"layer_decay": 0.5, "lr_scale": {"*.mlp.*": 2.0, "*norm*": 0.25}}
"""``optim``: nine groups of the optimizer."""
FULL, SELECTIVE = ({"activation_checkpointing": how} for how in ("full", "selective"))
TIED = {"tie_word_embeddings": True}
BF16, AT_ONCE = {"precision": "bf16"}, {"save_at": 0}
SKIPS = {"precision": "fp16", "loss_scale": 2.0**19}
SHORT = {"save_at": 2, "until": 3}
"""Models that generate at ZeRO-3, or are tried at other stages for all steps: a step costs more."""


def job(name: str, stage: int, *settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    merged: dict[str, Any] = {"name": name, "stage": stage}
    for each in (*settings, more):
        merged |= each
    return merged


SAME_RANKS = [
    # Every stage at every precision; beside it, what belongs to no stage or to no precision.
    # Random numbers, clipping, accumulation; 8 samples a step: step 5 is in the second epoch.
    *(job(f"fp32-{stage}", stage, GPT2, save_at=6 if stage in (0, 3) else 4) for stage in range(4)),
    # 4 samples a step: step 4 is in the first epoch.
    job("bf16-0", 0, BF16, AT_ONCE),
    job("bf16-1", 1, BF16),
    job("bf16-2", 2, BF16, zero=ROUND_ROBIN),
    job("bf16-3", 3, BF16, zero=HPZ),
    # Loss scaling; one so high that the first updates are skipped (other ones at stage 0).
    *(job(f"fp16-{stage}", stage, precision="fp16") for stage in (0, 3)),
    *(job(f"skips-{stage}", stage, SKIPS) for stage in (0, 1, 2)),
    # Tied weights, ranks with unequal parts of the batch, offload, sub-groups.
    job("tied-1", 1, FULL, config=TIED, optim="sgd", micro_batches=[3, 1]),
    job("tied-3", 3, SELECTIVE, zero=IN_PARTS, config=TIED, accumulation=2),
    job("offload", 3, BF16, zero={**ALL_CPU, "sub_group_size": 3000}, clip_norm=0.5),
    # Optimizers.
    job("lion", 2, optim="lion", zero=ROUND_ROBIN),
    job("muon-2", 2, MUON),
    job("muon-3", 3, MUON, zero=ALL_CPU),
    job("muon-bf16", 1, MUON, BF16),
    job("muon-first", 2, MUON, AT_ONCE),
    job("adafactor", 0, optim="adafactor"),
    job("adafactor-bf16", 0, BF16, optim="adafactor"),
    job("adam8bit", 0, EIGHT_BIT),
    job("adam8bit-bf16", 0, EIGHT_BIT, BF16),
    job("rates-2", 2, zero=CPU, optim_keys=RATES, accumulation=2),
    job("rates-3", 3, zero={"sub_group_size": 3000}, optim_keys=RATES, accumulation=2),
    # A task that uses all of the seam; equal weights generate the same samples again.
    job("own", 2, task=OWN_TASK),
    # Its frozen model is another network in another precision.
    *(job(f"source-{at}", at, SHORT, task=OWN_TASK, options=OTHER_NETWORK) for at in (2, 3)),
    # Shipped tasks that generate: with a value model, and with a teacher.
    job("ppo", 2, PPO),
    job("on-policy", 2, task="distill", options=ON_POLICY),
    job("ppo-lora", 3, PPO, SHORT, options={**REWARDED, "value_model": "pretrained"}, adapter=LORA),
    # An adapter beside frozen weights, which are drawn again as if they were loaded.
    job("lora-0", 0, SELECTIVE, adapter=LORA),
    job("lora-bf16-1", 1, BF16, adapter=LORA),
    job("lora-3", 3, FULL, zero={**HPZ, "param_persistence_threshold": 0}, adapter=LORA),
    job("dora", 3, BF16, FULL, SHORT, zero=ALL_CPU, adapter=DORA, config=TIED),
    # Two updates with the samples of each step.
    job("lora-own", 3, SHORT, task=OWN_TASK, options={"updates": 2}, adapter=LORA),
    job("frozen-0", 0, BF16, freeze="layers.0"),
    job("frozen-3", 3, BF16, AT_ONCE, freeze="layers.0"),
]


def loads(name: str, origin: str, stage: int, *settings: Any, **more: Any) -> dict[str, Any]:
    return job(name, stage, *settings, load=origin, **more)


ELSEWHERE: dict[int, list[dict[str, Any]]] = {
    # 2 ranks -> 1 ...
    1: [
        loads("one-own", "own", 3, task=OWN_TASK, until=6),
        loads("one-lion", "lion", 3, optim="lion", until=6),
        loads("one-lora", "lora-3", 2, adapter=LORA, until=6),
        loads("one-muon", "muon-2", 3, MUON, until=6),
        loads("one-rates", "rates-2", 3, zero=ALL_CPU, optim_keys=RATES, accumulation=8, until=6),
        loads("one-bf16", "bf16-1", 3, BF16, until=5),
    ],
    # ... -> 3, and the rest straight from 2 to 3.
    3: [
        loads("three-own", "one-own", 0, task=OWN_TASK),
        loads("three-lora", "one-lora", 0, adapter=LORA),
        loads("three-muon", "one-muon", 0, MUON),
        loads("three-rates", "one-rates", 1, optim_keys=RATES, accumulation=2),
        loads("three-bf16", "one-bf16", 2, BF16),
        loads("three-ada", "adafactor", 0, optim="adafactor"),
        loads("three-8bit", "adam8bit", 0, EIGHT_BIT),
        loads("three-tied", "tied-1", 3, config=TIED, optim="sgd"),
        loads("three-frozen", "frozen-0", 3, BF16, freeze="layers.0"),
    ],
}
if not (ASIDE / "bitsandbytes").is_dir():
    for some in (SAME_RANKS, *ELSEWHERE.values()):
        some[:] = [each for each in some if each.get("optim") != "adam8bit"]
Splits = dict[int, list[tuple[int, list[int], int]]]
SPLITS: Splits = {
    # Of the first step of a task that uses all of the seam: (stage, micro batches, accumulation).
    1: [(0, [2], 4)],
    2: [(0, [4, 4], 1), (1, [3, 1], 2), (2, [1, 1], 4)],
    3: [(3, [4, 2, 2], 1), (2, [2, 1, 1], 2)],
}
PPO_SPLITS: Splits = {2: [(2, [1, 1], 4), (3, [3, 1], 2)], 3: [(0, [4, 2, 2], 1)]}
MICRO = {1: [1], 2: [2, 2], 3: [2, 1, 1]}


def split_name(kind: str, world: int, stage: int, micro: list[int], accumulation: int) -> str:
    return f"split-{kind}-{world}-{stage}-{'-'.join(map(str, micro))}x{accumulation}"


def split_jobs(kind: str, splits: Splits, world: int) -> list[dict[str, Any]]:
    """One step of plain SGD each, of the same 8 samples."""
    task = {**PPO, "options": {**REWARDED, "updates": 1}} if kind == "ppo" else {"task": OWN_TASK}
    sgd = {"gradient": True, "optim": "sgd", "lr": 0.5, "weight_decay": 0.0}
    return [
        job(
            split_name(kind, world, stage, micro, accumulation), stage, task, sgd,
            micro_batches=micro, accumulation=accumulation,
        )
        for stage, micro, accumulation in splits.get(world, [])
    ]  # fmt: skip


def filled(job: dict[str, Any], *, world: int) -> dict[str, Any]:
    """With what most jobs have in common; always 4 samples a step, or 8."""
    common = {"world": world, "save_at": 4, "until": TOTAL, "micro_batches": MICRO[world]}
    job = {**common, **job}
    job.setdefault("accumulation", max(1, 4 // sum(job["micro_batches"])))
    return job


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every job has run: on 2 ranks, then on 1, then on 3."""
    out = tmp_path_factory.mktemp("state")
    write_pretrained(out / "pretrained")
    for world, jobs in {2: SAME_RANKS, **ELSEWHERE}.items():
        splits = [*split_jobs("own", SPLITS, world), *split_jobs("ppo", PPO_SPLITS, world)]
        run([*jobs, *splits], out, world=world)
    return out


def run(jobs: list[dict[str, Any]], out: Path, *, world: int) -> None:
    file = out / f"jobs-{world}.json"
    file.write_text(json.dumps([filled(job, world=world) for job in jobs]))
    words = ("tests.programs.state", str(file), str(out))
    done = launch(*words, ranks=world, timeout_s=900, PYTHONPATH=str(ASIDE))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]


def results(out: Path, name: str, *, world: int) -> list[dict[str, Any]]:
    return [json.loads((out / f"{name}.{rank}.json").read_text()) for rank in range(world)]


def state_of(out: Path, name: str) -> dict[str, Any]:
    """What is saved beside the tensors."""
    return dict(json.loads((out / name / "state.json").read_text()))


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
    assert len(one["losses"]) in (TOTAL, SHORT["until"])
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
        ("lora-[03]", 2e-6),
        (r"rates-\d", 2e-6),
        (r"muon-\d", 1e-4),
        (r"fp32-\d", 2e-6),
        (r"bf16-\d", 1e-3),
        (r"fp16-\d", 1e-3),
        ("skips-[12]", 1e-3),
    ],
)
def test_all_stages_are_the_same_training(out: Path, jobs: str, tolerance: float) -> None:
    """Stage 0 in half precision, too: DeepSpeed's wrapper there takes a step of its own before
    the first, and in fp16 divides by a loss scale that it has not multiplied by."""
    names = [job["name"] for job in SAME_RANKS if re.fullmatch(jobs, job["name"])]
    losses = [results(out, name, world=2)[0]["losses"] for name in names]
    assert len(losses) >= 2
    for other in losses[1:]:
        assert close(other, losses[0], rel=tolerance), (other, losses[0])


@pytest.mark.parametrize(
    ("kind", "splits", "trained"),
    [("own", SPLITS, {"policy", "scorer"}), ("ppo", PPO_SPLITS, {"policy", "value"})],
)
def test_every_split_has_the_same_gradient(out, kind, splits, trained) -> None:
    """The gradient of plain PyTorch, one generated example after the other: whatever the ranks,
    the stage, the micro batches and the accumulation."""
    (first,) = split_jobs(kind, {1: [(0, [2], 4)]}, 1)
    exp, _ = job_experiment(filled(first, world=1), out)
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


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_skipped_updates_are_counted_across_a_restart(out: Path, stage: int) -> None:
    state = state_of(out, f"skips-{stage}")
    skipped = state["engine"]["skipped_steps"]
    assert 0 < skipped < 4
    assert state["optimizer"]["scalars"] == {"step": 4 - skipped}
    assert state["loss_scaler"]["last_overflow_iter"] >= 0
    assert state["loss_scaler"]["cur_scale"] < 2**19


def test_a_checkpoint_with_an_adapter_has_the_whole_head_of_the_value_model(out: Path) -> None:
    """Its other weights are those of its source, as the policy's are: neither is in it."""
    state = state_of(out, "ppo-lora")
    names = [name for name in state["parameters"] if ".lora_" not in name]
    assert names == ["value.score.weight"]
    assert {name.split(".")[0] for name in state["parameters"]} == {"policy", "value"}
    assert sorted(state["frozen"]) == ["policy", "value"]


@pytest.mark.parametrize("name", ["own", "source-3"])
def test_a_checkpoint_holds_the_trained_models_by_name(out: Path, name: str) -> None:
    """And nothing of the frozen one, which comes from its source again."""
    state = state_of(out, name)
    assert {name.split(".")[0] for name in state["parameters"]} == {"policy", "scorer"}
    assert all(entry["trained"] for entry in state["parameters"].values())
    assert "scorer.score.weight" in state["parameters"]
    assert list(state["frozen"]) == ["reference"]


def test_a_frozen_model_has_a_source_and_a_precision_of_its_own(out: Path) -> None:
    """The same weights at every stage; its bf16 forward is rounded otherwise under ZeRO-3, so that
    from the first update on other samples are drawn."""
    names = ("source-2", "source-3", "own")
    found = [state_of(out, name)["frozen"]["reference"] for name in names]
    firsts = [results(out, name, world=2)[0]["losses"][0][0] for name in names]
    assert found[0] == found[1] != found[2]
    assert firsts[0] == pytest.approx(firsts[1], rel=1e-3)
    assert firsts[0] != pytest.approx(firsts[2], rel=1e-3)


@pytest.mark.parametrize("name", ["lora-0", "lora-bf16-1", "lora-3"])
def test_a_checkpoint_of_an_adapter_holds_nothing_else(out: Path, name: str) -> None:
    state = state_of(out, name)
    assert state["parameters"]
    assert all(".lora_" in name for name in state["parameters"])
    assert all(entry["trained"] for entry in state["parameters"].values())
    assert list(state["frozen"]) == ["policy"]
    kept, whole = (
        sum(file.stat().st_size for file in (out / each).glob("*.safetensors"))
        for each in (name, "bf16-1")
    )
    assert kept < 0.7 * whole  # a network of 32 dimensions; rank 4 is much of it


# States that lie elsewhere


def extension() -> Path:
    """Where torch puts it."""
    directory = os.environ.get("TORCH_EXTENSIONS_DIR")
    if directory:
        return Path(directory) / "async_io" / "async_io.so"
    return next(Path("~/.cache/torch_extensions").expanduser().glob("*/async_io/*.so"), Path("-"))


@pytest.mark.skipif(not extension().is_file(), reason="DeepSpeed's async_io is not built")
def test_states_on_a_disk_go_on_bit_for_bit_and_elsewhere(tmp_path: Path) -> None:
    nvme = {"offload_optimizer": "nvme", "nvme_path": str(tmp_path / "disk")}
    swapped = {**nvme, "offload_param": "nvme", "sub_group_size": 300_000}
    # Sub-groups of over 1 MiB are swapped, smaller ones stay in memory: both are here.
    wide = {**BF16, "config": {"hidden_size": 192, "intermediate_size": 1024}}
    run(
        [
            job("disk", 3, wide, zero=swapped),
            loads("memory", "disk", 2, wide),
            loads("disk-again", "memory", 3, wide, zero=nvme),
        ],
        tmp_path,
        world=2,
    )
    names = ("disk", "memory", "disk-again")
    found = {name: results(tmp_path, name, world=2) for name in names}
    assert [each["wrong"] for two in found.values() for each in two] == [{}] * 6
    losses = {name: [loss for loss, _ in two[0]["losses"]] for name, two in found.items()}
    assert len(losses["disk"]) == TOTAL
    assert losses["memory"] == pytest.approx(losses["disk"][4:], rel=5e-3)
    assert list((tmp_path / "disk").rglob("exp_avg*.swp")), "nothing was swapped"


# DeepSpeedCPUAdam, whose C++ side has a memory of its own

STEPS, AT = 120, 57


def train(optimizer: Any, parameters: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        optimizer.step()


def made(values: list[torch.Tensor]) -> tuple[Any, list[torch.nn.Parameter]]:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameters = [torch.nn.Parameter(value.clone()) for value in values]
    return DeepSpeedCPUAdam(parameters, lr=1e-2, weight_decay=0.1), parameters


@pytest.mark.parametrize("tensors", [1, 3])
def test_cpu_adam_goes_on_bit_for_bit(tensors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    start = [torch.randn(1000, generator=torch.Generator().manual_seed(n)) for n in range(tensors)]
    optimizer, parameters = made(start)
    train(optimizer, parameters, range(AT))
    owners = [Owner(parameter, optimizer) for parameter in parameters]
    saved = [{key: value.clone() for key, value in owner.values().items()} for owner in owners]
    scalars = read_scalars(owners)
    assert scalars == {"step": AT}
    train(optimizer, parameters, range(AT, STEPS))

    def resumed(*, replay: bool) -> list[torch.Tensor]:
        other, copies = made([values["master"] for values in saved])
        mine = [Owner(parameter, other) for parameter in copies]
        for owner, values in zip(mine, saved, strict=True):
            other.state[owner.tensor].update(
                {key: value.clone() for key, value in values.items() if key != "master"}
            )
            write_scalars(owner, scalars)
        if replay:
            replay_cpu_adam(mine, scalars)
        train(other, copies, range(AT, STEPS))
        return [parameter.detach() for parameter in copies]

    expected = [parameter.detach() for parameter in parameters]
    assert all(map(torch.equal, resumed(replay=True), expected))
    # Without it the powers of beta differ in the last bit, and so does what is trained.
    assert not all(map(torch.equal, resumed(replay=False), expected))
