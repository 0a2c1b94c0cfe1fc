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
from collections.abc import Iterable, Iterator, Sequence
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
from torch.utils.flop_counter import flop_registry

from llmx.config import Experiment, ModelConfig, experiment_from_dict
from llmx.config.optimizers import optimizer_of
from llmx.data import collate
from llmx.data.format.rows import Preference
from llmx.data.store.samples import Sample
from llmx.models.adapter import add_adapter, freeze, reach_line
from llmx.models.attention import AttentionMethod, methods
from llmx.models.blocks import Stack, recompute, stack_of
from llmx.models.experts import Routing, expert_blocks
from llmx.models.factory import DTYPES, build_model, padded_vocab, true_vocab
from llmx.models.isolation import turn_dropout_off
from llmx.models.model import (
    CAUSAL_LM,
    CLASSIFICATION,
    LANGUAGE_MODELS,
    ForwardOf,
    Model,
    Models,
    ModelSpec,
    NetworksByName,
    base_of,
)
from llmx.models.network_config import network_config
from llmx.models.quantized import BLOCK, Quantization, quantize_on_arrival, quantized_layers
from llmx.models.spec import are_bases
from llmx.models.varlen import IMPLEMENTATIONS, register
from llmx.plan.memory import fused_loss
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
from llmx.train.engine.build import with_source
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

    def has(self, event: Event) -> bool:
        """Whether an event is of this block."""
        return event.index in (self.parameters if event.kind == GRADIENT else self.modules)


@dataclass(frozen=True)
class Run:
    """A micro step of a network whose stack is cut."""

    events: Sequence[Event]
    flops: Sequence[float]
    """FLOPs until each event."""
    last_peak: int
    last_flops: float


def with_all_blocks(run: Run, blocks: Sequence[Numbers], num_run: int) -> Run | None:
    """The micro step with all ``blocks``, of which ``run`` has the first ``num_run``; without
    the FLOPs until each event. None where the blocks that are compared do not agree.

    Numbers of modules and parameters in ``run`` are those of the whole network.
    """
    before, former, repeated, last = blocks[num_run - 4 : num_run]
    forward = [_first(run.events, FETCH, block) for block in (former, repeated, last)]
    backward = [_first(run.events, FETCH_BACKWARD, block) for block in (repeated, former, before)]
    places = [place for place in (*forward, *backward) if place is not None]
    if len(places) < 6 or places != sorted(places):
        return None
    f_former, f_repeated, f_last, b_repeated, b_former, b_before = places
    ahead, back = _Part(run, f_repeated, f_last), _Part(run, b_repeated, b_former)
    if not ahead.agrees(_Part(run, f_former, f_repeated), repeated, former):
        return None
    if not back.agrees(_Part(run, b_former, b_before), repeated, former):
        return None
    num_added = len(blocks) - num_run
    modules, parameters = len(repeated.modules), len(repeated.parameters)

    def moved(events: Iterable[Event], live: int, by: int, whose: Numbers) -> Iterator[Event]:
        """Events with ``live`` bytes more; those of the block ``whose`` numbered ``by`` later."""
        for event in events:
            step = parameters if event.kind == GRADIENT else modules
            index = event.index + (by * step if whose.has(event) else 0)
            yield Event(event.kind, index, event.peak + live, event.live + live)

    events = [*run.events[:f_last]]
    for copy in range(1, num_added + 1):
        events += moved(ahead.events, copy * ahead.grows, copy, repeated)
    grown = num_added * ahead.grows
    events += moved(run.events[f_last:b_repeated], grown, num_added, last)
    for copy in range(num_added, 0, -1):
        events += moved(back.events, grown + (num_added - copy) * back.grows, copy, repeated)
    left = grown + num_added * back.grows
    events += moved(run.events[b_repeated:], left, num_added, last)
    flops = run.last_flops + num_added * (ahead.flops + back.flops)
    return Run(events, (), run.last_peak + left, flops)


def _first(events: Sequence[Event], kind: int, block: Numbers) -> int | None:
    """The place of the first event of a kind of the block itself, not of a module in it."""
    for place, event in enumerate(events):
        if event.kind == kind and event.index == block.modules[0]:
            return place
    return None


class _Part:
    """The events of a block in one direction: from its first one to that of the next block."""

    def __init__(self, run: Run, begin: int, end: int) -> None:
        self.events = run.events[begin:end]
        self.base = run.events[begin - 1].live
        self.grows = run.events[end - 1].live - self.base
        """Bytes that stay when it is over."""
        self.flops = run.flops[end] - run.flops[begin]

    def agrees(self, other: _Part, numbers: Numbers, other_numbers: Numbers) -> bool:
        """Whether another block does the same, and both do nothing but their own."""
        return self._own(numbers) is not None and self._own(numbers) == other._own(other_numbers)

    def _own(self, numbers: Numbers) -> list[Event] | None:
        if not all(numbers.has(event) for event in self.events):
            return None
        return [
            replace(
                event,
                index=event.index
                - (numbers.parameters if event.kind == GRADIENT else numbers.modules)[0],
                peak=event.peak - self.base,
                live=event.live - self.base,
            )
            for event in self.events
        ]


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
        self.flops = 0.0
        self.events: list[Event] = []
        self.flops_until: list[float] = []
        """FLOPs until each event."""
        self._known: dict[int, weakref.ref[Any]] = {}

    def run(self) -> Run:
        """The micro step that was recorded."""
        return Run(self.events, self.flops_until, self.peak, self.flops)

    def mark(self, kind: int, index: int) -> None:
        """Record an event, and the peak of memory since the one before it."""
        self.events.append(Event(kind, index, self.peak, self.live))
        self.flops_until.append(self.flops)
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
            count = flop_registry.get(getattr(function, "overloadpacket", None))
            if count is not None:
                # One of rows of any length looks at where they begin.
                with contextlib.suppress(RuntimeError):
                    self.flops += float(count(*args, **kwargs, out_val=result))
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
            name: _network(with_source(exp, spec), spec, precision=precision, method=method)
            for name, spec in own_specs.items()
        }
        networks = {name: network for name, (network, _) in parts.items()}
        is_single = len(networks) == 1
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
        groups = _groups(exp, combined, [*networks.values()], matrices)
        parameters = tuple(
            TracedParameter(
                parameter.numel(),
                parameter.requires_grad,
                groups.get(id(parameter), 0),
                id(parameter) in matrices,
            )
            for parameter in combined.parameters()
        )
        buffers = sum(buffer.numel() * buffer.element_size() for buffer in combined.buffers())
        buffers += sum(layer.packed_bytes for layer in packed)
        num_packed = sum(layer.num_weights for layer in packed)
        num_beside = sum(
            parameter.numel() for name in frozen for parameter in networks[name].parameters()
        )
        reach = reach_line(combined) if exp.adapter.kind != "none" else ""
        batch = _batch(exp, task, micro_batch, layout=method.layout)
        combined.train()
        # A loss of routers is of all of them.
        stack = (
            stack_of(combined) if by_blocks and is_single and not expert_blocks(combined) else None
        )
        if stack is not None and len(stack.blocks) > (num_run := stack.least + BEYOND):
            blocks = numbers_of(combined, stack)
            stack.cut(num_run)
            run = with_all_blocks(_run(recorder, task, models, batch), blocks, num_run)
        else:
            run = _run(recorder, task, models, batch)
    if run is None:
        return None
    return replace(
        trace,
        parameters=parameters,
        events=tuple(run.events),
        last_peak=run.last_peak,
        buffers=buffers,
        flops=run.last_flops,
        num_packed=num_packed,
        num_beside=num_beside,
        reach=reach,
    )


def _run(recorder: Recorder, task: Any, models: Models, batch: Any) -> Run:
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
    return recorder.run()


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
    if exp.model.init == "scratch":
        rows = _true_rows(exp, text)
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
    """Rows of the vocabulary that count: of the tokenizer where it is on this machine."""
    tokenizer = _tokenizer(exp) if exp.model.init == "scratch" else None
    rows: int = text.vocab_size if tokenizer is None else true_vocab(tokenizer)
    return rows


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
    if not spec.trained:
        network.requires_grad_(False)
    elif exp.adapter.kind != "none":
        with mock.patch.object(nn.Module, "_apply", _apply):
            add_adapter(
                network,
                plain,
                exp.adapter,
                exp.seed,
                ds_config=WHOLE,
                dtype=dtype,
                head=spec.head,
            )
    else:
        freeze(network, exp.model.freeze)
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


def _groups(
    exp: Experiment, combined: nn.Module, networks: list[nn.Module], matrices: set[int]
) -> dict[int, int]:
    """The optimizer's group of each trained parameter, by its id."""
    groups = parameter_groups(
        combined,
        weight_decay=exp.optim.weight_decay,
        apart=lr_scales(exp.optim, exp.adapter, networks),
        matrices=matrices,
    )
    return {
        id(parameter): number
        for number, group in enumerate(groups)
        for parameter in group["params"]
    }


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
        return collate(
            [sample] * micro_batch,
            seq_len=length,
            pad_id=0,
            layout=layout,
            columns=all_columns or None,
        )


def main(words: list[str]) -> int:
    job = json.loads(Path(words[0]).read_text(encoding="utf-8"))
    exp = experiment_from_dict(job["experiment"])
    answers: list[dict[str, Any]] = []
    for request in job["traces"]:
        model = replace(exp.model, activation_checkpointing=request.pop("activation_checkpointing"))
        try:
            trace = trace_step(replace(exp, model=model), **request)
            answers.append({"trace": trace.to_dict()})
        except Exception as error:  # whatever a network may raise on fake tensors
            text = str(error).strip().splitlines()
            answers.append({"problem": f"{type(error).__name__}: {text[0] if text else ''}"})
        write_json(Path(words[1]), answers)  # whoever waits may not wait for all
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
