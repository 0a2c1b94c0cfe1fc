"""The training loop, whole and visible: what happens at each step, in this order.

Everything is a function of the step: which samples, which learning rate. So a run is resumed
by beginning at another step. Run by ``python -m llmx.worker RUN_DIR`` on every rank.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from functools import partial
from typing import Any

from llmx.checkpoint.export.model import export_model
from llmx.checkpoint.state.engine_state import weights_hash
from llmx.collectives import all_gather
from llmx.config import Experiment, TaskConfig
from llmx.models.adapter import reach_line
from llmx.models.factory import num_parameters
from llmx.plan.types import Plan
from llmx.run.card import user_card, write_card
from llmx.run.rundir import RunDir
from llmx.tasks import OnlineTask
from llmx.text import plural
from llmx.train.batches import Step, make_step, pinned, prefetched
from llmx.train.evaluation import (
    complete_eval_prompts,
    evaluate,
    evaluation_due,
)
from llmx.train.rebalance import rebalance
from llmx.train.rollout import rollout_step, write_rollouts
from llmx.train.schedule import lr_at, optim_of
from llmx.train.session import Session, open_session
from llmx.train.status import RankStatus, ShutdownRequest, exit_interrupted
from llmx.train.step import seed_step, train_step, transform_of, weighed
from llmx.train.step_log import StepLog
from llmx.train.stopping import Diverged, EarlyStop


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
        session.saver.wait()  # what is being saved is from before the divergence
        raise
    if exp.task.save_model:
        status.enter("saving")
        session.log(f"Saving the model to {run_dir.final_model}")
        write_model(session)
    # No rank exits before rank 0 has written: a launcher kills all ranks when the first one exits.
    session.consensus.barrier()
    if session.servers is not None:
        session.servers.close()
    session.metrics.close()


def write_model(session: Session) -> None:
    """``model/``: the main model whole, or its adapter alone. Collective."""
    engine = session.engine
    engine.release_gathered()
    users_card = user_card(session.run_dir.final_model)
    export_model(
        engine.main.module,
        config=engine.config,
        tokenizer=session.task.tokenizer,
        vocab_size=engine.vocab_size,
        directory=session.run_dir.final_model,
        dtype=engine.dtype,
        adapter=engine.main.adapter,
        files=session.task.export_files(engine.main),
    )
    if session.rank == 0:
        try:
            write_card(session.run_dir, session.run_dir.final_model, former=users_card)
        except OSError as error:  # the model is there
            session.log(f"No model card in {session.run_dir.final_model}: {error}")


def train(session: Session) -> None:
    """Train all steps from the resume point, with the evaluations and checkpoints that are due."""
    exp, engine, start, saver = session.exp, session.engine, session.resume_point, session.saver
    task, group, total = session.task, session.consensus.group, session.length.steps
    optim = optim_of(exp.optim, exp.adapter)
    last = max(start.step, min(total, exp.task.stop_at_step or total))
    write_beginning(session)
    # From now on all ranks exit together, whichever of them receives a signal.
    session.stop.enable(exp.checkpoint.on_signal)
    done = start.step
    stopping = evaluation_due(exp.task, done, total) and not evaluate(session, done)
    # Also where the checkpoint is of the step at which training ended.
    early = None if stopping or done == total else early_stop(session)
    step_log, interval = StepLog(session), log_interval(exp.task, total)
    steps = steps_of(session, start.step, last)
    try:
        while done < last and not (stopping or early):
            number, done, line = done, done + 1, None
            if done in start.skip_steps:
                skip(session, done)
                saver.post_flags()
            else:
                step = step_log.next_of(steps)
                engine.set_lr(lr_at(number, optim=optim, total=total))
                seed_step(exp.seed, number, session.rank)
                loss_sum = train_step(
                    engine,
                    step,
                    task,
                    world=session.plan.world_size,
                    group=group,
                    metrics=step_log.metrics,
                    timed=step_log.timed,
                    before_update=saver.post_flags,
                )
                step_log.add(step, loss_sum)
                due = done % interval == 0 or done in (1, total)
                if due or done == last:
                    line = step_log.write(step, extra=not due)
            if session.rebalance is not None and done < last and rebalance(session, done, line):
                step_log.watch_split()
                steps.close()
                steps = steps_of(session, done, last)
            session.status.at_step(done)
            flags = session.consensus.read()
            stopping = flags.stop
            if not stopping and evaluation_due(exp.task, done, total):
                with step_log.paused():
                    stopping = not evaluate(session, done)
                    early = None if stopping or done == total else early_stop(session)
            if not (stopping or early) and done < last:
                saver.at_boundary(done, flags, step_log)
    finally:
        steps.close()
    if stopping or session.consensus.post_and_read(saver.flags()).stop:
        saver.save_and_exit(done, step_log)
    if early:
        # What completions the model gives that this early end leaves.
        complete_eval_prompts(session, when="after")
        session.metrics.event(
            "early_stopped", step=done, reason=str(early), best_step=early.best_step
        )
        session.log(f"training ends at step {done} of {total}: {early}")
    saver.at_end(done, step_log)
    if session.stop.disable():
        exit_interrupted(session.status)
    session.metrics.write("end", step=done, weights_hash=weights_hash(engine))


def log_interval(task: TaskConfig, total: int) -> int:
    """Steps between two logged lines: by default 10, or fewer where a run then has 50 lines."""
    return task.log_every_steps or max(1, min(10, total // 50))


def early_stop(session: Session) -> EarlyStop | None:
    """Why ``task.early_stopping`` ends training now, the same on every rank. Collective."""
    rule = session.early_stopping
    if rule is None:
        return None
    decision = rule.decide(session.metrics.evaluations) if session.rank == 0 else None
    return all_gather(decision, group=session.consensus.group)[0]


def write_beginning(session: Session) -> None:
    """The ``start`` line of a new run, or the ``resumed`` event of one that continues."""
    start, total = session.resume_point, session.length.steps
    parameters = num_parameters(session.engine.module)
    trained = num_parameters(session.engine.module, trained=True)
    part = "" if trained == parameters else f" ({trained:,} trained)"
    session.log(f"{parameters:,} parameters{part}, {total} steps")
    if session.exp.adapter.kind != "none" and (line := reach_line(session.engine.module)):
        session.log(line)
    if start.is_first:
        session.metrics.write(
            "start",
            total_steps=total,
            tokens_per_step=session.plan.batch.tokens_per_step,
            num_parameters=parameters,
            **({} if trained == parameters else {"num_trained": trained}),
            num_samples=len(session.train_store),
            world_size=session.plan.world_size,
            resumed_from=start.step,
            loss_unit=session.task.loss_unit,
            metrics=session.declared_metrics,
        )
        return
    session.metrics.event(
        "resumed",
        step=start.step,
        attempt=start.attempt,
        world_size=session.plan.world_size,
        total_steps=total,  # resume may have changed it
        metrics=session.declared_metrics,  # of this version of llmx
    )
    session.log(f"resuming from step {start.step} of {total} (attempt {start.attempt})")
    rollout = session.exp.rollout
    if session.servers is not None and rollout.weights_samples:
        ahead = f"rollout.max_staleness={rollout.max_staleness}"
        session.log(
            f"{ahead if rollout.max_staleness else 'rollout.vllm_python'}: the samples of the "
            "steps after it are drawn anew, and are others than before"
        )


def skip(session: Session, step: int) -> None:
    """Skip the samples of a step at which training diverged."""
    first, stop = session.length.samples_at(step - 1), session.length.samples_at(step)
    session.metrics.event("skipped", step=step, samples=[first, stop])
    count = plural(stop - first, "sample")
    session.log(f"step {step} is skipped (resume.json): {count} not trained")


def steps_of(session: Session, first: int, last: int) -> Generator[Step, None, None]:
    """The steps of this rank from ``first`` to ``last - 1``, by the current plan.

    A thread reads them ahead. A task that generates its samples makes them when they are asked
    for.
    """
    task, skipped = session.task, session.resume_point.skip_steps
    numbers = (number for number in range(first, last) if number + 1 not in skipped)
    if isinstance(task, OnlineTask):
        steps = generated_steps(session, task, numbers, last)
    else:
        steps = read_steps(session, numbers)
    try:
        for step in steps:
            if task.normaliser == "batch":
                step = weighed(step, task, group=session.consensus.group)
            yield step
    finally:
        steps.close()


def read_steps(session: Session, numbers: Iterable[int]) -> Generator[Step, None, None]:
    """The steps of these numbers, made of the data by a thread."""
    task, exp, plan = session.task, session.exp, session.plan
    make = partial(
        make_step,
        session.train_store,
        batch=plan.batch,
        rank=session.rank,
        seed=exp.seed,
        layout=session.layout,
        stop=session.length.stop,
        balance=plan.balance,
        normaliser=task.normaliser,
        draws=task.draws,
        transform=transform_of(task, seed=exp.seed),
    )
    return prefetched(map(make, numbers), pin=session.engine.device.type == "cuda")


def generated_steps(
    session: Session, task: OnlineTask, numbers: Iterable[int], last: int
) -> Generator[Step, None, None]:
    """The steps of these numbers, made of what the task generates. Rank 0 records the samples."""
    exp, plan, engine = session.exp, session.plan, session.engine
    for number in numbers:
        step = rollout_step(
            engine,
            task,
            session.train_store,
            number,
            batch=plan.batch,
            rank=session.rank,
            seed=exp.seed,
            layout=session.layout,
            stop=session.length.stop,
            balance=plan.balance,
            servers=session.servers,
            ahead=range(number + 1, min(number + 1 + exp.rollout.max_staleness, last)),
        )
        if session.rank == 0 and task.generated:
            attempt = session.resume_point.attempt
            write_rollouts(session.run_dir, task.generated, step=number + 1, attempt=attempt)
        yield pinned(step) if engine.device.type == "cuda" else step
