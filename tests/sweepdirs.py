"""Directories of sweeps as sweeps leave them: ``sweep.json``, and a run directory for each trial
that was started, with the files of ``docs/development/contracts.md``."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import yaml

from llmx.config import BatchConfig, OptimConfig, ZeroConfig, to_dict
from llmx.run.rundir import RunDir, write_json, write_text
from llmx.run.sweepdir import Sweep, Trial
from tests import tracked_run

START_S = tracked_run.START_S
STAGES = ("stage1", "stage2", "stage3")
OOM = {
    "cause": "rank 0: CUDA out of memory. Tried to allocate 2.00 GiB",
    "fix": "set batch.micro_batch to half of it, or zero=stage3",
}


def write_trial(
    root: Path,
    overrides: list[str],
    *,
    outcome: str = "ok",
    speed: float = 1000.0,
    memory_gib: float = 4.0,
    lr: float = 1e-3,
    stage: int = 2,
    micro_batch: int = 4,
    started: float = START_S,
    steps: int = 20,
    finished: bool = True,
    **result: Any,
) -> RunDir:
    """A run directory with losses that fall faster with a larger ``lr``; 0.03 and more diverges."""
    run = RunDir(root)
    config = to_dict(tracked_run.experiment(root))
    config |= {"zero": to_dict(ZeroConfig(stage=stage)), "optim": to_dict(OptimConfig(lr=lr))}
    config["batch"] = to_dict(BatchConfig(micro_batch=micro_batch))
    write_text(run.config, yaml.safe_dump(config, sort_keys=False))
    write_json(run.plan, tracked_run.plan().to_dict())
    write_text(run.overrides, yaml.safe_dump(overrides))
    start = {"kind": "start", "metrics": tracked_run.DECLARED, "num_parameters": 1_400_000}
    lines: list[dict[str, Any]] = [{**start, "time": started + 5, "total_steps": 20}]
    memory = [round(memory_gib, 3), round(memory_gib, 3) - 0.25]
    for step in range(2, steps + 1, 2):
        values = {"time": started + 5 + step, "tokens_per_s": round(speed) + step}
        loss = round(0.4 + 5.0 * math.exp(-step * min(1.0, 120 * lr) / 8), 4)
        found = {"loss": loss} if lr < 0.03 else {"loss": None, "nonfinite": True}
        lines.append({**tracked_run.train_line(step), **values, "memory_gib": memory, **found})
    ended = started + 5 + steps
    if outcome == "ok" and finished:
        final = 0.4 + abs(math.log10(lr / 3e-3)) if lr < 0.03 else 9.0
        lines.append(tracked_run.evaluation(steps, round(final, 4), 0.5) | {"time": ended})
        lines.append({"kind": "end", "step": steps, "time": ended})
    write_text(run.metrics, "".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        values = {"started": started, "ended": ended, **result}
        write_json(run.result, tracked_run.result(outcome, **values))
        write_text(run.report, "<!doctype html>")
    return run


def entry(index: int, overrides: list[str], run_dir: str = "", **values: Any) -> Trial:
    """A trial of the journal; it waits, unless ``values`` say otherwise."""
    return Trial(index, overrides, Path(run_dir or f"{index}_not_run"), **values)


def ended(index: int, overrides: list[str], run: RunDir, **values: Any) -> Trial:
    times = {"started": START_S, "ended": START_S + 30}
    return entry(index, overrides, str(run.root), **{"outcome": "ok", **times, **values})


def journal(directory: Path, trials: list[Trial], words: list[str], **values: Any) -> None:
    for trial in trials:
        trial.run_dir = directory.absolute() / trial.run_dir
    values = {"objective": "tokens_per_s", "complete": True, "started": START_S, **values}
    Sweep(directory.absolute(), trials, words=words, **values).write()


def grid(directory: Path, *, batches: tuple[int, ...] = (1, 2, 4, 8), **values: Any) -> Path:
    """ZeRO stage by micro batch: stages 1 and 2 run out of memory at 4 and 8, one trial crashed,
    one is the same as another, larger ones are pruned."""
    trials = []
    places = itertools.product(enumerate(STAGES, 1), batches)
    for index, ((stage, name), micro) in enumerate(places):
        words = [f"zero={name}", f"batch.micro_batch={micro}"]
        root = directory / f"{index}_zero-{name}_batch.micro_batch-{micro}"
        begun = START_S + 40 * index
        times = {"started": begun, "ended": begun + 30}
        full = 4 + 2 * stage
        if micro >= full:
            of = "zero=stage1 batch.micro_batch=8" if stage == 1 else words[0]
            trials.append(
                entry(index, words, outcome="pruned",
                      cause=f"it needs more memory than {of}, which ran out of it")
            )  # fmt: skip
            continue
        oom = micro > 2 * stage
        crash = stage == 3 and micro == batches[1]
        outcome = "oom" if oom else "crash" if crash else "ok"
        why = OOM if oom else {"cause": "rank 1: KeyError: 'text'"} if crash else {}
        run = write_trial(
            root, [*words, "experiment=demo"], outcome=outcome,
            speed=900 * micro**0.7 / stage**0.3, memory_gib=2.0 + 1.3 * micro / stage, stage=stage,
            micro_batch=micro, started=begun, steps=20 if outcome == "ok" else 4, **why,
        )  # fmt: skip
        trials.append(ended(index, words, run, outcome=outcome, **times, **why))
    first = ["zero=stage2", f"batch.micro_batch={batches[0]}"]
    trials.append(entry(len(trials), first, outcome="same", same_as=len(batches)))
    words = [f"zero={','.join(STAGES)}", f"batch.micro_batch={','.join(map(str, batches))}"]
    journal(directory, trials, ["experiment=demo", *words], **values)
    return directory


def rates(directory: Path, lrs: tuple[str, ...] = ("1e-4", "3e-4", "1e-3", "3e-3", "1e-2", "1e-1")):
    """Learning rates; the last diverges."""
    trials = []
    for index, lr in enumerate(lrs):
        root = directory / f"{index}_optim.lr-{lr}"
        run = write_trial(root, [f"optim.lr={lr}"], lr=float(lr))
        trials.append(ended(index, [f"optim.lr={lr}"], run))
    journal(directory, trials, [f"optim.lr={','.join(lrs)}"], objective="eval/loss")
    return directory
