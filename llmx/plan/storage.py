"""The memory and disk of a plan's hosts beside device memory: RAM, NVMe, disk, ``/dev/shm``. Pure.

    python -m llmx plan model=llama3_8b hardware=a100x8 zero=infinity zero.nvme_path=/nvme

Bytes that follow from the model, the ZeRO stage and ``checkpoint.keep``; what is assumed beside
them is a constant below. What is not known before data and model are there is None, and shown as
unknown. ``llmx.hardware.compare`` compares it with what a host has.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import PurePath

from llmx.config.accelerators import ACCELERATORS
from llmx.config.optimizers import optimizer_of
from llmx.config.schema import CheckpointConfig, Experiment
from llmx.plan.memory import BYTES, GIB, optimizer_bytes
from llmx.plan.types import HostStorage, Plan, StoragePlan

MIB = 1024**2

PINNED = 2
"""Checkpoints that are not removed yet, since they are being collected from disks of other hosts
(``llmx.launch.checkpoint_sync``)."""
TEXT_BYTES = 96 * 1024
"""Manifest, state, config, plan and tokenizer in a checkpoint: assumed."""

NCCL_CHANNEL_BYTES = 4 * MIB + 512 * 1024 + 4_915_200
"""Buffers of one channel of a connection through ``/dev/shm``, for NCCL's three protocols: Simple
(``NCCL_BUFFSIZE``, 4 MiB), LL and LL128 (``src/include/device.h``)."""
NCCL_CHANNELS = 4
"""Channels of a rank on a host whose GPUs do not reach each other (P2P): assumed. With P2P none
goes through ``/dev/shm``."""

SWAPPED_FROM_BYTES = MIB
"""DeepSpeed leaves smaller pieces in RAM (``swap_tensor/utils.py: MIN_AIO_BYTES``)."""
PARAMETER_BUFFERS, PARAMETER_BUFFER_ELEMENTS = 5, 10**8
"""``offload_param.buffer_count`` and ``buffer_size`` of DeepSpeed 0.19.8, allocated at once."""
OPTIMIZER_BUFFERS = 4
"""``offload_optimizer.buffer_count``: each of the largest group that is updated at once, fp32."""
PARAMETERS_IN_RAM = 10**9
"""``offload_param.max_in_cpu``: elements of a rank that stay in RAM beside their files."""


def plan_storage(exp: Experiment, plan: Plan) -> StoragePlan:
    """The storage of every host; hosts that take the same stand together."""
    is_known = plan.num_parameters > 0
    checkpoint = checkpoint_bytes(exp, plan) if is_known else None
    model = exported_bytes(exp, plan) if is_known else None
    private = exp.launch.sync == "rsync" and len(plan.hosts) > 1
    pinned = PINNED if private else 0
    retained, at_once = checkpoint_counts(exp.checkpoint, plan.total_steps, pinned=pinned)
    accelerator = ACCELERATORS[plan.accelerator]
    ram, buffers, files = _offload(exp, plan)

    @functools.cache
    def storage_of(
        device: str, slots: int, ram_gib: float | None, *, first: bool, whole: bool
    ) -> HostStorage:
        """``first``: the host has rank 0; ``whole``: whole checkpoints lie on its disk."""
        memory = next((part for part in plan.memory if part.device == device), None)
        # ``MemoryPlan`` has the RAM of the largest host with these devices.
        ranks_there = plan.slots_on(device)
        training = offload = saves = nvme = None
        if memory is not None:
            # A CPU rank's device memory is RAM of its host, and so is what it has freed.
            used_gib = 0.0 if accelerator.is_gpu else memory.total_gib - accelerator.context_gib
            training = math.ceil(slots * used_gib * GIB)
            saves = math.ceil(slots * memory.saves_host_gib * GIB / ranks_there)
            offload = math.ceil(slots * memory.host_gib * GIB / ranks_there)
        if is_known:
            nvme = slots * files
            if ram is not None:
                offload = slots * ram
            if offload is not None:
                offload += slots * buffers
        pushes = is_known and first and plan.rollout_hosts
        share = 1.0 if whole else slots / plan.world_size
        return HostStorage(
            hosts=(),
            ranks=slots,
            processes_bytes=slots * math.ceil(accelerator.process_gib * GIB),
            loading_bytes=_loading(exp, plan, slots=slots, first=first),
            training_bytes=training,
            offload_bytes=offload,
            saves_bytes=saves,
            saves_optional=exp.checkpoint.background == "auto",
            ram_has_bytes=None if ram_gib is None else math.floor(ram_gib * GIB),
            nvme_bytes=nvme,
            checkpoint_bytes=None if checkpoint is None else math.ceil(share * checkpoint),
            model_bytes=model if whole or first else 0,
            shm_bytes=slots * NCCL_CHANNELS * NCCL_CHANNEL_BYTES
            if slots > 1 and accelerator.is_gpu
            else 0,
            push_bytes=_pushed_bytes(plan) if pushes else 0,
            download_bytes=download_bytes(exp, plan),
        )

    rams = [host.memory_gib for host in exp.hardware.hosts]
    alike: dict[HostStorage, list[str]] = {}
    for index, host in enumerate(plan.hosts):
        ram_gib = rams[index] if index < len(rams) else None
        # On disks of their own hosts have what their ranks write; the launching machine collects.
        whole = not private or host.is_local
        storage = storage_of(host.device, host.slots, ram_gib, first=index == 0, whole=whole)
        alike.setdefault(storage, []).append(host.name)
    return StoragePlan(
        hosts=tuple(replace(storage, hosts=tuple(names)) for storage, names in alike.items()),
        checkpoint_bytes=checkpoint,
        checkpoints_kept=retained,
        checkpoints_at_once=at_once,
        model_bytes=model,
        private=private,
    )


# --- Disk ----------------------------------------------------------------------------------------


def checkpoint_bytes(exp: Experiment, plan: Plan) -> int:
    """Bytes of one checkpoint: fp32 weights and the optimizer's states of what is trained, for any
    ZeRO stage and number of ranks; frozen weights (``model.freeze``) as they are in memory. The
    frozen base of an adapter is not in it."""
    states = 4 + optimizer_bytes(exp.optim.kind, "fp32")
    size_bytes: float = states * plan.trained
    apart = optimizer_of(exp.optim.kind).matrices_apart
    if apart and exp.adapter.kind == "none" and plan.network is not None:
        size_bytes += 4 * min(plan.network.num_outside, plan.trained)
    if exp.adapter.kind == "none":
        size_bytes += BYTES[plan.precision] * (plan.num_parameters - plan.trained)
    return math.ceil(size_bytes) + TEXT_BYTES


def exported_bytes(exp: Experiment, plan: Plan) -> int:
    """Bytes of ``model/``, which is written at the end: the adapter alone where there is one."""
    network = plan.network
    if not exp.task.save_model or network is None:
        return 0
    elements = network.num_parameters if exp.adapter.kind == "none" else network.num_trained
    return BYTES[plan.precision] * elements + TEXT_BYTES


def download_bytes(exp: Experiment, plan: Plan) -> int | None:
    """Bytes of the weights of a model of the Hub, which lie in its cache as they were trained."""
    model, network = exp.model, plan.network
    if model.init == "scratch" or not model.path or PurePath(model.path).is_absolute():
        return 0
    if network is None or model.trained_dtype is None:
        return None
    added = network.num_trained if exp.adapter.kind != "none" else 0
    return BYTES[model.trained_dtype] * (network.num_parameters - added)


def checkpoint_counts(
    config: CheckpointConfig, total_steps: int | None, *, pinned: int = 0
) -> tuple[int | None, int | None]:
    """How many checkpoints stay at most, and how many are there at once while one is written: what
    ``checkpoint.keep`` does not name is removed after the next one is committed. None: no limit.
    ``pinned``: so many more stay while they are copied elsewhere."""
    saves_ever = bool(
        config.every_steps or config.every_minutes or config.at_end or config.on_signal
    )
    if not saves_ever:
        return 0, 0
    saves = math.inf
    if not config.every_steps and not config.every_minutes:
        saves = 1
    elif not config.every_minutes and total_steps is not None:
        interval = config.every_steps or 1
        saves = total_steps // interval + bool(config.at_end and total_steps % interval)
        saves = max(saves, int(config.at_end or config.on_signal))
    keep = config.keep
    stay: float = keep.last + keep.best + pinned
    if keep.every:
        between = math.lcm(keep.every, config.every_steps or 1)
        stay += math.inf if total_steps is None else total_steps // between
    retained, at_once = min(saves, stay), min(saves, stay + 1)
    return _finite(retained), _finite(at_once)


def _finite(value: float) -> int | None:
    return None if math.isinf(value) else int(value)


# --- RAM, NVMe, /dev/shm -------------------------------------------------------------------------


def _loading(exp: Experiment, plan: Plan, *, slots: int, first: bool) -> int | None:
    """Bytes beside the weights while they are read or drawn: the largest one, at most in fp32.
    Pages of mapped files do not count, the kernel takes them back."""
    network = plan.network
    if network is None:
        return None
    largest = 4 * network.hidden_size * max(network.vocab_size, network.intermediate_size)
    if exp.zero.stage >= 3:
        return largest * first  # rank 0 reads and broadcasts
    return slots * largest


def _offload(exp: Experiment, plan: Plan) -> tuple[int | None, int, int]:
    """Bytes of one rank's offload: what stays in RAM where something is on NVMe (None: all of it,
    as the memory plan has it); buffers through which it passes, with what page-locked memory is
    rounded up by; files below ``zero.nvme_path``. By DeepSpeed 0.19.8's rules: ``swap_tensor/
    partitioned_param_swapper.py``, ``optimizer_utils.py``; ``zero/stage3.py:
    _create_param_groups_fp16_flat_cpu_memory``."""
    zero, width = exp.zero, BYTES[plan.precision]
    shard = -(-plan.trained // (plan.world_size if zero.stage >= 1 else 1))
    group = min(shard, zero.sub_group_size)
    sums = BYTES[plan.grad_accum_dtype or plan.precision] * shard  # grad_partitions_flat_buffer
    parameters = width * -(-plan.num_parameters // plan.world_size)
    states = (4 + optimizer_bytes(exp.optim.kind, "fp32") + 4) * shard  # with the gradients, fp32
    ram = buffers = files = 0
    locked: list[int] = []
    if zero.offload_optimizer != "none":
        ram += sums
        locked.append(sums)
    if zero.offload_optimizer == "cpu":
        ram += states
        if zero.stage < 3:
            # single_partition_of_fp32_groups, its gradient, param_buffer_of_bit16_for_cpu_offload
            locked = [4 * shard, 4 * shard, width * shard]
    elif zero.offload_optimizer == "nvme":
        buffers += 4 * OPTIMIZER_BUFFERS * group
        files += states if 4 * group >= SWAPPED_FROM_BYTES else 0
    if zero.offload_param == "cpu":
        ram += parameters
        locked.append(parameters)
    elif zero.offload_param == "nvme":
        ram += width * min(shard, PARAMETERS_IN_RAM)
        buffers += width * PARAMETER_BUFFERS * PARAMETER_BUFFER_ELEMENTS
        files += parameters if parameters >= SWAPPED_FROM_BYTES else 0
    if zero.pin_memory and plan.on_gpus:  # PyTorch allocates it in powers of two
        buffers += sum((1 << max(0, n - 1).bit_length()) - n for n in locked)
    swaps = "nvme" in (zero.offload_param, zero.offload_optimizer)
    return ram if swaps else None, buffers, files


def _pushed_bytes(plan: Plan) -> int:
    """Bytes of the weights for rollout servers: those of the last push, gathered and packed new
    ones; and what is frozen, packed, at first also gathered (``llmx.rollout.client``)."""
    trained, frozen = plan.trained, plan.num_parameters - plan.trained
    return BYTES[plan.precision] * (2 * trained + frozen + max(trained, frozen))
