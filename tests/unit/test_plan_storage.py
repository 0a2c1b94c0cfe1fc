"""What a plan takes of its hosts: RAM, NVMe, disk, ``/dev/shm``. Sizes of real checkpoints are
compared in ``tests/integration/test_resume.py`` and ``test_adapter.py``."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmx.config import CheckpointConfig, KeepConfig
from llmx.plan.storage import (
    MIB,
    NCCL_CHANNEL_BYTES,
    NCCL_CHANNELS,
    TEXT_BYTES,
    checkpoint_counts,
    download_bytes,
    plan_storage,
)
from llmx.plan.types import HostStorage, MemoryPlan, Plan, StoragePlan
from tests.composing import Composed, planned
from tests.composing import composed as unsized
from tests.composing import sized as composed

GIB = 1024**3
LLAMA = ("model=llama3_8b", "data.seq_len=4096", "task.steps=1000", "checkpoint.every_steps=100")
SIZE = 8_030_261_248


def storage_of(*overrides: str) -> StoragePlan:
    return composed([*LLAMA, "hardware=a100x8", *overrides]).plan.storage


def host_of(*overrides: str) -> HostStorage:
    (host,) = storage_of(*overrides).hosts
    return host


def traced_host_of(*overrides: str) -> HostStorage:
    (host,) = planned([*LLAMA, "hardware=a100x8", *overrides]).plan.storage.hosts
    return host


@pytest.mark.parametrize(
    ("config", "total_steps", "expected"),
    [
        ({"every_steps": 100}, 1000, (2, 3)),
        ({"every_steps": 100, "keep": KeepConfig(last=1)}, 1000, (1, 2)),
        ({"every_steps": 100, "keep": KeepConfig(last=3, best=1)}, None, (4, 5)),
        ({"every_steps": 100, "keep": KeepConfig(every=300)}, 1000, (5, 6)),
        ({"every_steps": 100, "keep": KeepConfig(every=300)}, None, (None, None)),
        ({"every_steps": 600, "at_end": True}, 1000, (2, 2)),
        ({"on_signal": True}, 1000, (1, 1)),
        ({"every_steps": 5000, "on_signal": True}, 1000, (1, 1)),
    ],
)
def test_how_many_checkpoints_there_are_at_once(config, total_steps, expected) -> None:
    assert checkpoint_counts(CheckpointConfig(**config), total_steps) == expected


@pytest.mark.parametrize(
    ("overrides", "of_element"),
    [(["zero=stage3"], 12), (["optim=lion"], 8), (["optim.kind=sgd"], 4)],
)
def test_a_checkpoint_has_fp32_weights_and_the_states(overrides, of_element) -> None:
    storage = storage_of(*overrides)
    assert storage.checkpoint_bytes == of_element * SIZE + TEXT_BYTES
    assert storage.model_bytes == 2 * SIZE + TEXT_BYTES
    (host,) = storage.hosts
    most = storage.disk_bytes(host.checkpoint_bytes or 0, host.model_bytes or 0)
    assert most == 3 * (storage.checkpoint_bytes or 0)
    assert storage_of(*overrides, "task.save_model=false").model_bytes == 0
    if "zero=stage3" in overrides:  # that of an adapter has the adapter alone
        plan = composed([*LLAMA, "hardware=a100x8", "adapter=lora"]).plan
        assert 0 < plan.num_trained < SIZE / 50
        assert plan.storage.checkpoint_bytes == 12 * plan.num_trained + TEXT_BYTES
        assert plan.storage.model_bytes == 2 * plan.num_trained + TEXT_BYTES


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), 2 * SIZE),
        (("model.trained_dtype=fp32",), 4 * SIZE),
        (("model.trained_dtype=null",), None),
        (("model.init=scratch", "model.tokenizer=demo"), 0),
    ],
)
def test_weights_of_the_hub_lie_in_its_cache(words, expected) -> None:
    assert host_of(*words).download_bytes == expected
    done = composed([*LLAMA, "hardware=a100x8", *words])
    here = replace(done.experiment.model, path="/models/llama")
    assert download_bytes(replace(done.experiment, model=here), done.plan) == 0


def test_hosts_that_differ_have_one_disk_or_what_their_ranks_write() -> None:
    storage = storage_of("hardware=a100x2_v100x2", "zero=stage3")
    assert [one.hosts for one in storage.hosts] == [("node-a",), ("node-b",)]
    # One directory for all.
    assert {one.checkpoint_bytes for one in storage.hosts} == {storage.checkpoint_bytes}
    assert not storage.private
    storage = storage_of("hardware=a100x2_v100x2", "zero=stage3", "launch=rsync")
    assert storage.private
    assert storage.checkpoints_at_once == 5, "two more while they are collected"
    near, far = storage.hosts
    assert near.checkpoint_bytes == far.checkpoint_bytes == -(-(storage.checkpoint_bytes or 0) // 2)
    assert (near.model_bytes, far.model_bytes) == (storage.model_bytes, 0)


@pytest.mark.usefixtures("made_up_traces")
def test_offload_to_ram() -> None:
    """fp32 weights, two moments, the gradient, and what goes back in 16 bits; page-locked memory in
    powers of two."""
    host = traced_host_of("zero=stage2_offload", "zero.grad_accum_dtype=bf16")
    plain = traced_host_of("zero=stage2")
    assert plain.offload_bytes == plain.nvme_bytes == 0
    # NCCL goes through shared memory between the GPUs of a host.
    assert plain.shm_bytes == 8 * NCCL_CHANNELS * NCCL_CHANNEL_BYTES
    assert 200 * MIB < plain.shm_bytes < 512 * MIB
    unlocked = traced_host_of(
        "zero=stage2_offload", "zero.grad_accum_dtype=bf16", "zero.pin_memory=false"
    )
    # Sums over micro steps, and a buffer for the largest gradient.
    assert unlocked.offload_bytes == pytest.approx(
        SIZE * (12 + 4 + 2 + 2) + 8 * 2 * 128_256 * 4096, rel=0.03
    )
    shard = SIZE // 8
    locked = [4 * shard, 4 * shard, 2 * shard]
    rounding = sum((1 << (size - 1).bit_length()) - size for size in locked)
    assert host.offload_bytes - unlocked.offload_bytes == pytest.approx(8 * rounding, rel=0.001)
    assert host.ram_bytes == 8 * 2 * GIB + (host.offload_bytes or 0)


def test_offload_to_nvme() -> None:
    """As DeepSpeed swaps: weights, moments and gradients in fp32, parameters in 16 bits; in RAM
    the sums of gradients, the first 10^9 parameters of a rank, and the buffers."""
    done = composed([*LLAMA, "hardware=a100x8", "zero=infinity", "zero.nvme_path=/nvme"])
    (host,) = done.plan.storage.hosts
    assert host.nvme_bytes == pytest.approx(SIZE * (16 + 2), rel=1e-6)
    shard = SIZE // 8
    sums = {"fp32": 4, "bf16": 2}[done.plan.grad_accum_dtype]
    buffers = 2 * 5 * 10**8 + 4 * 4 * 10**9
    rounding = (1 << (sums * shard - 1).bit_length()) - sums * shard
    stays = sums * shard + 2 * 10**9
    assert host.offload_bytes == pytest.approx(8 * (stays + buffers + rounding), rel=0.001)


@pytest.mark.usefixtures("made_up_traces")
def test_what_cpu_ranks_train_in_is_ram() -> None:
    words = ["experiment=demo", "data.seq_len=1024"]
    done = planned(words)
    (host,) = done.plan.storage.hosts
    (memory,) = done.plan.memory
    of_rank = memory.total_gib - 0.6
    assert memory.context_gib > 0.6, "what it has freed is RAM, too"
    assert host.training_bytes == pytest.approx(2 * of_rank * GIB, abs=2)
    assert host.shm_bytes == 0, "DeepSpeed's all-reduce through /dev/shm is not used"
    # Copies for saves are made only where there is memory for them.
    forced = planned([*words, "checkpoint.background=always"]).plan.storage
    assert (forced.hosts[0].ram_bytes or 0) - host.ram_bytes == host.saves_bytes


def test_a_model_that_is_not_known_is_said_to_be_unknown() -> None:
    done = unsized(["model=hf", "model.path=owner/name", "hardware=a100x8"])
    storage = done.plan.storage
    assert done.plan.num_parameters == 0
    assert (storage.checkpoint_bytes, storage.model_bytes) == (None, None)
    (host,) = storage.hosts
    assert (host.ram_bytes, host.nvme_bytes) == (None, None)
    assert host.processes_bytes == 8 * 2 * GIB


def stored_again(done: Composed) -> Plan:
    return replace(done.plan, storage=plan_storage(done.experiment, done.plan))


@pytest.mark.usefixtures("made_up_traces")
def test_too_little_ram_is_a_warning() -> None:
    done = planned([*LLAMA, "hardware=a100x8", "zero=stage2_offload"])
    assert not [text for text in done.plan.warnings if "RAM" in text]
    done.experiment.hardware.hosts[0].memory_gib = 128
    plan = stored_again(done)
    (text,) = (text for text in plan.warnings if "RAM" in text)
    assert "localhost: " in text
    assert "128.0 GiB available (hardware.hosts[].memory_gib)" in text
    assert "zero=infinity zero.nvme_path=" in text
    done.experiment.hardware.hosts[0].memory_gib = 1024
    assert stored_again(done).warnings == done.plan.warnings


@pytest.mark.parametrize(("capacity", "text"), [(1.38, "1.38"), (139.8, "140")])
def test_what_a_device_has_is_said_as_exactly_as_what_it_needs(capacity: float, text: str) -> None:
    used = MemoryPlan("gpu", 995, 1, 1, 1, 1, 1, 0, capacity_gib=capacity)
    assert f"gpu: 1000.0 GiB predicted, {text} GiB available" in used.warning
