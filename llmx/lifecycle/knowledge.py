"""Gathers what a plan rests on beside its experiment: traces of the micro step, finished runs.

A trace depends on the network, the task, its micro batch and what runs it; the same is never traced
twice. It is made in a process of its own, and kept in the cache and in the run directory. Where
none can be had (a model that only the hosts have, code of the Hub, a task that cannot be run on
fake tensors) the memory is unknown, and the plan says why.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import llmx
from llmx.compose.complete import Composed, plan_experiment, refusal
from llmx.compose.task_rules import model_sources
from llmx.config import Experiment
from llmx.config.build import to_dict
from llmx.config.user_code import code_roots
from llmx.errors import ConfigError
from llmx.hardware.survey import version
from llmx.lifecycle.learned import finished_runs
from llmx.plan.choices import advice
from llmx.plan.knowledge import Knowledge
from llmx.plan.trace import StepTrace, TraceKey, Traces, wanted_traces
from llmx.plan.types import Plan
from llmx.run.provenance.content import hub_commit
from llmx.run.rundir import RunDir, read_mapping, write_json
from llmx.run.scratch import PACKAGES, ask

PROGRAM = "llmx.train.memory_trace"
TIME_LIMIT_S = 60.0
"""What is not traced by then is left out: first of all other ways to run it."""
CODE = (
    "models/adapter.py", "models/blocks.py", "models/experts.py", "models/factory.py",
    "models/flops.py", "models/loss.py", "models/model.py", "models/quantized.py",
    "models/varlen.py", "plan/network.py", "plan/trace.py", "train/memory_trace.py",
)  # fmt: skip
"""Files of llmx that a trace depends on, beside that of the task."""


ROUNDS = 4
"""Times that a choice of ``auto`` is traced as it will run before the best so far is taken."""
DEMO = Path(llmx.__file__).parent / "assets" / "demo" / "tokenizer"


def informed(
    composed: Composed, *, variants: bool = False, choose: bool = False, is_trial: bool = False
) -> Composed:
    """Plan again with all that is known, with advice where the plan does not fit.

    ``variants``: trace also other ways to run it, for a plan that someone reads. ``choose``: choose
    each value that the config left to the plan again; ConfigError where nothing fits. ``is_trial``:
    the trials of a sweep choose alike, whatever those before have shown.
    """
    if choose and composed.asked is not None:
        composed = _chosen(composed, composed.asked, is_trial=is_trial)
    knowledge = gather(composed, variants=variants)
    replanned = plan_experiment(composed.experiment, is_checked=True, knowledge=knowledge)
    knowledge = replanned.knowledge
    if not all(part.fits for part in replanned.plan.memory):
        knowledge = replace(knowledge, traces=gather(replanned, variants=True).traces)
    text = advice(replanned.experiment, replanned.plan, knowledge, allows=refusal)
    plan = replace(replanned.plan, chosen=composed.plan.chosen, advice=text)
    return replace(replanned, plan=plan, asked=composed.asked)


def _chosen(composed: Composed, asked: Experiment, *, is_trial: bool) -> Composed:
    """Choose each ``auto`` of ``asked`` by what is known."""
    without: list[Experiment] = []
    for _ in range(ROUNDS):
        knowledge = gather(composed, variants=True)
        if is_trial:
            knowledge = replace(knowledge, runs=())
        composed = plan_experiment(asked, knowledge=knowledge, without=without)
        if composed.plan.chosen is not None and composed.plan.chosen.problem:
            raise ConfigError(composed.plan.chosen.problem)
        if not composed.plan.memory:
            break
        # The choice is by bytes between two micro batches; this is the one that will run.
        knowledge = gather(composed, variants=False)
        exact = plan_experiment(composed.experiment, is_checked=True, knowledge=knowledge)
        if all(part.fits for part in exact.plan.memory):
            break
        without.append(composed.experiment)
    return composed


def gather(composed: Composed, *, variants: bool) -> Knowledge:
    """Everything that is known for a planned experiment. ``variants``: also traces of other ways to
    run it."""
    knowledge = finished_runs()
    if os.environ.get("LLMX_TRACES", "").lower() == "off":
        return knowledge
    traces = find_traces(composed.experiment, composed.plan, variants=variants)
    return replace(knowledge, traces=traces)


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


def find_traces(exp: Experiment, plan: Plan, *, variants: bool) -> Traces:
    """Read the traces from the run directory and the cache; make the missing ones. ConfigError
    where ``adapter`` or ``model.freeze`` name what the network does not have."""
    keys = wanted_traces(exp, plan, alternatives=variants)
    cache = Path(os.environ.get("LLMX_CACHE") or "~/.cache/llmx").expanduser() / "traces"
    places = {key: cache / f"{fingerprint(exp, plan, key)}.json" for key in keys}
    of_run = read_mapping(RunDir(Path(exp.run_dir)).traces) if exp.run_dir else {}
    answers: dict[TraceKey, dict[str, Any]] = {
        key: answer
        for key, place in places.items()
        if (answer := of_run.get(place.stem) or read_mapping(place))
    }
    problem = ""
    missing = [key for key in keys if key not in answers]
    if missing and exp.model.trust_remote_code:
        problem = "code of the Hub, which only the ranks run"
    elif missing:
        new_answers = _trace(exp, plan, missing)
        if new_answers is None:
            problem = f"the process that traces it gave no answer within {TIME_LIMIT_S:.0f} s"
        for key, answer in zip(missing, new_answers or (), strict=False):
            answers[key] = answer
            with contextlib.suppress(OSError):  # else it is traced again
                places[key].parent.mkdir(parents=True, exist_ok=True)
                write_json(places[key], answer)
    traces: dict[TraceKey, StepTrace] = {}
    for key, answer in answers.items():
        if refused := answer.get("refused"):
            raise ConfigError(refused)
        try:
            traces[key] = StepTrace.from_dict(answer["trace"])
        except (KeyError, TypeError, ValueError):
            problem = problem or str(answer.get("problem", "the answer in the cache is damaged"))
    return Traces.of(traces, problem)


def keep_traces(composed: Composed) -> None:
    """Write the traces of a run into its directory: a resume and the supervisor read them."""
    exp, plan, traces = composed.experiment, composed.plan, composed.knowledge.traces.found
    answers = {
        fingerprint(exp, plan, key): {"key": asdict(key), "trace": trace.to_dict()}
        for key, trace in traces.items()
    }
    if answers:
        write_json(RunDir(Path(exp.run_dir)).traces, answers)


def _trace(exp: Experiment, plan: Plan, keys: Sequence[TraceKey]) -> list[dict[str, Any]] | None:
    common = {"precision": plan.precision, "accelerator": plan.accelerator}
    job = {"experiment": to_dict(exp), "traces": [{**common, **asdict(key)} for key in keys]}
    print(
        "Tracing a micro step of this network, for its memory and size: once for these settings.",
        file=sys.stderr,
        flush=True,
    )
    answers: list[dict[str, Any]] | None = ask(
        PROGRAM, json.dumps(job), timeout_s=TIME_LIMIT_S, python_path=code_roots(exp.task)
    )
    return answers


def fingerprint(exp: Experiment, plan: Plan, key: TraceKey | None = None) -> str:
    """32 hex digits of all that a trace depends on; without ``key``, that all traces of a network
    have in common."""
    package, code = Path(llmx.__file__).parent, hashlib.sha256()
    for name in (*CODE, f"tasks/{exp.task.kind}.py"):
        with contextlib.suppress(OSError):  # a task of the user's own is not there
            code.update((package / name).read_bytes())
    model = replace(exp.model, activation_checkpointing="none", license=None, name="")
    sources: list[tuple[str, str | None]]
    sources = [(path, None) for path in model_sources(exp.task).values()]
    sources += [(model.path, model.revision)] if model.path else []
    parts = {
        "model": asdict(model),
        "networks": [
            [
                read_mapping(Path(path).expanduser() / "config.json"),
                hub_commit(path, kind="models", revision=revision),
            ]
            for path, revision in sources
        ],
        "tokenizer": exp.model.tokenizer,
        "adapter": asdict(exp.adapter),
        "groups": [exp.optim.kind, exp.optim.weight_decay, exp.optim.layer_decay,
                   exp.optim.lr_scale, exp.optim.muon_lr, exp.optim.lr],
        "data": [exp.data.seq_len, exp.data.layout, exp.data.packing],
        "task": [exp.task.kind, exp.task.options],
        "run": [plan.precision, plan.accelerator],
        "key": key and asdict(key),
        "packages": {name: version(name) for name in (*PACKAGES, "peft")},
        "code": code.hexdigest(),
    }  # fmt: skip
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
