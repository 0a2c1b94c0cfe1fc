"""Runs of llmx, for which one process has imported torch, DeepSpeed and Transformers.

A process on a GPU machine takes 25 to 40 s for that, and two of them (DeepSpeed's launcher and the
rank) belong to each run. A fork composes, checks and writes the run as ``python -m llmx`` does, and
then is its only rank. ``several`` starts ``python -m llmx`` itself.
"""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu.part import Context, PartFailed
from llmx.run.metrics.lines import read_metrics

LIMIT_S = 120.0
"""Of one run on a GPU: one that hangs takes no other's time."""


@dataclass(frozen=True)
class Run:
    """The files of a finished run."""

    directory: Path

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl`` of one kind."""
        lines = read_metrics(self.directory / "metrics.jsonl")
        return [line for line in lines if line["kind"] == kind]

    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines("train")]

    def json(self, name: str) -> Any:
        return json.loads((self.directory / name).read_text(encoding="utf-8"))

    def cause(self, log: Path) -> str:
        """Of a run that failed: from the file of its rank, else the last line of its output."""
        try:
            error = self.json("ranks/rank-000.json")["error"]
            return f"{error['type']}: {error['message']}".splitlines()[0]
        except (OSError, ValueError, TypeError):
            return log.read_text(errors="replace").strip().splitlines()[-1]

    def steady(self, key: str) -> float:
        """Median of a value over the ``train`` lines after the first third, which warms up."""
        lines = self.lines("train")
        values = [
            line[key]
            for line in lines
            if line["step"] > lines[-1]["step"] // 3 and line.get(key) is not None
        ]
        if not values:
            raise PartFailed(f"{self.directory.name}: no {key} was logged after the warm-up")
        return float(statistics.median(values))

    def peak_memory_gib(self) -> float:
        """The largest that any rank reported."""
        return float(max(max(line["memory_gib"]) for line in self.lines("train")))


def train(
    context: Context,
    name: str,
    *words: str,
    resume: bool = False,
    before: Callable[[Any], None] | None = None,
) -> Run:
    """Run ``python -m llmx WORDS`` on one device, in a fork, and read what it left.

    ``resume``: go on with the run directory of that name instead. ``before``: called with the
    launch in the process of the rank, before it begins. Raises PartFailed with the run's own cause.
    """
    run = Run(context.root / "runs" / name)
    if not resume:
        # A work directory that is used again: a run is never overwritten.
        shutil.rmtree(run.directory, ignore_errors=True)
        words = (*_fixed(context, run, slots=1), *words)
    command = ["resume", str(run.directory), *words] if resume else list(words)
    log = _log(context, name, command)
    process = _starts(context.cuda).Process(target=_be_run, args=(context, log, command, before))
    process.start()
    limit_s = LIMIT_S if context.cuda else 4 * LIMIT_S
    process.join(limit_s)
    if process.exitcode is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        raise PartFailed(f"{name}: it did not end in {limit_s:.0f} s")
    return _ended(run, process.exitcode, log)


def several(context: Context, name: str, *words: str) -> Run:
    """``python -m llmx WORDS`` on all GPUs, as a user starts it."""
    run = Run(context.root / "runs" / name)
    shutil.rmtree(run.directory, ignore_errors=True)
    command = [*_fixed(context, run, slots=context.num_gpus), *words]
    log = _log(context, name, command)
    with log.open("ab") as stream:
        done = subprocess.run(
            [sys.executable, "-m", "llmx", *command],
            cwd=context.root,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            check=False,
        )
    return _ended(run, done.returncode, log)


def _log(context: Context, name: str, command: list[str]) -> Path:
    """The file of a run's output, which begins with its command."""
    log = context.root / "logs" / f"run-{name}.log"
    log.write_text(f"$ python -m llmx {shlex.join(command)}\n", encoding="utf-8")
    return log


def _ended(run: Run, code: int, log: Path) -> Run:
    """The run; PartFailed, and the end of its output, where it did not end well."""
    if code != 0:
        print(log.read_text(errors="replace")[-3000:], file=sys.stderr, flush=True)
        raise PartFailed(f"{run.directory.name}: {run.cause(log)}")
    return run


def _fixed(context: Context, run: Run, *, slots: int) -> list[str]:
    hardware = [] if context.cuda else ["hardware=cpu2"]
    return [f"run_dir={run.directory}", "tracking=none", *hardware, f"hardware.slots={slots}"]


@functools.cache
def _starts(cuda: bool) -> BaseContext:
    """How runs are started: by forks of this process, which imports what a rank does; where one of
    the imports has opened the GPU, which no fork could use then, by new processes."""
    os.environ["DS_ACCELERATOR"] = "cuda" if cuda else "cpu"
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else torch opens it to count GPUs
    if not cuda:  # read once, when torch is imported
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in IMPORTS:
        importlib.import_module(name)
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=_leave_with_gpu_open)
    process.start()
    process.join()
    print(f"an import has opened the GPU: {bool(process.exitcode)}", file=sys.stderr, flush=True)
    return multiprocessing.get_context("spawn") if process.exitcode else fork


IMPORTS = (
    "hydra.main", "llmx.cli.hydra_app", "llmx.compose.complete", "llmx.data", "llmx.launch",
    "llmx.lifecycle.start", "llmx.train.loop", "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto", "transformers.models.llama.modeling_llama",
)  # fmt: skip
"""Not peft: it imports bitsandbytes, which opens the GPU."""


def _leave_with_gpu_open() -> None:
    import torch

    os._exit(int(torch.cuda._is_in_bad_fork()))  # type: ignore[no-untyped-call]


def _be_run(
    context: Context, log: Path, command: list[str], before: Callable[[Any], None] | None
) -> None:
    """Compose and write the run, be its rank, and leave as ``llmx.worker`` does."""
    code = 1
    try:
        os.chdir(context.root)
        stream = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        code = _run_words(command, before)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_words(command: list[str], before: Callable[[Any], None] | None) -> int:
    from llmx import worker
    from llmx.cli.main import main
    from llmx.launch.environment import rank_env
    from llmx.lifecycle import start

    def be_rank(launch: Any) -> int:
        os.environ.update(rank_env(launch), RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        if before is not None:
            before(launch)
        return worker.main([str(launch.run_dir.root)])

    start.supervised = be_rank
    return main(command)
