"""Start-up: seconds from the command to the first rank started, of the real ``python -m llmx``.

    python benchmarks/startup.py [--runs 9]

Every run is a real one, ended as soon as a rank is there. Both times are start
times of processes as the kernel keeps them (``/proc/PID/stat``, 10 ms), so nothing is
instrumented. Processor time is that of the control process alone, when the rank is there: it
depends less on what else the machine does. One more run under ``-X importtime`` comes first: it
lists what the control process imports, and leaves the byte code that the others find.
Exits with 1 where the median is over a second or something heavy was imported.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from machine import write_result

TARGET_S = 1.0
FOUND_WITHIN_S = 60.0
NO_BYTE_CODE = "PYTHONDONTWRITEBYTECODE"
"""Where it is set, every start compiles all that has changed since: no user's start."""
HEAVY = ("torch", "deepspeed", "transformers", "datasets", "wandb", "matplotlib", "tensorboard")
SHAPES = {
    "bundled demo, two CPU ranks": ["hardware=cpu2"],
    "ZeRO-3, with the W&B mirror": ["hardware=cpu2", "zero=stage3", "tracking=wandb"],
}


@dataclass
class Start:
    """One start of a run, up to its first rank."""

    seconds: float
    cpu_s: float
    """Processor time of the control process."""
    stderr: str


def main() -> int:
    """Measure, print, write benchmarks/results/startup.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=9, help="runs of each shape")
    options = parser.parse_args()
    modules = imported(start(next(iter(SHAPES.values())), importtime=True).stderr)
    lines = [
        "| command | median s | fastest | slowest | processor s | runs |",
        "|---|---|---|---|---|---|",
    ]
    medians = []
    for name, overrides in SHAPES.items():
        starts = [start(overrides) for _ in range(options.runs)]
        seconds = [run.seconds for run in starts]
        medians.append(statistics.median(seconds))
        lines.append(
            f"| {name}: `python -m llmx {' '.join(overrides)}` | {medians[-1]:.2f} "
            f"| {min(seconds):.2f} | {max(seconds):.2f} "
            f"| {statistics.median(run.cpu_s for run in starts):.2f} | {len(seconds)} |"
        )
    heavy = sorted({name.split(".")[0] for name in modules} & set(HEAVY))
    lines += ["", f"Modules imported by the control process: {len(modules)}."]
    lines.append(f"Of {', '.join(HEAVY)}: {', '.join(heavy) or 'none'}.")
    good = max(medians) < TARGET_S and not heavy
    lines.append(f"Target: under {TARGET_S:g} s and none of them: {'met' if good else 'MISSED'}.")
    write_result("startup", "Start-up: from the command to the first rank started", lines)
    return 0 if good else 1


def start(overrides: list[str], *, importtime: bool = False) -> Start:
    """Start a run, and end it as soon as its first rank is there."""
    with tempfile.TemporaryDirectory(prefix="llmx-startup-") as directory:
        run_dir = Path(directory) / "run"
        flags = ["-X", "importtime"] if importtime else []
        words = [*overrides, f"run_dir={run_dir}", "launch.stop_grace_s=1"]
        env = {key: value for key, value in os.environ.items() if key != NO_BYTE_CODE}
        with (Path(directory) / "stderr").open("w+") as stderr:
            control = subprocess.Popen(
                [sys.executable, *flags, "-m", "llmx", *words],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                cwd=directory,
                env=env,
            )
            try:
                rank = wait_for_rank(control, run_dir)
                seconds = start_time_s(rank) - start_time_s(control.pid)
                cpu = psutil.Process(control.pid).cpu_times()
            finally:
                control.send_signal(signal.SIGTERM)
                control.wait(60)
            stderr.seek(0)
            return Start(seconds, cpu.user + cpu.system, stderr.read())


def wait_for_rank(control: subprocess.Popen[bytes], run_dir: Path) -> int:
    """The process id of ``llmx.worker RUN_DIR``, as soon as one is there."""
    deadline = time.monotonic() + FOUND_WITHIN_S
    parent = psutil.Process(control.pid)
    while time.monotonic() < deadline:
        if control.poll() is not None:
            raise RuntimeError(f"python -m llmx ended by itself with {control.returncode}")
        for process in parent.children(recursive=True):
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if words[-2:] == ["llmx.worker", str(run_dir)]:
                return process.pid
        time.sleep(0.005)
    raise TimeoutError(f"no rank within {FOUND_WITHIN_S:g} s")


def start_time_s(pid: int) -> float:
    """When a process was started, seconds since boot (field 22 of ``/proc/PID/stat``)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def imported(importtime: str) -> set[str]:
    """Module names from the output of ``python -X importtime``."""
    return set(re.findall(r"^import time: +\d+ \| +\d+ \| +(\S+)$", importtime, re.M))


if __name__ == "__main__":
    sys.exit(main())
