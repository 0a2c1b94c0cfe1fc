"""Bytes of all tensors that are alive, exactly, also on a CPU: what an allocator would count."""

from __future__ import annotations

import contextlib
import gc

import torch
from torch._subclasses.fake_tensor import FakeTensor

from llmx.train.memory_trace import Recorder


class LiveMemory(Recorder):
    """Inside, every storage that an operator returns is counted until it is freed.

    ``live`` and ``peak`` are bytes. Storages that were there before are counted by ``take``.
    """

    def everything(self) -> None:
        """Count what Python can still reach, without tensors that are only a shape."""
        gc.collect()
        for value in gc.get_objects():
            if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                with contextlib.suppress(NotImplementedError, RuntimeError):
                    if value.device.type != "meta":
                        self.take(value)

    def restart(self) -> None:
        """Forget the peak."""
        self.peak = self.live
