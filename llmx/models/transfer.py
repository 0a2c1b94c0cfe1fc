"""Numbers of the host onto a device without a wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def to_device(values: Sequence[Any], device: torch.device, *, dtype: torch.dtype) -> torch.Tensor:
    """``torch.tensor(values, device=device)``, which would wait for all that the device has to do:
    from pinned memory the copy is queued behind it."""
    pin = device.type == "cuda" and torch.cuda.is_available()
    return torch.tensor(values, dtype=dtype, pin_memory=pin).to(device, non_blocking=True)
