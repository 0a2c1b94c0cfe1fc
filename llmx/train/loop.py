"""The training loop, whole and visible: what happens at each step, in this order.

Everything is a function of the step: which samples, which learning rate. So a run is resumed
by beginning at another step. Run by ``python -m llmx.worker RUN_DIR`` on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from llmx.config import Experiment
from llmx.errors import ConfigError
from llmx.models.factory import num_parameters
from llmx.models.model import Models
from llmx.plan.types import Plan
from llmx.run.rundir import RunDir
from llmx.tasks import Loss, Task, next_token_loss
from llmx.text import plural
from llmx.train.batches import Prefetch, Step, make_step
from llmx.train.completions import complete_eval_prompts
from llmx.train.divergence import Diverged
from llmx.train.engine import Engine
from llmx.train.engine_state import weights_hash
from llmx.train.evaluate import evaluate as evaluate_task
from llmx.train.export import export_model
from llmx.train.random import seed_step
from llmx.train.resume import Start
from llmx.train.schedule import lr_at
from llmx.train.session import Session, open_session
from llmx.train.signals import ShutdownRequest, exit_interrupted
from llmx.train.status import RankStatus
from llmx.train.step_log import StepLog, StepMetrics
from llmx.train.synchronisations import SynchronisationWatch


def run(
    exp: Experiment,
    plan: Plan,
    ds_config: dict[str, Any],
    run_dir: RunDir,
    status: RankStatus,
    stop: ShutdownRequest,
) -> None:
    """One rank from data to the exported model. The process group exists already."""
    session = open_session(exp, plan, ds_config, run_dir, status, stop)
    status.enter("training")
    try:
        train(session)
    except Diverged:  # on all ranks at the same step
        session.saver.complete()
        raise
    if exp.task.save_model:
        status.enter("saving")
        session.say(f"Saving the model to {run_dir.final_model}")
        export_model(
            session.engine.main.module,
            session.engine.config,
            tokenizer=session.tokenizer,
            vocab_size=session.engine.vocab_size,
            directory=run_dir.final_model,
            dtype=session.engine.dtype,
        )
    # Nobody leaves before rank 0 has written: a launcher ends the others with the first.
    session.agreement.barrier()
    session.metrics.close()


def train(session: Session) -> None:
    """All steps from where the run stands, with evaluation and checkpoints at theirs."""
    exp, engine, start, saver = session.exp, session.engine, session.start, session.saver
    total = session.length.steps
    last = max(start.step, min(total, exp.task.stop_at_step or total))
    write_beginning(session, total=total)
    # From now on all ranks exit together, whichever of them receives a signal.
    session.stop.enable(exp.checkpoint.on_signal)
    done = start.step
    stopping = evaluation_due(exp, done, total) and not evaluate(session, done, total)
    log = StepLog(session, total=total)
    waits = SynchronisationWatch(session.run_dir.synchronisations(session.rank), last_step=last)
    with prefetch(session, start, last) as steps:
        upcoming = iter(steps)
        for number in range(start.step, last):
            if stopping:
                break
            done = number + 1
            if done in start.skip_steps:
                skip(session, done)
                saver.tell()
            else:
                log.wait_for_data()
                step = weighed(next(upcoming), session.task, device=engine.device)
                log.data_is_here()
                engine.set_lr(lr_at(number, optim=exp.optim, total=total))
                seed_step(exp.seed, number, session.rank)
                loss_sum = train_step(
                    engine,
                    step,
                    world=session.plan.world_size,
                    loss_of=session.task.loss,
                    metrics=log.metrics,
                    before_update=saver.tell,
                )
                log.add(step, loss_sum)
                due = done % exp.task.log_every_steps == 0 or done in (1, total)
                if due or done == last:
                    log.write(step, extra=not due)
            waits.after_step(done)
            session.status.at_step(done)
            flags = session.agreement.read()
            stopping = flags.stop
            if not stopping and evaluation_due(exp, done, total):
                with log.paused():
                    stopping = not evaluate(session, done, total)
            if not stopping and done < last:
                saver.at_boundary(done, flags, log)
    if stopping or session.agreement.settle(saver.flags()).stop:
        saver.save_and_leave(done, log)
    saver.at_end(last, log)
    if session.stop.disable():
        exit_interrupted(session.status)
    session.metrics.write("end", step=last, weights_hash=weights_hash(engine))


def write_beginning(session: Session, *, total: int) -> None:
    """The ``start`` line, once in the life of a run; after that an event for each beginning."""
    start, parameters = session.start, num_parameters(session.engine.module)
    session.say(f"{parameters:,} parameters, {total} steps")
    if start.is_first:
        session.metrics.write(
            "start",
            total_steps=total,
            tokens_per_step=session.plan.batch.tokens_per_step,
            num_parameters=parameters,
            num_samples=len(session.train_store),
            world_size=session.plan.world_size,
            resumed_from=start.step,
            metrics=session.declared_metrics,
        )
        return
    session.metrics.event(
        "resumed",
        step=start.step,
        attempt=start.attempt,
        world_size=session.plan.world_size,
        total_steps=total,  # resume may have made the run longer
        metrics=session.declared_metrics,  # the run may go on with a newer llmx
    )
    session.say(f"resuming from step {start.step} of {total} (attempt {start.attempt})")


def skip(session: Session, step: int) -> None:
    """Pass over the samples of a step at which training diverged."""
    samples = [session.length.samples_at(step - 1), session.length.samples_at(step)]
    session.metrics.event("skipped", step=step, samples=samples)
    count = plural(samples[1] - samples[0], "sample")
    session.say(f"step {step} is skipped (resume.json): {count} not trained")


LossOf = Callable[[Models, dict[str, torch.Tensor]], Loss]
"""The loss of a micro batch (``Task.loss``)."""


def of_next_tokens(models: Models, batch: dict[str, torch.Tensor]) -> Loss:
    """The loss of language modelling."""
    return next_token_loss(models.main, batch)


def train_step(
    engine: Engine,
    step: Step,
    *,
    world: int,
    loss_of: LossOf = of_next_tokens,
    metrics: StepMetrics | None = None,
    before_update: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """Forward, backward and one update. Returns this rank's summed loss, fp32 scalar.

    ``metrics`` gets what the loss measures. ``before_update`` is called between the last backward
    pass and the update.

    DeepSpeed divides by the accumulation (in ``backward``) and by the ranks (in the
    reduction): the factor undoes both, so that the gradient is that of the mean over the
    step's weight, say its target tokens, however they lie.
    """
    factor = world * len(step.micro_batches) / (step.weight or 1)
    auxiliary_factor = world * len(step.micro_batches) / max(step.tokens, 1)
    models = engine.models
    for model in models.values():
        model.routing.begin_step()
    loss_sum = torch.zeros((), device=engine.device)
    for number, micro_batch in enumerate(step.micro_batches, start=1):
        scale = factor / len(step.micro_batches) * engine.loss_scale()
        for model in models.values():
            model.gradient_scale = scale
        loss = loss_of(models, micro_batch)
        objective = loss.sum * factor
        for model in models.values():
            objective = model.routing.objective(objective, factor=auxiliary_factor)
        engine.backward(objective)
        engine.note_grad_norm()
        if number == len(step.micro_batches):
            before_update()
        engine.engine.step()
        loss_sum += loss.sum.detach()
        if metrics is not None:
            metrics.add(loss)
    return loss_sum


def weighed(step: Step, task: Task, *, device: torch.device) -> Step:
    """With the step's weight, where the task knows it from its micro batches. Collective then."""
    if task.normaliser != "batch":
        return step
    mine = sum(task.weight(micro_batch) for micro_batch in step.micro_batches)
    weight = torch.tensor(mine, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(weight)
    return replace(step, weight=float(weight))


def evaluation_due(exp: Experiment, step: int, total: int) -> bool:
    """Before training, at every multiple of ``task.eval_every_steps``, and after training."""
    every = exp.task.eval_every_steps
    return step in (0, total) or bool(every and step % every == 0)


def evaluate(session: Session, step: int, total: int) -> bool:
    """Held-out loss, before and after training completions, too; an ``eval`` line. Collective.

    Returns False where it was given up because the run is asked to end: the evaluation is then
    made when the run goes on. What an earlier attempt has evaluated is not done again.
    """
    if session.eval_store is None or step in session.start.evaluated:
        return True
    session.status.enter("evaluating")
    result = evaluate_task(
        session.engine,
        session.task,
        session.eval_store,
        batch=session.plan.batch,
        layout=session.layout,
        interrupted=session.saver.asked_to_stop,
    )
    if result is None:
        session.status.enter("training")
        return False
    measured = {name: mean.value for name, mean in result.items()}
    loss, weight = measured.pop("loss"), int(result["loss"].weight)
    weighed_by = "target_tokens" if session.task.normaliser == "tokens" else "weight"
    when = {0: "before", total: "after"}.get(step)
    scores = complete_eval_prompts(session, when=when) if when else {}
    declared = session.task.metrics
    scores = {**measured, **scores}
    check_declared(session.task, scores)
    # A metric that this evaluation does not measure is null.
    values = {name: scores.get(name) for name in declared if "eval" in declared[name].kinds}
    session.metrics.write("eval", step=step, loss=loss, **{weighed_by: weight}, **values)
    shown = [f"  {declared[name].title} {declared[name].shown(scores[name])}" for name in scores]
    session.say(f"evaluation at step {step}: loss {loss:.4f}{''.join(shown)}")
    session.status.enter("training")
    return True


def check_declared(task: Task, measured: Iterable[str]) -> None:
    """Raise ConfigError for a metric that the task measures and does not declare: nobody would
    know how to show it, or whether more of it is better."""
    if unknown := sorted(set(measured) - set(task.metrics)):
        raise ConfigError(
            f"{type(task).__name__} measures {', '.join(unknown)}, which its `metrics` do not "
            f"declare. Add {unknown[0]}: Metric(...) there."
        )


@contextlib.contextmanager
def prefetch(session: Session, start: Start, last: int) -> Iterator[Prefetch]:
    """The steps of this rank, prepared by a thread that ends with the block."""
    steps = Prefetch(
        (
            make_step(
                session.train_store,
                step,
                batch=session.plan.batch,
                rank=session.rank,
                seed=session.exp.seed,
                layout=session.layout,
                stop=session.length.stop,
                normaliser=session.task.normaliser,
            )
            for step in range(start.step, last)
            if step + 1 not in start.skip_steps
        ),
        pin=session.engine.device.type == "cuda",
    )
    try:
        yield steps
    finally:
        steps.close()
