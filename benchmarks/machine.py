"""What benchmarks have in common: results and what they say of the machine, forked ranks, and what
would stop a peer."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for what is shared with the tests
RESULTS = Path(os.environ.get("LLMX_BENCHMARK_RESULTS") or ROOT / "benchmarks" / "results")
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


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_of(rank: int, *, world: int, port: int) -> dict[str, str]:
    """The variables of a rank on this machine."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_SIZE": world}
    place |= {"MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}}


def forked(run: Callable[[], object]) -> int:
    """A process that calls ``run``; its number."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def wait(pids: Iterable[int]) -> None:
    """Until all have ended, and well."""
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        raise RuntimeError(f"the forked processes ended with {codes}")


def write_result(name: str, title: str, lines: list[str]) -> Path:
    """Print and write ``benchmarks/results/NAME.md``; returns its path."""
    print("\n".join(lines))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.md"
    path.write_text("\n".join([f"# {title}", "", described(), "", *lines, ""]), encoding="utf-8")
    print(f"written: {path}")
    return path
