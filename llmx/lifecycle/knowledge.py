"""Gathers what a plan rests on beside its experiment: traces of the micro step, finished runs, the
tokenizer.

A trace depends on the network, the task, its micro batch and what runs it; the same is never traced
twice. It is made in a process of its own and kept in the cache. Where none can be had (a model that
only the hosts have, code of the Hub, a task that cannot be run on fake tensors) the plan keeps its
formula, and says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import llmx
from llmx.compose.complete import Composed, plan_experiment, refusal
from llmx.config import Experiment
from llmx.config.build import to_dict
from llmx.config.user_code import code_roots
from llmx.errors import ConfigError
from llmx.hardware.survey import version
from llmx.lifecycle.learned import finished_runs
from llmx.plan.choices import advice
from llmx.plan.knowledge import Knowledge
from llmx.plan.trace import NO_TRACES, StepTrace, TraceKey, Traces, wanted_traces
from llmx.plan.types import Plan
from llmx.run.provenance.content import hub_commit
from llmx.run.rundir import read_mapping, write_json
from llmx.run.scratch import PACKAGES, ask

PROGRAM = "llmx.train.memory_trace"
TIME_LIMIT_S = 60.0
"""What is not traced by then is left out: first of all other ways to run it."""
CODE = (
    "models/adapter.py", "models/blocks.py", "models/experts.py", "models/factory.py",
    "models/loss.py", "models/model.py", "models/quantized.py", "models/varlen.py",
    "plan/trace.py", "train/memory_trace.py",
)  # fmt: skip
"""Files of llmx that a trace depends on, beside that of the task."""


ROUNDS = 4
"""Times that a choice of ``auto`` is traced as it will run before the best so far is taken."""
DEMO = Path(llmx.__file__).parent / "assets" / "demo" / "tokenizer"


def informed(composed: Composed, *, make: bool, choose: bool = False) -> Composed:
    """Plan again with all that is known, with advice where the plan does not fit.

    ``make``: have missing traces made, also of other ways to run it, for a plan that someone reads.
    A launch takes what the cache knows, and does not wait. ``choose``: choose each value that the
    config left to the plan again, by traces that are made in any case; ConfigError where nothing
    fits.
    """
    if choose and composed.asked is not None:
        composed = _chosen(composed, composed.asked)
    knowledge = gather(composed, make=make, variants=make)
    found = plan_experiment(composed.experiment, is_checked=True, knowledge=knowledge)
    text = advice(found.experiment, found.plan, found.knowledge, allows=refusal)
    plan = replace(found.plan, chosen=composed.plan.chosen, advice=text)
    return replace(found, plan=plan, asked=composed.asked)


def _chosen(composed: Composed, asked: Experiment) -> Composed:
    """Choose each ``auto`` of ``asked`` by what is known; as it is where nothing is."""
    without: list[Experiment] = []
    for _ in range(ROUNDS):
        knowledge = gather(composed, make=True, variants=True)
        if not knowledge.traces.found and not knowledge.runs:
            break
        composed = plan_experiment(asked, knowledge=knowledge, without=without)
        # The choice is by bytes between two micro batches; this is the one that will run.
        knowledge = gather(composed, make=True, variants=False)
        exact = plan_experiment(composed.experiment, is_checked=True, knowledge=knowledge)
        if all(part.fits or not part.traced for part in exact.plan.memory):
            break
        without.append(composed.experiment)
    chosen = composed.plan.chosen
    if chosen is not None and chosen.problem:
        raise ConfigError(chosen.problem)
    return composed


def gather(composed: Composed, *, make: bool, variants: bool) -> Knowledge:
    """Everything that is known for a planned experiment. ``make``: missing traces are made;
    ``variants``: also those of other ways to run it."""
    exp, plan, known = composed.experiment, composed.plan, finished_runs()
    vocabulary = tokenizer_rows(exp.model.tokenizer or exp.model.path or "")
    known = replace(known, vocabulary=vocabulary)
    if plan.balance is not None and plan.balance.pending:
        # By finished runs other micro batches than by the data sheets.
        plan = plan_experiment(exp, is_checked=True, knowledge=known).plan
    return replace(known, traces=_traces(exp, plan, make=make, variants=variants))


def _traces(exp: Experiment, plan: Plan, *, make: bool, variants: bool) -> Traces:
    if os.environ.get("LLMX_TRACES", "").lower() == "off":
        return NO_TRACES
    if not any(exp.hardware.devices[host.device].memory_gib for host in plan.hosts):
        return Traces({}, "no device of the run has a known memory")
    return find_traces(exp, plan, variants=variants, make=make)


def tokenizer_rows(name: str, *, with_added: bool = True) -> int | None:
    """The largest id of a tokenizer and one; ``name``: a local directory, or ``demo``.
    ``with_added``: added tokens count, too."""
    directory = DEMO if name == "demo" else Path(name).expanduser()
    try:
        values = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary = values["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        added = {token["id"] for token in values.get("added_tokens", ())}
        return max(added.union(ids) if with_added else set(ids) - added, default=-1) + 1
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find_traces(exp: Experiment, plan: Plan, *, variants: bool, make: bool) -> Traces:
    """Read the traces from the cache; ``make``: make the missing ones."""
    keys = wanted_traces(exp, plan, alternatives=variants)
    traces: dict[TraceKey, StepTrace] = {}
    problem = ""
    answers: dict[TraceKey, dict[str, Any]] = {}
    places = {key: _cached(exp, plan, key) for key in keys}
    missing = []
    for key, path in places.items():
        try:
            answers[key] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            missing.append(key)
    if missing and make:
        new_answers = _trace(exp, plan, missing)
        if new_answers is None:
            problem = f"the process that traces it gave no answer within {TIME_LIMIT_S:.0f} s"
        for key, answer in zip(missing, new_answers or (), strict=False):
            answers[key] = answer
            with contextlib.suppress(OSError):  # else it is traced again
                places[key].parent.mkdir(parents=True, exist_ok=True)
                write_json(places[key], answer)
    for key, answer in answers.items():
        try:
            traces[key] = StepTrace.from_dict(answer["trace"])
        except (KeyError, TypeError, ValueError):
            problem = problem or str(answer.get("problem", "the answer in the cache is damaged"))
    return Traces(traces, problem)


def _trace(exp: Experiment, plan: Plan, keys: Sequence[TraceKey]) -> list[dict[str, Any]] | None:
    job = {
        "experiment": to_dict(exp),
        "traces": [
            {
                "precision": plan.precision,
                "accelerator": plan.accelerator,
                "attention": key.attention,
                "micro_batch": key.micro_batch,
                "activation_checkpointing": key.checkpointing,
            }
            for key in keys
        ],
    }
    if exp.model.trust_remote_code:  # code of the Hub, which only the ranks run
        return None
    answers: list[dict[str, Any]] | None = ask(
        PROGRAM, json.dumps(job), timeout_s=TIME_LIMIT_S, python_path=code_roots(exp.task)
    )
    return answers


def _cached(exp: Experiment, plan: Plan, key: TraceKey) -> Path:
    """Named after all that the trace depends on."""
    package, code = Path(llmx.__file__).parent, hashlib.sha256()
    for name in (*CODE, f"tasks/{exp.task.kind}.py"):
        with contextlib.suppress(OSError):  # a task of the user's own is not there
            code.update((package / name).read_bytes())
    model = replace(exp.model, activation_checkpointing="none", license=None, name="")
    parts = {
        "model": asdict(model),
        "files": read_mapping(Path(exp.model.path or "").expanduser() / "config.json"),
        "commit": exp.model.path
        and hub_commit(exp.model.path, kind="models", revision=exp.model.revision),
        "tokenizer": exp.model.tokenizer,
        "adapter": asdict(exp.adapter),
        "groups": [exp.optim.kind, exp.optim.weight_decay, exp.optim.layer_decay,
                   exp.optim.lr_scale, exp.optim.muon_lr, exp.optim.lr],
        "data": [exp.data.seq_len, exp.data.layout, exp.data.packing],
        "task": [exp.task.kind, exp.task.options],
        "run": [plan.precision, plan.accelerator],
        "key": asdict(key),
        "packages": {name: version(name) for name in (*PACKAGES, "peft")},
        "code": code.hexdigest(),
    }  # fmt: skip
    text = json.dumps(parts, sort_keys=True, default=str)
    name = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    root = Path(os.environ.get("LLMX_CACHE") or "~/.cache/llmx").expanduser()
    return root / "traces" / f"{name}.json"
