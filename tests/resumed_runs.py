"""Small runs that save, and what is compared of two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmx.run.metrics.lines import read_metrics
from llmx.run.rundir import RunDir
from tests.rundirs import experiment, write_run

MEASURED = {
    *("time", "step_time_s", "tokens_per_s", "mfu", "memory_gib", "data_wait_s"),
    *("forward_s", "backward_s", "update_s", "idle_share"),
}
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
