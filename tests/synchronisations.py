"""Where Python waits for numbers of the device, counted on a CPU by the operators that would wait
on a GPU. What comes from a batch, which lies in host memory on purpose, does not count."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import transformers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

import llmx

WAITING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default,
}
COPYING = {"cpu", "tolist", "numpy"}
PACKAGES = [Path(str(module.__file__)).parent for module in (llmx, deepspeed, transformers)]
"""Directories of the packages, wherever they are installed: a clone may be called ``llmx`` too."""


class _Functions(TorchFunctionMode):
    """Methods that copy to the host; a CPU's dispatcher never sees them."""

    def __init__(self, counter: Synchronisations) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None):
        if getattr(function, "__name__", "") in COPYING:
            self.counter.note(args)
        return function(*args, **(kwargs or {}))


class Synchronisations(TorchDispatchMode):
    """Inside, ``places`` counts them by file and function."""

    def __init__(self, *batches: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()
        self._host = WeakTensorKeyDictionary()
        self._alive = [tensor for batch in batches for tensor in batch.values()]
        self._functions = _Functions(self)
        for tensor in self._alive:
            self._host[tensor] = True

    def __enter__(self) -> Synchronisations:
        from deepspeed.accelerator import get_accelerator

        self._patch = mock.patch.object(
            type(get_accelerator()),
            "synchronize",
            side_effect=lambda *_: self.note(()),
        )
        self._patch.start()
        self._functions.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._functions.__exit__(*error)
        self._patch.stop()

    def note(self, args: Any) -> None:
        if not self._from_host(args):
            self.places[place()] += 1

    def _from_host(self, args: Any) -> bool:
        tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
        return bool(tensors) and all(each in self._host for each in tensors)

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None):
        if function in WAITING:
            self.note(args)
        result = function(*args, **(kwargs or {}))
        if self._from_host((args, kwargs)):
            for each in tree_leaves(result):
                if isinstance(each, torch.Tensor):
                    self._host[each] = True
        return result


def place() -> str:
    """``llmx/models/loss.py:micro_batch_loss``: the innermost function of llmx, DeepSpeed or
    Transformers on the stack."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        for package in PACKAGES:
            if file.startswith(f"{package}{os.sep}"):
                return f"{os.path.relpath(file, package.parent)}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"
