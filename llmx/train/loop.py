"""The training loop, whole and visible: what happens at each step, in this order.

Everything is a function of the step: which samples, which learning rate. So a run is resumed
by beginning at another step. Run by ``python -m llmx.worker RUN_DIR`` on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
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
from llmx.train.batches import Prefetch, Step, make_step, pinned
from llmx.train.evaluation import (
    complete_eval_prompts,
    evaluate,
    evaluation_due,
)
from llmx.train.rebalance import Line, record_change
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
    task, world = session.task, session.plan.world_size
    total, optim = session.length.steps, optim_of(exp.optim, exp.adapter)
    last = max(start.step, min(total, exp.task.stop_at_step or total))
    write_beginning(session, total=total)
    # From now on all ranks exit together, whichever of them receives a signal.
    session.stop.enable(exp.checkpoint.on_signal)
    done = start.step
    stopping = evaluation_due(exp.task, done, total) and not evaluate(session, done, total)
    # Also where the checkpoint is of the step at which training ended.
    early = None if stopping or done == total else early_stop(session)
    step_log = StepLog(session, total=total)
    rank, interval = session.rank, log_interval(exp.task, total)
    steps = steps_of(session, start.step, last)
    try:
        for number in range(start.step, last):
            if stopping or early:
                break
            done = number + 1
            line = None
            if done in start.skip_steps:
                skip(session, done)
                saver.post_flags()
            else:
                step = step_log.next_of(steps)
                samples = task.generated if isinstance(task, OnlineTask) else ()
                if rank == 0 and samples:
                    write_rollouts(session.run_dir, samples, step=done, attempt=start.attempt)
                engine.set_lr(lr_at(number, optim=optim, total=total))
                seed_step(exp.seed, number, rank)
                loss_sum = train_step(
                    engine,
                    step,
                    task,
                    world=world,
                    group=session.consensus.group,
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
                    stopping = not evaluate(session, done, total)
                    early = None if stopping or done == total else early_stop(session)
            if not (stopping or early) and done < last:
                saver.at_boundary(done, flags, step_log)
    finally:
        steps.close()
    if stopping or session.consensus.post_and_read(saver.flags()).stop:
        saver.save_and_exit(done, step_log)
    if early:
        last = done
        end_early(session, early, step=done, total=total)
    saver.at_end(last, step_log)
    if session.stop.disable():
        exit_interrupted(session.status)
    session.metrics.write("end", step=last, weights_hash=weights_hash(engine))


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


def end_early(session: Session, why: EarlyStop, *, step: int, total: int) -> None:
    """The event and the line of an early end, and completions of the model that it leaves."""
    complete_eval_prompts(session, when="after")
    session.metrics.event("early_stopped", step=step, reason=str(why), best_step=why.best_step)
    session.log(f"training ends at step {step} of {total}: {why}")


def write_beginning(session: Session, *, total: int) -> None:
    """The ``start`` line of a new run, or the ``resumed`` event of one that continues."""
    start, parameters = session.resume_point, num_parameters(session.engine.module)
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
    samples = [session.length.samples_at(step - 1), session.length.samples_at(step)]
    session.metrics.event("skipped", step=step, samples=samples)
    count = plural(samples[1] - samples[0], "sample")
    session.log(f"step {step} is skipped (resume.json): {count} not trained")


def rebalance(session: Session, step: int, line: Line | None) -> bool:
    """Change the split over the ranks after a step, where that is due; the same on every rank."""
    assert session.rebalance is not None
    before, plan = session.plan, session.rebalance.after_step(step, line)
    if plan is None:
        return False
    session.plan = plan
    if session.rank == 0:
        changes = session.rebalance.changes
        change = record_change(session.run_dir, before, plan, changes, log=session.log)
        session.metrics.event("rebalanced", step=step, **change)
    return True


def steps_of(session: Session, first: int, last: int) -> Generator[Step, None, None]:
    """The steps of this rank from ``first`` to ``last - 1``, by the current plan.

    A thread reads them ahead. A task that generates its samples makes them when they are asked
    for.
    """
    task, store, skipped = session.task, session.train_store, session.resume_point.skip_steps
    numbers = (number for number in range(first, last) if number + 1 not in skipped)
    parts: dict[str, Any] = {
        "batch": session.plan.batch,
        "rank": session.rank,
        "seed": session.exp.seed,
        "layout": session.layout,
        "stop": session.length.stop,
        "balance": session.plan.balance,
    }
    pin = session.engine.device.type == "cuda"
    with contextlib.ExitStack() as stack:
        if isinstance(task, OnlineTask):
            depth, servers = session.exp.rollout.max_staleness, session.servers
            steps: Iterable[Step] = (
                rollout_step(
                    session.engine,
                    task,
                    store,
                    number,
                    servers=servers,
                    ahead=range(number + 1, min(number + 1 + depth, last)),
                    **parts,
                )
                for number in numbers
            )
            steps = map(pinned, steps) if pin else steps
        else:
            parts |= {"normaliser": task.normaliser, "draws": task.draws}
            parts["transform"] = transform_of(task, seed=session.exp.seed)
            steps = Prefetch((make_step(store, number, **parts) for number in numbers), pin=pin)
            stack.callback(steps.close)
        for step in steps:
            if task.normaliser == "batch":
                step = weighed(step, task, group=session.consensus.group)
            yield step
