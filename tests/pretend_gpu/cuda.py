"""``torch.cuda`` of a host whose GPUs have one compute capability."""

from __future__ import annotations

import time
import warnings
from types import SimpleNamespace
from typing import Any

import torch

from tests.pretend_gpu.devices import Devices

NAMES = {(8, 0): "NVIDIA A100-SXM4-40GB", (7, 0): "Tesla V100-SXM2-32GB"}
GIB = {(8, 0): 40, (7, 0): 32}


def install(devices: Devices) -> None:
    """Replace what asks the driver."""
    cuda, report = torch.cuda, devices.report

    def properties(*_: Any) -> Any:
        return SimpleNamespace(
            name=NAMES[devices.capability],
            major=devices.capability[0],
            minor=devices.capability[1],
            total_memory=GIB[devices.capability] * 2**30,
            multi_processor_count=108,
            warp_size=32,
            is_integrated=False,
        )

    def memory(*_: Any) -> tuple[int, int]:
        return properties().total_memory, properties().total_memory

    class Event:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.time_s = 0.0

        def record(self, *_: Any) -> None:
            self.time_s = time.perf_counter()

        def wait(self, *_: Any) -> None:
            pass

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            report.wait("event.synchronize")

        def elapsed_time(self, later: Event) -> float:
            return max(1e-3, (later.time_s - self.time_s) * 1e3)

    class Stream:
        cuda_stream = 0

        def __init__(self, *_: Any, **__: Any) -> None:
            self.device = devices.whole("cuda")

        def wait_stream(self, _: Any) -> None:
            pass

        def wait_event(self, _: Any) -> None:
            pass

        def record_event(self, event: Event | None = None) -> Event:
            return event or Event()

        def synchronize(self) -> None:
            report.wait("stream.synchronize")

        def query(self) -> bool:
            return True

    class Context:
        """``with torch.cuda.stream(...)`` or ``torch.cuda.device(...)``."""

        def __init__(self, *_: Any) -> None:
            pass

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: Any) -> None:
            pass

    stream = Stream()

    def set_device(device: Any) -> None:
        devices.current = devices.whole(device).index

    def nothing(*_: Any, **__: Any) -> None:
        pass

    for name in (
        "init _lazy_init empty_cache reset_peak_memory_stats reset_max_memory_allocated "
        "reset_max_memory_cached manual_seed manual_seed_all ipc_collect"
    ).split():
        setattr(cuda, name, nothing)
    for name in "memory_allocated memory_reserved memory_cached max_memory_cached".split():
        setattr(cuda, name, lambda *_: 0)
    for name in "max_memory_allocated max_memory_reserved".split():
        setattr(cuda, name, lambda *_: 2**20)
    replaced = {
        "Event": Event,
        "Stream": Stream,
        "StreamContext": Context,
        "_is_in_bad_fork": lambda: False,
        "current_device": lambda: devices.current,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "device": Context,
        "device_count": lambda: devices.count,
        "get_arch_list": lambda: ["sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"],
        "get_device_capability": lambda *_: devices.capability,
        "get_device_name": lambda *_: properties().name,
        "get_device_properties": properties,
        # The CPU's own draws for both.
        "default_generators": (torch.default_generator,) * 8,
        "get_rng_state": lambda *_: torch.default_generator.get_state(),
        "set_rng_state": lambda state, *_: torch.default_generator.set_state(state),
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "is_initialized": lambda: True,
        "mem_get_info": memory,
        "memory_stats": lambda *_: {},
        "set_device": set_device,
        "stream": Context,
        "synchronize": lambda *_: report.wait("cuda.synchronize"),
        "nvtx": SimpleNamespace(range_push=nothing, range_pop=nothing),
    }
    for name, value in replaced.items():
        setattr(cuda, name, value)
    cuda.nccl.version = lambda: (2, 27, 5)
    torch.version.cuda = "12.6"
    torch._C._cuda_getDeviceCount = lambda: devices.count
    warnings.filterwarnings("ignore", message=".*pin_memory.*")
