"""The rules that hold before a GPU is touched: each names the value, the rule and the fix.

Pure: an experiment whose hardware is resolved goes in, problems come out, all at once.
Precision and batch sizes have their rules where they are computed (``llmx.plan``).
"""

from __future__ import annotations

from collections.abc import Iterator

from llmx.config.data_rules import data_problems
from llmx.config.schema import Experiment
from llmx.errors import ConfigError, did_you_mean


def validate(exp: Experiment, *, position_limit: int | None = None) -> None:
    """Raise one ConfigError with every broken rule.

    ``position_limit``: the longest sequence the model takes, where it is known.
    """
    problems = [
        *_hardware(exp),
        *_model_and_data(exp, position_limit),
        *data_problems(exp),
        *_length(exp),
        *_batch_and_optim(exp),
        *_zero(exp),
        *_checkpoint(exp),
        *_launch(exp),
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _accelerators(exp: Experiment) -> set[str]:
    devices = exp.hardware.devices
    return {devices[h.device].accelerator for h in exp.hardware.hosts if h.device in devices}


def _hardware(exp: Experiment) -> Iterator[str]:
    hardware = exp.hardware
    if not hardware.hosts:
        yield "hardware.hosts is empty: a run needs a host. Choose hardware=local or list hosts."
    seen: set[str] = set()
    for index, host in enumerate(hardware.hosts):
        where = f"hardware.hosts[{index}] ({host.name})"
        if host.name in seen:
            yield f"{where}: listed twice. A host appears once, with all its slots."
        seen.add(host.name)
        if host.slots < 1:
            yield f"{where}: slots={host.slots}, but a host in use has at least 1. Leave it out."
        if not 0 < host.ssh_port < 65536:
            yield f"{where}: ssh_port={host.ssh_port} is not a port (1 to 65535)."
        if ":" in host.name or " " in host.name or not host.name:
            yield f"{where}: a host name has no colon or space; the port goes into ssh_port."
        if not host.device:
            yield (
                f"{where}: no device type. Set device, or hardware.device=NAME; known: "
                f"{', '.join(hardware.devices)}."
            )
        elif host.device not in hardware.devices:
            yield (
                f"{where}: device {host.device!r} is not known."
                f"{did_you_mean(host.device, hardware.devices)} Known: "
                f"{', '.join(hardware.devices)}; or describe it under hardware.devices."
            )
        if hardware.slots is not None and hardware.slots > host.slots:
            yield (
                f"hardware.slots={hardware.slots}, but {host.name} has {host.slots} "
                f"{host.device}. Use at most {host.slots}."
            )
    if hardware.slots is not None and hardware.slots < 1:
        yield f"hardware.slots={hardware.slots}: use at least 1 device a host."
    if len(_accelerators(exp)) > 1:
        yield "hardware: CPU and CUDA ranks cannot train together. Leave one kind out."


def _model_and_data(exp: Experiment, position_limit: int | None) -> Iterator[str]:
    model, data = exp.model, exp.data
    if model.init == "pretrained" and not model.path:
        yield "model.path is empty, but model.init=pretrained loads weights from it. Set it."
    if model.init == "scratch" and model.kind == "hf" and not model.path:
        yield "model.kind=hf needs model.path (its config.json is the architecture)."
    if model.init == "scratch" and model.kind != "hf" and not model.config:
        yield f"model.config is empty: a {model.kind} from scratch needs hidden_size and the like."
    if not model.tokenizer and not model.path:
        yield "model.tokenizer is empty and there is no model.path to take it from. Set it."
    if position_limit is not None and data.seq_len > position_limit:
        yield (
            f"data.seq_len={data.seq_len}, but {model.name or model.path} takes at most "
            f"{position_limit} positions. Set data.seq_len={position_limit}."
        )
    flash = model.attention == "flash_attention_2"
    if flash and (exp.precision == "fp32" or "cpu" in _accelerators(exp)):
        yield "model.attention=flash_attention_2 needs CUDA and bf16 or fp16. Use sdpa."
    if data.layout == "padded" and flash:
        yield "data.layout=padded needs no varlen attention; use model.attention=sdpa."


def _length(exp: Experiment) -> Iterator[str]:
    task = exp.task
    if task.steps is None and task.epochs is None:
        yield "task.steps and task.epochs are both null: one says how long to train."
    if task.steps is not None and task.steps < 1:
        yield f"task.steps={task.steps}: train at least 1 step."
    if task.epochs is not None and task.epochs <= 0:
        yield f"task.epochs={task.epochs}: train a positive number of epochs."
    if task.log_every_steps < 1:
        yield f"task.log_every_steps={task.log_every_steps}: log at least every step or rarer."
    if task.stop_at_step is not None and task.stop_at_step < 1:
        yield f"task.stop_at_step={task.stop_at_step}: train at least 1 step."
    if task.spike_factor is not None and task.spike_factor <= 1:
        yield f"task.spike_factor={task.spike_factor}: a jump is over 1 times the usual loss."


def _batch_and_optim(exp: Experiment) -> Iterator[str]:
    batch, optim = exp.batch, exp.optim
    for name in ("global_batch", "tokens_per_step", "accumulation", "micro_batch"):
        value = getattr(batch, name)
        if value is not None and value < 1:
            yield f"batch.{name}={value}: at least 1."
    if batch.global_batch is not None and batch.tokens_per_step is not None:
        yield "batch.global_batch and batch.tokens_per_step say the same thing. Set one to null."
    if batch.tokens_per_step is not None and batch.accumulation is not None:
        yield "batch.accumulation follows from batch.tokens_per_step. Set one of them to null."
    if optim.lr <= 0:
        yield f"optim.lr={optim.lr}: a learning rate is positive."
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        yield f"optim.betas={optim.betas}: two numbers in [0, 1), e.g. [0.9, 0.95]."
    if optim.clip_norm < 0 or optim.weight_decay < 0:
        yield "optim.clip_norm and optim.weight_decay are not negative; 0 turns them off."
    if optim.warmup_steps is not None and optim.warmup_steps > (exp.task.steps or float("inf")):
        yield (
            f"optim.warmup_steps={optim.warmup_steps} is more than task.steps="
            f"{exp.task.steps}: the learning rate would never arrive."
        )
    for name in ("warmup_fraction", "decay_end_fraction", "min_lr_ratio"):
        value = getattr(optim, name)
        if value is not None and not 0 <= value <= 1:
            yield f"optim.{name}={value}: a part between 0 and 1."
    if optim.kind == "fused_adam" and "cpu" in _accelerators(exp):
        yield "optim.kind=fused_adam needs CUDA. Use optim.kind=adamw."
    if optim.kind == "fused_adam" and exp.zero.offload_optimizer != "none":
        yield "optim.kind=fused_adam runs on the GPU, but the optimizer is offloaded. Use cpu_adam."


def _zero(exp: Experiment) -> Iterator[str]:
    zero, hosts = exp.zero, exp.hardware.hosts
    if zero.stage not in (0, 1, 2, 3):
        yield f"zero.stage={zero.stage}: DeepSpeed has stages 0, 1, 2 and 3."
    if zero.offload_param != "none" and zero.stage != 3:
        yield (
            f"zero.offload_param={zero.offload_param} needs stage 3 (stage is {zero.stage}; "
            "DeepSpeed would ignore it). Use zero=stage3_offload."
        )
    if zero.offload_optimizer != "none" and zero.stage == 0:
        yield "zero.offload_optimizer needs stage 1 or higher. Use zero=stage2_offload."
    if zero.offload_optimizer == "nvme" and zero.stage != 3:
        yield "zero.offload_optimizer=nvme needs stage 3. Use zero=infinity."
    if "nvme" in (zero.offload_optimizer, zero.offload_param) and not zero.nvme_path:
        yield "zero.nvme_path is empty, but something is offloaded to NVMe. Set it to a fast disk."
    hpz = zero.hpz_partition_size
    if hpz > 1 and zero.stage != 3:
        yield f"zero.hpz_partition_size={hpz} needs stage 3. Use zero=stage3_zeropp."
    for host in hosts:
        if hpz < 1 or (hpz > 1 and host.slots % hpz):
            yield (
                f"zero.hpz_partition_size={hpz} does not divide the {host.slots} ranks of "
                f"{host.name}. Use a divisor, or 1 to turn it off."
            )
            break
    if zero.quantized_weights or zero.quantized_gradients:
        if zero.stage != 3:
            yield "zero.quantized_weights and _gradients need stage 3. Use zero=stage3_zeropp."
        if "cpu" in _accelerators(exp):
            yield "zero.quantized_weights (qwZ) and _gradients (qgZ) need CUDA. Turn them off."


def _checkpoint(exp: Experiment) -> Iterator[str]:
    checkpoint = exp.checkpoint
    for name in ("every_steps", "every_minutes"):
        value = getattr(checkpoint, name)
        if value is not None and value <= 0:
            yield f"checkpoint.{name}={value}: above 0, or null to not save by it."
    if checkpoint.keep.last < 1:
        yield f"checkpoint.keep.last={checkpoint.keep.last}: at least the newest one is kept."
    for name in ("best", "every"):
        if getattr(checkpoint.keep, name) < 0:
            yield f"checkpoint.keep.{name}={getattr(checkpoint.keep, name)}: 0 keeps none by it."
    if not checkpoint.metric.startswith(("eval/", "train/")):
        yield (
            f"checkpoint.metric={checkpoint.metric}: a value of a metrics line, e.g. eval/loss, "
            "eval/exact_match or train/loss."
        )


def _launch(exp: Experiment) -> Iterator[str]:
    launch, hosts = exp.launch, exp.hardware.hosts
    if launch.transport == "local" and len(hosts) > 1:
        yield (
            f"launch.transport=local starts this machine's ranks only, but there are "
            f"{len(hosts)} hosts. Use pdsh, openmpi or slurm."
        )
    if launch.transport == "slurm" and len({host.slots for host in hosts}) > 1:
        slots = ", ".join(f"{host.name} {host.slots}" for host in hosts)
        yield (
            f"launch.transport=slurm needs the same slots on every host (have {slots}). "
            "Use pdsh or openmpi, or hardware.slots=N."
        )
    if launch.transport == "slurm" and launch.sync == "rsync":
        yield "launch.sync=rsync goes over ssh; Slurm needs a shared file system. Use sync=none."
    if not 0 <= launch.master_port < 65536:
        yield f"launch.master_port={launch.master_port}: a port, or 0 for a free one."
    for name in ("max_restarts", "restart_backoff_s", "host_wait_s", "hang_timeout_s"):
        if (getattr(launch, name) or 0) < 0:
            yield f"launch.{name}={getattr(launch, name)}: not negative; 0 switches it off."
    for name in ("start_timeout_s", "heartbeat_timeout_s", "stop_grace_s"):
        if getattr(launch, name) <= 0:
            yield f"launch.{name}={getattr(launch, name)}: a positive number of seconds."
