"""The training of a campaign, what of it must not depend on what happened, and its undisturbed run.

with Undisturbed(directory, words, steps=700) as undisturbed:
    undisturbed.until_over().weights_hash
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from llmx.run.rundir import RunDir, read_json
from tests.chaos.run_files import json_lines
from tests.cluster.launching import REPOSITORY, SMALL


class GaveUp(AssertionError):
    """The run ended, or went on too slowly, when it should have survived."""


def training_words(steps: int) -> list[str]:
    """The words of the command line that say what is trained, and nothing of where."""
    return [
        *SMALL,
        *("data.max_rows=1500", "optim.lr=1e-3"),
        *(f"task.steps={steps}", "task.log_every_steps=1", "task.save_model=false"),
    ]


@dataclass
class Trained:
    """What must not depend on what happened on the way."""

    losses: dict[int, tuple[float, float]]
    """Step -> loss and gradient norm."""
    weights_hash: str


def trained(run_dir: RunDir, steps: int) -> Trained:
    """What a run says that is over; GaveUp where a step is missing or there twice."""
    records = json_lines(run_dir.metrics)
    train = [record for record in records if record["kind"] == "train"]
    found = [record["step"] for record in train]
    if found != list(range(1, steps + 1)):
        gaps = sorted(set(range(1, steps + 1)) - set(found))
        double = sorted({step for step in found if found.count(step) > 1})
        raise GaveUp(f"metrics.jsonl: steps missing {gaps}, steps twice {double}")
    starts = [record for record in records if record["kind"] == "start"]
    ends = [record for record in records if record["kind"] == "end"]
    if (len(starts), len(ends)) != (1, 1):
        raise GaveUp(f"metrics.jsonl has {len(starts)} start and {len(ends)} end lines")
    return Trained(
        {record["step"]: (record["loss"], record["grad_norm"]) for record in train},
        ends[0]["weights_hash"],
    )


class Undisturbed:
    """The same training as ranks of this machine, without checkpoints: no cluster, no fault.

    At the lowest priority: it uses the time in which the disturbed run waits. A context manager.
    """

    def __init__(self, directory: Path, words: list[str], *, steps: int) -> None:
        """``words``: what is trained, and by how many ranks."""
        directory.mkdir(parents=True)
        self.steps = steps
        self.run_dir = RunDir(directory / "run")
        self.out = directory / "console.out"
        words = [
            *words,
            *("launch.transport=local", "checkpoint=none"),
            *(f"run_dir={self.run_dir.root}", f"data.cache_dir={directory}/cache"),
        ]
        with self.out.open("wb") as stream:
            self.process = subprocess.Popen(
                ["nice", "-n", "19", sys.executable, "-m", "llmx", *words],
                cwd=directory,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Undisturbed:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            for _ in range(2):  # the second request ends the ranks at once
                self.process.terminate()
                try:
                    self.process.wait(timeout=30)
                    return
                except subprocess.TimeoutExpired:
                    continue
            self.process.kill()
            self.process.wait()

    def until_over(self, *, patience_s: float) -> Trained:
        """Wait for its good end; GaveUp with its last words where there is none, or no new step
        for ``patience_s``. From now on at the usual priority: nothing else is left to do."""
        supervisor = psutil.Process(self.process.pid)
        for process in [supervisor, *supervisor.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.nice(0)
        console_bytes = -1
        while (exit_code := self._ended_within(patience_s)) is None:
            if self.out.stat().st_size == console_bytes:
                raise GaveUp(f"undisturbed: no step for {patience_s:.0f} s\n{self._said()}")
            console_bytes = self.out.stat().st_size
        if exit_code != 0 or read_json(self.run_dir.result)["outcome"] != "ok":
            raise GaveUp(f"undisturbed: ended with {exit_code}\n{self._said()}")
        return trained(self.run_dir, self.steps)

    def _ended_within(self, timeout_s: float) -> int | None:
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def _said(self) -> str:
        return "\n".join(self.out.read_text(errors="replace").splitlines()[-25:])
