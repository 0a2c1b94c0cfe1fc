"""Whole runs through ``python -m llmx`` on this machine, read back from their directory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmx.run.metrics.lines import read_metrics
from llmx.run.rundir import RunDir
from tests.forked_ranks import shared

SMALL = (
    "model.config.hidden_size=32",
    "model.config.intermediate_size=64",
    "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=2",
    "data.max_rows=200",
    "task.eval_generate=0",
    "task.save_model=false",
)
"""The demo, cut down to what a test of one setting needs."""


@dataclass
class Finished:
    """A run that has ended, well or not."""

    dir: RunDir
    exit_code: int
    said: str
    """stdout and stderr together."""

    @property
    def result(self) -> dict[str, Any]:
        return dict(json.loads(self.dir.result.read_text()))

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl`` of one kind."""
        return lines(self.dir.root, kind)

    def series(self, name: str) -> list[float]:
        """One value of every ``train`` line."""
        return [line[name] for line in self.lines("train")]

    @property
    def losses(self) -> list[float]:
        return self.series("loss")

    @property
    def logs(self) -> str:
        """What the ranks wrote."""
        return "\n".join(path.read_text() for path in sorted(self.dir.logs.glob("rank-*.log")))

    def warnings(self) -> list[str]:
        """Every warning on the console, in ``result.json`` and in the logs of the ranks."""
        text = f"{self.said}\n{self.logs}"
        return [*self.result["warnings"], *re.findall(r"(?im)^.*warn(?:ing|ings)?\b.*$", text)]


def llmx(
    directory: Path, *words: str, timeout_s: float = 900.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """``python -m llmx WORDS`` in ``directory``, on one thread a process."""
    return subprocess.run(
        [sys.executable, "-m", "llmx", *words],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def succeeds(directory: Path, *words: str) -> str:
    """The same of a command that ends well; what it said. One that trains has its ranks forked."""
    trains = bool(words) and (words[0] == "-m" or "=" in words[0])
    done = llmx(directory, *words, *([forked()] if trains else []))
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` of one kind, of a run's directory."""
    return [line for line in read_metrics(RunDir(run).metrics) if line["kind"] == kind]


def forked() -> str:
    """For a command line: the ranks are forked by a server (``tests.forked_ranks``)."""
    return f"launch.python={shared().python}"


def train(
    directory: Path, name: str, *overrides: str, by_deepspeed: bool = False, **environment: str
) -> Finished:
    """Train on two CPU ranks (``hardware=cpu2``) in ``directory/name``, fp32 unless said else;
    ``by_deepspeed``: the ranks are not forked, but started by its launcher."""
    run = RunDir(directory / name)
    words = [
        "hardware=cpu2",
        "precision=fp32",
        "task.log_every_steps=1",
        f"data.cache_dir={directory / 'cache'}",
        f"run_dir={run.root}",
    ]
    keys = {word.partition("=")[0] for word in overrides}
    kept = [word for word in words if word.partition("=")[0] not in keys]
    more = () if by_deepspeed else (forked(),)
    done = llmx(directory, *kept, *overrides, *more, **environment)
    return Finished(run, done.returncode, done.stdout)
