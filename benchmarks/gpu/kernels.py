"""The part without a model: versions, matrix products and memory, attention kernels, cuDNN.

Timed with events of the device (the median of repeated calls after a warm-up); on a CPU, where
only ``--pretend`` is meant to run, with the clock.
"""

from __future__ import annotations

import importlib.util
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from typing import Any

import torch

from benchmarks.gpu.part import Context, Measure, at_most, must
from llmx.plan.cuda_builds import has_code_for

PACKAGES = "torch deepspeed transformers triton flash-attn liger-kernel bitsandbytes trl".split()

MATMUL_PART_OF_PEAK = 0.75
"""A library's product of 8192 cubed reaches about 0.8 of the data sheet on an H200 (770 to 800 of
989 TFLOP/s); well under it, something else uses the GPU, or it is throttled."""

COPY_PART_OF_PEAK = 0.8
"""A device-to-device copy, bytes read and written counted, of the data sheet's bandwidth."""


def kernels(context: Context) -> Iterator[Measure]:
    """The parts of this module, one after another: none has a process of its own."""
    for part in (versions, matmul, attention, cudnn):
        yield from part(context)


def versions(context: Context) -> Iterator[Measure]:
    """What is installed, and whether this torch has kernels for this chip."""
    for name in PACKAGES:
        try:
            yield Measure(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Measure(name, "not installed")
    for tool in ("nvcc", "ninja", "c++"):
        yield Measure(tool, shutil.which(tool) or "not found")
    if not context.cuda:
        return
    major, minor = torch.cuda.get_device_capability()
    archs = torch.cuda.get_arch_list()
    here = has_code_for(float(f"{major}.{minor}"), archs)
    yield Measure("device", torch.cuda.get_device_name())
    yield Measure("memory", torch.cuda.get_device_properties(0).total_memory / 2**30, "GiB")
    yield Measure("CUDA of torch", str(torch.version.cuda))
    yield Measure("cuDNN", str(torch.backends.cudnn.version()))
    yield Measure("NCCL", ".".join(str(part) for part in torch.cuda.nccl.version()))
    title = f"torch has kernels for sm_{major}{minor}"
    yield must(title, here, no=f"no: it has {', '.join(archs)}")


def matmul(context: Context) -> Iterator[Measure]:
    """Peak of a matrix product on random data by precision, and bandwidth of a copy."""
    size = 256 if context.pretend else 8192
    for name, dtype in {"bf16": torch.bfloat16, "fp16": torch.float16}.items():
        if context.cuda and name not in context.device.precisions:
            continue
        left, right = (
            torch.randn(size, size, device=context.torch_device, dtype=dtype) for _ in range(2)
        )
        seconds = timed(partial(torch.matmul, left, right), context=context)
        rate = 2 * size**3 / seconds / 1e12
        bound = MATMUL_PART_OF_PEAK * (context.peak_tflops(name) or 0)
        yield context.at_least(f"{name} product of {size} cubed", rate, bound, "TFLOP/s")
    source = torch.randn(2**20 if context.pretend else 2**30, device=context.torch_device)
    target = torch.empty_like(source)
    seconds = timed(lambda: target.copy_(source), context=context)
    rate = 2 * source.numel() * source.element_size() / seconds / 1e9
    bound = COPY_PART_OF_PEAK * (context.device.memory_gb_per_s or 0)
    yield context.at_least("copy on the device", rate, bound, "GB/s")


def attention(context: Context) -> Iterator[Measure]:
    """Kernels at 4 x 32 heads x 4096 x 128, forward and backward; packed rows isolated.

    ``causal`` has one row a line; the others four rows packed into each line. All packed ones
    must agree with the dense mask.
    """
    batch, heads, length, width = (1, 2, 64, 16) if context.pretend else (4, 32, 4096, 128)
    dtype = _half(context)
    rows = 4
    segments = torch.arange(length, device=context.torch_device) // (length // rows)
    segments = segments.expand(batch, length)
    shape = (batch, heads, length, width)
    torch.manual_seed(0)
    leaves = [
        torch.randn(shape, device=context.torch_device, dtype=dtype).requires_grad_()
        for _ in range(3)
    ]
    gradient = torch.randn(shape, device=context.torch_device, dtype=dtype)
    # Forward 2 and backward 5 products of n^2 x width, the causal half of each.
    flops = 7 * batch * heads * length**2 * width
    reference: list[torch.Tensor] = []
    for name, call in _attentions(context, segments=segments):
        try:
            output, *gradients = _forward_backward(call, leaves, gradient)
            seconds = timed(partial(_forward_backward, call, leaves, gradient), context=context)
        except (RuntimeError, ImportError, AttributeError, TypeError, ValueError) as error:
            yield Measure(name, f"does not run: {str(error).splitlines()[0][:90]}")
            continue
        part = 1 if name == "causal" else rows
        yield Measure(name, 1e3 * seconds, "ms")
        yield Measure(f"{name}, useful", flops / part / seconds / 1e12, "TFLOP/s")
        if name == "dense mask":
            reference = [output, *gradients]
        elif reference:
            apart = max(
                float((mine - theirs).float().norm() / theirs.float().norm())
                for mine, theirs in zip([output, *gradients], reference, strict=True)
            )
            # Two roundings of 16 bits each way; fp32 agrees to its own precision.
            bound = 1e-4 if dtype == torch.float32 else 2e-2
            yield at_most(f"{name}, apart from the dense mask", apart, bound)


def cudnn(context: Context) -> Iterator[Measure]:
    """Attention of one new token, whose keys are one more each time, as generation calls it: the
    host's time of a call, with cuDNN's attention (a plan for each length) and without."""
    tokens = 8 if context.pretend else 200
    shape = (2, 2, tokens, 16) if context.pretend else (64, 16, 512 + tokens, 128)
    keys = torch.randn(shape, device=context.torch_device, dtype=_half(context))
    for title, allowed in {"with": True, "without": False}.items():
        torch.backends.cuda.enable_cudnn_sdp(allowed)
        taken = []
        for end in range(shape[2] - tokens + 1, shape[2]):
            begun = time.perf_counter()
            seen = keys[:, :, :end]
            torch.nn.functional.scaled_dot_product_attention(seen[:, :, -1:], seen, seen)
            if context.cuda:
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - begun)
        yield Measure(f"one token, {title} cuDNN", 1e3 * statistics.median(taken), "ms")
    torch.backends.cuda.enable_cudnn_sdp(True)


def _half(context: Context) -> torch.dtype:
    """The 16 bits of this device; on a CPU all 32."""
    if not context.cuda:
        return torch.float32
    return torch.bfloat16 if "bf16" in context.device.precisions else torch.float16


def _forward_backward(
    call: Callable[..., torch.Tensor], leaves: list[torch.Tensor], gradient: torch.Tensor
) -> list[torch.Tensor]:
    output = call(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


def _attentions(
    context: Context, *, segments: torch.Tensor
) -> Iterator[tuple[str, Callable[..., torch.Tensor]]]:
    """Name and function of (query, key, value), all [B, H, T, D]; the dense mask comes second."""
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    batch, length = segments.shape
    yield "causal", lambda q, k, v: sdpa(q, k, v, is_causal=True)
    same = segments[:, :, None] == segments[:, None, :]
    mask = (same & torch.ones_like(same).tril()).unsqueeze(1)
    yield "dense mask", lambda q, k, v: sdpa(q, k, v, attn_mask=mask)
    counts = [int(torch.unique(line).numel()) for line in segments]
    each = length // counts[0]
    total = batch * counts[0]
    bounds = torch.arange(total + 1, device=segments.device, dtype=torch.int32) * each

    def flat(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])

    def back(x: torch.Tensor) -> torch.Tensor:
        return x.view(batch, length, *x.shape[1:]).transpose(1, 2)

    if context.cuda:

        def varlen(q: Any, k: Any, v: Any) -> torch.Tensor:
            from torch.nn.attention.varlen import varlen_attn

            rows = (flat(q), flat(k), flat(v), bounds, bounds, each, each)
            kernel: Any = varlen_attn
            try:
                found = kernel(*rows, window_size=(-1, 0))
            except TypeError:  # older torch has is_causal instead
                found = kernel(*rows, is_causal=True)
            return back(found[0] if isinstance(found, tuple) else found)

        yield "varlen (torch)", varlen
        if importlib.util.find_spec("flash_attn"):

            def flash(q: Any, k: Any, v: Any) -> torch.Tensor:
                from flash_attn import flash_attn_varlen_func

                return back(
                    flash_attn_varlen_func(
                        flat(q), flat(k), flat(v), bounds, bounds, each, each, causal=True
                    )
                )

            yield "varlen (flash-attn)", flash

        def flex_function() -> Callable[..., torch.Tensor]:
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            def visible(b: Any, _head: Any, query: Any, key: Any) -> Any:
                return (segments[b, query] == segments[b, key]) & (query >= key)

            blocks = create_block_mask(visible, batch, None, length, length, device="cuda")
            compiled = torch.compile(flex_attention)
            return lambda q, k, v: compiled(q, k, v, block_mask=blocks)

        made: list[Callable[..., torch.Tensor]] = []

        def flex(q: Any, k: Any, v: Any) -> torch.Tensor:
            if not made:
                made.append(flex_function())
            return made[0](q, k, v)

        yield "flex", flex

    def by_segment(q: Any, k: Any, v: Any) -> torch.Tensor:
        rows = [slice(start, start + each) for start in range(0, length, each)]
        parts = [sdpa(q[:, :, row], k[:, :, row], v[:, :, row], is_causal=True) for row in rows]
        return torch.cat(parts, dim=2)

    yield "one call a row", by_segment


def timed(call: Callable[[], object], *, context: Context, repeats: int = 20) -> float:
    """Median seconds of a call, after three to warm up."""
    repeats = 3 if context.pretend else repeats
    for _ in range(3):
        call()
    if context.torch_device == "cpu":
        taken = []
        for _ in range(repeats):
            begun = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begun)
        return statistics.median(taken)
    pairs = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return float(statistics.median(begin.elapsed_time(end) for begin, end in pairs)) / 1e3
