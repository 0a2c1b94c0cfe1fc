"""This rank's place in the process group, and its GPU: checked before anything is built.

The launch has surveyed hosts that it reaches over ssh; Slurm's and this machine are checked here,
by torch itself.
"""

from __future__ import annotations

import os
import socket
import warnings
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch

from llmx import collectives
from llmx.config import LaunchConfig, ZeroConfig
from llmx.config.hardware_rules import LEAST_BF16
from llmx.errors import ConfigError
from llmx.plan import cuda_builds
from llmx.plan.types import Plan


def join_process_group(plan: Plan, *, timeout_s: float = LaunchConfig.comm_timeout_s) -> None:
    """Initialise ``torch.distributed`` (NCCL on CUDA, gloo on CPU) through DeepSpeed.

    ``timeout_s``: of every collective (``launch.comm_timeout_s``); DeepSpeed's own default of 10
    minutes ends runs whose rank 0 still writes a model.

    DeepSpeed's shared-memory all-reduce for CPU is not used: it is compiled at the first run
    (about 26 s, with a compiler and ninja on every host), it leaves a 69 MB file a rank in
    ``/dev/shm``, and its sums depend on it being there.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import set_log_level_from_string

    # Its information is about itself; the rank's log is for what the run does.
    set_log_level_from_string("warning")
    # DeepSpeed calls collectives by names that torch is about to change: nothing a user can do.
    warnings.filterwarnings(
        "ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:
        torch.set_num_threads(int(threads))
    accelerator = get_accelerator().device_name()
    if accelerator != plan.accelerator:
        raise ConfigError(
            f"The plan is for {plan.accelerator}, DeepSpeed found {accelerator} on this host "
            f"(DS_ACCELERATOR={os.environ.get('DS_ACCELERATOR', '')!r}). Check the driver and "
            "CUDA_VISIBLE_DEVICES there, or choose another hardware group."
        )
    if plan.on_gpus:
        rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        # DeepSpeed reads the variable, too.
        os.environ["LOCAL_RANK"] = str(choose_gpu(plan, rank=rank, local_rank=local_rank))
    # Before anything else: what asks a device in passing would make a CUDA context on GPU 0.
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    _need_precision(plan.precision)
    if (shared_memory := get_accelerator().create_op_builder("ShareMemCommBuilder")) is not None:
        deepspeed.ops.__compatible_ops__[shared_memory.NAME] = False
    timeout = timedelta(seconds=timeout_s)
    deepspeed.init_distributed(
        dist_backend=get_accelerator().communication_backend_name(),
        auto_mpi_discovery=False,
        timeout=timeout,
        verbose=False,
    )
    if plan.on_gpus:
        collectives.host_group = torch.distributed.new_group(backend="gloo", timeout=timeout)


def _need_precision(precision: str) -> None:
    """Raise ConfigError for a precision that the device lacks; DeepSpeed would, after the model is
    built. No other one is asked for: torch answers for bf16 on a V100 by making a tensor there."""
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator()
    supported = {"fp16": device.is_fp16_supported, "bf16": device.is_bf16_supported}
    if precision in supported and not supported[precision]():
        raise ConfigError(
            f"precision={precision} is not supported by the {device.device_name()} of host "
            f"{socket.gethostname()}. Set precision=fp32, or precision=auto with the true "
            "hardware.devices.*.precisions."
        )


def device_of(plan: Plan) -> torch.device:
    """The device of this process."""
    if plan.on_gpus:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")


@dataclass(frozen=True)
class Gpus:
    """The GPUs of this host, according to torch and the driver."""

    visible: int
    """GPUs that this process sees."""
    installed: int | None
    """GPUs in the host; None where the driver does not report them."""
    names: tuple[str, ...] = ()
    capabilities: tuple[float, ...] = ()
    torch: str = ""
    cuda: str | None = None
    driver: str | None = None
    arch_list: tuple[str, ...] = ()


def choose_gpu(plan: Plan, *, rank: int, local_rank: int) -> int:
    """The number of this rank's GPU among those that it sees; ConfigError where none can do."""
    gpus = gpus_here()
    host = socket.gethostname()
    facts = {**asdict(gpus), "works": bool(gpus.capabilities)}
    if problems := cuda_builds.problems({host: facts}):
        raise ConfigError("\n".join(problems))
    slots = plan.hosts[plan.ranks[rank].host].slots
    index = gpu_index(gpus, local_rank=local_rank, slots=slots, host=host)
    # torch says that a V100 supports bf16, too, which it emulates.
    capability = gpus.capabilities[index] if index < len(gpus.capabilities) else 0.0
    if plan.precision == "bf16" and 0 < capability < LEAST_BF16:
        raise ConfigError(
            f"precision=bf16: the {gpus.names[index]} of {host} has compute capability "
            f"{capability:g} and emulates bf16, many times slower than fp16. Set precision=fp16, "
            "or precision=auto with the true device of that host in the hardware file."
        )
    return index


def gpu_index(gpus: Gpus, *, local_rank: int, slots: int, host: str) -> int:
    """The number of a rank's GPU among the visible ones.

    A scheduler that binds GPUs shows each rank its own alone (``--gpus-per-task``, ``--gpu-bind``
    of Slurm): number 0 there, whatever ``LOCAL_RANK`` is.
    """
    if local_rank < slots <= gpus.visible:
        return local_rank
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    is_slice = visible.startswith("MIG-")
    if gpus.visible == 1 and (is_slice or gpus.installed is None or gpus.installed >= slots):
        return 0
    there = "" if gpus.installed is None else f" of {gpus.installed}"
    raise ConfigError(
        f"{host}: {slots} ranks are planned, but local rank {local_rank} sees {gpus.visible} "
        f"GPUs{there} (CUDA_VISIBLE_DEVICES={visible}). "
        "Each rank must see all GPUs of its host, or one of its own. Set slots of the host to its "
        "number of GPUs; under Slurm check --gpus-per-task and --gpu-bind in "
        "launch.slurm.extra_args."
    )


def check_quantized_gradients(zero: ZeroConfig, plan: Plan, *, visible: int) -> None:
    """Raise ConfigError where qgZ would take the GPUs that a rank sees for the ranks of its host
    (``_get_local_all_to_all_group`` in ``deepspeed/utils/groups.py``)."""
    slots = {host.slots for host in plan.hosts}
    if zero.quantized_gradients and len(plan.hosts) > 1 and slots != {visible}:
        raise ConfigError(
            f"zero.quantized_gradients=true: DeepSpeed assumes one rank per visible GPU "
            f"({visible}), but the plan has {max(slots)} ranks per host. Make all GPUs of a host "
            "visible to each rank and use all of them, or set zero.quantized_gradients=false."
        )


def gpus_here() -> Gpus:
    """The GPUs as torch reports them; none where the driver is missing or too old."""
    try:
        visible = torch.cuda.device_count()
        properties = [torch.cuda.get_device_properties(index) for index in range(visible)]
    except (RuntimeError, AssertionError):
        visible, properties = 0, []
    return Gpus(
        visible=visible,
        installed=_installed(),
        names=tuple(gpu.name for gpu in properties),
        capabilities=tuple(float(f"{gpu.major}.{gpu.minor}") for gpu in properties),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        driver=_driver(),
        arch_list=tuple(torch.cuda.get_arch_list()),
    )


def _installed() -> int | None:
    try:
        return len(list(Path("/proc/driver/nvidia/gpus").iterdir()))
    except OSError:
        return None


def _driver() -> str | None:
    try:
        words = Path("/proc/driver/nvidia/version").read_text(errors="replace").split()
    except OSError:
        return None
    return next((word for word in words if cuda_builds.driver_branch(word)), None)
