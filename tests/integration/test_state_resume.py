"""An engine's state through files: bit for bit where the ranks stay, the same training where
they do not.

States on a disk (ZeRO-Infinity) are tried where ``libaio-dev`` is installed and
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

import numpy as np
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
OTHER_NETWORK = {"reference": "pretrained", "reference_precision": "bf16"}
GPT2: dict[str, Any] = {"kind": "gpt2", "config": DROPOUT, "clip_norm": 0.5, "accumulation": 2}
CPU = {"offload_optimizer": "cpu"}
ALL_CPU = {**CPU, "offload_param": "cpu", "param_persistence_threshold": 0}
IN_PARTS = {**ALL_CPU, "sub_group_size": 3000}
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
BF16 = {"precision": "bf16"}
SKIPS = {"precision": "fp16", "loss_scale": 2.0**19, "save_at": 4, "until": 6}
SAVED, UNTIL = 2, 4
SHORT = {"save_at": 1, "until": 2}
"""Of models whose step costs more, and whose file nothing goes on from elsewhere."""
LONGER = {"until": 5}
"""Of what takes a step on 1 rank, then two on 3: the optimizer's states are felt in the second."""


def job(name: str, stage: int, *settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    merged: dict[str, Any] = {"name": name, "stage": stage}
    for each in (*settings, more):
        merged |= each
    return merged


SAME_RANKS = [
    # Every stage and every precision; beside it, what belongs to no stage or to no precision.
    # Random numbers, clipping, accumulation; 8 samples a step: step 5 is in the second epoch.
    *(job(f"fp32-{at}", at, GPT2, save_at=4 if at == 2 else 6, until=TOTAL) for at in (0, 2, 3)),
    job("bf16-0", 0, BF16, save_at=0),
    *(job(f"bf16-{stage}", stage, BF16) for stage in (1, 2)),  # two wrappers of DeepSpeed
    job("bf16-3", 3, BF16, zero=IN_PARTS),
    # Loss scaling; one so high that the first updates are skipped (other ones at stage 0).
    *(job(f"fp16-{stage}", stage, precision="fp16") for stage in (0, 3)),
    *(job(f"skips-{stage}", stage, SKIPS) for stage in (0, 2)),
    # Tied weights, ranks with unequal parts of the batch.
    job("tied-1", 1, FULL, config=TIED, optim="sgd", micro_batches=[3, 1]),
    # Optimizers.
    job("lion", 2, optim="lion", zero=ROUND_ROBIN),
    job("muon-2", 2, MUON, LONGER),
    job("muon-3", 3, MUON, zero=ALL_CPU),
    job("muon-bf16", 1, MUON, BF16),
    job("muon-first", 2, MUON, save_at=0, until=2),
    job("adafactor", 0, optim="adafactor"),
    job("adam8bit", 0, EIGHT_BIT),
    job("adam8bit-bf16", 0, EIGHT_BIT, BF16),
    job("rates-2", 2, LONGER, zero=CPU, optim_keys=RATES, accumulation=2),
    # A task that uses all of the seam; equal weights generate the same samples again.
    job("own", 2, LONGER, task=OWN_TASK),
    # Its frozen model is another network in another precision.
    *(job(f"source-{at}", at, SHORT, task=OWN_TASK, options=OTHER_NETWORK) for at in (2, 3)),
    # An adapter beside frozen weights, which are drawn again as if they were loaded; two updates
    # with the samples of each step.
    job("ppo-lora", 3, PPO, SHORT, options={**REWARDED, "value_model": "pretrained"}, adapter=LORA),
    job("lora-0", 0, SELECTIVE, adapter=LORA),
    job("lora-bf16-1", 1, BF16, adapter=LORA),
    job("lora-3", 3, FULL, LONGER, zero={**HPZ, "param_persistence_threshold": 0}, adapter=LORA),
    job("dora", 3, BF16, FULL, SHORT, zero=ALL_CPU, adapter=DORA, config=TIED),
    job("frozen-0", 0, BF16, freeze="layers.0"),
    job("frozen-3", 3, BF16, freeze="layers.0", save_at=0, until=2),
]


def loads(name: str, origin: str, stage: int, *settings: Any, **more: Any) -> dict[str, Any]:
    return job(name, stage, *settings, load=origin, **more)


ELSEWHERE: dict[int, list[dict[str, Any]]] = {
    # 2 ranks -> 1 ...
    1: [
        loads("one-own", "own", 3, task=OWN_TASK, until=3),
        loads("one-lion", "lion", 3, optim="lion"),
        loads("one-lora", "lora-3", 2, adapter=LORA, until=3),
        loads("one-muon", "muon-2", 3, MUON, until=3),
        loads("one-rates", "rates-2", 3, zero=IN_PARTS, optim_keys=RATES, accumulation=8, until=3),
    ],
    # ... -> 3, and the rest straight from 2 to 3.
    3: [
        loads("three-own", "one-own", 0, LONGER, task=OWN_TASK),
        loads("three-lora", "one-lora", 0, LONGER, adapter=LORA),
        loads("three-muon", "one-muon", 0, MUON, LONGER),
        loads("three-rates", "one-rates", 1, LONGER, optim_keys=RATES, accumulation=2),
        loads("three-bf16", "bf16-1", 2, BF16),
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
    2: [(1, [3, 1], 2), (2, [1, 1], 4)],
    3: [(3, [4, 2, 2], 1)],
}
PPO_SPLITS: Splits = {2: [(3, [3, 1], 2)], 3: [(0, [4, 2, 2], 1)]}
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
    common = {"world": world, "save_at": SAVED, "until": UNTIL, "micro_batches": MICRO[world]}
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
        (r"muon-\d", 1e-4),
        (r"fp32-\d", 2e-6),
        (r"bf16-\d", 1e-3),
        (r"fp16-\d", 1e-3),
    ],
)
def test_all_stages_are_the_same_training(out: Path, jobs: str, tolerance: float) -> None:
    """Stage 0 in half precision, too: DeepSpeed's wrapper there takes a step of its own before
    the first, and in fp16 divides by a loss scale that it has not multiplied by."""
    names = [job["name"] for job in SAME_RANKS if re.fullmatch(jobs, job["name"])]
    losses = [results(out, name, world=2)[0]["losses"] for name in names]
    assert len(losses) >= 2
    steps = min(map(len, losses))
    for other in losses[1:]:
        assert close(other[:steps], losses[0][:steps], rel=tolerance), (other, losses[0])


@pytest.mark.parametrize(("name", "bf16"), [("fp16-0", "bf16-0"), ("lora-0", "lora-bf16-1")])
def test_bf16_is_near_the_curve_of_another_precision_and_not_on_it(
    out: Path, name: str, bf16: str
) -> None:
    """That of fp16, and of fp32."""
    wanted, found = (results(out, each, world=2)[0]["losses"] for each in (name, bf16))
    assert close(found, wanted, rel=0.03)
    assert not close(found, wanted, rel=1e-6)


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


@pytest.mark.parametrize("stage", [0, 2])
def test_skipped_updates_are_counted_across_a_restart(out: Path, stage: int) -> None:
    state = state_of(out, f"skips-{stage}")
    skipped = state["engine"]["skipped_steps"]
    assert 0 < skipped < 4
    assert state["optimizer"]["scalars"] == {"step": 4 - skipped}
    assert state["loss_scaler"]["last_overflow_iter"] >= 0
    assert state["loss_scaler"]["cur_scale"] < 2**19


@pytest.mark.parametrize(
    ("name", "trained", "frozen", "beside_adapters"),
    [
        ("own", ["policy", "scorer"], ["reference"], None),
        ("source-3", ["policy", "scorer"], ["reference"], None),
        # Its other weights are those of its source, as the policy's are.
        ("ppo-lora", ["policy", "value"], ["policy", "value"], ["value.score.weight"]),
        *((f"lora-{kind}", ["model"], ["policy"], []) for kind in ("0", "bf16-1", "3")),
    ],
)
def test_a_checkpoint_holds_what_is_trained_by_name(
    out: Path, name: str, trained: list[str], frozen: list[str], beside_adapters: list[str] | None
) -> None:
    """And nothing of what is frozen, which comes from its source again."""
    state = state_of(out, name)
    assert sorted({key.split(".")[0] for key in state["parameters"]}) == trained
    assert all(entry["trained"] for entry in state["parameters"].values())
    assert sorted(state["frozen"]) == frozen
    others = [key for key in state["parameters"] if ".lora_" not in key]
    assert others == (list(state["parameters"]) if beside_adapters is None else beside_adapters)


def test_a_frozen_model_has_a_source_and_a_precision_of_its_own(out: Path) -> None:
    """The same weights at every stage; its bf16 forward is rounded otherwise under ZeRO-3."""
    names = ("source-2", "source-3", "own")
    found = [state_of(out, name)["frozen"]["reference"] for name in names]
    firsts = [results(out, name, world=2)[0]["losses"][0][0] for name in names]
    assert found[0] == found[1] != found[2]
    assert firsts[0] == pytest.approx(firsts[1], rel=1e-3)
    assert firsts[0] != pytest.approx(firsts[2], rel=1e-3)


def test_a_checkpoint_of_an_adapter_is_small(out: Path) -> None:
    kept, whole = (
        sum(file.stat().st_size for file in (out / name).glob("*.safetensors"))
        for name in ("lora-3", "bf16-1")
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
    assert losses["memory"] == pytest.approx(losses["disk"][SAVED:], rel=5e-3)
    assert list((tmp_path / "disk").rglob("exp_avg*.swp")), "nothing was swapped"


# DeepSpeedCPUAdam, whose C++ side has a memory of its own

STEPS, AT = 120, 57


class Counting:
    """What ``cpu_adam.h`` does with one tensor, without a compiler (minutes): it multiplies its
    powers of beta up from step to step, and computes them anew where a step does not follow."""

    def __init__(self) -> None:
        self.powers: dict[int, tuple[int, Any]] = {}

    def create_adam(self, number: int, *_: Any) -> None:
        self.powers[number] = 0, np.float32([1, 1])

    def destroy_adam(self, number: int) -> None:
        del self.powers[number]

    def adam_update(
        self, number: int, step: int, lr: float, beta1: float, beta2: float, eps: float,
        decay: float, _: bool, values: Any, gradient: Any, first: Any, second: Any,
    ) -> None:  # fmt: skip
        betas = np.float32([beta1, beta2])
        last, powers = self.powers[number]
        if step == last + 1:
            powers = powers * betas
        elif step != last:
            powers = np.float32(np.float64(betas) ** step)
        self.powers[number] = step, powers
        # MKL's square root depends on where a tensor lies.
        values, gradient, first, second = (t.numpy() for t in (values, gradient, first, second))
        first += (gradient - first) * (1 - betas[0])
        second += (gradient * gradient - second) * (1 - betas[1])
        one, two = 1 - powers
        step_size, root = np.float32(lr) / one, np.sqrt(second / two) + np.float32(eps)
        values -= np.float32(lr * decay) * values + step_size * first / root


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


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("tensors", [1, 3])
def test_cpu_adam_goes_on_bit_for_bit(
    tensors: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.ops.adam import cpu_adam

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    if not compiled:
        monkeypatch.setattr(cpu_adam.CPUAdamBuilder, "load", lambda _: Counting())
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
