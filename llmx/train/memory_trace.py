"""Traces a micro step on fake tensors: ``python -m llmx.train.memory_trace JOB.json OUT``.

The real network of the experiment, its adapter, activation checkpointing, attention and the loss of
its task are run forward and backward on tensors that have a shape and no memory; each storage is
counted from its making to its end. ``llmx.lifecycle.knowledge`` starts it, in a process of its own.

Blocks that are built alike behave alike. So a stack is cut after a few of them (``Stack.cut``), two
in the middle are compared, event by event, and where they agree the second one is repeated until
there are as many as in the whole stack: 80 blocks are traced in the time of 5.

Shown by ``python -m pytest tests/unit/test_plan_trace.py``.
"""

from __future__ import annotations

import contextlib
import json
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmx.config import Experiment, ModelConfig, experiment_from_dict
from llmx.config.model_rules import added_tokens
from llmx.config.optimizers import optimizer_of
from llmx.data import collate
from llmx.data.format.rows import Preference
from llmx.data.store.samples import Sample
from llmx.errors import ConfigError
from llmx.models.adapter import reach_line
from llmx.models.attention import AttentionMethod, methods
from llmx.models.blocks import Stack, recompute, stack_of
from llmx.models.experts import Routing, expert_blocks
from llmx.models.factory import DTYPES, build_model, padded_vocab, vocab_rows
from llmx.models.flops import model_flops
from llmx.models.isolation import turn_dropout_off
from llmx.models.model import (
    CAUSAL_LM,
    CLASSIFICATION,
    LANGUAGE_MODELS,
    MASKED_LM,
    ForwardOf,
    Model,
    Models,
    ModelSpec,
    NetworksByName,
    base_of,
)
from llmx.models.network_config import network_config
from llmx.models.parameters import output_embedding
from llmx.models.quantized import BLOCK, Quantization, quantize_on_arrival, quantized_layers
from llmx.models.spec import are_bases
from llmx.models.varlen import IMPLEMENTATIONS, register
from llmx.plan.memory import fused_loss
from llmx.plan.network import Network
from llmx.plan.trace import (
    FETCH,
    FETCH_BACKWARD,
    GRADIENT,
    RELEASE,
    RELEASE_BACKWARD,
    Event,
    StepTrace,
    TracedParameter,
)
from llmx.run.rundir import write_json
from llmx.tasks import JointTask, task_class
from llmx.train.engine.build import choose_trained, with_source
from llmx.train.engine.muon import hidden_matrices
from llmx.train.engine.optimizer import lr_scales, parameter_groups

BEYOND = 4
"""Blocks that are run beside the first ones, which may differ: one whose input may still be kept
for something else, two that are compared, and the last one of the stack."""


@dataclass(frozen=True)
class Numbers:
    """The numbers of a block in a trace."""

    modules: range
    parameters: range

    def of(self, event: Event) -> range:
        """The numbers that this kind of event counts with."""
        return self.parameters if event.kind == GRADIENT else self.modules

    def has(self, event: Event) -> bool:
        """Whether an event is of this block."""
        return event.index in self.of(event)


def with_all_blocks(trace: StepTrace, blocks: Sequence[Numbers], num_run: int) -> StepTrace | None:
    """The micro step with all ``blocks``, of which ``trace`` has the first ``num_run``. None where
    the blocks that are compared do not agree.

    Numbers of modules and parameters in ``trace`` are those of the whole network.
    """
    run = trace.events
    before, former, repeated, last = blocks[num_run - 4 : num_run]
    begins = [_begin(run, FETCH, block) for block in (former, repeated, last)]
    begins += [_begin(run, FETCH_BACKWARD, block) for block in (repeated, former, before)]
    if -1 in begins or begins != sorted(begins):
        return None
    f_former, f_repeated, f_last, b_repeated, b_former, b_before = begins
    forward = _Part(run, f_repeated, f_last, repeated)
    backward = _Part(run, b_repeated, b_former, repeated)
    if not forward.agrees(_Part(run, f_former, f_repeated, former)):
        return None
    if not backward.agrees(_Part(run, b_former, b_before, former)):
        return None
    added = blocks[num_run - 1 : -1]
    events = [*run[:f_last]]
    for number, block in enumerate(added, start=1):
        events += _moved(forward.events, number * forward.grows, repeated, block)
    grown = len(added) * forward.grows
    events += _moved(run[f_last:b_repeated], grown, last, blocks[-1])
    for block in reversed(added):
        events += _moved(backward.events, grown, repeated, block)
        grown += backward.grows
    events += _moved(run[b_repeated:], grown, last, blocks[-1])
    return replace(trace, events=tuple(events), last_peak=trace.last_peak + grown)


def _begin(events: Sequence[Event], kind: int, block: Numbers) -> int:
    """The place of the first event of a kind of the block itself, not of a module in it; -1 where
    there is none."""
    first = (kind, block.modules[0])
    places = (place for place, event in enumerate(events) if (event.kind, event.index) == first)
    return next(places, -1)


def _moved(events: Iterable[Event], live: int, old: Numbers, new: Numbers) -> Iterator[Event]:
    """Events with ``live`` bytes more; those of the block ``old`` as of the block ``new``."""
    for event in events:
        step = new.of(event)[0] - old.of(event)[0] if old.has(event) else 0
        yield Event(event.kind, event.index + step, event.peak + live, event.live + live)


class _Part:
    """The events of a block in one direction: from its first one to that of the next block."""

    def __init__(self, run: Sequence[Event], begin: int, end: int, block: Numbers) -> None:
        self.events, self.block = run[begin:end], block
        self.base = run[begin - 1].live
        self.grows = run[end - 1].live - self.base
        """Bytes that stay when it is over."""

    def agrees(self, other: _Part) -> bool:
        """Whether another block does the same, and both do nothing but their own."""
        has_own_events = all(
            part.block.has(event) for part in (self, other) for event in part.events
        )
        moved = _moved(other.events, self.base - other.base, other.block, self.block)
        return has_own_events and list(moved) == list(self.events)


WHOLE = {"zero_optimization": {"stage": 0}}
"""The part of DeepSpeed's configuration that a network is built by, without sharding."""


class Recorder(TorchDispatchMode):
    """Inside, every storage that an operator returns is counted until it is freed.

    Operators on real tensors (the micro batch, on the CPU) run for real, so that what looks at them
    finds values; all else is fake.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.events: list[Event] = []
        self._known: dict[int, weakref.ref[Any]] = {}

    def mark(self, kind: int, index: int) -> None:
        """Record an event, and the peak of memory since the one before it."""
        self.events.append(Event(kind, index, self.peak, self.live))
        self.peak = self.live

    def leave_out(self, values: Iterable[torch.Tensor]) -> None:
        """Exclude the storages of these tensors from the count."""
        for value in values:
            storage = value.untyped_storage()
            self._known[storage._cdata] = weakref.ref(storage)

    def take(self, values: Any) -> None:
        """Count the storages of these tensors."""
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor):
                self._count(value)

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.prim.device.default and not _in_kernel(args[0]):
            return args[0].fake_device  # two thirds of all that comes here
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        counts = function.overloadpacket is torch.ops.aten.arange
        if (tensors or counts) and not any(isinstance(x, FakeTensor) for x in tensors):
            with unset_fake_temporarily():
                result = function(*args, **kwargs)
        else:
            result = _on_fakes(function, args, kwargs)
        self.take(result)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or not size:
            return

        def gone(_: Any) -> None:
            if self._known.pop(key, None) is not None:
                self.live -= size

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)


def _in_kernel(tensor: Any) -> bool:
    """Whether the device of a tensor is asked by a kernel that runs for its shape; or of a real
    one."""
    return not isinstance(tensor, FakeTensor) or bool(tensor.fake_mode.in_kernel_invocation)


def _on_fakes(function: Any, args: Any, kwargs: Any) -> Any:
    """Products by expert have a shape for bf16 alone; the CPU computes them in fp32, too."""
    if "_grouped_mm" not in str(function) or args[0].dtype == torch.bfloat16:
        return function(*args, **kwargs)
    halves = (x.to(torch.bfloat16) for x in args[:2])
    return function(*halves, *args[2:], **kwargs).to(args[0].dtype)


class _Mark(torch.autograd.Function):
    """The identity; calls something when the gradient comes through it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, called: Any) -> torch.Tensor:
        ctx.called = called
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.called()
        return gradients[0], None


def _marked(values: Any, called: Any) -> Any:
    """Mark each tensor that has a gradient, as DeepSpeed wraps inputs and outputs of modules."""
    if isinstance(values, torch.Tensor):
        mark: Any = _Mark.apply
        return mark(values, called) if values.requires_grad else values
    if isinstance(values, (tuple, list)):
        marked = [_marked(value, called) for value in values]
        return type(values)(*marked) if hasattr(values, "_fields") else type(values)(marked)
    if isinstance(values, dict):  # what transformers' models return
        for key in values:
            values[key] = _marked(values[key], called)
    return values


def watch(network: nn.Module, recorder: Recorder) -> StepTrace:
    """Let ``recorder`` see modules and gradients; returns the trace without events."""
    numbers: dict[int, int] = {}
    for parameter in network.parameters():
        numbers[id(parameter)] = len(numbers)
        if parameter.requires_grad:

            def there(parameter: torch.Tensor) -> None:
                parameter.grad = None
                recorder.mark(GRADIENT, numbers[id(parameter)])

            parameter.register_post_accumulate_grad_hook(there)
    modules: list[tuple[int, ...]] = []
    for module, gathered in _hooked(network):
        _watch_module(module, len(modules), recorder)
        modules.append(tuple(numbers[id(parameter)] for parameter in gathered))
    return StepTrace((), tuple(modules), ())


def _hooked(network: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """The modules that DeepSpeed's stage 3 hooks, and what each of them gathers: those without
    parameters, too, since it fetches ahead at each of them; a block with experts as a whole."""
    wholes, visited = tuple(expert_blocks(network)), set()

    def below(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
        if module in visited:
            return
        visited.add(module)
        is_whole = type(module) in wholes
        yield module, list(module.parameters(recurse=is_whole))
        for child in () if is_whole else module.children():
            yield from below(child)

    yield from below(network)


def _watch_module(module: nn.Module, index: int, recorder: Recorder) -> None:
    waiting: list[list[int]] = []

    def before(_module: Any, args: Any) -> Any:
        recorder.mark(FETCH, index)
        left = [sum(isinstance(x, torch.Tensor) and x.requires_grad for x in tree_leaves(args))]
        waiting.append(left)

        def called() -> None:
            left[0] -= 1
            if left[0] == 0:
                recorder.mark(RELEASE_BACKWARD, index)

        return _marked(args, called)

    def after(_module: Any, _args: Any, output: Any) -> Any:
        recorder.mark(RELEASE, index)
        fetched: list[bool] = []

        def called() -> None:
            if not fetched:
                recorder.mark(FETCH_BACKWARD, index)
                fetched.append(True)

        return _marked(output, called)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


class Refusal(Exception):
    """The message of names in ``adapter`` or ``model.freeze`` that the network does not have."""


METHODS = ("varlen", "segments", "sdpa", "eager")
"""The implementations in the order of the ranks (``models.select_attention.candidates``)."""


def trace_step(
    exp: Experiment, *, precision: str, accelerator: str, attention: str, micro_batch: int
) -> StepTrace:
    """Trace one forward and backward pass of the experiment's task on fake tensors: of a few of its
    blocks, where the others do the same. With ``model.attention=auto`` and a network that does not
    take ``attention``, by the next one that the ranks try.

    Raises whatever the network or the task raises where it cannot be run so.
    """
    later: tuple[str, ...] = ()
    if exp.model.attention == "auto" and attention in METHODS:
        later = METHODS[METHODS.index(attention) + 1 :]
    problem: Exception | None = None
    for implementation in (attention, *later):
        for by_blocks in (True, False):  # a network may count on all of its blocks
            try:
                run = (precision, accelerator, implementation, micro_batch)
                if trace := _trace(exp, *run, by_blocks=by_blocks):
                    return trace
            except Refusal:
                raise
            except Exception as error:
                problem = problem or error
    assert problem is not None, "all blocks were run"
    raise problem


def _trace(
    exp: Experiment,
    precision: str,
    accelerator: str,
    attention: str,
    micro_batch: int,
    *,
    by_blocks: bool,
) -> StepTrace | None:
    """Trace with one implementation of attention. ``by_blocks``: a few blocks are run; None where
    those that are compared do not agree."""
    register()
    kind = task_class(exp.task.kind, exp.task.options)
    task = kind(exp, None)
    specs = task.models()
    if len(specs) > 1:  # distributions over the same tokens
        task = kind(exp, _tokenizer(exp))
    bases = are_bases(specs, exp.adapter, exp.model)
    own_specs = {
        name: spec for name, spec in specs.items() if name not in bases and not spec.precomputes
    }
    method = _method(exp, attention)
    with FakeTensorMode(allow_non_fake_inputs=True), _pretended(accelerator):
        parts = {
            name: _network(exp, spec, precision=precision, method=method)
            for name, spec in own_specs.items()
        }
        networks = {name: network for name, (network, _) in parts.items()}
        is_single = len(networks) == 1
        facts = _facts(exp, specs, parts, precision=precision, method=method)
        frozen = [name for name, spec in own_specs.items() if not spec.trained]
        combined = (
            next(iter(networks.values())) if is_single else NetworksByName(networks, frozen=frozen)
        )
        packed = quantized_layers(combined).values()
        recorder = Recorder()
        packed_tensors = [tensor for layer in packed for tensor in layer.packed_tensors]
        recorder.leave_out([*combined.parameters(), *combined.buffers(), *packed_tensors])
        trace = watch(combined, recorder)
        models = Models()
        for name, (network, config) in parts.items():
            spec = own_specs[name]
            models[name] = _TracedModel(
                name=name,
                spec=spec,
                module=network,
                forward=combined if is_single else ForwardOf(combined, name, network),
                config=config,
                vocab_size=_true_rows(exp, config.get_text_config()),
                attention=method,
                dtype=DTYPES[spec.precision or precision],
                device=torch.device("cpu"),
                routing=Routing(network),
                fused_loss=spec.head in LANGUAGE_MODELS and fused_loss(exp.model, accelerator),
            )
        for name in bases:
            models[name] = base_of(models.main, name=name, spec=specs[name])
        apart = optimizer_of(exp.optim.kind).matrices_apart
        matrices = hidden_matrices(combined) if apart else set()
        groups = parameter_groups(
            combined,
            weight_decay=exp.optim.weight_decay,
            apart=lr_scales(exp.optim, exp.adapter, networks.values()),
            matrices=matrices,
        )
        group_of = {
            id(parameter): number
            for number, group in enumerate(groups)
            for parameter in group["params"]
        }
        parameters = tuple(
            TracedParameter(
                parameter.numel(),
                parameter.requires_grad,
                group_of.get(id(parameter), 0),
                id(parameter) in matrices,
            )
            for parameter in combined.parameters()
        )
        buffers = sum(buffer.numel() * buffer.element_size() for buffer in combined.buffers())
        buffers += sum(layer.packed_bytes for layer in packed)
        reach = reach_line(combined) if exp.adapter.kind != "none" else ""
        batch = _batch(exp, task, micro_batch, layout=method.layout)
        combined.train()
        # A loss of routers is of all of them.
        stack = (
            stack_of(combined) if by_blocks and is_single and not expert_blocks(combined) else None
        )
        blocks, num_run = list[Numbers](), 0
        if stack is not None and len(stack.blocks) > stack.least + BEYOND:
            blocks, num_run = numbers_of(combined, stack), stack.least + BEYOND
            stack.cut(num_run)
        _run(recorder, task, models, batch)
    trace = replace(
        trace,
        parameters=parameters,
        events=tuple(recorder.events),
        last_peak=recorder.peak,
        buffers=buffers,
        networks=facts,
        reach=reach,
    )
    return with_all_blocks(trace, blocks, num_run) if blocks else trace


def facts_of(network: nn.Module, config: Any, *, head: str, seq_len: int) -> Network:
    """Sizes and operations of a network in rows of ``seq_len`` tokens, each of them a target."""
    text = config.get_text_config()
    layers = [module.is_causal for module in network.modules() if hasattr(module, "is_causal")]
    flops = model_flops(network, causal=any(layers) if layers else head != MASKED_LM)
    whole, without_attention = (
        flops.of_step(tokens=1, target_tokens=1, square_tokens=squares) for squares in (seq_len, 0)
    )
    frozen = 2.0 * (flops.frozen_matrices + flops.frozen_head)
    forward = (whole + frozen) / 3
    num_trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    num_packed = sum(layer.num_weights for layer in quantized_layers(network).values())
    hidden = _first(text, "hidden_size", "d_model") or 0
    heads = _first(text, "num_attention_heads") or 1
    head_width = _first(text, "head_dim") or hidden // heads
    return Network(
        num_parameters=sum(p.numel() for p in network.parameters()) + num_packed,
        num_trained=num_trained,
        num_packed=num_packed,
        num_looked_up=_num_looked_up(network),
        hidden_size=hidden,
        intermediate_size=_first(text, "intermediate_size", "ffn_dim", "n_inner") or 4 * hidden,
        num_layers=_first(text, "num_hidden_layers") or 1,
        kv_size=(_first(text, "num_key_value_heads") or heads) * head_width,
        vocab_size=_first(text, "vocab_size") or 0,
        forward_flops=forward,
        backward_flops=whole - forward if num_trained else 0.0,
        attention_flops=(whole - without_attention) / 3,
        head_flops=2.0 * flops.head,
        rms_norm=any(type(module).__name__.endswith("RMSNorm") for module in network.modules()),
    )


def _num_looked_up(network: nn.Module) -> int:
    """Parameters of the embeddings that are not the output head as well."""
    head = output_embedding(network)
    multiplied = {id(parameter) for parameter in head.parameters()} if head is not None else set()
    tables = [module for module in network.modules() if isinstance(module, nn.Embedding)]
    parameters = [parameter for table in tables for parameter in table.parameters(recurse=False)]
    return sum(p.numel() for p in parameters if id(p) not in multiplied)


def _first(config: Any, *names: str) -> int | None:
    """The first of these values of a config that is a number."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def _facts(
    exp: Experiment, specs: Mapping[str, ModelSpec], built: Mapping[str, Any], **run: Any
) -> dict[str, Network]:
    """Facts of the networks that are built, and of those that compute stored columns before
    training: of weights of their own where they can be built on this machine."""
    facts = {
        name: facts_of(network, config, head=specs[name].head, seq_len=exp.data.seq_len)
        for name, (network, config) in built.items()
    }
    main = next(network for network in facts.values() if network.num_trained)
    for name, spec in specs.items():
        if spec.precomputes and spec.source is None:
            facts[name] = replace(main, num_trained=0, backward_flops=0.0)
        elif spec.precomputes:
            with contextlib.suppress(Exception):
                network, config = _network(exp, spec, **run)
                facts[name] = facts_of(network, config, head=spec.head, seq_len=exp.data.seq_len)
    return facts


def networks_of(exp: Experiment, *, precision: str = "fp32") -> dict[str, Network]:
    """The networks of an experiment's task by name, without a trace of its micro step."""
    specs = task_class(exp.task.kind, exp.task.options)(exp, None).models()
    bases = are_bases(specs, exp.adapter, exp.model)
    method = _method(exp, "eager")
    with FakeTensorMode(allow_non_fake_inputs=True), _pretended("cpu"):
        built = {
            name: _network(exp, spec, precision=precision, method=method)
            for name, spec in specs.items()
            if name not in bases and not spec.precomputes
        }
        return _facts(exp, specs, built, precision=precision, method=method)


def _run(recorder: Recorder, task: Any, models: Models, batch: Any) -> None:
    main = models.main
    with recorder:
        if main.spec.head == CLASSIFICATION:
            # Losses of a few numbers by sequence take no memory, but read labels.
            total = main.logits(batch).float().square().sum()
        elif isinstance(task, JointTask):
            # The gradients of a step's outputs come from all of them together.
            total = task.outputs(models, batch).float().sum()
        else:
            loss = task.loss(models, batch)
            total = loss.sum * 1.0
            del loss
        total = main.routing.objective(total, factor=1.0)
        total.backward()
        del total


def numbers_of(network: nn.Module, stack: Stack) -> list[Numbers]:
    """The numbers of each block of the stack, as ``watch`` counts modules and parameters."""
    modules = {id(module): number for number, (module, _) in enumerate(_hooked(network))}
    parameters = {id(parameter): number for number, parameter in enumerate(network.parameters())}

    def whole(numbers: Iterable[int]) -> range:
        ordered = sorted(numbers)
        return range(ordered[0], ordered[-1] + 1)

    return [
        Numbers(
            whole(modules[id(module)] for module, _ in _hooked(block)),
            whole(parameters[id(parameter)] for parameter in block.parameters()),
        )
        for block in stack.blocks
    ]


class _TracedModel(Model):
    """A model whose inputs are real tensors: the code that makes them reads the micro batch."""

    def inputs(self, batch: Any) -> Any:
        with unset_fake_temporarily():
            return super().inputs(batch)

    def sequences_of_targets(self, batch: Any) -> tuple[torch.Tensor, int]:
        with unset_fake_temporarily():
            return super().sequences_of_targets(batch)


@contextlib.contextmanager
def _pretended(accelerator: str) -> Iterator[None]:
    """Inside, fake tensors of the CPU are computed with as those of a GPU would be: a build of
    torch without CUDA has no fake ones of it."""
    from llmx.models import loss, quantized

    packing = mock.patch.multiple(quantized, pack=_pack, unpack=_unpack)
    if accelerator == "cpu":
        with packing:
            yield
        return

    chunks = {"cpu": loss.CHUNK_ELEMENTS["cuda"]}
    with (
        packing,
        mock.patch.object(loss, "CHUNK_ELEMENTS", loss.CHUNK_ELEMENTS | chunks),
        mock.patch.object(nn.functional, "scaled_dot_product_attention", _attention_on_cuda),
        mock.patch.object(nn.functional, "dropout", _dropout_on_cuda),
    ):
        yield


def _attention_on_cuda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The memory-efficient kernel, which keeps no scores, as every GPU has it."""
    if enable_gqa and key.shape[1] != query.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros(
                attn_mask.shape, dtype=query.dtype, device=query.device
            ).masked_fill_(attn_mask.logical_not(), float("-inf"))
        shape = (*query.shape[:2], query.shape[2], key.shape[2])
        attn_mask = attn_mask.expand(shape)
    result: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]
    return result


def _dropout_on_cuda(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """Dropout with a mask of one byte per element, as the kernel of CUDA keeps it."""
    if not training or p == 0.0:
        return input
    result: torch.Tensor = torch.ops.aten.native_dropout(input, p, True)[0]
    return result


def _method(exp: Experiment, attention: str) -> AttentionMethod:
    """The attention method that the ranks will most likely use."""
    layout = "padded" if exp.data.layout == "padded" else "packed"
    implementation = IMPLEMENTATIONS.get(attention, attention)
    return methods(implementation, layout, causal=True)[0]


def _config(exp: Experiment, spec: ModelSpec) -> Any:
    config = _known_config(exp.model)
    text = config.get_text_config()
    rows = _true_rows(exp, text)
    if exp.model.init == "scratch" or rows > text.vocab_size:
        text.vocab_size = padded_vocab(rows, multiple_of=exp.model.pad_vocab_to_multiple_of)
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        number = getattr(text, token, None)
        if isinstance(number, int) and number >= text.vocab_size:
            setattr(text, token, None)
    if spec.head != CAUSAL_LM and spec.num_labels:
        config.num_labels = spec.num_labels
    config.use_cache = text.use_cache = False
    return config


def _known_config(model: ModelConfig) -> Any:
    """The config of the weights where they are on this machine, else of the known values."""
    try:
        return network_config(model)
    except (OSError, ValueError):
        values = {key: value for key, value in model.network.items() if key != "model_type"}
        if not (model.architecture and values):
            raise
    from transformers import AutoConfig

    return AutoConfig.for_model(model.architecture, **values)


def _true_rows(exp: Experiment, text: Any) -> int:
    """Rows of the vocabulary that count (``vocab_rows``); those of the config where the tokenizer
    is not on this machine."""
    needs_tokenizer = exp.model.init == "scratch" or added_tokens(exp.model)
    tokenizer = _tokenizer(exp) if needs_tokenizer else None
    return text.vocab_size if tokenizer is None else vocab_rows(exp.model, text, tokenizer)


def _tokenizer(exp: Experiment) -> Any:
    """The tokenizer of the experiment; None where it is not on this machine."""
    from llmx.tasks import tokenizer_of

    with contextlib.suppress(Exception), unset_fake_temporarily():
        return tokenizer_of(exp)
    return None


def _network(
    exp: Experiment, spec: ModelSpec, *, precision: str, method: AttentionMethod
) -> tuple[nn.Module, Any]:
    """The network of ``spec`` without weights, and its config."""
    exp = with_source(exp, spec)
    config = _config(exp, spec)
    checkpointing = exp.model.activation_checkpointing if spec.trained else "none"
    plain = replace(exp.model, activation_checkpointing="none", compile=False)
    dtype = DTYPES[spec.precision or precision]
    quantization = Quantization.of(exp.adapter) if spec.trained else None
    network = build_model(
        plain,
        exp.seed,
        config,
        precision=spec.precision or precision,
        device=torch.device("cpu"),
        implementation=method.implementation,
        ds_config=WHOLE,
        head=spec.head,
        weights=False,
        adapter=exp.adapter if quantization is not None else None,
    )
    if quantization is not None:
        arrive = quantize_on_arrival(network, quantization, device=torch.device("cpu"), dtype=dtype)
        for name, weight in list(network.named_parameters()):
            if weight.is_meta:
                arrive(name, torch.empty(weight.shape, dtype=dtype))
    try:
        with mock.patch.object(nn.Module, "_apply", _apply):
            choose_trained(network, exp, spec, ds_config=WHOLE, dtype=dtype)
    except ConfigError as error:
        if isinstance(error.__cause__, ImportError):  # a package that this machine lacks
            raise
        raise Refusal(str(error)) from error
    if not spec.dropout:
        turn_dropout_off(network)
    if checkpointing != "none":
        # A generator's state is no fake tensor.
        recompute(network, checkpointing, preserve_rng_state=False)
    return network, config


def _pack(weight: torch.Tensor, quantization: Quantization) -> tuple[torch.Tensor, Any]:
    """Two weights in a byte and a scale for each block, as bitsandbytes lays them out."""
    blocks = -(-weight.numel() // BLOCK)
    scales = torch.empty(blocks, dtype=torch.uint8 if quantization.double else torch.float32)
    second = torch.empty(-(-blocks // 256)) if quantization.double else None
    state = SimpleNamespace(
        absmax=scales,
        nested=quantization.double,
        state2=SimpleNamespace(absmax=second),
        shape=weight.shape,
        dtype=weight.dtype,
    )
    return torch.empty(-(-weight.numel() // 2), 1, dtype=torch.uint8), state


def _unpack(packed: torch.Tensor, state: Any) -> torch.Tensor:
    return torch.empty(state.shape, dtype=state.dtype)


def _apply(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """``Module._apply``, which swaps fake tensors in place, with new parameters: those that
    something refers to weakly cannot be swapped."""
    for submodule in module.modules() if recurse else [module]:
        for name, parameter in submodule._parameters.items():
            if parameter is not None:
                submodule._parameters[name] = nn.Parameter(
                    function(parameter.detach()), parameter.requires_grad
                )
        for name, buffer in submodule._buffers.items():
            if buffer is not None:
                submodule._buffers[name] = function(buffer)
    return module


def _batch(exp: Experiment, task: Any, micro_batch: int, *, layout: str) -> dict[str, torch.Tensor]:
    """Full rows of two sequences each where they are packed or come in pairs, every token a
    target."""
    length = exp.data.seq_len
    packs = layout == "packed" and exp.data.packing != "none"
    two_sequences = (packs or Preference in task.takes) and length > 1
    starts = np.array([0, length // 2] if two_sequences else [0], dtype=np.int64)
    targets = np.ones(length, dtype=bool)
    targets[starts] = False
    all_columns = (*task.columns, *task.precomputed, *getattr(task, "rollout_columns", ()))
    stored = [column for column in all_columns if column.name != "weight"]
    columns = {
        column.name: np.zeros(
            (length if column.per == "token" else len(starts), *column.shape), dtype=column.dtype
        )
        for column in stored
    }
    sample = Sample(np.zeros(length, dtype=np.uint32), targets, starts, columns=columns)
    with unset_fake_temporarily():
        batch = collate(
            [sample] * micro_batch,
            seq_len=length,
            pad_id=0,
            layout=layout,
            columns=all_columns or None,
        )
        if task.draws:
            batch["draw_seeds"] = torch.zeros(micro_batch * len(starts), dtype=torch.int64)
    return batch


def main(words: list[str]) -> int:
    job = json.loads(Path(words[0]).read_text(encoding="utf-8"))
    exp = experiment_from_dict(job["experiment"])
    answers: list[dict[str, Any]] = []
    for request in job["traces"]:
        model = replace(exp.model, activation_checkpointing=request.pop("checkpointing"))
        try:
            trace = trace_step(replace(exp, model=model), **request)
            answers.append({"trace": trace.to_dict()})
        except Refusal as error:
            answers.append({"refused": str(error)})
        except Exception as error:  # whatever a network may raise on fake tensors
            text = str(error).strip().splitlines()
            answers.append({"problem": f"{type(error).__name__}: {text[0] if text else ''}"})
        write_json(Path(words[1]), answers)  # whoever waits may not wait for all
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
