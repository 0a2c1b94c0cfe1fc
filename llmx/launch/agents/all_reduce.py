"""A rendezvous of ranks as a training has it, and timed all-reduces: what ``doctor --bandwidth``
starts on every host. One file: its text is sent there and runs in the Python of the ranks.

    python llmx/launch/agents/all_reduce.py '{"master": ["10.0.0.1", 29500], "ranks": [0, 1],
        "world": 4, "backend": "gloo", "megabytes": 64, "env": {}}'

Prints a JSON line: ``connect_s``, ``latency_s`` (of 8 bytes) and ``seconds`` (of so many megabytes,
the median of a few), by the first rank of the host; or ``error``.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

TIMEOUT_S = 60
REPEATS = 5


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Start the ranks of this host, each in a process of its own; the result of the first one."""
    os.environ.update(request["env"])
    processes = []
    for local, rank in enumerate(request["ranks"]):
        rank_request = json.dumps({**request, "rank": rank, "local": local})
        # Its own text is on the command line of this process, or in a file.
        program = [sys.executable, "-c", request["source"], rank_request]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(program, stdout=pipe, stderr=pipe, text=True))
    results: list[dict[str, Any]] = []
    for rank, process in zip(request["ranks"], processes):  # noqa: B905 (Python 3.9)
        output, errors = process.communicate()
        if process.returncode:
            lines = errors.strip().splitlines() or [f"exit code {process.returncode}"]
            return {"error": f"rank {rank}: {lines[-1]}"}
        results.append(json.loads(output.splitlines()[-1]))
    return results[0]


def measure(request: dict[str, Any]) -> dict[str, float]:
    """One rank: meet the others, then time all-reduces with them."""
    # By name: this runs on hosts, and the launch itself loads no torch.
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    is_gpu = request["backend"] == "nccl"
    device = torch.device("cuda", request["local"]) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    address, port = request["master"]
    host = f"[{address}]" if ":" in address else address
    began = time.monotonic()
    dist.init_process_group(
        request["backend"],
        init_method=f"tcp://{host}:{port}",
        rank=request["rank"],
        world_size=request["world"],
        timeout=timedelta(seconds=TIMEOUT_S),
    )

    def seconds_of(numbers: int) -> float:
        values = torch.ones(numbers, device=device)
        times = []
        for _ in range(REPEATS + 1):  # the first one opens connections
            if is_gpu:
                torch.cuda.synchronize()
            started = time.monotonic()
            dist.all_reduce(values)
            if is_gpu:
                torch.cuda.synchronize()
            times.append(time.monotonic() - started)
        return sorted(times[1:])[REPEATS // 2]

    latency_s = seconds_of(2)
    connect_s = time.monotonic() - began
    result = {"connect_s": connect_s, "latency_s": latency_s,
              "seconds": seconds_of(request["megabytes"] * 250_000)}  # fmt: skip
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    arguments = json.loads(sys.argv[-1])
    print(json.dumps(measure(arguments) if "rank" in arguments else main(arguments)))
