"""What every benchmark's result says of the machine, and where results are written."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from pathlib import Path

RESULTS = Path(os.environ.get("LLMX_BENCHMARK_RESULTS") or Path(__file__).parent / "results")
PACKAGES = ("torch", "deepspeed", "transformers", "hydra-core")


def described() -> str:
    """Date, processor, cores, memory, versions and load, in one line."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    return (
        f"{time.strftime('%Y-%m-%d')}; {model}, {os.cpu_count()} cores, {memory_gib:.0f} GiB; "
        f"Python {platform.python_version()}, {versions}; "
        f"load {os.getloadavg()[0]:.1f} at the end"
    )


def write_result(name: str, title: str, lines: list[str]) -> Path:
    """Write ``benchmarks/results/NAME.md``; returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.md"
    path.write_text("\n".join([f"# {title}", "", described(), "", *lines, ""]), encoding="utf-8")
    print(f"written: {path}")
    return path
