"""The values of a plan: frozen, computed once, written to ``plan.json``, read by the ranks.

``Plan.from_dict(plan.to_dict()) == plan``.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from itertools import repeat
from typing import Any, get_args, get_origin, get_type_hints

from llmx import text as human
from llmx.config.accelerators import ACCELERATORS
from llmx.plan.network import Network


@dataclass(frozen=True)
class HostPlan:
    """One machine of the run, in hostfile order."""

    name: str
    address: str
    ssh_port: int
    user: str | None
    identity_file: str | None
    slots: int
    device: str
    interface: str | None
    is_local: bool
    """This machine: reached without ssh."""
    fingerprint: str | None = None
    """The fingerprint of its ssh host key."""


@dataclass(frozen=True)
class RankPlan:
    """One rank: a process with a device."""

    rank: int
    host: int
    """Index into ``Plan.hosts``."""
    device: str
    micro_batch: int
    """Samples this rank takes in one micro step."""


@dataclass(frozen=True)
class BatchPlan:
    """The batch algebra, solved: ``global_batch == sum(micro_batches) * accumulation``, or the sum
    of ``sizes`` where micro steps differ."""

    global_batch: int
    accumulation: int
    """Micro steps of the rank that has most."""
    micro_batches: tuple[int, ...]
    """The largest micro batch of each rank."""
    seq_len: int
    sizes: tuple[tuple[int, ...], ...] = ()
    """Samples of each micro step of each rank; empty where a rank's are all alike. A rank may have
    fewer micro steps than another one."""

    def sizes_of(self, rank: int) -> tuple[int, ...]:
        """Samples of each micro step of a rank."""
        if self.sizes:
            return self.sizes[rank]
        return (self.micro_batches[rank],) * self.accumulation

    def places(self, rank: int, micro_step: int, *, samples: int) -> range:
        """The places, among the ``samples`` of a step, of a rank's micro step (from 0).

        The ranks take consecutive parts of the first micro step, then of the second, and so on. A
        step with fewer samples than ``global_batch`` (the last one, with ``data.last_batch=short``)
        fills the first places, and the others are empty.
        """
        if not 0 <= micro_step < len(self.sizes_of(rank)):
            raise ValueError(f"micro_step {micro_step} is not in [0, {len(self.sizes_of(rank))})")
        if samples > self.global_batch:
            raise ValueError(f"{samples} samples of a step are more than {self.global_batch}")
        everyone = range(len(self.micro_batches))
        if self.sizes:
            start = sum(sum(sizes[:micro_step]) for sizes in self.sizes)
            start += sum(sum(self.sizes[r][micro_step : micro_step + 1]) for r in everyone[:rank])
        else:
            start = micro_step * sum(self.micro_batches) + sum(self.micro_batches[:rank])
        stop = start + self.sizes_of(rank)[micro_step]
        return range(min(start, samples), min(stop, samples))

    @property
    def tokens_per_step(self) -> int:
        """Positions of one optimizer step, padding included."""
        return self.global_batch * self.seq_len


@dataclass(frozen=True)
class RankSpeed:
    """The time of one rank for a micro batch, forward and backward, without communication.

    Femtoseconds, in whole numbers: every host computes the same split from them.
    """

    fixed_fs: int
    token_fs: int
    """The time of each token of the micro batch, padding included."""
    square_fs: int = 0
    """The time of each squared token of each row: attention."""

    def time_fs(self, tokens: int, squares: int) -> int:
        """Femtoseconds of a micro batch with so many tokens and squared tokens."""
        return self.fixed_fs + self.token_fs * tokens + self.square_fs * squares


@dataclass(frozen=True)
class BalancePlan:
    """The speeds and limits by which the samples of a step are shared out, where not evenly."""

    method: str
    """``spec``, ``weights``, ``measured``, or ``even`` where only drift is corrected."""
    speeds: tuple[RankSpeed, ...]
    """One a rank."""
    limits: tuple[int, ...]
    """The most samples of a micro batch, one a rank."""
    same_steps: bool
    """All ranks have as many micro steps: the ZeRO stage communicates in each of them."""
    accumulation: int | None = None
    """``batch.accumulation``, where it was given."""
    micro_step_fs: int | None = None
    """The time of an exchange in a micro step in which all ranks meet, as measured, or by the
    assumed links; None: not known."""
    overlap: bool = False
    """Whether that exchange goes on behind computing."""
    pending: bool = False
    """The ranks measure their speeds at the start; these are of the data sheet, or of ``source``.
    """
    source: str = ""
    """The finished runs whose speeds these are: ``learned from 3 runs in FILE``."""


USABLE = 0.95
"""The part of a device's memory that counts; the rest is kept free for fragmentation."""


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted peak of one rank, GiB, by part; and of its host's RAM."""

    device: str
    parameters_gib: float
    gradients_gib: float
    optimizer_gib: float
    activations_gib: float
    """With logits and the loss."""
    buffers_gib: float
    context_gib: float
    host_gib: float
    """RAM of one host for offloaded states."""
    capacity_gib: float
    """0 when the device's memory is not known."""
    update_gib: float = 0.0
    """The memory that the update needs beyond what the last backward pass has held."""
    drawing_gib: float = 0.0
    """The memory that drawing samples needs beyond the most that training holds."""
    saves_host_gib: float = 0.0
    """RAM of one host for the copies that are written in the background."""

    @property
    def total_gib(self) -> float:
        return (
            self.parameters_gib
            + self.gradients_gib
            + self.optimizer_gib
            + self.activations_gib
            + self.buffers_gib
            + self.context_gib
            + self.update_gib
            + self.drawing_gib
        )

    @property
    def fits(self) -> bool:
        return self.capacity_gib == 0 or self.total_gib <= USABLE * self.capacity_gib

    @property
    def warning(self) -> str:
        """The sentence of a device that the ranks do not fit on; else empty."""
        if self.fits:
            return ""
        return (
            f"{self.device}: {self.total_gib:.1f} GiB predicted, {self.capacity_gib:.3g} GiB "
            "available: expect it to run out of memory."
        )


@dataclass(frozen=True)
class HostStorage:
    """The memory and disk of hosts that are alike (``llmx.plan.storage``): bytes of one host; None
    where it is not known."""

    hosts: tuple[str, ...]
    """Their names, in hostfile order."""
    ranks: int
    """Ranks of one host."""
    processes_bytes: int
    """RAM of the ranks' processes before they load anything."""
    loading_bytes: int | None
    """RAM while weights are read, beside the weights; free again before training."""
    training_bytes: int | None
    """The device memory of CPU ranks; 0 of GPUs."""
    offload_bytes: int | None
    """RAM of what is offloaded to it, of what an offload to NVMe leaves there, and of buffers."""
    saves_bytes: int | None
    """RAM of the copies that are written in the background."""
    saves_optional: bool
    """Saves are copied only where there is memory for it (``checkpoint.background=auto``)."""
    ram_has_bytes: int | None
    """``hardware.hosts[].memory_gib``."""
    nvme_bytes: int | None
    """Files below ``zero.nvme_path``."""
    checkpoint_bytes: int | None
    """The part of one checkpoint that lies on its file system."""
    model_bytes: int | None
    """``model/``, written at the end, where it is on its file system."""
    shm_bytes: int
    """``/dev/shm``, where GPUs of the host do not reach each other."""
    push_bytes: int = 0
    """RAM of rank 0's host for weights that go to rollout servers."""
    download_bytes: int | None = 0
    """Weights from the Hub, in its cache (``HF_HOME``)."""

    @property
    def ram_bytes(self) -> int | None:
        """The most RAM at once; without copies for saves that can do without."""
        parts = (self.training_bytes, self.offload_bytes, self.saves_bytes)
        if self.loading_bytes is None or any(part is None for part in parts):
            return None
        saves = 0 if self.saves_optional else self.saves_bytes or 0
        training = sum(part or 0 for part in parts[:-1]) + saves + self.push_bytes
        return self.processes_bytes + max(self.loading_bytes, training)

    @property
    def warning(self) -> str:
        """The sentence of hosts that have less RAM than they need; empty where they fit or it is
        not known."""
        needed, has = self.ram_bytes, self.ram_has_bytes
        if needed is None or has is None or needed <= has:
            return ""
        return (
            f"{self.names}: {human.size(needed)} of RAM predicted, {human.size(has)} available "
            f"(hardware.hosts[].memory_gib): expect the kernel to kill ranks. {self.less_ram}"
        )

    @property
    def less_ram(self) -> str:
        """The advice where RAM is short, by the largest part."""
        if self.nvme_bytes:
            return "Fewer ranks on the host, or zero.sub_group_size=100000000."
        if self.offload_bytes:
            return (
                "Offload less, or to NVMe: zero=infinity zero.nvme_path=/path/on/a/fast/disk; "
                "or more hosts."
            )
        if self.push_bytes:
            return "adapter=lora, of which little is sent, or no rollout.hosts."
        if self.training_bytes:
            return "batch.micro_batch=1, zero=stage3, or fewer ranks on the host."
        return "Fewer ranks on the host."

    @property
    def names(self) -> str:
        """``node-a``, ``node-a, node-b``, ``node-a, node-b and 6 more``."""
        if len(self.hosts) <= 3:
            return ", ".join(self.hosts)
        return f"{', '.join(self.hosts[:2])} and {len(self.hosts) - 2} more"


@dataclass(frozen=True)
class StoragePlan:
    """RAM, NVMe, disk and ``/dev/shm`` of the hosts."""

    hosts: tuple[HostStorage, ...]
    """Each host once, those that are alike together."""
    checkpoint_bytes: int | None
    """Bytes of one whole checkpoint; None: not known."""
    checkpoints_kept: int | None
    """The most checkpoints between two saves; None: no limit."""
    checkpoints_at_once: int | None
    """The most checkpoints while one is written."""
    model_bytes: int | None
    """``model/``, written at the end."""
    private: bool
    """Hosts have disks of their own (``launch.sync=rsync``)."""

    def on(self, host: str | None) -> HostStorage | None:
        """The storage of one host; None where it is not known."""
        return next((storage for storage in self.hosts if host in storage.hosts), None)

    def disk_bytes(self, checkpoint: int, model: int) -> int | None:
        """The most bytes on a file system with so much of each; None: no limit."""
        if self.checkpoints_at_once is None or self.checkpoints_kept is None:
            return None
        return max(
            self.checkpoints_at_once * checkpoint, self.checkpoints_kept * checkpoint + model
        )


@dataclass(frozen=True)
class Exchange:
    """One kind of communication of a step."""

    name: str
    gb: float
    """10^9 bytes that a rank sends."""
    seconds: float
    """Whether computing hides it or not."""


@dataclass(frozen=True)
class DrawnSamples:
    """The samples that a task generates in a step, for each prompt of ``batch.global_batch``."""

    group_size: int
    """Completions of each prompt."""
    new_tokens: int
    """The most tokens of a completion."""
    updates: int = 1
    """Optimizer updates with the samples of a step."""
    rows: int = 64
    """The most completions that a device draws at once: fewer where memory is short."""


@dataclass(frozen=True)
class RolloutTime:
    """The parts of a step whose samples are generated (``llmx.plan.rollout_time``)."""

    draws_s: float
    trains_s: float
    weights_s: float
    """Sending weights to the rollout servers, or gathering those of ZeRO-3."""
    training_idle: float = 0.0
    """Part of a step in which the training hosts wait for samples."""
    drawing_idle: tuple[tuple[str, float], ...] = ()
    """(rollout host, part of a step in which it draws nothing); empty where the ranks draw."""
    overlaps: bool = False
    """The servers draw while the ranks train (``rollout.max_staleness``)."""

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        drawn_s = self.weights_s + self.draws_s
        return max(self.trains_s, drawn_s) if self.overlaps else self.trains_s + drawn_s


@dataclass(frozen=True)
class TimePlan:
    """Predicted time of one optimizer step (``llmx.plan.step_time``), and what follows from it."""

    step_s: float = 0.0
    """0: it is not known."""
    unknown: str = ""
    """Why it is not known, with the key to set."""
    computing_s: float = 0.0
    """Forward and backward, of the slowest ranks."""
    communication_s: float = 0.0
    exposed_s: float = 0.0
    """The part of the communication that computing does not hide."""
    update_s: float = 0.0
    host_s: float = 0.0
    """Copies to and from host memory or NVMe, and the update there (offload)."""
    flops: float = 0.0
    """FLOPs of the model in a step; what is computed again is not counted."""
    tokens_per_s: float = 0.0
    """Padding included."""
    mfu: tuple[tuple[str, float], ...] = ()
    """(device type, its part of its peak), one each whose peak is known."""
    idle: tuple[float, ...] = ()
    """Part of a step in which a rank waits for slower ones, one each."""
    even_step_s: float = 0.0
    """The step of the even split, where the plan's is not even; 0: there is none."""
    bottleneck: str = ""
    exchanges: tuple[Exchange, ...] = ()
    hours: float = 0.0
    """The time of all steps, without evaluation and saves; 0 where the number of steps is not
    known."""
    device_hours: float = 0.0
    cost: float | None = None
    """The cost of the run (``hardware.price_per_hour``); None where a price or the hours are not
    known."""
    sources: tuple[str, ...] = ()
    """Sentences about the speeds that were assumed or learned."""
    rollout: RolloutTime | None = None
    """The parts of ``step_s`` of a task that generates its samples, where they are known."""


@dataclass(frozen=True)
class ChosenPlan:
    """The keys that the config left to the plan (``auto``), and the values that it took."""

    keys: tuple[str, ...]
    """``zero``, ``model.activation_checkpointing``, ``batch.micro_batch``: those that were auto."""
    words: tuple[str, ...]
    """The chosen values as overrides, in the order of ``keys``."""
    reason: str
    problem: str = ""
    """The advice where nothing fits; such a plan is not launched."""


@dataclass(frozen=True)
class NetworkBeside:
    """A network that a task has beside the one that is exported."""

    name: str
    precision: str | None = None
    """The precision of its weights; None: that of the run."""
    before_training: bool = False
    """Computes stored columns, and is freed before the others are built."""
    source: str | None = None
    """A directory or a Hub id of its own; None: that of the ``model`` group."""
    revision: str | None = None
    """The revision of ``source`` on the Hub."""
    network: Network | None = None
    """None where it could not be built on this machine."""


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before a process is started."""

    hosts: tuple[HostPlan, ...]
    ranks: tuple[RankPlan, ...]
    accelerator: str
    """``cuda`` or ``cpu``."""
    precision: str
    """``fp32``, ``bf16`` or ``fp16``."""
    precision_reason: str
    batch: BatchPlan
    transport: str
    master_addr: str
    num_parameters: int
    """Parameters of all networks that are trained, with those of an adapter; 0 when it is not known
    before loading."""
    peak_tflops: float
    """Sum over ranks at ``precision``; 0 when unknown. The denominator of MFU."""
    memory: tuple[MemoryPlan, ...]
    """One a device type; empty where no micro step was traced."""
    total_steps: int | None = None
    """Optimizer steps; None when it follows from the number of samples (``task.epochs``)."""
    notes: tuple[str, ...] = ()
    """Warnings that do not follow from ``memory`` and ``storage``."""
    advice: str = ""
    """The advice where ``memory`` does not fit."""
    network: Network | None = None
    """The network that is exported; None where it could not be built on this machine."""
    num_trained: int | None = None
    """Parameters that are trained beside frozen ones (``adapter``); None where all are, or where
    it is not known."""
    grad_accum_dtype: str = ""
    """The dtype in which gradients are summed over micro steps; empty: ``precision``."""
    beside: tuple[NetworkBeside, ...] = ()
    """Networks of the task that are not exported: frozen ones, and others that are trained."""
    attention: tuple[tuple[str, str], ...] = ()
    """(device type, implementation for packed rows), one each: ``varlen``, ``segments``, ..."""

    balance: BalancePlan | None = None
    """The split over unequal ranks; None: evenly."""
    time: TimePlan | None = None
    """None until it is predicted."""
    chosen: ChosenPlan | None = None
    """None where the config left nothing to the plan."""
    storage: StoragePlan | None = None
    """None until it is predicted."""
    checkpointing: tuple[tuple[str, str], ...] = ()
    """(device type, activation checkpointing), one each, where they differ."""
    rollout_hosts: tuple[HostPlan, ...] = ()
    """Hosts that draw samples and have no ranks."""
    drawn: DrawnSamples | None = None
    """None where the task reads its samples."""

    def attention_on(self, device: str) -> str:
        """The attention for packed rows on this type of device; empty where the plan has none."""
        return dict(self.attention).get(device, "")

    @property
    def trained(self) -> int:
        """Parameters that are trained: all of them, where nothing is frozen."""
        return self.num_parameters if self.num_trained is None else self.num_trained

    @property
    def on_gpus(self) -> bool:
        return ACCELERATORS[self.accelerator].is_gpu

    @property
    def devices(self) -> list[str]:
        """Types of devices, in the order of the ranks."""
        return list(dict.fromkeys(rank.device for rank in self.ranks))

    def micro_batch_on(self, device: str) -> int:
        """The largest micro batch of the ranks on this type of device."""
        return max(rank.micro_batch for rank in self.ranks if rank.device == device)

    def slots_on(self, device: str) -> int:
        """The most ranks on a host with this type of device."""
        return max(host.slots for host in self.hosts if host.device == device)

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def memory_warnings(self) -> tuple[str, ...]:
        """The warnings about devices and hosts that are too small, with the advice."""
        hosts = self.storage.hosts if self.storage is not None else ()
        texts = (*(part.warning for part in self.memory), self.advice, *(h.warning for h in hosts))
        return tuple(dict.fromkeys(filter(None, texts)))

    @property
    def warnings(self) -> tuple[str, ...]:
        """All warnings, for a person."""
        return (*self.memory_warnings, *self.notes)

    def to_dict(self) -> dict[str, Any]:
        """The plan as nested plain values (tuples as lists) with the totals that a reader wants."""
        values = dataclasses.asdict(self)
        values["world_size"] = self.world_size
        values["warnings"] = list(self.warnings)
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """The inverse of ``to_dict``, also after a trip through JSON."""
        derived = ("world_size", "warnings")
        plan: Plan = _typed(cls, {key: values[key] for key in values if key not in derived})
        return plan


_hints = functools.cache(get_type_hints)


def _typed(kind: Any, value: Any) -> Any:
    """A value of JSON as the type of its field: tuples of lists, dataclasses of mappings."""
    if hasattr(kind, "__dataclass_fields__"):
        hints = _hints(kind)
        fields = {name: _typed(hints.get(name), field) for name, field in value.items()}
        return kind(**fields)
    kinds = get_args(kind)
    if get_origin(kind) is tuple:
        element_kinds = repeat(kinds[0]) if Ellipsis in kinds else kinds
        return tuple(map(_typed, element_kinds, value))
    return value if value is None or type(None) not in kinds else _typed(kinds[0], value)
