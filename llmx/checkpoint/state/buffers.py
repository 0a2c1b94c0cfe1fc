"""torch's tensors as files hold them: safetensors' names of dtypes, and bytes."""

from __future__ import annotations

from typing import Any

import torch

from llmx.checkpoint.tensors import Fragment

DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""As safetensors calls them."""
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def as_buffer(tensor: torch.Tensor) -> Any:
    """The bytes of a contiguous tensor on the CPU, not copied."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def whole_tensor(name: str, tensor: torch.Tensor) -> Fragment:
    """A tensor on the CPU for a file of whole ones, such as an export. Shares its memory."""
    dtype = DTYPE_NAMES[tensor.dtype]
    return Fragment(name, dtype, tensor.numel(), as_buffer(tensor), tuple(tensor.shape))
