"""From a validated experiment to a plan: hosts, ranks, precision, batch, memory. Pure.

``python -m llmx plan ...`` prints it; nothing is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from llmx.config.accelerators import ACCELERATORS
from llmx.config.hardware_rules import on_cpus
from llmx.config.schema import (
    BatchConfig,
    DataConfig,
    DeviceConfig,
    Experiment,
    HardwareConfig,
    HostConfig,
    LaunchConfig,
    ModelConfig,
    ZeroConfig,
)
from llmx.errors import ConfigError
from llmx.plan.adapter import adapter_size, trained_parameters
from llmx.plan.balance import FS, balanced_batch
from llmx.plan.batch import solve_batch, wanted_global_batch
from llmx.plan.by_device import RECOMPUTED, checkpointing_by_device, checkpointing_on, on_device
from llmx.plan.ds_config import bucket_sizes
from llmx.plan.geometry import Geometry, model_geometry
from llmx.plan.memory import (
    before_training_gib,
    predict_memory,
)
from llmx.plan.step_time import micro_step_exchange_s, with_time
from llmx.plan.storage import with_storage
from llmx.plan.types import (
    SUMMED,
    USABLE,
    BalancePlan,
    BatchPlan,
    FrozenNetwork,
    HostPlan,
    KnownSpeeds,
    MemoryPlan,
    Plan,
    RankPlan,
    RankSpeed,
)

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
ASSUMED_EFFICIENCY = 0.4
"""Part of the peak that a well-fed training step reaches; for predicted times only."""
USED_FLOPS = 1e12 * ASSUMED_EFFICIENCY
"""Of each TFLOP/s of the peak."""


def make_plan(
    exp: Experiment,
    *,
    local_names: frozenset[str] = LOCAL_NAMES,
    frozen: tuple[FrozenNetwork, ...] = (),
    logits: str = SUMMED,
    known: KnownSpeeds | None = None,
) -> Plan:
    """Plan a validated experiment whose hardware is resolved (``kind: static``).

    Args:
        local_names: names and addresses of this machine; a host among them needs no ssh.
        frozen: what its task has beside the network that it trains.
        logits: what the loss of its task needs (``Task.logits``).
        known: speeds to plan with where the ranks will measure them.
    """
    common: dict[str, Any] = {
        "local_names": local_names,
        "frozen": frozen,
        "logits": logits,
        "limits": dict[tuple[str, int], bool](),
    }
    plan = _planned(exp, **common, known=known)
    if plan.balance is not None and plan.balance.micro_step_fs is None and plan.peak_tflops:
        # The split decides how often ranks meet, and takes what that costs into account.
        cost = round(FS * micro_step_exchange_s(exp, plan))
        if cost and not exp.batch.weights:
            plan = _planned(exp, **common, known=known, micro_step_fs=cost)
    return with_storage(with_time(plan, exp), exp)


def _planned(
    exp: Experiment,
    *,
    local_names: frozenset[str],
    frozen: tuple[FrozenNetwork, ...],
    logits: str,
    known: KnownSpeeds | None,
    limits: dict[tuple[str, int], bool],
    micro_step_fs: int | None = None,
) -> Plan:
    """Without time and storage. ``micro_step_fs``: where no earlier run has measured it.
    ``limits``: by device and micro batch, whether it fits, as far as that was asked before."""
    hardware = exp.hardware
    hosts = tuple(_host(host, local_names) for host in hardware.hosts)
    used: dict[str, list[str]] = {}
    for host in hosts:
        used.setdefault(host.device, []).append(host.name)
    precision, reason = choose_precision(exp.precision, used, hardware.devices)

    placed = [index for index, host in enumerate(hosts) for _ in range(host.slots)]
    accelerator = hardware.devices[hosts[0].device].accelerator
    shape, adapter = model_geometry(exp.model), adapter_size(exp.model, exp.adapter)
    trained = trained_parameters(exp.model, exp.adapter)
    live = tuple(one for one in frozen if not one.before_training)

    def memory_of(ranks: tuple[RankPlan, ...], sums: str) -> tuple[MemoryPlan, ...]:
        return _memory(exp, shape, hosts, ranks, precision, accelerator, sums, live, logits)

    def fits(device: str, micro_batch: int) -> bool:
        if (device, micro_batch) not in limits:
            ranks = tuple(
                RankPlan(rank, index, device, micro_batch)
                for rank, index in enumerate(placed)
                if hosts[index].device == device
            )
            memory = memory_of(ranks, "")
            limits[device, micro_batch] = all(part.fits for part in memory)
        return limits[device, micro_batch]

    batch, balance = _batch(
        exp,
        [hosts[index] for index in placed],
        precision,
        per_token=0.0
        if shape is None
        else shape.flops_per_token(exp.data.seq_len, trained=trained)
        + sum(2.0 * one.num_parameters for one in live),
        fits=fits,
        known=known,
        micro_step_fs=micro_step_fs,
        overlap=bool(bucket_sizes(exp.model, exp.zero, accelerator)["overlap"]),
    )
    ranks = tuple(
        RankPlan(rank, index, hosts[index].device, batch.micro_batches[rank])
        for rank, index in enumerate(placed)
    )

    def memory_with(sums: str) -> tuple[MemoryPlan, ...]:
        return memory_of(ranks, sums)

    grad_accum = choose_grad_accum(
        exp.zero,
        precision,
        accumulation=batch.accumulation,
        fits=lambda sums: all(part.fits for part in memory_with(sums)),
    )
    memory = memory_with(grad_accum)
    peaks = [hardware.devices[rank.device].peak_tflops.get(precision, 0.0) for rank in ranks]
    ways = checkpointing_by_device(exp)
    return Plan(
        hosts=hosts,
        ranks=ranks,
        accelerator=accelerator,
        precision=precision,
        precision_reason=reason,
        batch=batch,
        transport=_transport(exp.launch, hosts),
        master_addr=_master_addr(hardware, hosts),
        num_parameters=(shape.num_parameters + (adapter.added if adapter else 0) if shape else 0),
        peak_tflops=sum(peaks) if all(peaks) else 0.0,
        memory=memory,
        total_steps=exp.task.steps,
        notes=(
            *_notes(exp, hosts, precision),
            *_of_balance(exp, ranks, precision, balance),
            *_of_frozen(exp, frozen, memory, precision, len(ranks)),
        ),
        num_trained=trained,
        frozen=frozen,
        logits=logits,
        grad_accum_dtype=grad_accum,
        balance=balance,
        attention=tuple(
            (name, attention_for(exp.model, exp.data, hardware.devices[name], precision, shape))
            for name in used
        ),
        checkpointing=tuple(ways.items()) if len(set(ways.values())) > 1 else (),
    )


def attention_for(
    model: ModelConfig,
    data: DataConfig,
    device: DeviceConfig,
    precision: str,
    shape: Geometry | None = None,
) -> str:
    """The attention for packed rows on this type of device; the ranks try it at the start.

    ``varlen`` is PyTorch's flash kernel for rows of any length: 16 bits, and GPUs from compute
    capability 8.0 on, the first that compute bf16. ``segments`` runs row by row on every GPU. Both
    are causal: what sees its whole row has a mask.
    """
    if model.attention != "auto":
        return model.attention
    if shape is not None and not shape.causal:
        return "eager" if shape.keeps_scores else "sdpa"
    if not ACCELERATORS[device.accelerator].is_gpu:
        return "sdpa"
    if data.layout == "padded":
        return "sdpa"  # rows of their own need no mask
    return "varlen" if precision != "fp32" and "bf16" in device.precisions else "segments"


def _host(host: HostConfig, local_names: frozenset[str]) -> HostPlan:
    address = host.address or host.name
    return HostPlan(
        name=host.name,
        address=address,
        ssh_port=host.ssh_port,
        user=host.user,
        identity_file=host.identity_file,
        slots=host.slots,
        device=host.device,
        interface=host.interface,
        is_local=address in local_names or host.name in LOCAL_NAMES,
    )


def _transport(launch: LaunchConfig, hosts: tuple[HostPlan, ...]) -> str:
    if launch.transport != "auto":
        return launch.transport
    return "local" if len(hosts) == 1 and hosts[0].is_local else "pdsh"


def _master_addr(hardware: HardwareConfig, hosts: tuple[HostPlan, ...]) -> str:
    if hardware.master_addr:
        return hardware.master_addr
    if len(hosts) == 1 and hosts[0].is_local:
        return "127.0.0.1"
    return hosts[0].address


def _memory(
    exp: Experiment,
    shape: Geometry | None,
    hosts: tuple[HostPlan, ...],
    ranks: tuple[RankPlan, ...],
    precision: str,
    accelerator: str,
    grad_accum: str,
    frozen: tuple[FrozenNetwork, ...],
    logits: str,
) -> tuple[MemoryPlan, ...]:
    if shape is None:
        return ()
    plans = []
    for name in dict.fromkeys(rank.device for rank in ranks):
        plans.append(
            predict_memory(
                on_device(exp, name),
                shape,
                device_name=name,
                device=exp.hardware.devices[name],
                micro_batch=max(rank.micro_batch for rank in ranks if rank.device == name),
                world_size=sum(host.slots for host in hosts),
                slots=max(host.slots for host in hosts if host.device == name),
                precision=precision,
                buckets=bucket_sizes(exp.model, exp.zero, accelerator),
                grad_accum_dtype=grad_accum,
                frozen=frozen,
                logits=logits,
            )
        )
    return tuple(plans)


def _notes(exp: Experiment, hosts: tuple[HostPlan, ...], precision: str) -> Iterator[str]:
    trained = exp.model.trained_dtype
    if exp.model.init == "pretrained" and trained == "bf16" and precision == "fp16":
        yield (
            f"{exp.model.name or exp.model.path} was trained in bf16; its activations may overflow "
            "fp16 (loss scale falls, then NaN). If it does: precision=fp32, or devices with bf16."
        )
    if (
        not on_cpus(exp.hardware)
        and exp.model.attention in ("sdpa", "eager")
        and exp.data.layout != "padded"
    ):
        yield (
            f"model.attention={exp.model.attention} isolates packed rows with a mask of "
            f"{exp.data.seq_len:,} x {exp.data.seq_len:,}, kept for each layer, and computes what "
            "it hides. model.attention=auto needs no mask."
        )
    if unpriced := without_price(exp.hardware, hosts):
        yield (
            f"hardware.price_per_hour has no price for {', '.join(unpriced)}, so the cost of the "
            "run is unknown."
        )
    if exp.zero.quantized_gradients and len(hosts) == 1:
        yield ("zero.quantized_gradients (qgZ) has no effect on one node.")
    if exp.hardware.env.get("NCCL_IB_DISABLE") == "1" and exp.zero.stage == 3 and len(hosts) > 2:
        yield (
            "NCCL_IB_DISABLE=1 with ZeRO-3 makes every added node slower; remove it where "
            "InfiniBand or RoCE works."
        )


def without_price(hardware: HardwareConfig, hosts: Sequence[HostPlan]) -> list[str]:
    """Types of devices that have none, where others have one."""
    prices = hardware.price_per_hour
    return [
        name for name in dict.fromkeys(h.device for h in hosts) if prices and name not in prices
    ]


def _of_balance(
    exp: Experiment, ranks: tuple[RankPlan, ...], precision: str, balance: BalancePlan | None
) -> Iterator[str]:
    """What the split over ranks leaves undone."""
    names = dict.fromkeys(rank.device for rank in ranks)
    if len(names) > 1 and balance is None:
        yield (
            f"Devices differ and batch.balance={exp.batch.balance}: in every step the faster ones "
            "wait for the slower. batch.balance=auto gives each rank as much as it computes in the "
            "same time."
        )
    unknown = [name for name in names if not exp.hardware.devices[name].peak_tflops.get(precision)]
    if balance is not None and balance.method == "spec" and not balance.pending and unknown:
        yield (
            f"batch.balance=spec: hardware.devices.{unknown[0]} has no peak_tflops at {precision}, "
            "so every device counts as equally fast. Set it, or batch.balance=measured."
        )


def _batch(
    exp: Experiment,
    placed: list[HostPlan],
    precision: str,
    *,
    per_token: float,
    fits: Callable[[str, int], bool],
    known: KnownSpeeds | None = None,
    micro_step_fs: int | None = None,
    overlap: bool = False,
) -> tuple[BatchPlan, BalancePlan | None]:
    """The split of a step over the ranks, on ``placed`` hosts; evenly, or by their speeds.

    ``per_token``: FLOPs of a token, 0 unknown. ``fits``: whether a micro batch has room on a device
    type.
    """
    config, seq_len, world = exp.batch, exp.data.seq_len, len(placed)
    method = _method(config, {host.device for host in placed})
    if method == "even" and not config.rebalance:
        return solve_batch(config, seq_len=seq_len, world=world), None
    devices = exp.hardware.devices
    peaks = [devices[host.device].peak_tflops.get(precision, 0.0) for host in placed]
    weights = peaks if all(peaks) and method != "even" else [1.0] * world
    if method == "weights":
        named = config.weights
        weights = [named.get(host.name, named.get(host.device, 1.0)) for host in placed]
    elif method != "even" and len(set(checkpointing_by_device(exp).values())) > 1:
        weights = [
            weight / RECOMPUTED[checkpointing_on(exp, host.device)]
            for weight, host in zip(weights, placed, strict=True)
        ]
    timed = per_token and all(peaks) and method not in ("weights", "even")
    scale = per_token * FS / USED_FLOPS if timed else max(weights) * FS / 1e6
    speeds = tuple(RankSpeed(0, max(1, round(scale / weight))) for weight in weights)
    limits = {
        name: _limit(config.micro_batch, partial(fits, name))
        for name in {host.device for host in placed}
    }
    balance = BalancePlan(
        method=method,
        speeds=speeds,
        limits=tuple(limits[host.device] for host in placed),
        same_steps=exp.zero.stage >= 2,
        accumulation=config.accumulation,
        micro_step_fs=micro_step_fs,
        overlap=overlap and exp.zero.stage >= 2,
        pending=method == "measured",
    )
    # What is not measured yet must not decide how many samples a step has.
    of_step = [1.0] * world if balance.pending else weights
    size = wanted_global_batch(config, seq_len=seq_len, weights=of_step)
    if balance.pending and known is not None and len(known.speeds) == world:
        balance = replace(
            balance,
            speeds=known.speeds,
            micro_step_fs=known.micro_step_fs,
            source=known.source,
        )
    return balanced_batch(size, balance, seq_len=seq_len), balance


def _method(config: BatchConfig, devices: set[str]) -> str:
    if config.weights:
        return "weights"
    if config.balance == "auto":
        return "measured" if len(devices) > 1 else "even"
    return "even" if config.balance == "off" else config.balance


def _limit(micro_batch: int, fits: Callable[[int], bool]) -> int:
    """The largest micro batch that fits, at most ``micro_batch``; that where none does: the plan
    warns of it."""
    if fits(micro_batch) or not fits(1):
        return micro_batch
    low, high = 1, micro_batch
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _of_frozen(
    exp: Experiment,
    frozen: tuple[FrozenNetwork, ...],
    memory: tuple[MemoryPlan, ...],
    precision: str,
    world_size: int,
) -> Iterator[str]:
    """What is not known of frozen networks, and those that are too large before training."""
    for one in frozen:
        if memory and not one.num_parameters:
            yield (
                f"The memory of the model {one.name!r} of task={exp.task.kind} is not counted: the "
                "size of its architecture is not known on this machine. Give a local directory of "
                "it, or leave room."
            )
        needed = before_training_gib(one, exp.zero, precision, world_size)
        for part in memory:
            if one.before_training and part.capacity_gib and needed > USABLE * part.capacity_gib:
                shard = " zero=stage3 shards it over the ranks." if exp.zero.stage < 3 else ""
                yield (
                    f"{part.device}: the model {one.name!r} of task={exp.task.kind} takes "
                    f"{needed:.1f} GiB before training, {part.capacity_gib:.0f} GiB available."
                    f"{shard}"
                )


# --- Precision -----------------------------------------------------------------------------------


def choose_precision(
    wanted: str, hosts_by_device: Mapping[str, list[str]], devices: Mapping[str, DeviceConfig]
) -> tuple[str, str]:
    """``(precision, reason)`` for the device types in use.

    ``hosts_by_device``: device type -> names of the hosts that have it.
    Raises ConfigError when ``wanted`` is not supported by one of them; names the hosts.
    """
    if wanted != "auto":
        for name, hosts in hosts_by_device.items():
            supported = devices[name].precisions
            if wanted not in supported:
                common = _best(hosts_by_device, devices)
                raise ConfigError(
                    f"precision={wanted}: {name} ({', '.join(hosts)}) computes "
                    f"{', '.join(supported)} only. Use precision={common} or precision=auto."
                )
        return wanted, "set by precision="
    best = _best(hosts_by_device, devices)
    if not all(ACCELERATORS[devices[name].accelerator].is_gpu for name in hosts_by_device):
        return best, "CPU ranks compute fp32 fastest and exactly"
    if best == "fp32":
        lacking = _without(("bf16", "fp16"), hosts_by_device, devices)
        return best, f"{lacking} computes neither bf16 nor fp16"
    if best == "fp16":
        return best, f"{_without(('bf16',), hosts_by_device, devices)} has no bf16"
    return best, "every device supports it"


def _without(
    precisions: tuple[str, ...],
    hosts_by_device: Mapping[str, list[str]],
    devices: Mapping[str, DeviceConfig],
) -> str:
    """The device types that have none of ``precisions``, with their hosts; where each has one, but
    not the same one, all of them."""
    named = {name: f"{name} ({', '.join(hosts)})" for name, hosts in hosts_by_device.items()}
    lacking = [
        text for name, text in named.items() if not set(precisions) & set(devices[name].precisions)
    ]
    return " and ".join(lacking or named.values())


def choose_grad_accum(
    zero: ZeroConfig, precision: str, *, accumulation: int, fits: Callable[[str], bool]
) -> str:
    """In what gradients are summed over micro steps: ``fp32`` or ``precision``.

    ``fits``: whether the run fits its devices with that. Raises ConfigError for what DeepSpeed
    cannot do.
    """
    wanted, stage = zero.grad_accum_dtype, zero.stage
    if wanted == "auto":
        if precision == "fp32" or stage == 0:
            return precision
        # A single micro step sums nothing; at stage 2 it takes no more memory all the same, since
        # the update needs fp32 anyway.
        useful = accumulation > 1 or stage == 2
        return "fp32" if useful and fits("fp32") else precision
    if wanted == "precision":
        return precision
    if wanted == "fp32" and precision != "fp32" and stage == 0:
        raise ConfigError(
            f"zero.grad_accum_dtype=fp32 with zero.stage=0 and precision={precision}: DeepSpeed "
            f"sums in {precision} at stage 0. Set zero=stage1, or zero.grad_accum_dtype=auto."
        )
    if wanted not in ("fp32", precision):
        raise ConfigError(
            f"zero.grad_accum_dtype={wanted} with precision={precision}: gradients are summed in "
            f"fp32 or in the run's precision. Set zero.grad_accum_dtype=fp32 or =auto."
        )
    return wanted


def _best(hosts_by_device: Mapping[str, list[str]], devices: Mapping[str, DeviceConfig]) -> str:
    used = [devices[name] for name in hosts_by_device]
    if not all(ACCELERATORS[device.accelerator].is_gpu for device in used):
        return "fp32"
    for precision in ("bf16", "fp16"):
        if all(precision in device.precisions for device in used):
            return precision
    return "fp32"
