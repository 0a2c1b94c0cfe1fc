"""Parts without a model: versions, matrix products and memory, attention kernels.

Timed with events of the device (the median of repeated calls after a warm-up); on a CPU, where
only ``--tiny`` is meant to run, with the clock.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.part import Context, Measure, at_least, at_most, must
from llmx.plan.cuda_builds import has_code_for

PACKAGES = "torch deepspeed transformers datasets triton flash-attn liger-kernel trl".split()

MATMUL_PART_OF_PEAK = 0.75
"""A library's product of 8192 cubed reaches about 0.8 of the data sheet on an H200 (770 to 800 of
989 TFLOP/s); well under it, something else uses the GPU, or it is throttled."""

COPY_PART_OF_PEAK = 0.8
"""A device-to-device copy, bytes read and written counted, of the data sheet's bandwidth."""


def versions(context: Context) -> list[Measure]:
    """What is installed, and whether this torch has kernels for this chip."""
    found = []
    for name in PACKAGES:
        try:
            found.append(Measure(name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            found.append(Measure(name, "not installed"))
    found += [Measure(tool, shutil.which(tool) or "not found") for tool in ("nvcc", "ninja", "c++")]
    if not context.cuda:
        return [*found, Measure("device", "CPU")]
    major, minor = torch.cuda.get_device_capability()
    archs = torch.cuda.get_arch_list()
    here = has_code_for(float(f"{major}.{minor}"), archs)
    return [
        *found,
        Measure("device", torch.cuda.get_device_name()),
        Measure("GPUs", float(context.num_gpus)),
        Measure("memory", torch.cuda.get_device_properties(0).total_memory / 2**30, "GiB"),
        Measure("CUDA of torch", str(torch.version.cuda)),
        Measure("NCCL", ".".join(str(part) for part in torch.cuda.nccl.version())),
        must(f"torch has kernels for sm_{major}{minor}", here, no=f"no: it has {', '.join(archs)}"),
    ]


def matmul(context: Context) -> list[Measure]:
    """Peak of a matrix product on random data by precision, and bandwidth of a copy."""
    size = 256 if context.tiny else 8192
    measures = []
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    for name, dtype in dtypes.items():
        if context.cuda and name not in context.device.precisions:
            continue
        left, right = (
            torch.randn(size, size, device=context.torch_device, dtype=dtype) for _ in range(2)
        )
        seconds = timed(partial(torch.matmul, left, right), context=context)
        rate = 2 * size**3 / seconds / 1e12
        peak = context.peak_tflops(name)
        title = f"{name} product of {size} cubed"
        if context.compares and peak:
            measures.append(at_least(title, rate, MATMUL_PART_OF_PEAK * peak, "TFLOP/s"))
        else:
            measures.append(Measure(title, rate, "TFLOP/s"))
    elements = 2**20 if context.tiny else 2**30
    source = torch.randn(elements, device=context.torch_device)
    target = torch.empty_like(source)
    seconds = timed(lambda: target.copy_(source), context=context)
    rate = 2 * source.numel() * source.element_size() / seconds / 1e9
    peak = context.device.memory_gb_per_s
    if context.compares and peak:
        measures.append(at_least("copy on the device", rate, COPY_PART_OF_PEAK * peak, "GB/s"))
    else:
        measures.append(Measure("copy on the device", rate, "GB/s"))
    return measures


def attention(context: Context) -> list[Measure]:
    """Kernels at 4 x 32 heads x 4096 x 128, forward and backward; packed rows isolated.

    ``causal`` has one row a line; the others four rows packed into each line. All packed ones
    must agree with the dense mask.
    """
    batch, heads, length, width = (1, 2, 64, 16) if context.tiny else (4, 32, 4096, 128)
    dtype = torch.bfloat16 if "bf16" in context.device.precisions else torch.float16
    dtype = dtype if context.cuda else torch.float32
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
    measures: list[Measure] = []
    reference: list[torch.Tensor] = []
    for name, call in _attentions(context, segments=segments):
        try:
            output, *gradients = _forward_backward(call, leaves, gradient)
            seconds = timed(partial(_forward_backward, call, leaves, gradient), context=context)
        except (RuntimeError, ImportError, AttributeError, TypeError, ValueError) as error:
            measures.append(Measure(name, f"does not run: {str(error).splitlines()[0][:90]}"))
            continue
        part = 1 if name == "causal" else rows
        measures.append(Measure(name, 1e3 * seconds, "ms"))
        measures.append(Measure(f"{name}, useful", flops / part / seconds / 1e12, "TFLOP/s"))
        if name == "dense mask":
            reference = [output, *gradients]
        elif reference:
            apart = max(
                float((mine - theirs).float().norm() / theirs.float().norm())
                for mine, theirs in zip([output, *gradients], reference, strict=True)
            )
            # Two roundings of 16 bits each way; fp32 agrees to its own precision.
            bound = 1e-4 if dtype == torch.float32 else 2e-2
            measures.append(at_most(f"{name}, apart from the dense mask", apart, bound))
    return measures


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
    repeats = 3 if context.tiny else repeats
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


def free_gib(directory: Path) -> float:
    """Free space of the disk that holds a directory."""
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize / 2**30
