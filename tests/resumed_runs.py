"""Small runs that save, and what is compared of two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmx.plan import make_plan
from llmx.run import snapshot
from llmx.run.metrics.lines import GROUPS, read_metrics
from llmx.run.rundir import RunDir
from tests.composing import with_networks
from tests.rundirs import experiment, write_run

MEASURED = {"time", *(key for key, group in GROUPS.items() if group == "perf")}
"""What depends on the machine, not on the training."""
OF_THE_INTERVAL = {"loss_mean"}
"""Over the steps since the last line, or since a resume between two lines."""

STEPS = 40
EVERY = 8


def saving_run(directory: Path, *, ranks: int = 2, **groups: Any) -> RunDir:
    """40 steps of accumulation 2 over two epochs, saved at every 8th, evaluated at every 16th."""
    defaults: dict[str, Any] = {
        "task": {"steps": STEPS, "log_every_steps": 3, "eval_every_steps": 16},
        "data": {"max_rows": 200, "eval_samples": 8, "seq_len": 64},
        "batch": {"micro_batch": 2, "accumulation": 2},
        "checkpoint": {"every_steps": EVERY},
    }
    for group, values in groups.items():
        known = defaults.get(group)
        merged = isinstance(known, dict) and isinstance(values, dict)
        defaults[group] = {**known, **values} if merged else values
    # The prepared data is shared, so that each run begins in a moment.
    defaults["data"].setdefault("cache_dir", str(directory.parent / "cache"))
    return write_run(experiment(directory, ranks=ranks, **defaults))


def measurements(run_dir: RunDir) -> list[dict[str, Any]]:
    """All lines of ``metrics.jsonl`` but events, without what the machine decides."""
    return [
        {key: value for key, value in line.items() if key not in MEASURED | OF_THE_INTERVAL}
        for line in read_metrics(run_dir.metrics)
        if line["kind"] != "event"
    ]


def events(run_dir: RunDir, name: str) -> list[dict[str, Any]]:
    """The events of one name."""
    return [line for line in read_metrics(run_dir.metrics) if line.get("event") == name]


def has_saved(run_dir: RunDir, step: int) -> bool:
    """Whether the metrics say that this step, or a later one, is saved."""
    return any(event["step"] >= step for event in events(run_dir, "saved"))


def assert_planned_sizes(run_dir: RunDir) -> None:
    """A checkpoint and ``model/`` take what the plan says, within 5 % or, of small ones, 64 KiB."""
    exp = snapshot.load(run_dir)
    exp.model.config.setdefault("vocab_size", 1024)  # of the bundled tokenizer
    storage = make_plan(exp, with_networks(exp)).storage
    assert storage is not None
    newest = sorted(run_dir.checkpoints.glob("step-*"))[-1]
    for directory, planned in (
        (newest, storage.checkpoint_bytes),
        (run_dir.root / "model", storage.model_bytes),
    ):
        written = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        assert written == pytest.approx(planned, rel=0.05, abs=2**16)
