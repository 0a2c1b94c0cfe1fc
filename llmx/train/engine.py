"""From an experiment to a DeepSpeed engine: process group, device, model, optimizer.

Tried by ``python -m pytest -m deepspeed tests/integration/test_train_export.py``.
"""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from llmx.config import Experiment, LaunchConfig, OptimConfig
from llmx.errors import ConfigError
from llmx.models.attention import AttentionMethod
from llmx.models.experts import Routing, gather_experts_together
from llmx.models.factory import (
    DTYPES,
    build_model,
    model_config,
    true_vocab,
)
from llmx.models.liger import apply_liger, wants_liger
from llmx.models.loss import fused_loss_problem
from llmx.models.model import (
    CAUSAL_LM,
    ForwardOf,
    Model,
    Models,
    ModelSpec,
    NetworksByName,
)
from llmx.models.parameters import whole_shape
from llmx.models.select_attention import select_attention
from llmx.plan.memory import fused_loss
from llmx.plan.types import Plan
from llmx.train.devices import check_quantized_gradients, choose_gpu
from llmx.train.loss_scale import grow_after_step
from llmx.train.state_refresh import forget_dummy_step
from llmx.train.state_values import check_states


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
    found = get_accelerator().device_name()
    if found != plan.accelerator:
        raise ConfigError(
            f"The plan is for {plan.accelerator}, DeepSpeed found {found} on this host "
            f"(DS_ACCELERATOR={os.environ.get('DS_ACCELERATOR', '')!r}). Check the driver and "
            "CUDA_VISIBLE_DEVICES there, or choose another hardware group."
        )
    if plan.accelerator == "cuda":
        rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        # DeepSpeed reads the variable, too.
        os.environ["LOCAL_RANK"] = str(choose_gpu(plan, rank=rank, local_rank=local_rank))
    _need_precision(plan.precision)
    if (shared_memory := get_accelerator().create_op_builder("ShareMemCommBuilder")) is not None:
        deepspeed.ops.__compatible_ops__[shared_memory.NAME] = False
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(
        dist_backend=get_accelerator().communication_backend_name(),
        auto_mpi_discovery=False,
        timeout=timedelta(seconds=timeout_s),
        verbose=False,
    )


def _need_precision(precision: str) -> None:
    """DeepSpeed would refuse it, too, but only after the model is built."""
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator()
    missing = {
        "fp16": not device.is_fp16_supported(),
        "bf16": not device.is_bf16_supported(),
    }
    if missing.get(precision, False):
        raise ConfigError(
            f"precision={precision} is not supported by the {device.device_name()} of host "
            f"{socket.gethostname()}. Set precision=fp32, or precision=auto with the true "
            "hardware.devices.*.precisions."
        )


def device_of(plan: Plan) -> torch.device:
    """The device of this process."""
    if plan.accelerator == "cuda":
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")


def seed_everything(exp: Experiment, *, accelerator: str) -> None:
    """Deterministic algorithms where asked for; by default on CPU, where they cost nothing."""
    wanted = exp.deterministic if exp.deterministic is not None else accelerator == "cpu"
    # Asked for in words, a missing deterministic kernel is an error, else a warning.
    torch.use_deterministic_algorithms(wanted, warn_only=exp.deterministic is None)
    # Would fill every new buffer of DeepSpeed with NaN first.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.manual_seed(exp.seed)


@dataclass
class Engine:
    """A DeepSpeed engine, and the networks inside that it trains or only holds."""

    engine: Any
    models: Models
    dtype: torch.dtype
    device: torch.device
    stage: int
    precision: str
    frozen_fingerprints: dict[str, str] = field(default_factory=dict)
    """Of the frozen models, by name (``engine_state.frozen_fingerprints``)."""
    _norm: torch.Tensor | None = None
    _scale: float = 1.0
    """What ``backward`` has multiplied the loss by, where DeepSpeed does not."""

    @property
    def main(self) -> Model:
        """The network that is exported and that generates."""
        return self.models.main

    @property
    def config(self) -> Any:
        """Of the main network."""
        return self.main.config

    @property
    def vocab_size(self) -> int:
        """Of the main network."""
        return self.main.vocab_size

    @property
    def attention(self) -> AttentionMethod:
        """Of the main network."""
        return self.main.attention

    @property
    def layout(self) -> str:
        """``packed`` where every network can be given packed sequences, else ``padded``."""
        layouts = {model.attention.layout for model in self.models.values()}
        return "packed" if layouts == {"packed"} else "padded"

    @property
    def module(self) -> nn.Module:
        """All that DeepSpeed holds: the network, or several by name (``NetworksByName``)."""
        module: nn.Module = self.engine.module
        return module

    @property
    def main_prefix(self) -> str:
        """What the names of the main network's parameters begin with in ``module``."""
        return "" if len(self.models) == 1 else f"{self.main.name}."

    def is_saved(self, parameter_name: str) -> bool:
        """Whether a checkpoint holds this parameter or buffer: those of frozen models come from
        their source again."""
        if len(self.models) == 1:
            return True
        return self.models[parameter_name.split(".", 1)[0]].spec.trained

    def set_lr(self, lr: float) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of ``loss``, multiplied by the loss scale where the step divides by it.

        DeepSpeed 0.19.8 does so for ZeRO's optimizers only (``engine.backward``). At stage 0 in
        fp16 its step divides all the same: every update would be next to nothing.
        """
        if self.stage == 0 and self.precision == "fp16":
            self._scale = self.loss_scale()
            loss = loss * self._scale
        self.engine.backward(loss)

    def note_grad_norm(self) -> None:
        """Before ``engine.step``: keep the gradient's norm where DeepSpeed computes none.

        That is stage 0 in fp32, where the reduced gradients lie whole on every rank after the
        last backward of a step.
        """
        whole = self.stage == 0 and self.precision == "fp32"
        if whole and self.engine.is_gradient_accumulation_boundary():
            gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
            self._norm = torch.nn.utils.get_total_norm(gradients)

    def last_norm(self) -> torch.Tensor | float | None:
        """Norm of the last step's gradient, before clipping, as it lies on the device; None
        where nobody computed it."""
        if self._norm is not None:
            return self._norm
        norm = self.engine.get_global_grad_norm()
        # FusedAdam's wrapper divides by the scale itself, the other one of stage 0 does not.
        whole = type(self.engine.optimizer).__name__ != "FP16_UnfusedOptimizer"
        return norm if whole or norm is None else norm / self._scale

    def grad_norm(self) -> float | None:
        """The same as a number. Waits for the device."""
        norm = self.last_norm()
        return None if norm is None else float(norm)

    def loss_scale(self) -> float:
        """DeepSpeed's fp16 loss scale; 1 at the other precisions."""
        if self.precision != "fp16":
            return 1.0
        optimizer = self.engine.optimizer
        return float(getattr(optimizer, "loss_scale", None) or optimizer.cur_scale)


ONE_MODEL = {"policy": ModelSpec()}


def build_engine(
    exp: Experiment,
    plan: Plan,
    ds_config: dict[str, Any],
    *,
    tokenizer: Any,
    specs: Mapping[str, ModelSpec] = ONE_MODEL,
) -> Engine:
    """Networks, optimizer and ``deepspeed.initialize``. Collective; needs the process group.

    Args:
        specs: the networks, by name (``Task.models``). Several live in one engine: one backward
            pass serves losses over all of them, and checkpoints need nothing of their own.
    """
    import deepspeed

    if not any(spec.trained for spec in specs.values()):
        raise ConfigError("The task trains none of its models: one must have trained=True.")
    device = device_of(plan)
    if plan.accelerator == "cuda":
        check_quantized_gradients(exp, plan, visible=torch.cuda.device_count())
    seed_everything(exp, accelerator=plan.accelerator)
    parts = {
        name: _build_one(exp, plan, ds_config, spec=spec, tokenizer=tokenizer, device=device)
        for name, spec in specs.items()
    }
    networks = {name: part.network for name, part in parts.items()}
    frozen = [name for name, spec in specs.items() if not spec.trained]
    one = len(networks) == 1
    whole = next(iter(networks.values())) if one else NetworksByName(networks, frozen=frozen)
    if ds_config["zero_optimization"]["stage"] == 3:
        gather_experts_together(whole)
    # Dropout draws differ from rank to rank, and not with how the model was built.
    torch.manual_seed(exp.seed + 1 + torch.distributed.get_rank())
    load_muon_uncompiled()
    optimizer = build_optimizer(
        whole,
        exp.optim,
        accelerator=plan.accelerator,
        offloaded=exp.zero.offload_optimizer != "none",
    )
    check_states(optimizer)
    engine, _, _, _ = deepspeed.initialize(
        model=whole,
        optimizer=optimizer,
        config=ds_config,
        dist_init_required=False,
    )
    forget_dummy_step(engine)
    grow_after_step(engine)
    models = Models(
        {
            name: Model(
                name=name,
                spec=specs[name],
                module=part.network,
                forward=engine if one else ForwardOf(engine, name, part.network),
                config=part.config,
                vocab_size=(
                    true_vocab(tokenizer) if exp.model.init == "scratch" else part.config.vocab_size
                ),
                attention=part.attention,
                dtype=DTYPES[plan.precision],
                device=device,
                routing=Routing(part.network),
            )
            for name, part in parts.items()
        }
    )
    for name, model in models.items():
        if parts[name].with_liger:
            apply_liger(model.module)
        if model.spec.head == CAUSAL_LM:
            wanted = fused_loss(exp, plan.accelerator)
            model.fused_loss = wanted and _can_fuse(exp, model)
    return Engine(
        engine=engine,
        models=models,
        dtype=DTYPES[plan.precision],
        device=device,
        stage=ds_config["zero_optimization"]["stage"],
        precision=plan.precision,
    )


@dataclass(frozen=True)
class _Built:
    """A network with its weights in place, not yet in an engine."""

    network: nn.Module
    config: Any
    attention: AttentionMethod
    with_liger: bool


def _build_one(
    exp: Experiment,
    plan: Plan,
    ds_config: dict[str, Any],
    *,
    spec: ModelSpec,
    tokenizer: Any,
    device: torch.device,
) -> _Built:
    """Collective."""
    config = model_config(exp, tokenizer=tokenizer, num_labels=spec.num_labels)
    attention = select_attention(exp, plan, config, device=device)
    with_liger = wants_liger(exp, config, device=device, dtype=DTYPES[plan.precision])
    network = build_model(
        exp,
        config,
        precision=plan.precision,
        device=device,
        implementation=attention.implementation,
        ds_config=ds_config,
        head=spec.head,
    )
    if not spec.trained:
        network.requires_grad_(False)
    return _Built(network, config, attention, with_liger)


def _few_tokens(exp: Experiment, model: Model) -> tuple[dict[str, Any], torch.Tensor]:
    """A micro batch to try the model with: inputs and labels."""
    ids = torch.arange(min(8, exp.data.seq_len))[None]
    return model.inputs(
        {
            "input_ids": ids,
            "position_ids": ids,
            "segment_ids": torch.ones_like(ids),
            "labels": ids,
        }
    )


def _can_fuse(exp: Experiment, model: Model) -> bool:
    """Whether head and loss of this model can be computed together; says why not. Collective."""
    problem = fused_loss_problem(model.forward, *_few_tokens(exp, model))
    problems: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(problems, problem)
    problem = next((found for found in problems if found), None)
    if problem is None:
        return True
    kind = type(model.module).__name__
    if exp.model.fused_loss:
        raise ConfigError(
            f"model.fused_loss=true does not work with {kind}: {problem}. "
            "Set model.fused_loss=null, which leaves it off here."
        )
    if torch.distributed.get_rank() == 0:
        print(f"model.fused_loss is off for {kind}: {problem}", flush=True)
    return False


def load_muon_uncompiled() -> None:
    """Load DeepSpeed's Muon kernels without compiling them: it loads them to compare types, and
    ``torch.compile`` would bring in all of inductor, a fifth of the start of a rank. Nothing here
    uses Muon."""
    from deepspeed.runtime import compiler

    real = compiler.compile
    compiler.compile = lambda: lambda function: function
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    except ImportError:
        return  # a DeepSpeed without them
    finally:
        compiler.compile = real


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors (biases and norms) do not. Order as in the model."""
    matrices, vectors = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (matrices if len(whole_shape(parameter)) > 1 else vectors).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    model: nn.Module, optim: OptimConfig, *, accelerator: str, offloaded: bool = False
) -> torch.optim.Optimizer:
    """The optimizer that DeepSpeed wraps. The learning rate is set at every step.

    AdamW is one fused kernel on CUDA, which moves a quarter of the memory, and on the CPU of an
    offload, where it is eight times as fast. A run on CPU ranks keeps the plain one: its results
    are those that were recorded.
    """
    groups = parameter_groups(model, weight_decay=optim.weight_decay)
    if optim.kind == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr)
    betas = (optim.betas[0], optim.betas[1])
    if optim.kind == "adamw":
        fused = accelerator == "cuda" or offloaded
        return torch.optim.AdamW(
            groups, lr=optim.lr, betas=betas, eps=optim.eps, fused=True if fused else None
        )
    _need_compiler(optim.kind)
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    try:
        if optim.kind == "cpu_adam":
            return DeepSpeedCPUAdam(
                groups, lr=optim.lr, betas=betas, eps=optim.eps, adamw_mode=True
            )
        if accelerator != "cuda":
            raise ConfigError("optim.kind=fused_adam needs CUDA. Set optim.kind=adamw.")
        return FusedAdam(groups, lr=optim.lr, betas=betas, eps=optim.eps, adam_w_mode=True)
    except (RuntimeError, OSError, ImportError) as error:
        raise ConfigError(
            f"DeepSpeed could not build its extension for optim.kind={optim.kind}: {error} "
            "Set optim.kind=adamw, which is PyTorch's own and needs no build."
        ) from error


def _need_compiler(kind: str) -> None:
    missing = []
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        missing.append("a C++ compiler (apt-get install g++)")
    if not shutil.which("ninja"):
        missing.append("ninja (pip install ninja)")
    if missing:
        raise ConfigError(
            f"optim.kind={kind} is an extension that DeepSpeed compiles on each host, and this "
            f"one lacks {' and '.join(missing)}. Install it, or set optim.kind=adamw."
        )
