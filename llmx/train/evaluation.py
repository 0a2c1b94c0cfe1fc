"""The loss and the task's metrics on held-out samples: means over all ranks.

Tried by ``python -m pytest -m deepspeed tests/integration/test_train_export.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from llmx.collectives import all_gather
from llmx.config import TaskConfig
from llmx.data import EvalPrompt
from llmx.data.eval_prompts import unreachable_completions
from llmx.errors import ConfigError
from llmx.models.generate import generate, stop_ids
from llmx.models.sampling import Sampling
from llmx.plan.types import BatchPlan
from llmx.run.rundir import RunDir, read_json, write_json
from llmx.tasks import Accumulator, Mean, Table, Task, held_out
from llmx.train.batches import Layout
from llmx.train.engine.build import Engine
from llmx.train.session import Session


def slices(num_samples: int, *, micro_batches: tuple[int, ...], rank: int) -> list[range]:
    """The samples of each forward of ``rank``: as many forwards on every rank, some empty."""
    samples, first = range(num_samples), sum(micro_batches[:rank])
    return [
        samples[start + first : start + first + micro_batches[rank]]
        for start in range(0, num_samples, sum(micro_batches))
    ]


@torch.no_grad()
def evaluate_task(
    engine: Engine,
    task: Task,
    store: Any,
    *,
    batch: BatchPlan,
    layout: Layout,
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, Mean | Accumulator] | None:
    """The loss and the metrics of the task on ``store``, over all ranks. Collective.

    ``interrupted`` is called before each micro batch, and returns the same on every rank; None
    where it returned True.
    """
    rank = torch.distributed.get_rank()
    stopped = False

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        nonlocal stopped
        for indices in slices(len(store), micro_batches=batch.micro_batches, rank=rank):
            if interrupted():
                stopped = True
                return
            # A rank without samples left runs a line of padding: the collectives of ZeRO-3 need
            # as many forwards of everyone.
            yield layout.collate(held_out(task, store, indices), columns=store.batch_columns)

    engine.engine.eval()
    measures = task.evaluate(engine.models, batches())
    engine.engine.train()
    return None if stopped else together(measures)


def together(measures: Mapping[str, Mean | Accumulator]) -> dict[str, Mean | Accumulator]:
    """The measures of all ranks, added up in their order. Collective."""
    by_rank = all_gather(dict(measures))
    merged: dict[str, Mean | Accumulator] = {}
    for name, measure in measures.items():
        total, *addends = (measures_of_rank[name] for measures_of_rank in by_rank)
        if isinstance(measure, Accumulator):
            # In this rank's own object, which may hold what is not sent.
            vars(measure).update(vars(total))
            total = measure
        for addend in addends:
            if isinstance(total, Accumulator):
                total.merge(addend)
            elif isinstance(addend, Mean):
                total.add(addend.sum, addend.weight)
        merged[name] = total
    return merged


def complete_eval_prompts(session: Session, *, when: str | None) -> dict[str, float]:
    """The task's metrics of greedy completions; none for a task without eval prompts. Collective.

    Args:
        when: ``before`` or ``after`` training: the column of ``samples.json`` that rank 0 writes;
            None in between, where nothing is written.
    """
    prompts = session.task.eval_prompts()
    if not prompts:
        return {}
    limit = session.exp.task.eval_max_new_tokens
    if when == "before" and (warning := unreachable_completions(prompts, limit)):
        session.log(warning)
    greedy = Sampling(
        max_new_tokens=limit,
        stop_ids=frozenset(stop_ids(session.engine.main.module, session.task.tokenizer)),
    )
    main, rows = session.engine.main, [prompt.tokens for prompt in prompts]
    generated = generate(main, rows, greedy, batch_size=main.rows)
    completions = [session.task.decode(list(completion.text_tokens)) for completion in generated]
    scores = session.task.score(prompts, completions)
    if session.rank == 0 and when is not None:
        write_samples(session.run_dir, prompts, completions, scores, when=when)
    return scores


def write_samples(
    run_dir: RunDir,
    prompts: Sequence[EvalPrompt],
    completions: list[str],
    scores: Mapping[str, float],
    *,
    when: str,
) -> None:
    """Rewrite ``samples.json`` with the completions ``before`` or ``after`` training, and
    with the metrics of both (``NAME_before``, ``NAME_after``)."""
    old: dict[str, Any] = {}
    if when == "after" and run_dir.samples.is_file():
        old = read_json(run_dir.samples)
    blanks: list[str | None] = [None] * len(prompts)
    earlier = [row["before"] for row in old.get("rows", ())]
    if len(earlier) != len(prompts):  # another file is not of this run
        earlier = blanks
    columns = (completions, blanks) if when == "before" else (earlier, completions)
    values: dict[str, Any] = {
        "rows": [
            {"prompt": prompt.prompt, "expected": prompt.expected, "before": before, "after": after}
            for prompt, before, after in zip(prompts, *columns, strict=True)
        ]
    }
    for name, value in scores.items():
        before, after = f"{name}_before", f"{name}_after"
        values[before] = value if when == "before" else old.get(before)
        values[after] = value if when == "after" else None
    write_json(run_dir.samples, values)


def evaluation_due(task: TaskConfig, step: int, total: int) -> bool:
    """Before training, at every multiple of ``task.eval_every_steps``, and after training."""
    if not task.evaluate:
        return False
    interval = task.eval_every_steps
    return step in (0, total) or bool(interval and step % interval == 0)


def evaluate(session: Session, step: int) -> bool:
    """Held-out loss, before and after training completions, too; an ``eval`` line. Collective.

    Returns False where a shutdown request interrupted it: the evaluation is then made on resume.
    A step that an earlier attempt has evaluated is skipped.
    """
    if session.eval_store is None or step in session.resume_point.evaluated:
        return True
    session.status.enter("evaluating")
    result = evaluate_task(
        session.engine,
        session.task,
        session.eval_store,
        batch=session.plan.batch,
        layout=session.layout,
        interrupted=session.saver.stop_requested,
    )
    declared = session.task.metrics
    # A task that generates may measure nothing beside it.
    if result or (
        result is not None and any("eval" in metric.kinds for metric in declared.values())
    ):
        _write_line(session, step, result)
    session.status.enter("training")
    return result is not None


def _write_line(session: Session, step: int, result: Mapping[str, Mean | Accumulator]) -> None:
    """The ``eval`` line of what was measured, with what completions measure beside it."""
    task, declared = session.task, session.task.metrics
    measured: dict[str, float | None] = {}
    tables: list[Table] = []
    for name, measure in result.items():
        if isinstance(measure, Mean):
            measured[name] = measure.value
        else:
            measured.update(measure.values())
            tables += measure.tables()
    if tables and session.rank == 0:
        # What the newest evaluation leaves for the report.
        values = {"step": step, "tables": [asdict(table) for table in tables]}
        write_json(session.run_dir.tables, values)
    line: dict[str, Any] = {}
    mean = result.get("loss")
    weight = mean.weight if isinstance(mean, Mean) else measured.pop("weight", None)
    if "loss" in measured and weight is not None:
        weighed_by = "target_tokens" if task.normaliser == "tokens" else "weight"
        line["loss"] = measured.pop("loss")
        line[weighed_by] = int(weight) if weight.is_integer() else weight
    when = {0: "before", session.length.steps: "after"}.get(step)
    # What was asked for by name, and what the best checkpoint goes by, is measured at every
    # evaluation. So is what may end the training, and what is measured alone.
    goes_by = {session.checkpoint.metric.removeprefix("eval/")}
    if session.early_stopping:
        goes_by.add(session.early_stopping.name)
    missing = any(name in declared and name not in measured for name in goes_by)
    if when or missing or not result or session.exp.task.eval_metrics:
        measured.update(complete_eval_prompts(session, when=when))
    # Nothing would know how to show another one, or whether more of it is better.
    if unknown := sorted(set(measured) - set(declared)):
        raise ConfigError(
            f"{type(task).__name__} measures {', '.join(unknown)}, which its `metrics` do not "
            f"declare. Add {unknown[0]}: Metric(...) there."
        )
    # A metric that this evaluation does not measure is null.
    line.update({name: measured.get(name) for name in declared if "eval" in declared[name].kinds})
    session.metrics.write("eval", step=step, **line)
    texts = [f"loss {line['loss']:.4f}"] if "loss" in line else []
    texts += [
        f"{declared[name].title} {declared[name].shown(value)}"
        for name, value in measured.items()
        if value is not None
    ]
    session.log(f"evaluation at step {step}: {'  '.join(texts)}")
