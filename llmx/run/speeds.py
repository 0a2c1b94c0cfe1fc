"""What the ranks of a cluster have measured once, for the plans of later runs there.

``RUN_DIR/balance.json`` is of one run, and each host keeps what its ranks measured by all that it
depends on. What is kept here is for the control process, which knows neither devices nor networks:
rank 0 writes it after measuring, ``plan`` reads it on the machine of rank 0, or where
``data.cache_dir`` is shared. Each file is JSON and may be removed at any time. docs/unequal.md.

Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

from llmx.config import DataConfig, Experiment
from llmx.plan.types import KnownSpeeds, Plan, RankSpeed
from llmx.run.rundir import read_json, write_json

FORMAT = 1


def speeds_directory(data: DataConfig) -> Path:
    """``speeds/`` in ``data.cache_dir``, else in ``$LLMX_CACHE``, else in ``~/.cache/llmx``."""
    root = data.cache_dir or os.environ.get("LLMX_CACHE") or "~/.cache/llmx"
    return Path(root).expanduser() / "speeds"


def known_speeds(exp: Experiment, plan: Plan) -> KnownSpeeds | None:
    """The speeds that an earlier run of the same measured on these hosts; None without one."""
    path = _path(exp, plan)
    try:
        values = read_json(path)
        speeds = tuple(RankSpeed(**speed) for speed in values["speeds"])
        micro_step_fs = values.get("micro_step_fs")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return KnownSpeeds(speeds, micro_step_fs, str(path)) if len(speeds) == plan.world_size else None


def keep_speeds(exp: Experiment, plan: Plan, *, run_dir: Path) -> None:
    """Keep the measured speeds for the next plan, by rank 0, where they can be written."""
    assert plan.balance is not None
    path = _path(exp, plan)
    values = {
        "speeds": [asdict(speed) for speed in plan.balance.speeds],
        "micro_step_fs": plan.balance.micro_step_fs,
        "hosts": [host.name for host in plan.hosts],
        "model": exp.model.name or exp.model.path,
        "run_dir": str(run_dir),
        "time": time.time(),
    }
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, values)


def _path(exp: Experiment, plan: Plan) -> Path:
    """Named after what both sides know of it."""
    assert plan.balance is not None
    model = asdict(replace(exp.model, name="", license=None))
    parts = {
        "format": FORMAT,
        "hosts": [(host.name, host.address, host.device, host.slots) for host in plan.hosts],
        "ranks": [(rank.host, rank.device) for rank in plan.ranks],
        "model": model,
        "adapter": asdict(exp.adapter),
        "task": [exp.task.kind, exp.task.options],
        "data": [exp.data.seq_len, exp.data.packing, exp.data.layout, exp.data.pad_to_multiple_of],
        "zero": exp.zero.stage,
        "run": [plan.precision, plan.attention],
        "limits": plan.balance.limits,
        **({"checkpointing": plan.checkpointing} if plan.checkpointing else {}),
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    name = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return speeds_directory(exp.data) / "clusters" / f"{name}.json"
