"""The part without a model: versions, matrix products, bandwidth of memory.

On a CPU only ``--pretend`` is meant to run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata

import torch
from torch.utils import benchmark

from benchmarks.gpu.part import Context, Measure, must
from llmx.plan.cuda_builds import has_code_for

PACKAGES = "torch deepspeed transformers triton flash-attn liger-kernel bitsandbytes trl".split()

MATMUL_PART_OF_PEAK = 0.75
"""A library's product of 8192 cubed reaches about 0.8 of the data sheet on an H200 (770 to 800 of
989 TFLOP/s); well under it, something else uses the GPU, or it is throttled."""

COPY_PART_OF_PEAK = 0.8
"""A device-to-device copy, bytes read and written counted, of the data sheet's bandwidth."""


def kernels(context: Context) -> Iterator[Measure]:
    """Both: neither has a process of its own."""
    yield from versions(context)
    yield from matmul(context)


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


def timed(call: Callable[[], object], *, context: Context) -> float:
    """Seconds of a call, when the device is done."""
    timer = benchmark.Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    timer.timeit(3)  # to warm up
    return timer.timeit(3 if context.pretend else 20).mean
