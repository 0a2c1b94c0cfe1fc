"""Networks, optimizer and ``deepspeed.initialize``: the engine that the loop drives.

DeepSpeed's stages 1 and 2 put gradients into buckets as they become ready, and add up the buckets
of all ranks: ranks whose order differs would add up different parameters, without a word. Where
ranks compute in different ways (activation checkpointing or attention by type of device), each
tries its network on a few tokens, and they compare (``check_gradient_order``).

Tried by ``python -m pytest -m deepspeed tests/integration/test_train_engines.py
tests/integration/test_train_export.py`` and ``python -m pytest
tests/unit/test_models_blocks.py``.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import torch
from deepspeed.runtime.precision_config import DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import ValidationError
from torch import nn

from llmx import text as human
from llmx.checkpoint.state.engine_state import forget_dummy_step
from llmx.checkpoint.state.layout import state_layout
from llmx.checkpoint.state.values import check_states
from llmx.collectives import all_gather, first_problem
from llmx.config import Experiment, ModelConfig
from llmx.config.accelerators import ACCELERATORS
from llmx.config.build import shown
from llmx.errors import ConfigError
from llmx.models.adapter import Adapter, add_adapter, freeze
from llmx.models.experts import Routing, gather_experts_together
from llmx.models.factory import (
    DTYPES,
    build_model,
    model_config,
    new_token_ids,
    vocab_rows,
)
from llmx.models.isolation import line_of, tiny_model, turn_dropout_off
from llmx.models.liger import wants_liger
from llmx.models.loss import fused_loss_problem, output_head_problem, without_cache
from llmx.models.model import (
    LANGUAGE_MODELS,
    ForwardOf,
    Model,
    Models,
    ModelSpec,
    NetworksByName,
    base_of,
)
from llmx.models.network_config import network_config
from llmx.models.parameters import whole_bytes, whole_shape
from llmx.models.pooling import has_score
from llmx.models.select_attention import select_attention
from llmx.models.spec import are_bases
from llmx.models.tiny import tiny_config
from llmx.plan.by_device import on_device
from llmx.plan.memory import fused_loss
from llmx.plan.types import Plan
from llmx.train.engine.muon import Muon, hidden_matrices
from llmx.train.engine.optimizer import LR_SCALE, build_optimizer, load_muon_uncompiled, lr_scales
from llmx.train.engine.patches import grow_after_step, know_passes_apart
from llmx.train.engine.process_group import check_quantized_gradients, device_of


def gradient_order(network: nn.Module, forward: Callable[[], Any]) -> list[str]:
    """Names of trained parameters in the order in which a backward pass completes their gradients.

    ``forward`` passes the network forward. Gradients are dropped one by one, so that it takes no
    memory for all of them. The network is as it was afterwards, but for random numbers drawn.
    """
    names: list[str] = []

    def completed(name: str, parameter: torch.Tensor) -> None:
        names.append(name)
        parameter.grad = None

    handles = [
        parameter.register_post_accumulate_grad_hook(partial(completed, name))
        for name, parameter in network.named_parameters()
        if parameter.requires_grad
    ]
    try:
        with torch.enable_grad():
            output = forward()
            # What a loss may see: logits or hidden states, an auxiliary loss.
            values = output.values() if hasattr(output, "keys") else [output]
            parts = [
                value.float().square().sum()
                for value in values
                if isinstance(value, torch.Tensor) and value.requires_grad
            ]
            if not parts:
                raise ValueError("its forward pass has no output with a gradient")
            torch.stack(parts).sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    return names


def seed_everything(seed: int, *, deterministic: bool | None, accelerator: str) -> None:
    """Deterministic algorithms where set; by default on CPU, where they cost nothing."""
    by_default = not ACCELERATORS[accelerator].is_gpu
    use_deterministic = by_default if deterministic is None else deterministic
    # A missing deterministic kernel is an error where they were set, else a warning.
    torch.use_deterministic_algorithms(use_deterministic, warn_only=deterministic is None)
    # Would fill every new buffer of DeepSpeed with NaN first.
    cast(Any, torch.utils.deterministic).fill_uninitialized_memory = False
    torch.manual_seed(seed)


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
    """Fingerprints of the frozen models, by name (``engine_state.frozen_fingerprints``)."""
    generates_whole: bool | None = None
    """At ZeRO-3: whether the last generation gathered all weights once."""
    _norm: torch.Tensor | None = None
    _scale: float = 1.0
    """What ``backward`` has multiplied the loss by, where DeepSpeed does not."""

    @property
    def main(self) -> Model:
        """The network that is exported and that generates."""
        return self.models.main

    @property
    def config(self) -> Any:
        return self.main.config

    @property
    def vocab_size(self) -> int:
        return self.main.vocab_size

    @property
    def layout(self) -> str:
        """``packed`` where every network can be given packed sequences, else ``padded``."""
        return layout_of(self.models)

    @property
    def module(self) -> nn.Module:
        """The module inside DeepSpeed: the network, or several by name (``NetworksByName``)."""
        module: nn.Module = self.engine.module
        return module

    @property
    def networks(self) -> dict[str, Model]:
        """The models that have a network of their own, by name."""
        return {name: model for name, model in self.models.items() if not model.of_base}

    @property
    def main_prefix(self) -> str:
        """The prefix of the main network's parameters in ``module``."""
        return "" if len(self.networks) == 1 else f"{self.main.name}."

    def release_gathered(self) -> None:
        """Give back what ZeRO-3 has gathered, also what is under way: a forward pass that is
        shorter than the one before it ends with parameters fetched ahead, and DeepSpeed gathers
        none of these for anything else. Collective."""
        if self.stage == 3:
            self.engine.empty_partition_cache()

    def is_saved(self, parameter_name: str) -> bool:
        """Whether a checkpoint holds this parameter or buffer: those of frozen models, and of the
        frozen base of an adapter, come from their source again."""
        model = self.main
        if len(self.networks) > 1:
            name, parameter_name = parameter_name.split(".", 1)
            model = self.models[name]
        if model.adapter is not None:
            return parameter_name in model.adapter.trained
        return model.spec.trained

    def set_lr(self, lr: float) -> None:
        """The learning rate of the next step; that of parts with one of their own is in proportion
        to it (``llmx.train.engine.optimizer``)."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr * group.get(LR_SCALE, 1.0)

    def set_micro_steps(self, count: int) -> None:
        """Set the micro steps of this rank for the next update, before its first one. Ranks may
        differ at ZeRO stages 0 and 1, which communicate in the last one only."""
        engine = self.engine
        if engine.gradient_accumulation_steps() == count:
            return
        engine.set_train_batch_size(
            engine.train_micro_batch_size_per_gpu() * count * engine.dp_world_size
        )
        engine.micro_steps = engine.global_steps * count  # its remainder finds the last micro step
        if hasattr(engine.optimizer, "gradient_accumulation_steps"):  # its own copy
            engine.optimizer.gradient_accumulation_steps = count

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of ``loss``, multiplied by the loss scale where the step divides by it.

        DeepSpeed 0.19.8 does so for ZeRO's optimizers only (``engine.backward``). At stage 0 in
        fp16 its step divides all the same: every update would be next to nothing.
        """
        if self.stage == 0 and self.precision == "fp16":
            self._scale = self.loss_scale()
            loss = loss * self._scale
        self.engine.backward(loss)
        # At stage 0 in fp32 DeepSpeed computes no norm: all ranks have all reduced gradients now.
        computes_none = self.stage == 0 and self.precision == "fp32"
        if computes_none and self.engine.is_gradient_accumulation_boundary():
            gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
            self._norm = torch.nn.utils.get_total_norm(gradients)

    def last_norm(self) -> torch.Tensor | float | None:
        """Norm of the last step's gradient, before clipping, still on the device; None where it
        was not computed."""
        if self._norm is not None:
            return self._norm
        norm: torch.Tensor | float | None = self.engine.get_global_grad_norm()
        # FusedAdam's wrapper divides by the scale itself, the other one of stage 0 does not.
        is_unscaled = type(self.engine.optimizer).__name__ != "FP16_UnfusedOptimizer"
        return norm if is_unscaled or norm is None else norm / self._scale

    def grad_norm(self) -> float | None:
        """``last_norm`` as a number. Waits for the device."""
        norm = self.last_norm()
        return None if norm is None else float(norm)

    def loss_scale(self) -> float:
        """DeepSpeed's fp16 loss scale; 1 at the other precisions."""
        if self.precision != "fp16":
            return 1.0
        optimizer = self.engine.optimizer
        return float(getattr(optimizer, "loss_scale", None) or optimizer.cur_scale)


def check_sections(ds_config: Mapping[str, Any]) -> None:
    """Refuse a value of ``zero.extra`` that DeepSpeed does not take, before anything is loaded.

    Raises:
        ConfigError: the key, its value and DeepSpeed's rule.
    """
    sections = {"zero_optimization": DeepSpeedZeroConfig, "fp16": DeepSpeedFP16Config}
    for section, config in sections.items():
        try:
            config(**ds_config[section])
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(str(part) for part in ("zero.extra", section, *problem["loc"]))
            raise ConfigError(f"{place}={shown(problem['input'])}: {problem['msg']}.") from None


def layout_of(models: Models) -> str:
    """``packed`` where every network can be given packed sequences, else ``padded``."""
    layouts = {model.attention.layout for model in models.values()}
    return "packed" if layouts == {"packed"} else "padded"


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
        raise ConfigError(
            "The task trains none of its models. Set trained=True on at least one ModelSpec."
        )
    device = device_of(plan)
    # What differs by type of device is in here, and nowhere else.
    exp = on_device(exp, plan.ranks[torch.distributed.get_rank()].device)
    if plan.on_gpus:
        check_quantized_gradients(exp.zero, plan, visible=torch.cuda.device_count())
    seed_everything(exp.seed, deterministic=exp.deterministic, accelerator=plan.accelerator)
    bases = are_bases(specs, exp.adapter, exp.model)
    own_specs = {name: spec for name, spec in specs.items() if name not in bases}
    models = build_networks(
        exp, plan, ds_config, specs=own_specs, tokenizer=tokenizer, device=device
    )
    networks = {name: model.module for name, model in models.items()}
    for name, network in networks.items():
        if not own_specs[name].dropout:
            turn_dropout_off(network)
    frozen = [name for name, spec in own_specs.items() if not spec.trained]
    is_single = len(networks) == 1
    combined = models.main.module if is_single else NetworksByName(networks, frozen=frozen)
    stage = ds_config["zero_optimization"]["stage"]
    if stage == 3:
        gather_experts_together(combined)
    if computes_by_device(plan) and stage in (1, 2):
        check_gradient_order(models, plan, seq_len=exp.data.seq_len)
    for model in models.values():
        model.fused_loss = (
            model.spec.head in LANGUAGE_MODELS
            and fused_loss(exp.model, plan.accelerator)
            and _can_fuse(model, with_source(exp, model.spec).model)
        )
    # Dropout draws differ from rank to rank, and not with how the model was built.
    torch.manual_seed(exp.seed + 1 + torch.distributed.get_rank())
    load_muon_uncompiled()
    optimizer = build_optimizer(
        combined,
        exp.optim,
        apart=lr_scales(exp.optim, exp.adapter, networks.values()),
        accelerator=plan.accelerator,
        offloaded=exp.zero.offload_optimizer != "none",
    )
    check_states(optimizer, partitioned=stage > 0)
    matrices = hidden_matrices(combined) if isinstance(optimizer, Muon) else set()
    shapes = {name: whole_shape(p) for name, p in combined.named_parameters() if id(p) in matrices}
    engine, _, _, _ = deepspeed.initialize(
        model=combined,
        optimizer=optimizer,
        config=ds_config,
        dist_init_required=False,
    )
    forget_dummy_step(engine)
    grow_after_step(engine)
    know_passes_apart(engine)
    if isinstance(optimizer, Muon):
        optimizer.distribute(state_layout(engine), shapes=shapes, device=device)
    for name, model in models.items():
        model.connect(engine if is_single else ForwardOf(engine, name, model.module))
    for name in sorted(bases):
        models[name] = base_of(models.main, name=name, spec=specs[name])
    built = Engine(
        engine=engine,
        models=models,
        dtype=DTYPES[plan.precision],
        device=device,
        stage=stage,
        precision=plan.precision,
    )
    for model in models.values():
        model.for_generation = partial(weights_for_generation, built, model)
    return built


def computes_by_device(plan: Plan) -> bool:
    """Whether ranks on one type of device compute otherwise than those on another."""
    return bool(plan.checkpointing) or len({way for _, way in plan.attention}) > 1


def check_gradient_order(models: Models, plan: Plan, *, seq_len: int) -> None:
    """Raise ConfigError where gradients of the networks do not become ready in the same order on
    all ranks: DeepSpeed would add up different parameters. A few tokens each. Collective."""
    for model in models.values():
        network = model.module
        if not any(parameter.requires_grad for parameter in network.parameters()):
            continue
        orders = all_gather(_order_of(model, seq_len=seq_len))
        expected, _ = orders[0]
        differing = [rank for rank, answer in enumerate(orders) if answer != (expected, "")]
        if not differing:
            continue
        rank = differing[0]
        order, why = orders[rank]
        kind = type(network).__name__
        if why and not plan.checkpointing:
            if torch.distributed.get_rank() == 0:
                print(f"Cannot check the order of the gradients of {kind}: {why}", flush=True)
            continue
        if not why:
            pairs = enumerate(zip_longest(expected, order, fillvalue="none"), start=1)
            place, (name, there) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
            why = f"gradient {place} is {there} there and {name} on rank 0"
        raise ConfigError(
            f"{kind}: ZeRO stages 1 and 2 need gradients in the same order on all ranks. Rank "
            f"{rank} and rank 0 differ: {why}. Set one model.activation_checkpointing (null for "
            "each type of device) and one model.attention (segments, sdpa or eager) for all ranks."
        )


def _order_of(model: Model, *, seq_len: int) -> tuple[list[str], str]:
    """The order of a network's gradients, by a few tokens; or why it is not known."""
    network, device = model.module, model.device
    if next(network.parameters()).device.type != device.type:
        network.to(device)  # as DeepSpeed will; attention may have a kernel there only
    was_training = network.training
    network.train()  # else nothing is computed again
    ids = torch.arange(min(8, seq_len))[None]
    tokens = {"input_ids": ids, "position_ids": ids, "labels": ids}
    try:
        inputs, _ = model.inputs({**tokens, "segment_ids": torch.ones_like(ids)})
        if has_score(network):
            at = torch.zeros(1, dtype=torch.long, device=device)
            inputs["pool_at"] = at, at
        return gradient_order(network, partial(network, **inputs, **without_cache(network))), ""
    except (RuntimeError, TypeError, IndexError, KeyError, AttributeError, ValueError) as error:
        return [], f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    finally:
        network.train(was_training)


def check_spec(spec: ModelSpec, *, precision: str) -> None:
    """Raise ConfigError for a precision that a network cannot have beside the run's."""
    if spec.precision in (None, precision):
        return
    if spec.precision not in DTYPES:
        raise ConfigError(f"precision={spec.precision} is not one of {', '.join(DTYPES)}.")
    if precision != "fp32":
        raise ConfigError(
            f"DeepSpeed casts all networks of an engine to precision={precision}. Remove precision "
            "from the ModelSpec; a frozen network in a lower precision needs a run with "
            "precision=fp32."
        )


def with_source(exp: Experiment, spec: ModelSpec) -> Experiment:
    """The experiment with the ``model`` group of this network: its source, without the overrides of
    ``model.config`` and the trust in remote code, which are for ``model.path``."""
    if spec.source is None:
        return exp
    model = replace(
        exp.model,
        kind="hf",
        init="pretrained",
        path=str(Path(spec.source).expanduser()) if spec.source.startswith("~") else spec.source,
        revision=spec.revision,
        config={},
        resolved={},
        resolved_from=None,
        add_tokens=[],
        add_special_tokens=[],
        trust_remote_code=exp.model.trust_remote_code and spec.source == exp.model.path,
    )
    return replace(exp, model=model)


def check_source(model: ModelConfig) -> None:
    """Raise ConfigError where a network's source has no config that can be read."""
    try:
        network_config(model)
    except Exception as error:  # the Hub client's errors have no common base
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ConfigError(
            f"no directory with a config.json on this host, and loading from the Hub failed: "
            f"{reason} Set the source to a directory that exists on every host, or to a Hub id."
        ) from error


def check_tokenizer(model: ModelConfig, tokenizer: Any) -> None:
    """Raise ConfigError where the tokenizer beside a network's weights numbers its tokens
    otherwise than the run's: the network would read other text. One that is not there, or cannot
    be loaded, says nothing."""
    from transformers import AutoTokenizer

    try:
        source_ids = AutoTokenizer.from_pretrained(
            model.path,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
        ).get_vocab()
    except Exception:  # the Hub client's errors have no common base
        return
    run_ids: dict[str, int] = tokenizer.get_vocab()
    ids = set(source_ids.values())
    differing = [
        t for t, number in run_ids.items() if number in ids and source_ids.get(t) != number
    ]
    if differing:
        token = min(differing, key=run_ids.__getitem__)
        raise ConfigError(
            f"its tokenizer differs from that of the run: {len(differing)} of {len(run_ids)} "
            f"tokens have different ids, e.g. {token!r} is {run_ids[token]} in the run and "
            f"{source_ids.get(token, 'missing')} in the source. All networks of a task read the "
            "same token ids: choose a source with the tokenizer of the run."
        )


def build_networks(
    exp: Experiment,
    plan: Plan,
    ds_config: dict[str, Any],
    *,
    specs: Mapping[str, ModelSpec],
    tokenizer: Any,
    device: torch.device,
) -> Models:
    """The networks of ``specs`` by name, not yet in an engine (``Model.connect``). Collective.

    Raises:
        ConfigError: one cannot be built; the message names one that has a source of its own.
    """
    models = Models()
    for name, spec in specs.items():
        try:
            check_spec(spec, precision=plan.precision)
            own_exp = with_source(exp, spec)
            if spec.source is not None:
                check_source(own_exp.model)
                check_tokenizer(own_exp.model, tokenizer)
            models[name] = _build_network(
                name, own_exp, plan, ds_config, spec=spec, tokenizer=tokenizer, device=device
            )
        except ConfigError as error:
            if spec.source is None and spec.precision is None:
                raise
            settings = {
                "source": spec.source,
                "revision": spec.revision,
                "precision": spec.precision,
            }
            words = [f"{key}={value}" for key, value in settings.items() if value is not None]
            words.append(f"trained={spec.trained}")
            raise ConfigError(
                f"The model {name!r} of the task, ModelSpec({', '.join(words)}): {error}"
            ) from error
    return models


def _build_network(
    name: str,
    exp: Experiment,
    plan: Plan,
    ds_config: dict[str, Any],
    *,
    spec: ModelSpec,
    tokenizer: Any,
    device: torch.device,
) -> Model:
    """One network with its weights, adapter and frozen parts. Collective."""
    config = model_config(exp.model, exp.data, tokenizer=tokenizer, spec=spec)
    attention = select_attention(exp.model, exp.data, plan, config, device=device, head=spec.head)
    precision = spec.precision or plan.precision
    dtype = DTYPES[precision]
    liger_kernel = wants_liger(exp.model, config, device=device, dtype=dtype)
    network = build_model(
        exp.model,
        exp.seed,
        config,
        precision=precision,
        device=device,
        implementation=attention.implementation,
        ds_config=ds_config,
        head=spec.head,
        new_tokens=new_token_ids(exp.model, tokenizer),
        adapter=exp.adapter if spec.trained else None,
    )
    adapter = choose_trained(network, exp, spec, ds_config=ds_config, dtype=dtype)
    text = network_config(exp.model).get_text_config()
    return Model(
        name=name,
        spec=spec,
        module=network,
        forward=network,
        config=config,
        vocab_size=vocab_rows(exp.model, text, tokenizer),
        attention=attention,
        dtype=dtype,
        device=device,
        routing=Routing(network),
        adapter=adapter,
        liger_kernel=liger_kernel,
    )


def choose_trained(
    network: nn.Module,
    exp: Experiment,
    spec: ModelSpec,
    *,
    ds_config: Mapping[str, Any],
    dtype: torch.dtype,
) -> Adapter | None:
    """Freeze the parameters that are not trained, and put the adapter in. Collective at ZeRO-3."""
    if spec.trained and exp.adapter.kind != "none":
        return add_adapter(
            network,
            exp.model,
            exp.adapter,
            exp.seed,
            ds_config=ds_config,
            dtype=dtype,
            head=spec.head,
        )
    if spec.trained:
        freeze(network, exp.model.freeze)
    else:
        network.requires_grad_(False)
    return None


def _can_fuse(model: Model, choice: ModelConfig) -> bool:
    """Whether head and loss of this network can be computed together; logs why not. Collective.

    A small one of its class is tried: an error of a forward inside an engine of ZeRO-3, even one
    that is caught, leaves weights that DeepSpeed can no longer free.
    """
    kind = type(model.module).__name__
    problem = output_head_problem(model.module)
    if problem is None:
        try:
            tiny = tiny_config(model.config)
            tiny._attn_implementation = "eager"
            small = tiny_model(tiny, remote=choice.trust_remote_code, head=model.spec.head)
        except Exception as error:
            problem = f"no small model of its class could be tried ({line_of(error)})"
        else:
            ids = torch.arange(8)[None]
            problem = fused_loss_problem(small, {"input_ids": ids}, ids)
    rank_and_problem = first_problem(problem)
    if rank_and_problem is None:
        return True
    _, problem = rank_and_problem
    if choice.fused_loss:
        raise ConfigError(
            f"model.fused_loss=true does not work with {kind}: {problem}. "
            "Set model.fused_loss=null, which turns it off for this model."
        )
    if torch.distributed.get_rank() == 0:
        print(f"model.fused_loss is off for {kind}: {problem}", flush=True)
    return False


@contextlib.contextmanager
def whole_weights(engine: Engine, network: nn.Module | None = None) -> Iterator[None]:
    """Inside, every rank holds ``network``, or all of them, whole, gathered once; no other can be
    used. Collective; without ZeRO-3 nothing happens.

    It takes the memory of these weights on every device (2 bytes a parameter in bf16). Weights must
    not be changed inside. An error inside is the end of the engine: DeepSpeed puts its hooks back
    only where the block ends well.
    """
    if engine.stage != 3:
        yield
        return
    from deepspeed.runtime.zero.stage3 import unwrap_model_for_generation

    engine.release_gathered()
    held = network or engine.module
    of_engine = SimpleNamespace(parameters=held.parameters, optimizer=engine.engine.optimizer)
    with unwrap_model_for_generation(of_engine), _without_backward_hooks(engine.module):
        yield


@contextlib.contextmanager
def weights_for_generation(engine: Engine, model: Model) -> Iterator[None]:
    """``whole_weights`` of a model where these take at most half of the memory that is free on
    every rank: the rest is for keys and values. It saves a gathering of every layer for each token.
    Which it is, is logged when it changes. Collective."""
    if engine.stage != 3:
        yield
        return
    needed = sum(map(whole_bytes, model.module.parameters()))
    free = all_gather(free_bytes(engine.device))
    rank = min(range(len(free)), key=free.__getitem__)
    fits = 2 * needed <= free[rank]
    if fits != engine.generates_whole and torch.distributed.get_rank() == 0:
        weights = human.size(needed)
        text = f"Generation gathers the weights ({weights}) once, and not for each token."
        if not fits:
            text = (
                "Generation gathers every layer again for each token (ZeRO-3), which is slow: the "
                f"weights take {weights}, more than half of the {human.size(free[rank])} that are "
                f"free on rank {rank}. Where the optimizer fits, set zero=stage2."
            )
        print(f"{text}\n", end="", flush=True)
    engine.generates_whole = fits
    with whole_weights(engine, model.module) if fits else contextlib.nullcontext():
        yield


def free_bytes(device: torch.device) -> int:
    """Free memory of the device; of RAM the share of a rank."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    return int(psutil.virtual_memory().available) // int(os.environ.get("LOCAL_SIZE", "1"))


@contextlib.contextmanager
def _without_backward_hooks(network: nn.Module) -> Iterator[None]:
    """Inside, modules call nothing in a backward pass. DeepSpeed leaves those on experts
    (``gather_experts_together``), which hand over gradients, and zeros for experts without any."""
    hooks = [(module, module._backward_hooks) for module in network.modules()]
    for module, _ in hooks:
        module._backward_hooks = OrderedDict()
    try:
        yield
    finally:
        for module, backward_hooks in hooks:
            module._backward_hooks = backward_hooks
