"""What every benchmark's result says of the machine, where results are written, and what would stop
a peer."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path

import psutil

RESULTS = Path(os.environ.get("LLMX_BENCHMARK_RESULTS") or Path(__file__).parent / "results")
PACKAGES = ("torch", "deepspeed", "transformers", "hydra-core")


def described() -> str:
    """Date, commit, machine, versions and load, in one line."""
    return f"{machine()}; load {os.getloadavg()[0]:.1f} at the end"


def machine() -> str:
    """Date, commit, processor, cores, memory and versions, in one line."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    return (
        f"{time.strftime('%Y-%m-%d')}, commit {commit()}; {model}, {os.cpu_count()} cores, "
        f"{memory_gib:.0f} GiB; "
        f"Python {platform.python_version()}, {versions}"
    )


def commit() -> str:
    """The short hash of the commit that is measured; + where tracked files differ from it."""
    words = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    done = subprocess.run(
        words, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def refuse_left_locks() -> None:
    """A peer waits without end and without a word for a build of an extension that was killed.

    torch has the lock of a build open until the build ends.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions").expanduser()
    locks = sorted(root.resolve().rglob("lock"))
    if not locks:
        return
    processes = psutil.process_iter(["open_files"])
    held = {file.path for process in processes for file in process.info["open_files"] or ()}
    for lock in locks:
        if str(lock) not in held and lock.exists():
            raise SystemExit(
                f"{lock} is left from a build that was killed: no process has it open, and "
                "DeepSpeed would wait for it without end. Remove it."
            )


def write_result(name: str, title: str, lines: list[str]) -> Path:
    """Write ``benchmarks/results/NAME.md``; returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.md"
    path.write_text("\n".join([f"# {title}", "", described(), "", *lines, ""]), encoding="utf-8")
    print(f"written: {path}")
    return path
