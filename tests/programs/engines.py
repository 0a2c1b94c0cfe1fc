"""Small engines on two forked ranks: many questions to DeepSpeed at the price of one start.

``python -m tests.programs.engines OUT``: every rank answers all of ``CHECKS`` and writes
``OUT/<check>.<rank>.json``: ``{"answer": ...}`` or ``{"error": traceback}``. The tests of
``tests/integration/test_train_engines.py`` judge the answers.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401, imported for the children
import torch
import transformers.models.llama.modeling_llama  # noqa: F401

from llmx.plan import make_plan
from llmx.train.engine import Engine, join_process_group
from llmx.train.engine_state import capture
from tests.programs.state import build, fp16_allowed, job_experiment, train
from tests.reference import synthetic_store
from tests.rundirs import experiment, free_port

WORLD = 2
CHECKS: dict[str, Callable[[Path], Any]] = {}


def check(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    CHECKS[function.__name__] = function
    return function


def trained(job: dict[str, Any], out: Path, *, steps: int) -> tuple[Engine, list[Any]]:
    """An engine after its first steps, and the loss and the gradient norm of each."""
    job = {"name": "x", "world": WORLD, "micro_batches": [2, 2], "accumulation": 1, **job}
    exp, plan = job_experiment(job, out)
    with fp16_allowed(job):
        engine = build(job, exp, plan, first_weights=exp.seed)
        numbers = train(engine, exp, plan, synthetic_store(out / "store"), steps=range(steps))
    return engine, numbers


def masters(engine: Engine) -> torch.Tensor:
    """All master values that this rank answers for, end to end."""
    found = [each for each in capture(engine, world=WORLD) if each.state == "master"]
    return torch.cat([each.tensor.float().clone() for each in found])


@check
def growing_loss_scale(out: Path) -> Any:
    """The same four steps at a loss scale that stays and at one that doubles twice."""
    answer = {}
    for stage in range(4):
        found = []
        for window in (1000, 2):
            extra = {"fp16": {"initial_scale_power": 8, "loss_scale_window": window}}
            job = {"stage": stage, "precision": "fp16", "optim": "sgd", "zero": {"extra": extra}}
            engine, numbers = trained(job, out, steps=6)
            found.append((masters(engine), numbers, engine.loss_scale()))
            engine.engine.destroy()
        (still, numbers, scale), (growing, others, grown) = found
        answer[str(stage)] = {
            "apart": float((still - growing).abs().max()),
            "numbers": [numbers, others],
            "scales": [scale, grown],
        }
    return answer


def run_rank(rank: int, port: int, out: Path, names: list[str]) -> None:
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": WORLD,
        "LOCAL_SIZE": WORLD,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in place.items()})
    join_process_group(make_plan(experiment(out, ranks=WORLD)))
    for name in names:
        try:
            result = {"answer": CHECKS[name](out)}
        except Exception:
            result = {"error": traceback.format_exc()}
        (out / f"{name}.{rank}.json").write_text(json.dumps(result))
        if "error" in result:  # the ranks may no longer be at the same collective
            print(result["error"], flush=True)
            os._exit(1)
    torch.distributed.destroy_process_group()


def main() -> None:
    out, names = Path(sys.argv[1]), sys.argv[2:] or list(CHECKS)
    pids, port = [], free_port()
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            try:
                run_rank(rank, port, out, names)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        pids.append(pid)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))


if __name__ == "__main__":
    main()
