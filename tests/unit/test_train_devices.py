"""Which GPU a rank takes, and what a GPU cannot do: by facts of GPUs that are not here."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from llmx import collectives
from llmx.errors import ConfigError
from llmx.plan.ds_config import ds_config
from llmx.plan.types import Plan
from llmx.train.engine import process_group as devices
from llmx.train.engine.build import check_sections
from llmx.train.engine.process_group import Gpus, check_quantized_gradients, choose_gpu, gpu_index
from tests.composing import composed

A100 = Gpus(
    visible=2,
    installed=2,
    names=("NVIDIA A100-SXM4-40GB",) * 2,
    capabilities=(8.0,) * 2,
    torch="2.13.0",
    cuda="12.6",
    driver="570.86.15",
    arch_list=("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"),
)
V100 = dataclasses.replace(A100, names=("Tesla V100-SXM2-32GB",) * 2, capabilities=(7.0,) * 2)


@functools.cache
def plan_of(*overrides: str) -> Plan:
    return composed(list(overrides)).plan


@pytest.mark.parametrize(
    ("visible", "installed", "slots", "local_rank", "index"),
    [
        (8, 8, 8, 5, 5),
        (8, 8, 4, 3, 3),  # more GPUs than ranks
        (1, 8, 8, 5, 0),  # bound: --gpus-per-task
        (1, None, 4, 3, 0),
        (1, 8, 1, 0, 0),
        *((*few, None) for few in ((2, 8, 4, 3), (2, 8, 4, 0), (1, 1, 2, 1))),
        (0, 0, 1, 0, None),
    ],
)
def test_the_gpu_of_a_rank(visible, installed, slots, local_rank, index) -> None:
    gpus = Gpus(visible=visible, installed=installed)
    if index is not None:
        assert gpu_index(gpus, local_rank=local_rank, slots=slots, host="a") == index
        return
    message = f"a: {slots} ranks are planned, but local rank {local_rank} sees {visible} GPUs"
    with pytest.raises(ConfigError, match=message):
        gpu_index(gpus, local_rank=local_rank, slots=slots, host="a")


MIXED = ("hardware=a100x2_v100x2",)
BF16 = ("hardware=a100x8", "precision=bf16")


@pytest.mark.parametrize(
    ("words", "gpus", "more", "rank", "chosen"),
    [
        # torch says that a V100 supports bf16, which it emulates.
        (MIXED, V100, {}, 3, 1),
        (BF16, A100, {"visible": 8}, 1, 1),
        (BF16, V100, {"visible": 8}, 1, "Tesla V100-SXM2-32GB of node-b has compute cap"),
        # Before a kernel is started: "no kernel image is available" says nothing of the fix.
        (MIXED, V100, {"cuda": "13.0", "driver": "580.1", "arch_list": ("sm_75", "sm_80")}, 2,
         "no code for its GPUs.*index-url .*/cu126"),
        # torch sees no GPU then.
        (MIXED, Gpus(visible=0, installed=2, torch="2.13.0"),
         {"cuda": "13.0", "driver": "535.161.07"}, 2,
         r"driver 535.161.07 is too old .* needs driver 580"),
        # In a container with cuda-compat torch works with it, and nothing is refused.
        (MIXED, A100, {"cuda": "13.0", "driver": "535.161.07", "arch_list": ("sm_80",)}, 2, 0),
    ],
)  # fmt: skip
def test_a_gpu_is_refused_for_what_it_cannot_do(
    words, gpus, more, rank, chosen, monkeypatch
) -> None:
    monkeypatch.setattr(devices, "gpus_here", lambda: dataclasses.replace(gpus, **more))
    monkeypatch.setattr("socket.gethostname", lambda: "node-b")
    if isinstance(chosen, int):
        assert choose_gpu(plan_of(*words), rank=rank, local_rank=rank % 2) == chosen
        return
    with pytest.raises(ConfigError, match=chosen):
        choose_gpu(plan_of(*words), rank=rank, local_rank=rank % 2)


def test_quantized_gradients_need_all_gpus_of_a_host() -> None:
    done = composed(["hardware=a800x2_n7", "zero=stage3_zeropp"])
    zero = dataclasses.replace(done.experiment.zero, quantized_gradients=True)
    check_quantized_gradients(zero, done.plan, visible=2)
    for visible in (1, 8):
        with pytest.raises(ConfigError, match=f"one rank per visible GPU \\({visible}\\)"):
            check_quantized_gradients(zero, done.plan, visible=visible)


def test_the_device_is_set_before_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question to torch about bf16 makes a tensor, and so a context, on the current GPU: GPU 0
    for each rank of the host, before its own is set."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    calls: list[object] = []
    accelerator = get_accelerator()
    for name in ("set_device", "is_fp16_supported", "is_bf16_supported"):
        monkeypatch.setattr(
            accelerator, name, lambda *words, name=name: calls.append((name, *words)) or True
        )
    monkeypatch.setattr(accelerator, "device_name", lambda: "cuda")
    monkeypatch.setattr(devices, "gpus_here", lambda: V100)
    monkeypatch.setattr(deepspeed, "init_distributed", lambda **_: calls.append("init"))
    monkeypatch.setattr(torch.distributed, "new_group", lambda **given: given["backend"])
    monkeypatch.setattr(collectives, "host_group", None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    devices.join_process_group(plan_of(*MIXED))
    assert calls == [("set_device", 1), ("is_fp16_supported",), "init"]
    assert collectives.host_group == "gloo"


def ds_config_of(*overrides: str) -> dict[str, Any]:
    made = composed(list(overrides))
    exp = made.experiment
    return ds_config(exp.model, exp.zero, exp.optim, made.plan)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("zero_optimization.round_robin_gradients=7", "gradients=7: Input should be a valid bool"),
        ("fp16.hysteresis=two", r"zero\.extra\.fp16\.hysteresis=two: Input should be a valid int"),
    ],
)
def test_a_value_that_deepspeed_refuses_is_named_before_anything_is_loaded(word, message) -> None:
    words = ("hardware=a100x8", "precision=fp16")
    check_sections(ds_config_of(*words))
    with pytest.raises(ConfigError, match=message):
        check_sections(ds_config_of(*words, f"zero.extra.{word}"))
