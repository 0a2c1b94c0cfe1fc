"""The kinds of devices that ranks train on, by the name that PyTorch and DeepSpeed have for them.

To add one: an ``Accelerator`` here. What only a rank asks of a device (events, allocator, kernels)
stands with the code that uses it, in ``llmx.train`` and ``llmx.models``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Accelerator:
    """One value of ``hardware.devices.NAME.accelerator``. Speeds count where the config gives
    none; except for ``nominal_tflops`` a plan names them as assumed."""

    is_gpu: bool
    """It has memory of its own and runs behind the process that launches its kernels. Other ranks
    compute on the cores and in the RAM of their host, whose C library keeps what they free."""
    context: str
    """What a plan calls the memory beside tensors."""
    context_gib: float
    """On a GPU, the CUDA context with workspaces of cuBLAS and NCCL; of a CPU rank, all that its
    process has resident: the libraries, gloo, the loader."""
    process_gib: float
    """RAM of a rank beside its tensors: Python, torch, deepspeed, transformers (measured on CPU,
    docs/development/predictions.md); with CUDA also its driver and NCCL, which is assumed."""
    loss_chunk_bytes: int
    """Logits that the loss has in fp32 at a time."""
    nominal_tflops: float
    """Assumed speed of arithmetic, good for an order of candidates alone."""
    link_gb_per_s: float
    """To the other devices of the host."""
    host_link_gb_per_s: float
    """To the RAM of the host."""
    memory_gb_per_s: float
    trains: bool = True
    """Ranks run on it; others can only be planned for."""


_CUDA = Accelerator(
    is_gpu=True,
    context="CUDA context",
    context_gib=1.0,
    process_gib=2.0,
    loss_chunk_bytes=128 * 2**20,
    nominal_tflops=100.0,
    link_gb_per_s=25.0,
    host_link_gb_per_s=25.0,
    memory_gb_per_s=500.0,
)
ACCELERATORS = {
    "cuda": _CUDA,
    "npu": replace(_CUDA, context="CANN context", trains=False),
    "xpu": replace(_CUDA, context="SYCL context", trains=False),
    "cpu": Accelerator(
        is_gpu=False,
        context="process",
        context_gib=0.6,
        process_gib=0.6,
        loss_chunk_bytes=4 * 2**20,
        nominal_tflops=0.1,
        link_gb_per_s=5.0,
        host_link_gb_per_s=10.0,
        memory_gb_per_s=20.0,
    ),
}
