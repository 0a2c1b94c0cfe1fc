"""Kernels that only CUDA has, computed with what a CPU has, and their conditions."""

from __future__ import annotations

from itertools import pairwise

import torch

from tests.pretend_gpu.devices import Devices, device_of


def install(devices: Devices) -> None:
    """To be called after llmx is imported."""
    from llmx.models import varlen

    def varlen_kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        cu_seq_lens: torch.Tensor,
        max_length: int,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        if query.dtype not in (torch.float16, torch.bfloat16) or devices.capability < (8, 0):
            raise devices.report.fault(f"the flash kernel of {query.dtype}, {devices.capability}")
        if device_of(cu_seq_lens).type != "cuda" or cu_seq_lens.dtype != torch.int32:
            raise devices.report.fault("cu_seq_lens of the flash kernel is int32 on the GPU")
        assert window is None
        parts = []
        for start, stop in pairwise(_numbers(cu_seq_lens)):
            assert stop - start <= max_length
            rows = (x[start:stop].transpose(0, 1)[None] for x in (query, key, value))
            part = torch.nn.functional.scaled_dot_product_attention(
                *rows, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
            )
            parts.append(part[0].transpose(0, 1))
        return torch.cat(parts)

    varlen.varlen_kernel = varlen_kernel


def _numbers(x: torch.Tensor) -> list[int]:
    """Without a wait: a kernel reads them where they are."""
    with torch.utils._python_dispatch._disable_current_modes():
        return raw_tolist(x)


raw_tolist = torch.Tensor.tolist
