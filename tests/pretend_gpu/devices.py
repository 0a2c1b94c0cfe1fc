"""Tensors that know on which GPU they lie. Their storage is a CPU's, with the GPU as an attribute.

All of torch's Python that asks for a device, names one or moves something is replaced: methods of
``Tensor``, factories, ``with torch.device(...)``. Below the dispatcher there is nothing but CPU.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device as device_context
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.pretend_gpu.report import Report

CPU = torch.device("cpu")
COPIES = ("aten.copy_.", "aten._to_copy.", "aten._foreach_copy_.", "c10d.")
"""Operators that may take tensors of several devices. Collectives have rules of their own."""
INDEXING = ("aten.index.", "aten.index_put", "aten._index_put_impl_", "aten._unsafe_index.")
WAITING = (
    *("aten._local_scalar_dense.", "aten.nonzero.", "aten.masked_select.", "aten.equal."),
    *("aten._unique2.", "aten.unique_dim.", "aten.unique_consecutive."),
)
"""The size or the value of their result is known on the host."""
FACTORIES = (
    "empty zeros ones full tensor arange empty_like zeros_like ones_like full_like rand randn "
    "randint randperm linspace eye empty_strided as_tensor scalar_tensor rand_like randn_like "
    "tril_indices triu_indices"
).split()
METHODS = "new_empty new_zeros new_ones new_full new_tensor new_empty_strided".split()

raw_to = torch.Tensor.to
raw_type = torch.Tensor.type


class Devices:
    """Of one process: it may use the GPU ``local_rank`` of its host."""

    def __init__(self) -> None:
        self.report = Report()
        self.local_rank = 0
        self.count = 1
        self.capability = (8, 0)
        self.current = 0
        """``torch.cuda.current_device()``: number 0 until it is set, as on a GPU."""

    def whole(self, device: Any) -> torch.device:
        """With the number of the GPU."""
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type == "cuda" and device.index is None:
            return torch.device("cuda", self.current)
        return device

    def put(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Say that a new tensor lies there."""
        if device.type == "cuda":
            if device.index != self.local_rank:
                raise self.report.fault(
                    f"local rank {self.local_rank} makes a tensor on {device}: a CUDA context there"
                )
            tensor.untyped_storage().pretended = device
        return tensor

    def install(self) -> None:
        """For all of this process, threads included."""
        device_context._device_constructors()  # cached, of the functions before they are replaced
        tensor = torch.Tensor
        tensor.device = property(device_of)
        tensor.is_cuda = property(lambda x: device_of(x).type == "cuda")
        tensor.is_cpu = property(lambda x: device_of(x).type == "cpu")
        tensor.get_device = lambda x: -1 if device_of(x).index is None else device_of(x).index
        tensor.to = functools.partialmethod(lambda x, *a, **k: self._to(x, *a, **k))
        tensor.cpu = lambda x, *_, **__: self._move(x, CPU)
        tensor.cuda = lambda x, device=None, non_blocking=False, **_: self._move(
            x, self.whole("cuda" if device is None else device), non_blocking=non_blocking
        )
        tensor.type = _type
        tensor.pin_memory = _pinned
        tensor.is_pinned = lambda x, *_: getattr(x.untyped_storage(), "pinned", False)
        tensor.record_stream = lambda x, stream: None
        for owner, names in ((torch, FACTORIES), (tensor, METHODS)):
            for name in names:
                setattr(owner, name, self._factory(getattr(owner, name), name))
        for name in ("tolist", "numpy"):
            setattr(tensor, name, self._to_host(getattr(tensor, name)))
        self._context()
        run, mode = threading.Thread.run, functools.partial(_Operators, self)

        def run_with_operators(thread: threading.Thread) -> None:
            with mode():
                run(thread)

        threading.Thread.run = run_with_operators
        mode().__enter__()

    def _to(self, x: torch.Tensor, *words: Any, **options: Any) -> torch.Tensor:
        """``Tensor.to`` in all its forms."""
        target, dtype = options.get("device"), options.get("dtype")
        switches = []
        for word in words:
            if isinstance(word, torch.Tensor):
                target, dtype = word.device, word.dtype
            elif isinstance(word, torch.dtype):
                dtype = word
            elif isinstance(word, bool):
                switches.append(word)
            elif isinstance(word, str | int | torch.device):
                target = word
        if target is None or x.is_meta or self.whole(target).type == "meta":
            return raw_to(x, *words, **options)
        non_blocking, copy = (*switches, False, False)[:2]
        return self._move(
            x,
            self.whole(target),
            dtype=dtype,
            non_blocking=options.get("non_blocking", non_blocking),
            copy=options.get("copy", copy),
        )

    def _move(
        self,
        x: torch.Tensor,
        target: torch.device,
        *,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        copy: bool = False,
    ) -> torch.Tensor:
        dtype = dtype or x.dtype
        if device_of(x) == target and dtype == x.dtype and not copy:
            return x
        self.transfer(device_of(x), target, source=x, non_blocking=non_blocking)
        _here.target = target
        try:
            return self.put(raw_to(x, dtype=dtype, copy=True), target)
        finally:
            _here.target = None

    def transfer(
        self,
        source_device: torch.device,
        target: torch.device,
        *,
        source: torch.Tensor,
        non_blocking: bool,
    ) -> None:
        """Count the wait of a copy between host and GPU: blocking, or from unpinned memory."""
        if source_device.type == target.type or not source.numel():
            return
        to_host = target.type == "cpu"
        if not non_blocking:
            self.report.wait("copy to the host" if to_host else "copy to the GPU")
        elif not to_host and not source.is_pinned():
            self.report.wait("copy to the GPU from memory that is not pinned")

    def _factory(self, raw: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(raw)
        def make(*words: Any, **options: Any) -> Any:
            pinned = options.pop("pin_memory", False)
            like = words[0] if words and isinstance(words[0], torch.Tensor) else None
            device = options.get("device")
            target = None if device is None else self.whole(device)
            if target is not None and target.type == "cuda":
                options["device"] = CPU
                if name in ("tensor", "as_tensor"):
                    if like is not None:
                        copy = name == "tensor"
                        return self._move(like, target, dtype=options.get("dtype"), copy=copy)
                    self.report.wait("copy to the GPU of Python numbers")
            elif target is None and like is not None and name not in ("tensor",):
                target = device_of(like)
                if target.type == "cuda" and name == "new_tensor":
                    self.report.wait("copy to the GPU of Python numbers")
            _here.in_factory = True
            try:
                result = raw(*words, **options)
            finally:
                _here.in_factory = False
            if target is not None and not result.is_meta and name != "as_tensor":
                self.put(result, target)
            if pinned:
                result.untyped_storage().pinned = True
            return result

        return make

    def _to_host(self, raw: Callable[..., Any]) -> Callable[..., Any]:
        """``tolist`` copies, ``numpy`` refuses."""

        def method(x: torch.Tensor, *words: Any, **options: Any) -> Any:
            if device_of(x).type == "cuda":
                if raw.__name__ == "numpy":
                    raise self.report.fault("numpy() of a tensor on the GPU")
                self.report.wait("copy to the host")
            return raw(x, *words, **options)

        return method

    def _context(self) -> None:
        """``with torch.device(...)``."""
        raw, constructors = (
            device_context.DeviceContext.__torch_function__,
            device_context._device_constructors(),
        )

        def function(
            context: Any, call: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if context.device.type != "cuda":
                return raw(context, call, types, args, kwargs)
            if call in constructors and kwargs.get("device") is None:
                made = call(*args, **{**kwargs, "device": CPU})
                return self.put(made, self.whole(context.device))
            return call(*args, **kwargs)

        device_context.DeviceContext.__torch_function__ = function


_here = threading.local()
"""``target`` of a copy, and whether a factory is called, in this thread."""


def device_of(x: torch.Tensor) -> torch.device:
    """Where it lies."""
    if x.is_meta:
        return torch.device("meta")
    try:
        return getattr(x.untyped_storage(), "pretended", CPU)
    except (NotImplementedError, RuntimeError):  # it has no storage
        return CPU


def _adopts(x: torch.Tensor) -> bool:
    return not x.is_meta and getattr(x.untyped_storage(), "adopts", False)


def _type(x: torch.Tensor, *words: Any, **options: Any) -> Any:
    if not words and not options:
        name = raw_type(x)
        return name.replace("torch.", "torch.cuda.") if device_of(x).type == "cuda" else name
    words = tuple(w.replace("cuda.", "") if isinstance(w, str) else w for w in words)
    return raw_type(x, *words, **options)


def _pinned(x: torch.Tensor, *_: Any) -> torch.Tensor:
    if x.is_pinned():
        return x
    copy = raw_to(x.detach(), copy=True)
    copy.untyped_storage().pinned = True
    return copy


class _Operators(TorchDispatchMode):
    """What an operator may take, where its result lies, and whether the host waits for it."""

    def __init__(self, devices: Devices) -> None:
        super().__init__()
        self.devices, self.report = devices, devices.report

    def __torch_dispatch__(self, call: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(call)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        gpus = {device for device in map(device_of, tensors) if device.type == "cuda"}
        if gpus:
            self._check(name, tensors, gpus)
        if name.startswith("aten.copy_."):
            target, source = args[:2]
            self.devices.transfer(
                device_of(source),
                device_of(target),
                source=source,
                non_blocking=args[2] if len(args) > 2 else kwargs.get("non_blocking", False),
            )
        result = call(*args, **kwargs)
        device = getattr(_here, "target", None) if name.startswith("aten._to_copy.") else None
        device = device or next(iter(gpus), CPU)
        if all(map(_adopts, tensors)) and not getattr(_here, "in_factory", False):
            for x in tree_leaves(result):
                if isinstance(x, torch.Tensor) and not x.is_meta:
                    # C++ made it (zeros of a backward pass), for what it is used with next.
                    x.untyped_storage().adopts = True
        if device.type == "cuda" and not name.startswith(("aten.copy_.", "c10d.")):
            for x in tree_leaves(result):
                if isinstance(x, torch.Tensor) and not x.is_meta:
                    storage = x.untyped_storage()
                    if not hasattr(storage, "pretended"):
                        storage.pretended = device
        return result

    def _check(self, name: str, tensors: list[torch.Tensor], gpus: set[torch.device]) -> None:
        if not name.startswith(COPIES):
            for number, x in enumerate(tensors):
                if device_of(x).type != "cpu" or x.dim() == 0 or not x.numel():
                    continue
                if _adopts(x):
                    x.untyped_storage().pretended = next(iter(gpus))
                    continue
                if name.startswith(INDEXING) and number:
                    self.report.wait("copy to the GPU of an index")
                    continue
                raise self.report.fault(f"{name} takes tensors on cpu and on {min(map(str, gpus))}")
        if name.startswith(WAITING):
            self.report.wait(name.split(".")[1])
        if name.startswith(INDEXING) and any(x.dtype == torch.bool for x in tensors[1:]):
            self.report.wait("index by a mask")
