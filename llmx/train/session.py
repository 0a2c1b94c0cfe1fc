"""The session of one rank: its data, engine, task and writers.

Made once at the start by ``open_session``; the loop only reads it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from llmx.checkpoint.state.engine_state import frozen_fingerprints
from llmx.collectives import all_gather
from llmx.config import CheckpointConfig, Experiment
from llmx.config.model_rules import position_limit
from llmx.plan.types import Plan
from llmx.rollout.client import IDLE_SHARE, RolloutServers
from llmx.run.metrics import Metric
from llmx.run.metrics.declared import check_checkpoint_metric, check_declared
from llmx.run.rundir import RunDir, read_mapping, write_json
from llmx.spread import StorageTopology, find_topology
from llmx.tasks import Task, task_of, tokenizer_of
from llmx.train.batches import PAD_TO_ON, Layout
from llmx.train.engine.build import Engine, build_engine, check_sections
from llmx.train.metrics import MetricsWriter, truncate_metrics
from llmx.train.precompute import from_trained, with_precomputed
from llmx.train.rebalance import Rebalance, open_rebalance
from llmx.train.resume import ResumePoint, check_samples, find_resume_point, identity, restore_from
from llmx.train.rollout import open_servers
from llmx.train.saver import Consensus, Saver, ever_saves
from llmx.train.schedule import RunLength, run_length
from llmx.train.speeds import measure_speeds
from llmx.train.status import RankStatus, ShutdownRequest
from llmx.train.stopping import EarlyStopping

PREPARATION = ("encoder", "time")
"""Lines about how the data was prepared, which another run may have done."""


@dataclass
class Session:
    """Everything that the loop of one rank uses."""

    exp: Experiment
    plan: Plan
    run_dir: RunDir
    engine: Engine
    task: Task
    train_store: Any
    eval_store: Any | None
    layout: Layout
    length: RunLength
    """Steps and samples of the whole run."""
    status: RankStatus
    consensus: Consensus
    stop: ShutdownRequest
    topology: StorageTopology
    checkpoint: CheckpointConfig
    """Its metric and mode are those of the task where the configuration says ``auto``."""
    identity: dict[str, Any]
    """What a checkpoint must have in common with the run that resumes from it."""
    resume_point: ResumePoint
    early_stopping: EarlyStopping | None
    servers: RolloutServers | None
    """Servers on ``rollout.hosts``."""
    rebalance: Rebalance | None = None
    metrics: MetricsWriter = dataclasses.field(init=False)
    saver: Saver = dataclasses.field(init=False)

    @property
    def rank(self) -> int:
        return torch.distributed.get_rank()

    @property
    def declared_metrics(self) -> dict[str, Any]:
        """The metrics of the task and of rollout servers as the ``start`` line has them."""
        metrics = dict(self.task.metrics)
        if self.plan.rollout_hosts:
            metrics["rollout_wait_share"] = Metric(
                "time waiting for samples", "percent", kinds=("train",)
            )
            metrics |= {
                f"{IDLE_SHARE}/{host.name}": Metric(
                    f"idle time of {host.name}", "percent", kinds=("train",)
                )
                for host in self.plan.rollout_hosts
            }
            metrics["rollout_tokens_per_s"] = Metric("tokens/s drawn", kinds=("train",))
        return {name: metric.to_dict() for name, metric in metrics.items()}

    def log(self, text: str) -> None:
        """One line of rank 0's log."""
        log(text)


def open_session(
    exp: Experiment,
    plan: Plan,
    ds_config: dict[str, Any],
    run_dir: RunDir,
    status: RankStatus,
    stop: ShutdownRequest,
) -> Session:
    """Open everything that a run needs, in an order that is the same on all ranks:

    1. the task: nothing is communicated
    2. the data of both splits: collective
    3. the group of the flags, and in it the storage topology and the resume point; what cannot be
       resumed fails here, before a model is built
    4. the networks, the precomputed columns, the state of the checkpoint: collective
    5. the split of the batch over the ranks: collective
    6. the files that this run writes; the group of the saver
    """
    status.enter("loading")
    check_sections(ds_config)
    task, checkpoint, early_stopping = _open_task(exp)
    train_store, eval_store = open_stores(exp, task, plan, run_dir)
    for line in task.see_data(train_store, eval_store):
        log(line)

    consensus = Consensus(timeout_s=exp.launch.comm_timeout_s)
    topology = find_topology(
        run_dir.checkpoints, create=ever_saves(checkpoint), group=consensus.group
    )
    run_identity = identity(seed=exp.seed, seq_len=exp.data.seq_len, plan=plan, store=train_store)
    stage = ds_config["zero_optimization"]["stage"]
    resume_point = find_resume_point(
        run_dir, run_identity, topology=topology, stage=stage, group=consensus.group
    )
    length = run_length(
        exp.task,
        num_samples=len(train_store),
        global_batch=plan.batch.global_batch,
        last_batch=exp.data.last_batch,
    )
    check_samples(resume_point.state, length)

    engine, train_store, eval_store = _open_engine(
        exp, plan, ds_config, task, train_store, eval_store, group=consensus.group
    )
    if resume_point.state:
        restore_from(resume_point, engine)
        status.at_step(resume_point.step)
        status.saved(resume_point.step)

    if plan.drawn is not None:
        engine.main.rows = plan.drawn.rows
    session = Session(
        exp=exp,
        plan=plan,
        run_dir=run_dir,
        engine=engine,
        task=task,
        train_store=train_store,
        eval_store=eval_store,
        layout=layout_for(exp, plan, task, engine.layout),
        length=length,
        status=status,
        consensus=consensus,
        stop=stop,
        topology=topology,
        checkpoint=checkpoint,
        identity=run_identity,
        resume_point=resume_point,
        early_stopping=early_stopping,
        servers=open_servers(exp, engine, log),
    )
    if plan.balance is not None:
        # How a kernel computes packed rows may differ by device; how they are split may not.
        whole_rows = any(
            model.attention.isolation != "cu_seq_lens" for model in engine.models.values()
        )
        whole_rows = any(all_gather(whole_rows, group=consensus.group))
        session.layout = dataclasses.replace(session.layout, whole_rows=whole_rows)
        measure_speeds(session)
        if exp.batch.rebalance:
            session.rebalance = open_rebalance(session)
    session.metrics = open_metrics(run_dir, resume_point)
    if session.rank == 0:
        write_inputs(session)
    session.saver = Saver(session)
    return session


def _open_task(exp: Experiment) -> tuple[Task, CheckpointConfig, EarlyStopping | None]:
    """The task, and the rules by its metrics. What they name wrongly fails before data is read."""
    task = task_of(exp, tokenizer_of(exp))
    check_declared(task.metrics, task=exp.task.kind)
    task.load()
    checkpoint, kind = exp.checkpoint, exp.task.kind
    if checkpoint.metric == "auto":
        checkpoint = dataclasses.replace(checkpoint, metric=task.judged_by)
    measures: Any = {"task": kind, "evaluates_loss": task.evaluates_loss}
    mode = check_checkpoint_metric(checkpoint.metric, checkpoint.mode, task.metrics, **measures)
    early_stopping = EarlyStopping.of(exp.task.early_stopping, checkpoint, task.metrics, **measures)
    return task, dataclasses.replace(checkpoint, mode=mode), early_stopping


def _open_engine(
    exp: Experiment,
    plan: Plan,
    ds_config: dict[str, Any],
    task: Task,
    train_store: Any,
    eval_store: Any,
    *,
    group: Any,
) -> tuple[Engine, Any, Any]:
    """The engine, and both stores with the task's precomputed columns. Collective.

    The columns are computed before the engine is built, unless the trained networks compute them.
    """

    def build() -> Engine:
        specs = {name: spec for name, spec in task.models().items() if not spec.precomputes}
        return build_engine(exp, plan, ds_config, tokenizer=task.tokenizer, specs=specs)

    engine = build() if from_trained(exp, task) else None
    stores, precomputed_by = with_precomputed(
        exp,
        plan,
        ds_config,
        tokenizer=task.tokenizer,
        task=task,
        stores={"train": train_store, "eval": eval_store},
        layout=lambda name: layout_for(exp, plan, task, name),
        group=group,
        log=log,
        engine=engine,
    )
    engine = engine or build()
    engine.frozen_fingerprints = frozen_fingerprints(engine) | precomputed_by
    return engine, stores["train"], stores["eval"]


def layout_for(exp: Experiment, plan: Plan, task: Task, name: str) -> Layout:
    """The layout of batches. ``name``: ``packed`` or ``padded``."""
    return Layout(
        seq_len=exp.data.seq_len,
        pad_id=task.pad_id,
        layout=name,
        pad_to=exp.data.pad_to_multiple_of or PAD_TO_ON[plan.accelerator],
    )


def open_metrics(run_dir: RunDir, resume_point: ResumePoint) -> MetricsWriter:
    """``metrics.jsonl`` as it was at the resume point, open for appending."""
    writes = torch.distributed.get_rank() == 0
    lines = truncate_metrics(run_dir.metrics, resume_point.step) if writes else []
    writer = MetricsWriter(run_dir.metrics, enabled=writes)
    writer.remember(lines)
    for bad in resume_point.damaged:
        writer.event("damaged", step=resume_point.step, checkpoint=bad.step, reason=bad.reason)
        log(f"WARNING: the checkpoint of step {bad.step} is damaged and is not used: {bad.reason}")
    return writer


def log(text: str) -> None:
    """One line of rank 0's log, which the console shows."""
    if torch.distributed.get_rank() == 0:
        # One write: the thread that saves logs, too.
        print(f"{text}\n", end="", flush=True)


def write_inputs(session: Session) -> None:
    """Write ``inputs.json``, and ``data.json`` with lines about each split. By rank 0 alone."""
    from llmx.data.store.summary import report
    from llmx.data.tokenize.tokenizer import tokenizer_fingerprint

    train, held_out = session.train_store, session.eval_store
    inputs = {
        "data": train.fingerprint,
        "date": train.meta["identity"].get("date"),
        "eval_data": None if held_out is None else held_out.fingerprint,
        "tokenizer": tokenizer_fingerprint(session.task.tokenizer),
        # Of a model from the Hub: the commit that was loaded.
        "model": getattr(session.engine.config, "_commit_hash", None),
    }
    write_json(session.run_dir.inputs, inputs)
    lines = {}
    for split, store in {"train": train, "eval": held_out}.items():
        if store is not None:
            rows = report(store.meta, was_prepared=True)
            lines[split] = [[name, value] for name, value in rows if name not in PREPARATION]
    write_json(session.run_dir.data, lines)


def open_stores(exp: Experiment, task: Task, plan: Plan, run_dir: RunDir) -> tuple[Any, Any | None]:
    """Training and held-out samples, prepared by the first rank of each host. Collective. A chat
    template writes the day on which the run began. DataError where too much is lost
    (``task.max_lost``)."""
    from llmx.data.distributed import prepare_together
    from llmx.data.store.summary import check_lost, lost_rows, summary

    hosts = [plan.hosts[rank.host].name for rank in plan.ranks]
    splits = ["train", "eval"] if exp.data.has_eval else ["train"]
    began = read_mapping(run_dir.inputs).get("date")
    stores = prepare_together(
        exp.data, exp.seed, task.tokenizer, task, splits, hosts=hosts, date=began
    )
    longest = position_limit(exp.model.network)
    for split, store in zip(splits, stores, strict=True):
        check_lost(store.meta, max_lost=exp.task.max_lost, longest=longest)
        for line in (f"Data ({split}): {summary(store)}", *lost_rows(store.meta, longest=longest)):
            log(line)
    return stores[0], stores[1] if len(stores) > 1 else None
