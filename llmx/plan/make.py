"""From a validated experiment to a plan: hosts, ranks, precision, batch, memory. Pure.

``python -m llmx plan ...`` prints it; nothing is launched.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from llmx.config.accelerators import ACCELERATORS
from llmx.config.addresses import LOCAL_NAMES
from llmx.config.by_host import keys_of
from llmx.config.hardware_rules import no_ranks_there
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
from llmx.plan.balance import FS, balanced_batch
from llmx.plan.batch import solve_batch, wanted_global_batch
from llmx.plan.by_device import RECOMPUTED, checkpointing_by_device, checkpointing_on
from llmx.plan.ds_config import bucket_sizes
from llmx.plan.knowledge import NO_KNOWLEDGE, Knowledge
from llmx.plan.memory import before_training_gib, memory_of, samples_of
from llmx.plan.rollout_time import ROWS, server_problem
from llmx.plan.step_time import (
    LearnedSpeeds,
    flops_by_device,
    micro_step_exchange_s,
    step_time,
)
from llmx.plan.storage import plan_storage
from llmx.plan.types import (
    USABLE,
    BalancePlan,
    BatchPlan,
    DrawnSamples,
    HostPlan,
    MemoryPlan,
    Plan,
    RankPlan,
    RankSpeed,
)

ROOMY = 0.9
"""The part of a device's memory up to which completions are drawn at once."""
USED_FLOPS = 0.4e12
"""FLOP/s that a well-fed training step reaches of each TFLOP/s of the peak; for the split alone."""


def make_plan(exp: Experiment, knowledge: Knowledge = NO_KNOWLEDGE) -> Plan:
    """Plan a validated experiment whose hardware is resolved (``kind: static``)."""
    hardware, networks = exp.hardware, knowledge.traces.networks
    local_names = knowledge.local_names
    hosts = tuple(_host(host, local_names) for host in hardware.hosts)
    hosts_by_device: dict[str, list[str]] = {}
    for host in hosts:
        hosts_by_device.setdefault(host.device, []).append(host.name)
    rollout_hosts = tuple(_host(host, local_names) for host in exp.rollout.servers)
    computing_hosts = {name: list(names) for name, names in hosts_by_device.items()}
    for host in rollout_hosts:  # CPUs draw in any precision
        if ACCELERATORS[hardware.devices[host.device].accelerator].is_gpu:
            computing_hosts.setdefault(host.device, []).append(host.name)
    precision, reason = choose_precision(exp.precision, computing_hosts, hardware.devices)
    placed = [index for index, host in enumerate(hosts) for _ in range(host.slots)]
    trained_networks = [network for network in networks.values() if network.num_trained]
    num_parameters = sum(network.num_parameters for network in trained_networks)
    num_trained = sum(network.num_trained for network in trained_networks)
    peaks = [hardware.devices[hosts[at].device].peak_tflops.get(precision, 0.0) for at in placed]
    checkpointing = checkpointing_by_device(exp)
    plan = Plan(
        hosts=hosts,
        ranks=tuple(RankPlan(rank, at, hosts[at].device, 1) for rank, at in enumerate(placed)),
        accelerator=hardware.devices[hosts[0].device].accelerator,
        precision=precision,
        precision_reason=reason,
        batch=BatchPlan(len(placed), 1, (1,) * len(placed), exp.data.seq_len),
        transport=_transport(exp.launch, exp.hardware, hosts),
        master_addr=_master_addr(hardware, hosts),
        num_parameters=num_parameters,
        peak_tflops=sum(peaks) if all(peaks) else 0.0,
        memory=(),
        total_steps=exp.task.steps,
        network=trained_networks[0] if trained_networks else None,
        num_trained=None if num_trained == num_parameters else num_trained,
        beside=tuple(
            replace(described, network=networks.get(described.name))
            for described in knowledge.beside
        ),
        attention=tuple(
            (name, attention_for(exp.model, exp.data, hardware.devices[name], precision))
            for name in hosts_by_device
        ),
        checkpointing=tuple(checkpointing.items()) if len(set(checkpointing.values())) > 1 else (),
        rollout_hosts=rollout_hosts,
    )

    def fits(device: str, micro_batch: int) -> bool:
        """Whether a micro batch has room on a type of device in a step that sums several."""
        alike = [rank for rank in plan.ranks if rank.device == device]
        sums = choose_grad_accum(exp.zero, precision, accumulation=2)
        trial = replace(
            plan,
            ranks=tuple(replace(rank, micro_batch=micro_batch) for rank in alike),
            batch=replace(plan.batch, accumulation=2),
            grad_accum_dtype=sums,
        )
        return all(part.fits for part in _memory(exp, trial, knowledge))

    batch, balance = _batch(exp, plan, fits=fits, learned=knowledge.learned(exp, plan))
    ranks = tuple(replace(rank, micro_batch=batch.micro_batches[rank.rank]) for rank in plan.ranks)
    sums = choose_grad_accum(exp.zero, precision, accumulation=batch.accumulation)
    plan = replace(plan, batch=batch, balance=balance, ranks=ranks, grad_accum_dtype=sums)
    if knowledge.drawn is not None:
        plan = replace(plan, drawn=_with_rows(exp, plan, knowledge.drawn, knowledge))
    plan = replace(plan, memory=_memory(exp, plan, knowledge))
    plan = replace(plan, notes=tuple(_notes(exp, plan)))
    return replace(
        plan,
        time=step_time(exp, plan, learned=knowledge.learned(exp, plan)),
        storage=plan_storage(exp, plan),
    )


def _memory(exp: Experiment, plan: Plan, knowledge: Knowledge) -> tuple[MemoryPlan, ...]:
    """The memory of each type of device; empty where the traces do not cover all."""
    memory = []
    for name in plan.devices:
        setting, size = checkpointing_on(exp, name), plan.micro_batch_on(name)
        trace = knowledge.traces.get(plan.attention_on(name), setting, size)
        if trace is None:
            return ()
        context_gib = knowledge.contexts_gib.get(name)
        memory.append(memory_of(exp, plan, trace, name, context_gib=context_gib))
    return tuple(memory)


NOT_CAUSAL = {"bert": "sdpa", "megatron-bert": "eager"}
"""Architectures that see their whole row -> the attention that they have for it."""


def attention_for(
    model: ModelConfig, data: DataConfig, device: DeviceConfig, precision: str
) -> str:
    """The attention for packed rows on this type of device; the ranks try it at the start.

    ``varlen`` is PyTorch's flash kernel for rows of any length: 16 bits, and GPUs from compute
    capability 8.0 on, the first that compute bf16. ``segments`` runs row by row on every GPU. Both
    are causal: what sees its whole row has a mask.
    """
    if model.attention != "auto":
        return model.attention
    if model.architecture in NOT_CAUSAL:
        return NOT_CAUSAL[model.architecture]
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
        fingerprint=host.fingerprint,
    )


def _transport(launch: LaunchConfig, hardware: HardwareConfig, hosts: tuple[HostPlan, ...]) -> str:
    if launch.transport != "auto":
        return launch.transport
    is_plain = len(hosts) == 1 and hosts[0].is_local and not keys_of(hardware.hosts[0])
    return "local" if is_plain else "ssh"


def _master_addr(hardware: HardwareConfig, hosts: tuple[HostPlan, ...]) -> str:
    if hardware.master_addr:
        return hardware.master_addr
    if len(hosts) == 1 and hosts[0].is_local:
        return "127.0.0.1"
    return hosts[0].address


def _notes(exp: Experiment, plan: Plan) -> Iterator[str]:
    hosts, trained = plan.hosts, exp.model.trained_dtype
    if problem := no_ranks_there(plan.accelerator):
        yield problem
    if exp.model.init == "pretrained" and trained == "bf16" and plan.precision == "fp16":
        yield (
            f"{exp.model.name or exp.model.path} was trained in bf16; its activations may overflow "
            "fp16 (loss scale falls, then NaN). If it does: precision=fp32, or devices with bf16."
        )
    if plan.on_gpus and exp.model.attention in ("sdpa", "eager") and exp.data.layout != "padded":
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
    yield from _of_balance(exp, plan)
    yield from _of_beside(exp, plan)
    yield from _of_drawing(exp, plan)


def _with_rows(
    exp: Experiment, plan: Plan, drawn: DrawnSamples, knowledge: Knowledge
) -> DrawnSamples:
    """Limit the completions at once to what the devices that draw have room for, whole groups."""

    def fits(rows: int) -> bool:
        trial = replace(plan, drawn=replace(drawn, rows=rows))
        servers = _servers_gib(exp, trial)
        ranks = _memory(exp, trial, knowledge)
        return all(
            not has or needed <= ROOMY * has
            for needed, has in [
                *((needed, exp.hardware.devices[name].memory_gib) for name, needed in servers),
                *((part.total_gib, part.capacity_gib) for part in ranks if part.drawing_gib),
            ]
        )

    rows = _limit(ROWS, fits)
    return replace(drawn, rows=max(rows - rows % drawn.group_size, min(rows, drawn.group_size)))


def _servers_gib(exp: Experiment, plan: Plan) -> Iterator[tuple[str, float]]:
    """The memory of a rollout server on each type of device that has one."""
    samples = samples_of(exp, plan)
    for name in dict.fromkeys(host.device for host in plan.rollout_hosts if samples):
        assert samples is not None
        context_gib = ACCELERATORS[exp.hardware.devices[name].accelerator].context_gib
        yield name, samples.server_gib(context_gib=context_gib)


def _of_drawing(exp: Experiment, plan: Plan) -> Iterator[str]:
    """Notes about fewer completions at once, and rollout servers that do not fit."""
    if plan.drawn is not None and plan.drawn.rows < ROWS:
        yield (
            f"Memory is left for at most {plan.drawn.rows} completions at once on each "
            f"{'rollout server' if plan.rollout_hosts else 'rank'} (otherwise {ROWS}): drawing "
            "takes longer. A smaller max_new_tokens or data.seq_len, or more memory left by "
            "training (zero=stage3, an offload), draws more at once."
        )
    for name, needed in _servers_gib(exp, plan):
        if problem := server_problem(name, needed, exp.hardware.devices[name].memory_gib):
            yield problem


def without_price(hardware: HardwareConfig, hosts: Sequence[HostPlan]) -> list[str]:
    """Types of devices that have none, where others have one."""
    prices = hardware.price_per_hour
    return [
        name for name in dict.fromkeys(h.device for h in hosts) if prices and name not in prices
    ]


def _of_balance(exp: Experiment, plan: Plan) -> Iterator[str]:
    """Notes about a split over ranks that leaves devices waiting."""
    names, balance, precision = plan.devices, plan.balance, plan.precision
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
    plan: Plan,
    *,
    fits: Callable[[str, int], bool],
    learned: LearnedSpeeds,
) -> tuple[BatchPlan, BalancePlan | None]:
    """The split of a step over the ranks; evenly, or by their speeds. ``fits``: whether a micro
    batch has room on a device type; ``learned``: the speeds that finished runs have shown, by which
    ranks share out until they have measured their own."""
    config, seq_len, world = exp.batch, exp.data.seq_len, plan.world_size
    placed = [plan.hosts[rank.host] for rank in plan.ranks]
    method = _method(config, set(plan.devices))
    if method == "even" and not config.rebalance:
        return solve_batch(config, seq_len=seq_len, world=world), None
    devices = exp.hardware.devices
    peaks = [devices[host.device].peak_tflops.get(plan.precision, 0.0) for host in placed]
    weights = peaks if all(peaks) and method != "even" else [1.0] * world
    if method == "weights":
        by_name = config.weights
        weights = [by_name.get(host.name, by_name.get(host.device, 1.0)) for host in placed]
    elif method != "even" and len(set(checkpointing_by_device(exp).values())) > 1:
        weights = [
            weight / RECOMPUTED[checkpointing_on(exp, host.device)]
            for weight, host in zip(weights, placed, strict=True)
        ]
    scale = max(weights) * FS / 1e6
    flops = flops_by_device(exp, plan)
    if flops and all(peaks) and method not in ("weights", "even"):
        scale = flops[plan.devices[0]].model * FS / USED_FLOPS
    speeds = tuple(RankSpeed(0, max(1, round(scale / weight))) for weight in weights)
    source = ""
    if flops and method == "measured" and set(plan.devices) <= set(learned.tflops):
        source = learned.source
        speeds = tuple(
            RankSpeed(0, round(flops[name].run * FS / 1e12 / learned.tflops[name]))
            for name in (host.device for host in placed)
        )
    limits = {
        name: _limit(config.micro_batch, functools.partial(fits, name)) for name in plan.devices
    }
    # The split decides how often ranks meet, and takes what that costs into account.
    known_exchange = all(peaks) and not config.weights
    exchange_fs = round(FS * micro_step_exchange_s(exp, plan)) if known_exchange else 0
    overlap = bucket_sizes(exp.model, exp.zero, plan.accelerator)["overlap"]
    balance = BalancePlan(
        method=method,
        speeds=speeds,
        limits=tuple(limits[host.device] for host in placed),
        same_steps=exp.zero.stage >= 2,
        accumulation=config.accumulation,
        micro_step_fs=exchange_fs or None,
        overlap=bool(overlap) and exp.zero.stage >= 2,
        pending=method == "measured",
        source=source,
    )
    # What is not measured yet must not decide how many samples a step has.
    of_step = [1.0] * world if balance.pending else weights
    size = wanted_global_batch(config, seq_len=seq_len, weights=of_step)
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
    return bisect_left(range(1, micro_batch), True, key=lambda size: not fits(size))


def _of_beside(exp: Experiment, plan: Plan) -> Iterator[str]:
    """Notes about networks of unknown size, and those that are too large before training."""
    for described in plan.beside:
        if not described.before_training:
            continue
        name, network = f"the model {described.name!r} of task={exp.task.kind}", described.network
        if network is None and plan.memory:
            yield (
                f"The memory of {name} is not counted: it could not be built on this machine. Give "
                "a local directory of it, or leave room."
            )
        if network is None:
            continue
        precision = described.precision or plan.precision
        needed = before_training_gib(network, exp, precision=precision, world_size=plan.world_size)
        for part in plan.memory:
            if part.capacity_gib and needed > USABLE * part.capacity_gib:
                shard = " zero=stage3 shards it over the ranks." if exp.zero.stage < 3 else ""
                yield (
                    f"{part.device}: {name} takes {needed:.1f} GiB before training, "
                    f"{part.capacity_gib:.0f} GiB available.{shard}"
                )


# --- Precision -----------------------------------------------------------------------------------


def choose_precision(
    precision: str, hosts_by_device: Mapping[str, list[str]], devices: Mapping[str, DeviceConfig]
) -> tuple[str, str]:
    """``(precision, reason)`` for the device types in use.

    ``hosts_by_device``: device type -> names of the hosts that have it.
    Raises ConfigError when ``precision`` is not supported by one of them; names the hosts.
    """
    used = [devices[name] for name in hosts_by_device]
    on_gpus = all(ACCELERATORS[device.accelerator].is_gpu for device in used)
    best = "fp32"
    if on_gpus:
        common = (p for p in ("bf16", "fp16") if all(p in device.precisions for device in used))
        best = next(common, "fp32")
    if precision != "auto":
        for name, hosts in hosts_by_device.items():
            supported = devices[name].precisions
            if precision not in supported:
                raise ConfigError(
                    f"precision={precision}: {name} ({', '.join(hosts)}) computes "
                    f"{', '.join(supported)} only. Use precision={best} or precision=auto."
                )
        return precision, "set by precision="
    if not on_gpus:
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
    texts = {name: f"{name} ({', '.join(hosts)})" for name, hosts in hosts_by_device.items()}
    lacking = [
        text for name, text in texts.items() if not set(precisions) & set(devices[name].precisions)
    ]
    return " and ".join(lacking or texts.values())


def choose_grad_accum(zero: ZeroConfig, precision: str, *, accumulation: int) -> str:
    """The dtype in which gradients are summed over micro steps: ``fp32`` or ``precision``.

    Raises ConfigError for what DeepSpeed cannot do.
    """
    dtype, stage = zero.grad_accum_dtype, zero.stage
    if dtype == "auto":
        # A single micro step sums nothing; at stage 2 it takes no more memory all the same, since
        # the update needs fp32 anyway. DeepSpeed sums in the precision at stage 0.
        useful = stage > 0 and (accumulation > 1 or stage == 2)
        return "fp32" if useful else precision
    if dtype == "precision":
        return precision
    if dtype == "fp32" and precision != "fp32" and stage == 0:
        raise ConfigError(
            f"zero.grad_accum_dtype=fp32 with zero.stage=0 and precision={precision}: DeepSpeed "
            f"sums in {precision} at stage 0. Set zero=stage1, or zero.grad_accum_dtype=auto."
        )
    if dtype not in ("fp32", precision):
        raise ConfigError(
            f"zero.grad_accum_dtype={dtype} with precision={precision}: gradients are summed in "
            f"fp32 or in the run's precision. Set zero.grad_accum_dtype=fp32 or =auto."
        )
    return dtype
