"""Small engines on two ranks: many questions to DeepSpeed at the price of one start.

``deepspeed --num_gpus 2 --module --no_local_rank tests.programs.engines OUT [CHECK ...]``: every
rank answers all of ``CHECKS`` and writes ``OUT/<check>.<rank>.json``. The tests of
``tests/integration/test_train_engines.py`` judge the answers.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import llmx.models.factory as model_module
import llmx.models.loss as loss_module
import llmx.train.engine.build as build_module
from llmx.checkpoint.state.engine_state import capture, frozen_fingerprints
from llmx.config import Experiment
from llmx.data import collate
from llmx.errors import ConfigError
from llmx.models.attention import AttentionMethod, model_inputs
from llmx.models.blocks import compile_blocks
from llmx.models.factory import build_model, model_config, num_parameters
from llmx.models.generate import generate
from llmx.models.loss import micro_batch_loss
from llmx.models.model import ModelSpec
from llmx.models.sampling import Sampling
from llmx.plan import ds_config, make_plan
from llmx.plan.types import Plan
from llmx.tasks.base import Accumulator
from llmx.train.batches import Layout, Step, make_step
from llmx.train.engine.build import Engine, build_engine, whole_weights
from llmx.train.engine.process_group import join_process_group
from llmx.train.evaluation import evaluate_task
from llmx.train.precompute import frozen_models
from llmx.train.step import train_step
from tests.programs.leaving import run_and_leave
from tests.programs.state import build, fp16_allowed, job_experiment, store_of, task_of, train
from tests.reference import NEXT_TOKEN, SEQ_LEN, VOCABULARY, word_tokenizer
from tests.rundirs import experiment

WORLD = 2
OWN_TASK = "tests.programs.own_task:Everything"
CHECKS: dict[str, Callable[[Path], Any]] = {}


def check(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    CHECKS[function.__name__] = function
    return function


def whole(job: dict[str, Any]) -> dict[str, Any]:
    """A job with what most have in common."""
    return {"name": "x", "world": WORLD, "micro_batches": [2, 2], "accumulation": 1, **job}


@dataclass
class Built:
    """An engine, and what it is trained by and on."""

    exp: Experiment
    plan: Plan
    engine: Engine
    store: Any

    def train(self, first: int, stop: int) -> list[Any]:
        """The loss and the gradient norm of each of these steps."""
        return train(self.engine, self.exp, self.plan, self.store, steps=range(first, stop))


def built(job: dict[str, Any], out: Path) -> Built:
    job = whole(job)
    exp, plan = job_experiment(job, out)
    return Built(exp, plan, build(job, exp, plan, first_weights=exp.seed), store_of(job, out))


def trained(job: dict[str, Any], out: Path, *, steps: int) -> tuple[Engine, list[Any]]:
    """An engine after its first steps, and the loss and the gradient norm of each."""
    with fp16_allowed(job):
        made = built(job, out)
        numbers = made.train(0, steps)
    return made.engine, numbers


def masters(engine: Engine) -> torch.Tensor:
    """All master values that this rank answers for, end to end."""
    found = [each for each in capture(engine, world=WORLD) if each.state == "master"]
    return torch.cat([each.tensor.float().clone() for each in found])


def scale_of(precision: str) -> dict[str, Any]:
    """``zero.extra`` with a loss scale that does not overflow at the first step."""
    return {"fp16": {"initial_scale_power": 8}} if precision == "fp16" else {}


@check
def growing_loss_scale(out: Path) -> Any:
    """The same steps at a loss scale that stays and at one that doubles twice."""
    answer = {}
    for stage in (0, 1, 3):
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


def compiled_quickly(model: Any) -> None:
    """By the compiler's graphs, without its code generator."""
    compile_blocks(model, backend="aot_eager")


REDUCE = {"use_multi_rank_bucket_allreduce": False}
EXTRA = {
    1: {"contiguous_gradients": False, "parameter_alignment": True},
    2: {"contiguous_gradients": False, "ignore_unused_parameters": False, "reduce_scatter": False},
    3: {
        "enable_sanity_checks": True,
        "log_trace_cache_warnings": True,
        "memory_efficient_linear": False,
        "reduce_scatter": False,
        "stage3_allgather_sequential": True,
        "stage3_model_persistence_threshold": 100,
        "stage3_use_all_reduce_for_fetch_params": True,
    },
}
"""Keys of ``zero.extra`` that change how it is computed, by stage (``llmx.plan.ds_config``)."""


WAYS: dict[str, dict[str, Any]] = {
    "fused loss": {"model": {"fused_loss": True}},
    "selective": {"activation_checkpointing": "selective"},
    "full": {"activation_checkpointing": "full"},
    "compiled": {"model": {"compile": True}},
    # Each gradient to the rank that owns it, in place of an all-reduce.
    "reduce to owner": {"zero": {"extra": {"zero_optimization": REDUCE}}},
    **{f"extra {n}": {"zero": {"extra": {"zero_optimization": of}}} for n, of in EXTRA.items()},
}
TRIED = {
    (1, "fp32"): ("full", "reduce to owner", "extra 1"),
    (2, "fp32"): ("fused loss", "selective", "compiled", "reduce to owner", "extra 2"),
    (3, "fp32"): ("fused loss", "selective", "full", "extra 3"),
    (2, "fp16"): ("fused loss", "selective"),
}


@check
def same_training(out: Path) -> Any:
    """Three steps the plain way and in ways that must compute the same, by stage."""
    answer: dict[str, Any] = {}
    for (stage, precision), names in TRIED.items():
        base = {
            "stage": stage,
            "precision": precision,
            "clip_norm": 0.5,
            "accumulation": 2,
            "micro_batches": [2, 1],
            "config": {"tie_word_embeddings": stage == 1},
            "zero": {"param_persistence_threshold": 0},
        }
        plain, numbers = trained(base, out, steps=3)
        wanted = masters(plain)
        plain.engine.destroy()
        for name in names:
            change = WAYS[name]
            job = {**base, **change, "zero": {**base["zero"], **change.get("zero", {})}}
            with mock.patch.object(model_module, "compile_blocks", compiled_quickly):
                engine, others = trained(job, out, steps=3)
            answer[f"{stage}-{precision}-{name}"] = {
                "numbers": [numbers, others],
                "apart": float((masters(engine) - wanted).abs().max()),
                "fused": engine.main.fused_loss,
            }
            engine.engine.destroy()
    return answer


MIXED_JOBS: dict[str, dict[str, Any]] = {
    **{str(stage): {"stage": stage, "kind": "gpt2"} for stage in (0, 2)},
    "2-lora": {
        "stage": 2,
        "adapter": {"kind": "lora", "rank": 2, "targets": ["all-linear"], "dropout": 0.5},
    },
}
"""Other families and ways of summing were held against each other in the same way, once
(docs/unequal.md): each engine takes a second."""
DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}


@check
def mixed_checkpointing(out: Path) -> Any:
    """Two steps in which rank 1 computes again and rank 0 does not, against those in which none
    does; and how often all ranks have added something up."""
    answer = {}
    for name, recipe in MIXED_JOBS.items():
        found = []
        for ways in (["none", "none"], ["none", "full"]):
            job = {
                **recipe,
                "by_device": ways,
                "model": {"attention": "sdpa"},
                "accumulation": 2,
                "micro_batches": [2, 1],
                "clip_norm": 0.5,
                "zero": {"reduce_bucket_size": 5000, **recipe.get("zero", {})},
                "config": {
                    **recipe.get("config", {}),
                    **(DROPOUT if recipe.get("kind") == "gpt2" else {}),
                },
            }
            # Each rank has a host of its own.
            with Reductions() as reductions, mock.patch.dict(os.environ, LOCAL_RANK="0"):
                engine, numbers = trained(job, out, steps=2)
            modules = engine.module.modules()
            again = any(getattr(module, "gradient_checkpointing", False) for module in modules)
            mine = ways[torch.distributed.get_rank()]
            found.append((masters(engine), numbers, again == (mine != "none")))
            engine.engine.destroy()
        answer[name] = {
            "numbers": [numbers for _, numbers, _ in found],
            "same": [bool(torch.equal(one, found[0][0])) for one, _, _ in found],
            "as_told": all(told for *_, told in found),
            "reductions": reductions.count,
        }
    return answer


class Reductions:
    """Counts what all ranks add up."""

    def __enter__(self) -> Reductions:
        self.count, real = 0, torch.distributed.all_reduce

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return real(*args, **kwargs)

        self._patch = mock.patch.object(torch.distributed, "all_reduce", counted)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


@check
def gatherings(out: Path) -> Any:
    """How often each of four steps at ZeRO-3 gathers parameters, and what it computes: with and
    without evaluations before the first three, and with completions after those; with
    a pass without gradients between each forward pass and its backward pass; of a task whose loss
    takes such a pass in each step, two passes of a network, or passes of several; of a low-rank
    adapter, whose layers look at each other's parameters. And which parameters a backward pass has
    left gathered, in any step."""
    from deepspeed.runtime.zero import partition_parameters

    answer: dict[str, Any] = {}
    for name, task, between in (
        ("plain", "pretrain", ""),
        ("evaluated", "pretrain", "evaluate"),
        ("completed", "pretrain", "evaluate and complete"),
        ("within", "pretrain", "evaluate"),
        ("joint", "embed", ""),
        ("twice", "tests.programs.own_task:Twice", ""),
        ("networks", OWN_TASK, ""),
        ("adapter", "pretrain", "evaluate"),
    ):
        job: dict[str, Any] = {
            "stage": 3,
            "task": task,
            "accumulation": 2 if task == "embed" else 1,
            "zero": {"param_persistence_threshold": 0},
        }
        if name == "adapter":
            job["adapter"] = {"kind": "lora", "rank": 2, "targets": ["all-linear"]}
        made = built(job, out)
        engine = made.engine
        numbers, counts = [], []
        left = gathered_at_steps(engine)
        real = partition_parameters._dist_allgather_fn
        if name == "within":
            look_before_backward(engine)
        for step in range(4):
            if between and step in (0, 1, 2):
                evaluated(made)
            if between.endswith("complete") and step in (0, 1, 2):
                generate(engine.main, PROMPTS, Sampling(max_new_tokens=2), batch_size=1)
            with mock.patch.object(partition_parameters, "_dist_allgather_fn", wraps=real) as calls:
                numbers += made.train(step, step + 1)
            counts.append(calls.call_count)
        answer[name] = {
            "numbers": numbers,
            "counts": counts,
            "parameters": sum(1 for _ in engine.module.parameters()),
            "left": sorted(left),
        }
        engine.engine.destroy()
    return answer


def gathered_at_steps(engine: Engine) -> set[str]:
    """The parameters that are gathered when an optimizer step begins, of all steps from now on."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    found: set[str] = set()
    step = engine.engine.step

    def note() -> None:
        for path, parameter in engine.module.named_parameters():
            if parameter.ds_status != ZeroParamStatus.NOT_AVAILABLE:
                found.add(path)
        step()

    engine.engine.step = note
    return found


def look_before_backward(engine: Engine) -> None:
    """Let each backward pass follow a forward pass without gradients."""
    backward = engine.backward
    ids = torch.arange(4)[None]
    one = {"input_ids": ids, "position_ids": ids, "segment_ids": torch.ones_like(ids)}

    def look(loss: torch.Tensor) -> None:
        with torch.no_grad():
            engine.main.log_probabilities({**one, "labels": ids})
        backward(loss)

    engine.backward = look  # type: ignore[method-assign]


def evaluated(made: Built) -> dict[str, Any]:
    layout = Layout(seq_len=SEQ_LEN, pad_id=0, layout=made.engine.layout)
    task, batch = task_of(made.exp), made.plan.batch
    measures = evaluate_task(made.engine, task, made.store, batch=batch, layout=layout)
    assert measures
    return measures


@check
def another_order(out: Path) -> Any:
    """What is said where gradients of one rank come in another order."""
    rank = torch.distributed.get_rank()
    real = build_module.gradient_order

    def turned(*args: Any) -> list[str]:
        found = real(*args)
        return found[::-1] if rank == 1 else found

    with (
        mock.patch.object(build_module, "gradient_order", turned),
        mock.patch.dict(os.environ, LOCAL_RANK="0"),
    ):
        try:
            built({"stage": 2, "by_device": ["none", "full"]}, out)
        except ConfigError as error:
            return str(error)
    return ""


PROMPTS = [(5, 6, 7), (8,), (5, 6, 7), tuple(range(3, 20)), (9, 10)]


@check
def generation(out: Path) -> Any:
    """Completions between steps of training, and whether training goes on as it would: by stage,
    of a task with one model and of one with several; "whole" holds all weights on every rank
    while it generates."""
    answer: dict[str, Any] = {}
    for task in ("pretrain", OWN_TASK):
        stages = ("0", "3", "3-whole") if task == "pretrain" else ("0", "3-whole")
        runs = {stage: generated(task, stage, out) for stage in stages}
        _, plain = trained({"stage": 2, "task": task}, out, steps=4)
        answer[task] = {"runs": runs, "without": plain}
    return answer


def generated(task: str, stage: str, out: Path) -> dict[str, Any]:
    """Two steps, completions of every model that writes, two steps."""
    zero = {"param_persistence_threshold": 0}
    made = built({"stage": int(stage[0]), "task": task, "zero": zero}, out)
    engine, numbers = made.engine, made.train(0, 2)
    stops = frozenset({2, *range(60, 66)})
    drawn = Sampling(temperature=1.2, top_p=0.95, max_new_tokens=8, stop_ids=stops)
    found: dict[str, Any] = {}
    gathered: dict[str, list[str]] = {}
    for name in sorted({"policy", "reference"} & set(engine.models)):
        for sampling in (Sampling(max_new_tokens=8), drawn):
            model = engine.models[name]
            if stage == "3":
                model.for_generation = contextlib.nullcontext
            elif stage == "3-whole":
                with model.for_generation():
                    gathered[name] = [
                        n for n, one in engine.networks.items() if is_whole(one.module)
                    ]
            completions = generate(model, PROMPTS, sampling, seeds=range(5), batch_size=1)
            kind = "greedy" if sampling.greedy else "sampled"
            found[f"{kind} {name}"] = [asdict(one) for one in completions]
    numbers += made.train(2, 4)
    training = {name: model.module.training for name, model in engine.models.items()}
    engine.engine.destroy()
    return {"completions": found, "numbers": numbers, "training": training, "whole": gathered}


def is_whole(network: torch.nn.Module) -> bool:
    """Whether every weight is gathered here."""
    return all(p.numel() == p.ds_numel for p in network.parameters())


CLIPPED = 0.01

JOINT = {
    "embed": {"symmetric": True},
    # The likelihood of good answers grows, so that the reference point is more than 0.
    "dpo": {"loss": "kto", "reference": "live", "beta": 10.0, "sft_weight": 1.0},
}


@check
def joint_steps(out: Path) -> Any:
    """Losses and gradient norms of tasks whose loss is that of a whole step, by stage and split:
    one pass, two passes, and uneven ranks."""
    answer: dict[str, Any] = {task: {} for task in JOINT}
    one_pass, two_passes, uneven = ([4, 4], 1), ([2, 2], 2), ([3, 1], 2)
    splits = ((0, one_pass), (2, uneven), (3, two_passes), (3, uneven))
    for task, (stage, (micro_batches, accumulation)) in itertools.product(JOINT, splits):
        job = {
            "stage": stage,
            "task": task,
            "optim": "sgd",
            "lr": 0.5,
            "options": JOINT[task],
            "micro_batches": micro_batches,
            "accumulation": accumulation,
            "zero": {"param_persistence_threshold": 0},
        }
        made = built(job, out)
        answer[task][f"{stage}: {micro_batches} x {accumulation}"] = made.train(0, 2)
        if stage == 3:
            measures = evaluated(made).values()
            found = [m.values() for m in measures if isinstance(m, Accumulator)]
            answer[task].setdefault("evaluated", []).append(found)
        made.engine.engine.destroy()
    return answer


@check
def used_twice(out: Path) -> Any:
    """Losses and gradient norms of one forward pass, and of two before one backward pass."""
    answer = {}
    cases = [*((stage, "bf16", 10**6) for stage in range(3)), (2, "fp32", 500), (3, "bf16", 500)]
    for stage, precision, bucket in cases:
        numbers = []
        for task in ("pretrain", "tests.programs.own_task:Twice"):
            job = {
                "stage": stage,
                "precision": precision,
                "task": task,
                "optim": "sgd",
                "accumulation": 2,
                "zero": {"reduce_bucket_size": bucket, "param_persistence_threshold": 0},
            }
            engine, found = trained(job, out, steps=2)
            numbers.append(found)
            engine.engine.destroy()
        answer[f"{stage} {precision} {bucket}"] = numbers
    return answer


@check
def dropout_of_dpo(out: Path) -> Any:
    """Losses of the first step of GPT-2, which has dropout, by ``task.options.dropout``."""
    answer = {}
    for dropout in (False, True):
        job = {
            "stage": 2,
            "kind": "gpt2",
            "config": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
            "task": "dpo",
            "options": {"reference": "live", "beta": 1.0, "dropout": dropout},
        }
        engine, numbers = trained(job, out, steps=1)
        answer[str(dropout)] = numbers[0][0]
        engine.engine.destroy()
    return answer


@check
def gradient_sums(out: Path) -> Any:
    """How far the gradient of 64 micro steps is from that of bf16 passes summed in fp64: read off
    one SGD step, by stage and by the precision of the sums."""
    answer: dict[str, float] = {}
    exact: dict[str, torch.Tensor] = {}
    offload = {"offload_optimizer": "cpu"}
    for name, stage, zero, accum in (
        ("1", 1, {}, "bf16"),
        ("1", 1, {}, "fp32"),
        ("3", 3, {}, "fp32"),
        ("2-offload", 2, offload, "fp32"),
        ("3-offload", 3, offload, "fp32"),
    ):
        job = {
            "stage": stage,
            "precision": "bf16",
            "optim": "sgd",
            "zero": {**zero, "grad_accum_dtype": accum},
            "accumulation": 64,
            "micro_batches": [1, 1],
        }
        answer[f"{name}-{accum}"] = distance_from_exact(job, out, exact)
    return answer


def distance_from_exact(job: dict[str, Any], out: Path, exact: dict[str, torch.Tensor]) -> float:
    """``exact`` is filled by the first call: every job has the same weights and samples."""
    made = built(job, out)
    exp, engine, step = made.exp, made.engine, step_at(made, 0)
    if not exact:
        exact.update(exact_gradient(exp, step))
    before = captured(engine)
    engine.set_lr(1.0)
    train_step(engine, step, NEXT_TOKEN, world=WORLD)
    after = captured(engine)
    engine.engine.destroy()
    wrong = total = 0.0
    for (name, start), values in after.items():
        update = (before[name, start] - values).double()
        wanted = exact[name].view(-1)[start : start + len(values)]
        # Weight decay is a part of the step, not of the gradient.
        if update.numel() and exp.optim.weight_decay and exact[name].dim() > 1:
            update -= exp.optim.weight_decay * before[name, start].double()
        wrong += float((update - wanted).square().sum())
        total += float(wanted.square().sum())
    both = torch.tensor([wrong, total], dtype=torch.float64)
    torch.distributed.all_reduce(both)
    return float((both[0] / both[1]).sqrt())


def step_at(made: Built, number: int) -> Step:
    """This rank's part of a step."""
    return make_step(
        made.store,
        number,
        batch=made.plan.batch,
        rank=torch.distributed.get_rank(),
        seed=made.exp.seed,
        layout=Layout(seq_len=SEQ_LEN, pad_id=0, layout="packed"),
    )


def captured(engine: Engine) -> dict[tuple[str, int], torch.Tensor]:
    found = [each for each in capture(engine, world=WORLD) if each.state == "master"]
    return {(each.name, each.start): each.tensor.float().clone() for each in found}


def exact_gradient(exp: Any, step: Any) -> dict[str, torch.Tensor]:
    """Each micro step's gradient in bf16, as the engines compute it; their sum in fp64."""
    config = model_config(exp.model, exp.data, tokenizer=word_tokenizer())
    cpu, stage0 = torch.device("cpu"), {"zero_optimization": {"stage": 0}}
    model = build_model(
        exp.model,
        exp.seed,
        config,
        precision="bf16",
        device=cpu,
        implementation="sdpa",
        ds_config=stage0,
    )
    factor = 1 / step.target_tokens
    sums = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in model.named_parameters()}
    for micro_batch in step.micro_batches:
        inputs, labels = model_inputs(
            micro_batch, method=AttentionMethod(), dtype=torch.bfloat16, device=cpu
        )
        model.zero_grad()
        loss = micro_batch_loss(model, inputs, labels, vocab_size=VOCABULARY)
        (loss * factor).backward()
        for name, parameter in model.named_parameters():
            sums[name] += parameter.grad
    for values in sums.values():
        torch.distributed.all_reduce(values)
    return sums


@check
def clipping(out: Path) -> Any:
    """Of one step of SGD, clipped and not: the norms that were reported, and the norm of the
    difference of the two updates."""
    norms, weights = [], []
    for limit in (0.0, CLIPPED):
        job = {"stage": 2, "optim": "sgd", "lr": 0.5, "clip_norm": limit}
        engine, ((_, norm),) = trained(job, out, steps=1)
        norms.append(norm)
        weights.append(masters(engine).double())
        engine.engine.destroy()
    apart = (weights[0] - weights[1]).square().sum()
    torch.distributed.all_reduce(apart)
    return {"norms": norms, "apart": float(apart.sqrt())}


@check
def base_of_an_adapter(out: Path) -> Any:
    """How far a frozen model that is the trained one's base lies from a copy of its own, at first
    and after two steps; by stage, with and without activation checkpointing."""
    answer: dict[str, Any] = {}
    specs = {"policy": ModelSpec(), "reference": ModelSpec(trained=False)}
    for stage, recompute in ((0, "none"), (1, "full"), (3, "none"), (3, "full")):
        job = whole(
            {
                "stage": stage,
                "kind": "gpt2",
                "config": {"resid_pdrop": 0.5, "embd_pdrop": 0.5},
                "activation_checkpointing": recompute,
                "adapter": {"kind": "lora", "rank": 2, "targets": ["all-linear"], "dropout": 0.5},
            }
        )
        exp, plan = job_experiment(job, out)
        config = ds_config(exp.model, exp.zero, exp.optim, plan)
        tokenizer = word_tokenizer()
        engine = build_engine(exp, plan, config, tokenizer=tokenizer, specs=specs)
        store = store_of(job, out)
        layout = Layout(seq_len=SEQ_LEN, pad_id=0, layout=engine.layout)
        batch = collate([store[0], store[1]], seq_len=SEQ_LEN, pad_id=0, layout=layout.layout)
        reference, policy = engine.models["reference"], engine.models["policy"]
        with (
            frozen_models(
                exp, plan, config, tokenizer=tokenizer, specs={"reference": specs["reference"]}
            ) as apart,
            torch.no_grad(),
        ):
            wanted = apart["reference"].log_probabilities(batch).values.clone()
        engine.engine.train()
        # At ZeRO-3 the order of its modules is known before those of the adapter are used.
        for _ in range(3):
            first = reference.log_probabilities(batch).values
        for _ in range(2):
            ours = policy.log_probabilities(batch).values
            ratio = ours - reference.log_probabilities(batch).values
            engine.backward(-torch.nn.functional.logsigmoid(ratio.sum()))
            engine.engine.step()
        last = reference.log_probabilities(batch).values
        engine.engine.eval()
        with torch.no_grad():
            moved = policy.log_probabilities(batch).values - wanted
        answer[f"{stage}-{recompute}"] = {
            "parameters": num_parameters(engine.module, trained=False),
            "apart": [float((each - wanted).abs().max()) for each in (first, last)],
            "moved": float(moved.abs().max()),
            "graph": first.requires_grad,
            "saved": [n for n, _ in engine.module.named_parameters() if engine.is_saved(n)][:1],
            "fingerprints": list(frozen_fingerprints(engine)),
        }
        engine.engine.destroy()
    return answer


@check
def fused_loss_that_fails(out: Path) -> Any:
    """Whether head and loss are together where they fail, by stage. The weights are gathered whole
    afterwards."""
    answer: dict[str, Any] = {}
    with (
        mock.patch.object(loss_module, "fused_linear_cross_entropy", side_effect=ValueError("no")),
        mock.patch.object(build_module, "fused_loss", return_value=True),
    ):
        for stage in (2, 3):
            job = {"stage": stage, "zero": {"param_persistence_threshold": 0}}
            engine, _ = trained(job, out, steps=0)
            with whole_weights(engine):
                answer[str(stage)] = engine.main.fused_loss
            engine.engine.destroy()
    return answer


def main() -> None:
    out, names = Path(sys.argv[1]), sys.argv[2:] or list(CHECKS)
    join_process_group(make_plan(experiment(out, ranks=WORLD)))
    for name in names:
        answer = json.dumps(CHECKS[name](out))
        (out / f"{name}.{torch.distributed.get_rank()}.json").write_text(answer)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run_and_leave(main)
