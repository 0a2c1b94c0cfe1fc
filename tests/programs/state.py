"""Engines that train, are saved, and go on as other engines; many in one launch.

``deepspeed --num_gpus 2 --module --no_local_rank tests.programs.state JOBS.json OUT``

A job is ``{"name", "world", "stage", ...}`` (see ``job_experiment``). Without ``"load"`` it trains
``"until"`` steps (``TOTAL``) and saves after ``"save_at"`` of them; a new engine with other first
weights goes on from the files, and every bit is compared. With ``"load": NAME`` it goes on from
what that job left (any number of ranks, any stage) up to step ``"until"``, and saves there.

Every rank writes ``OUT/<name>.<rank>.json``; ``OUT/<name>/`` has the files and ``state.json``.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import llmx.train.engine.build as engine_module
from llmx.checkpoint.fragments import FragmentIndex, check_cover
from llmx.checkpoint.state.engine_state import (
    as_buffer,
    capture,
    frozen_fingerprints,
    restore,
    saved_layout,
    state_values,
    weights_hash,
)
from llmx.checkpoint.state.values import write_loss_scaler
from llmx.checkpoint.tensors import Fragment, write_tensors
from llmx.config import Experiment
from llmx.models.factory import build_model
from llmx.plan import ds_config, make_plan
from llmx.plan.types import Plan
from llmx.tasks import OnlineTask, Task, task_class
from llmx.train.batches import Layout, Step, make_step
from llmx.train.engine.build import Engine, build_engine
from llmx.train.engine.process_group import join_process_group
from llmx.train.rollout import rollout_step
from llmx.train.schedule import lr_at
from llmx.train.step import seed_step, train_step, weighed
from tests.programs.leaving import run_and_leave
from tests.reference import (
    SEQ_LEN,
    paired_store,
    preference_store,
    synthetic_store,
    text_pairs_store,
    whole_weights,
    word_tokenizer,
)
from tests.rundirs import PARITY_MODELS, experiment, with_batch

TOTAL = 7
"""Steps of a whole run; with 8 samples a step the second epoch begins in step 5 (of 40 samples)."""

Key = tuple[str, str, int]


class CountingIndex(FragmentIndex):
    """Knows how much was read of it."""

    bytes_read = 0

    def read_range(self, state: str, name: str, start: int, stop: int, out: Any) -> None:
        super().read_range(state, name, start, stop, out)
        self.bytes_read += memoryview(out).nbytes


def job_experiment(job: dict[str, Any], out: Path) -> tuple[Experiment, Plan]:
    """A model of 32 dimensions with AdamW and weight decay, unless the job says otherwise."""
    kind, world = job.get("kind", "llama"), job["world"]
    hardware = {"hardware": two_types(job["by_device"])} if "by_device" in job else {}
    exp = experiment(
        out,
        **hardware,
        ranks=world,
        seed=3,
        precision=job.get("precision", "fp32"),
        model={
            "name": kind,
            "kind": kind,
            "config": {**PARITY_MODELS[kind], **job.get("config", {})},
            "activation_checkpointing": job.get("activation_checkpointing", "none"),
            **job.get("model", {}),
        },
        data={"seq_len": SEQ_LEN},
        adapter=job.get("adapter", {}),
        task={"kind": job.get("task", "pretrain"), "options": task_options(job, out)},
        zero={"stage": job["stage"], "pin_memory": False, **job.get("zero", {})},
        batch={"micro_batch": 1},
        optim={
            "kind": job.get("optim", "adamw"),
            "lr": job.get("lr", 0.02),
            "clip_norm": job.get("clip_norm", 0.0),
            "weight_decay": job.get("weight_decay", 0.1),
            "warmup_steps": 1,
            **job.get("optim_keys", {}),
        },
    )
    return exp, with_batch(make_plan(exp), tuple(job["micro_batches"]), job["accumulation"])


def two_types(ways: list[str]) -> dict[str, Any]:
    """A rank on each of two types of device, with its own activation checkpointing."""
    devices = {
        name: {
            "accelerator": "cpu",
            "precisions": ["fp32", "bf16", "fp16"],
            "activation_checkpointing": how,
        }
        for name, how in zip(("large", "small"), ways, strict=True)
    }
    hosts = [{"name": f"host-{name}", "slots": 1, "device": name} for name in devices]
    return {"name": "cpu", "hosts": hosts, "devices": devices}


def task_options(job: dict[str, Any], out: Path) -> dict[str, Any]:
    """``task.options``; a model of one of these names is a directory below ``out``."""
    models = () if job.get("task") == "dpo" else ("reference", "teacher", "value_model")
    options = job.get("options", {})
    return {name: str(out / of) if name in models else of for name, of in options.items()}


def build(job: dict[str, Any], exp: Experiment, plan: Plan, *, first_weights: int) -> Engine:
    """``job["freeze"]``: parameters with that in their name are not trained, and there is a buffer
    that counts; llmx itself trains all that a model has, and Llama has no buffer to save."""
    from deepspeed.utils import groups

    # DeepSpeed keeps hpZ's group for the process; a second engine would refuse to make its own.
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    if not {"task", "adapter"} & set(job):  # what is frozen is drawn again, and must be the same
        exp = replace(exp, seed=first_weights)

    def frozen(*args: Any, **kwargs: Any) -> Any:
        model = build_model(*args, **kwargs)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(job["freeze"] not in name)
        model.register_buffer("seen", torch.arange(3) + first_weights)
        return model

    made = frozen if "freeze" in job else build_model
    with mock.patch.object(engine_module, "build_model", made):
        engine = build_engine(
            exp,
            plan,
            ds_config(exp.model, exp.zero, exp.optim, plan),
            tokenizer=word_tokenizer(),
            specs=task_of(exp).models(),
        )
    engine.frozen_fingerprints = frozen_fingerprints(engine)
    return engine


def task_of(exp: Experiment) -> Task:
    """By default the one that trains one model on next tokens."""
    return task_class(exp.task.kind, exp.task.options)(exp, word_tokenizer())


def store_of(job: dict[str, Any], out: Path) -> Any:
    """What the job's task is trained on."""
    kind = job.get("task", "pretrain")
    if kind == "pretrain" or kind.endswith(":Twice"):
        return synthetic_store(out / "store")
    if kind == "embed":
        return text_pairs_store(out / "text-pairs")
    return preference_store(out / "preferences") if kind == "dpo" else paired_store(out / "pairs")


@contextlib.contextmanager
def fp16_allowed(job: dict[str, Any]) -> Iterator[None]:
    """PyTorch computes fp16 on any CPU, if slowly; DeepSpeed allows it on the newest only."""
    from deepspeed.accelerator import get_accelerator

    allowed = mock.patch.object(get_accelerator(), "is_fp16_supported", return_value=True)
    with allowed if job.get("precision") == "fp16" else contextlib.nullcontext():
        yield


def train(engine: Engine, exp: Experiment, plan: Plan, store: Any, *, steps: range) -> list[Any]:
    """The mean loss of each step, and the norm of its gradient."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    losses, task = [], task_of(exp)
    for number in steps:
        step = step_of(engine, task, store, number, plan=plan, seed=exp.seed)
        seed_step(exp.seed, number, rank)
        engine.set_lr(lr_at(number, optim=exp.optim, total=TOTAL))
        loss = train_step(engine, step, task, world=world).double()
        torch.distributed.all_reduce(loss)
        losses.append([float(loss) / step.weight, engine.grad_norm()])
    return losses


def step_of(engine: Engine, task: Task, store: Any, number: int, *, plan: Plan, seed: int) -> Step:
    """This rank's part of a step, read or generated. Collective."""
    common: dict[str, Any] = {
        "batch": plan.batch,
        "rank": torch.distributed.get_rank(),
        "seed": seed,
        "layout": Layout(seq_len=SEQ_LEN, pad_id=0, layout="packed"),
    }
    if isinstance(task, OnlineTask):
        step = rollout_step(engine, task, store, number, **common)
    else:
        step = make_step(store, number, normaliser=task.normaliser, **common)
    return weighed(step, task) if task.normaliser == "batch" else step


def save(engine: Engine, directory: Path, *, step: int) -> None:
    """Every rank its file, rank 0 ``state.json``. Collective."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    directory.mkdir(parents=True, exist_ok=True)
    fragments = [
        Fragment(each.key, each.dtype, len(each.tensor), as_buffer(each.tensor))
        for each in capture(engine, world=world)
    ]
    write_tensors(directory / f"rank-{rank:05d}.safetensors", fragments)
    state = {"step": step, "weights_hash": weights_hash(engine), **state_values(engine)}
    if rank == 0:
        (directory / "state.json").write_text(json.dumps(state))
    torch.distributed.barrier()


def load(engine: Engine, directory: Path) -> tuple[dict[str, Any], list[str]]:
    """Its ``state.json`` and what is wrong. Collective."""
    state = json.loads((directory / "state.json").read_text())
    index = CountingIndex(sorted(directory.glob("*.safetensors")))
    check_cover(
        index.cover, state["parameters"], state["buffers"], state["optimizer"].get("states")
    )
    before = weights_hash(engine)
    restore(engine, index, state)
    wrong = []
    if before == state["weights_hash"] or weights_hash(engine) != state["weights_hash"]:
        wrong.append(f"weights {before} -> {weights_hash(engine)}, not {state['weights_hash']}")
    held = bytes_held(engine)
    if index.bytes_read != held:
        wrong.append(f"{index.bytes_read} bytes were read for {held}")
    wrong += [
        f"{key}: {value} saved, {state_values(engine)[key]} restored"
        for key, value in state.items()
        if key in ("optimizer", "engine", "parameters", "loss_scaler")
        and value != state_values(engine)[key]
    ]
    return state, wrong


def bytes_held(engine: Engine) -> int:
    """Of all that this rank holds of the state, its own part or the whole."""
    layout = saved_layout(engine)
    fixed = sum(part.values.nbytes for part in (*layout.frozen, *layout.buffers))
    return fixed + sum(
        values.nbytes
        for piece in layout.trained
        for values in (
            *(piece.of(flat) for flat in piece.owner.values().values()),
            *piece.owner.whole_states().values(),
        )
    )


def copies(engine: Engine) -> dict[Key, torch.Tensor]:
    found = capture(engine, world=torch.distributed.get_world_size())
    return {(each.state, each.name, each.start): each.tensor.clone() for each in found}


def differing(one: dict[Key, torch.Tensor], other: dict[Key, torch.Tensor]) -> list[str]:
    """Keys of what is not the same bit for bit."""
    if one.keys() != other.keys():
        return [str(key) for key in one.keys() ^ other.keys()]
    return [
        str(key)
        for key in one
        if not torch.equal(one[key].view(torch.uint8), other[key].view(torch.uint8))
    ]


def train_and_resume(job: dict[str, Any], *, out: Path, store: Any) -> dict[str, Any]:
    """An uninterrupted run, and a new engine from its files."""
    exp, plan = job_experiment(job, out)
    at, until, directory = job["save_at"], job["until"], out / job["name"]
    engine = build(job, exp, plan, first_weights=exp.seed)
    if "loss_scale" in job:  # so high that the first updates are skipped
        write_loss_scaler(engine.engine, {"cur_scale": job["loss_scale"]})
    losses = train(engine, exp, plan, store, steps=range(at))
    save(engine, directory, step=at)
    saved = copies(engine)
    losses += train(engine, exp, plan, store, steps=range(at, until))
    final, final_hash = copies(engine), weights_hash(engine)
    engine.engine.destroy()

    # Other first weights: what is not restored shows.
    other = build(job, exp, plan, first_weights=exp.seed + 1)
    wrong: dict[str, Any] = {}
    _, wrong["restored"] = load(other, directory)
    wrong["restored"] += differing(saved, copies(other))
    for time_ in ("first", "again"):
        if time_ == "again":  # in place, over an engine that has trained on
            wrong["in place"] = load(other, directory)[1] + differing(saved, copies(other))
        found = train(other, exp, plan, store, steps=range(at, until))
        if found != losses[at:]:
            wrong[f"losses {time_}"] = [losses[at:], found]
        wrong[f"final {time_}"] = differing(final, copies(other))
    if weights_hash(other) != final_hash:
        wrong["final hash"] = [final_hash, weights_hash(other)]
    other.engine.destroy()
    return {"wrong": {key: value for key, value in wrong.items() if value}, "losses": losses}


def go_on(job: dict[str, Any], *, out: Path, store: Any) -> dict[str, Any]:
    """Go on from another job's files, and leave one's own."""
    exp, plan = job_experiment(job, out)
    engine = build(job, exp, plan, first_weights=exp.seed + 1)
    state, wrong = load(engine, out / job["load"])
    losses = train(engine, exp, plan, store, steps=range(state["step"], job["until"]))
    save(engine, out / job["name"], step=job["until"])
    engine.engine.destroy()
    return {"wrong": {"restored": wrong} if wrong else {}, "losses": losses, "first": state["step"]}


def first_gradient(job: dict[str, Any], *, out: Path, store: Any) -> dict[str, Any]:
    """The mean loss of the first step; rank 0 writes its gradient, read off an update of plain SGD,
    to ``OUT/<name>.pt``."""
    exp, plan = job_experiment(job, out)
    engine = build(job, exp, plan, first_weights=exp.seed)
    before = whole_weights(engine.module)
    losses = train(engine, exp, plan, store, steps=range(1))
    after = whole_weights(engine.module)
    lr = lr_at(0, optim=exp.optim, total=TOTAL)
    if torch.distributed.get_rank() == 0:
        gradient = {name: (before[name] - after[name]) / lr for name in before}
        torch.save(gradient, out / f"{job['name']}.pt")
    engine.engine.destroy()
    return {"wrong": {}, "losses": losses}


def main() -> None:
    jobs, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    join_process_group(make_plan(experiment(out, ranks=jobs[0]["world"])))
    rank = torch.distributed.get_rank()
    for job in jobs:
        began, store = time.perf_counter(), store_of(job, out)
        with fp16_allowed(job):
            if job.get("gradient"):
                result = first_gradient(job, out=out, store=store)
            else:
                result = (go_on if "load" in job else train_and_resume)(job, out=out, store=store)
        result["seconds"] = time.perf_counter() - began
        print(job["name"], result, flush=True)
        (out / f"{job['name']}.{rank}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run_and_leave(main)
