"""Bytes of all tensors that are alive, exactly, also on a CPU: what an allocator would count."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Inside, every storage that an operator returns is counted until it is freed.

    ``live`` and ``peak`` are bytes. Storages that were there before are counted by ``take``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def take(self, values: Any) -> None:
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor):
                self._count(value)

    def everything(self) -> None:
        """Count what Python can still reach."""
        gc.collect()
        for each in gc.get_objects():
            if isinstance(each, torch.Tensor):
                self._count(each)

    def restart(self) -> None:
        """Forget the peak."""
        self.peak = self.live

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None):
        result = function(*args, **(kwargs or {}))
        self.take(result)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, FakeTensor):  # a compiler's: only a shape
            return
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or not size or tensor.device.type == "meta":
            return

        def gone(_: Any) -> None:
            if self._known.pop(key, None) is not None:
                self.live -= size

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)
