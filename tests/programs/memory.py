"""How much memory a rank needs to build a model, and what it says of a broken checkpoint.

``deepspeed --num_gpus 2 --module --no_local_rank tests.programs.memory JOBS.json OUT``

A job is ``{"name", "stage", "config"}`` and optionally ``"path"``. Every rank writes
``OUT/<name>-<rank>.json``: ``growth``, the peak resident bytes of ``build_model`` above what was
resident before it; and ``error``, the message of a ConfigError, or null.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

from llmx.errors import ConfigError
from llmx.models.factory import build_model, model_config
from llmx.plan import ds_config, make_plan
from llmx.train.engine.process_group import join_process_group
from tests.programs.leaving import run_and_leave
from tests.reference import word_tokenizer
from tests.rundirs import parity_experiment


def resident(entry: str) -> int:
    """Bytes of ``VmRSS`` (now) or ``VmHWM`` (the peak) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{entry}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(entry)


def run_job(job: dict[str, Any], *, out: Path, tokenizer: Any) -> None:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    exp = parity_experiment(out, ranks=world, stage=job["stage"])
    exp.model.config = job["config"]
    if "path" in job:
        exp.model.init, exp.model.path = "pretrained", job["path"]
    plan = make_plan(exp)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before, error = resident("VmRSS"), None
    try:
        model = build_model(
            exp.model,
            exp.seed,
            model_config(exp.model, exp.data, tokenizer=tokenizer),
            precision="fp32",
            device=torch.device("cpu"),
            implementation="sdpa",
            ds_config=ds_config(exp.model, exp.zero, exp.optim, plan),
        )
        del model
    except ConfigError as raised:
        error = str(raised)
    report = {"growth": resident("VmHWM") - before, "error": error}
    (out / f"{job['name']}-{rank}.json").write_text(json.dumps(report))


def main() -> None:
    jobs, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    join_process_group(make_plan(parity_experiment(out, ranks=2)))
    tokenizer = word_tokenizer()
    for job in jobs:
        run_job(job, out=out, tokenizer=tokenizer)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run_and_leave(main)
