"""The training loop, whole and visible: what happens at each step, in this order.

Everything is a function of the step: which samples, which learning rate. So a run is resumed
by beginning at another step. Run by ``python -m llmx.worker RUN_DIR`` on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from llmx.config import Experiment
from llmx.plan.types import Plan
from llmx.rundir import RunDir
from llmx.train.answers import answer_questions
from llmx.train.attention import model_inputs
from llmx.train.batches import Prefetch, Step, make_step
from llmx.train.engine import Engine
from llmx.train.evaluate import evaluate_loss
from llmx.train.export import export_model
from llmx.train.loss import micro_batch_loss
from llmx.train.model import num_parameters
from llmx.train.schedule import lr_at, total_steps
from llmx.train.session import Session, open_session
from llmx.train.status import RankStatus
from llmx.train.step_log import StepLog


def run(
    exp: Experiment, plan: Plan, ds_config: dict[str, Any], run_dir: RunDir, status: RankStatus
) -> None:
    """One rank from data to the exported model. The process group exists already."""
    session = open_session(exp, plan, ds_config, run_dir, status)
    status.enter("training")
    train(session)
    if exp.task.save_model:
        status.enter("saving")
        session.say(f"Saving the model to {run_dir.final_model}")
        export_model(
            session.engine.module,
            session.engine.config,
            tokenizer=session.tokenizer,
            vocab_size=session.engine.vocab_size,
            directory=run_dir.final_model,
            dtype=session.engine.dtype,
        )
    # Nobody leaves before rank 0 has written: a launcher ends the others with the first.
    torch.distributed.barrier()
    session.metrics.close()


def train(session: Session, *, first_step: int = 0) -> None:
    """All steps, with evaluation before, during and after, and a metrics line now and then."""
    exp, engine, batch = session.exp, session.engine, session.plan.batch
    total = total_steps(
        exp.task, num_samples=len(session.train_store), global_batch=batch.global_batch
    )
    session.metrics.write(
        "start",
        total_steps=total,
        tokens_per_step=batch.tokens_per_step,
        num_parameters=num_parameters(engine.module),
        num_samples=len(session.train_store),
        world_size=session.plan.world_size,
        resumed_from=first_step,
    )
    session.say(f"{num_parameters(engine.module):,} parameters, {total} steps")
    evaluate(session, step=first_step, generate_answers=first_step == 0, when="before")
    log = StepLog(session, total=total)
    with prefetch(session, first_step, total) as steps:
        for step in steps:
            log.data_is_here()
            engine.set_lr(lr_at(step.step, optim=exp.optim, total=total))
            loss_sum = train_step(engine, step, world=session.plan.world_size)
            done = step.step + 1
            session.status.at_step(done)
            log.add(step, loss_sum)
            if done % exp.task.log_every_steps == 0 or done in (first_step + 1, total):
                log.write(step)
            every = exp.task.eval_every_steps
            if every and done % every == 0 and done < total:
                evaluate(session, step=done, generate_answers=False)
                log.restart()
    evaluate(session, step=total, generate_answers=True, when="after")
    session.metrics.write("end", step=total)


def train_step(engine: Engine, step: Step, *, world: int) -> torch.Tensor:
    """Forward, backward and one update. Returns this rank's summed loss, fp32 scalar.

    DeepSpeed divides by the accumulation (in ``backward``) and by the ranks (in the
    reduction): the factor undoes both, so that the gradient is that of the mean over the
    step's target tokens, however they lie.
    """
    factor = world * len(step.micro_batches) / max(step.target_tokens, 1)
    loss_sum = torch.zeros((), device=engine.device)
    for micro_batch in step.micro_batches:
        inputs, labels = model_inputs(
            micro_batch,
            implementation=engine.implementation,
            dtype=engine.dtype,
            device=engine.device,
        )
        loss = micro_batch_loss(engine.engine, inputs, labels, vocab_size=engine.vocab_size)
        engine.engine.backward(loss * factor)
        engine.note_grad_norm()
        engine.engine.step()
        loss_sum += loss.detach()
    return loss_sum


def evaluate(
    session: Session, *, step: int, generate_answers: bool, when: str | None = None
) -> None:
    """Held-out loss, and answers where asked for; an ``eval`` line. Collective."""
    if session.eval_store is None:
        return
    loss, targets = evaluate_loss(
        session.engine, session.eval_store, batch=session.plan.batch, layout=session.layout
    )
    matched = answer_questions(session, when=when) if generate_answers and when else None
    session.metrics.write("eval", step=step, loss=loss, target_tokens=targets, exact_match=matched)
    answers = "" if matched is None else f"  exact match {matched:.1%}"
    session.say(f"evaluation at step {step}: loss {loss:.4f}{answers}")


@contextlib.contextmanager
def prefetch(session: Session, first_step: int, total: int) -> Iterator[Prefetch]:
    """The steps of this rank, prepared by a thread that ends with the block."""
    steps = Prefetch(
        make_step(
            session.train_store,
            step,
            batch=session.plan.batch,
            rank=session.rank,
            seed=session.exp.seed,
            layout=session.layout,
        )
        for step in range(first_step, total)
    )
    try:
        yield steps
    finally:
        steps.close()
