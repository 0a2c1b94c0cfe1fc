"""Before a launch: can the rows of this model be packed, and can it be trained at all?

The result comes from a trial on a tiny model (``llmx.models.isolation``), made by a process of its
own. Where it cannot be had (no transformers here, a model that only the hosts have, code of the
Hub), the ranks decide at their start; they try in any case.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, TextIO

import llmx
from llmx.compose.complete import Composed, plan_experiment
from llmx.config import DataConfig, Experiment, ModelConfig, TaskConfig
from llmx.config.user_code import code_hashes, user_task
from llmx.errors import ConfigError
from llmx.lifecycle.aside import (
    PACKAGES,
    ask,
    cache_file,
    config_file,
    hash_of,
    keep,
    package_version,
)
from llmx.run import snapshot
from llmx.run.provenance.content import hub_commit

PROGRAM = "llmx.tasks.trial"
TIME_LIMIT_S = 120.0
CODE = (
    "attention", "factory", "heads", "isolation", "loss", "select_attention", "tiny", "trial",
    "varlen",
)  # fmt: skip
"""Modules of ``llmx.models`` that a result depends on."""


def resolve_layout(composed: Composed, *, stream: TextIO) -> Composed:
    """With ``data.layout=padded`` where rows cannot be packed, which a line then says.

    Where they can, ``data.layout=auto`` stays: the ranks try the attention of their own devices,
    now and whenever the run is resumed, and pad the rows if none of it isolates them.

    ConfigError for a model that cannot be trained, and for ``data.layout=packed`` where rows would
    see each other. A plan (``dry_run``) takes what the cache knows, and starts nothing. So does a
    run of one of llmx's own kinds (llama, qwen3, ...): no start is worth seconds of waiting for a
    result that the tests know, and the ranks try it in any case.
    """
    exp, accelerator = composed.experiment, composed.plan.accelerator
    result = cached_result(exp.model, exp.data, exp.task, accelerator=accelerator)
    if result is None and not exp.dry_run and exp.model.kind == "hf":
        result = _run_trial(exp, accelerator=accelerator)
    if result is None:
        return composed
    model = exp.model.path or exp.model.name or exp.model.kind
    if result["problem"]:
        raise ConfigError(f"{model} cannot be trained: {result['problem']}")
    if exp.data.layout == "packed" and not result["packs"]:
        raise ConfigError(
            f"data.layout=packed cannot be used with {model}: {result['why']}. Set "
            "data.layout=auto (or padded)."
        )
    if exp.data.layout == "auto" and not result["packs"]:
        print(f"{model}: rows are not packed (data.layout=auto): {result['why']}.", file=stream)
        padded = dataclasses.replace(exp.data, layout="padded")
        return plan_experiment(dataclasses.replace(composed.asked or exp, data=padded))
    if result["packs"] and result["dense"]:
        return _warn_of_dense_mask(composed)
    return composed


def _warn_of_dense_mask(composed: Composed) -> Composed:
    """A line in the plan for each type of GPU on which only a dense mask isolates packed rows."""
    exp, plan = composed.experiment, composed.plan
    if exp.model.attention != "auto":
        return composed  # sdpa and eager: the plan has said it already
    size = f"{exp.data.seq_len:,} x {exp.data.seq_len:,}"
    found = []
    for device, attention in plan.attention:
        if exp.hardware.devices[device].accelerator != "cuda":
            continue
        # Flex attention takes what the other kernels refuse; it runs where varlen does.
        unless = ", unless flex_attention fits it" if attention == "varlen" else ""
        found.append(
            f"{device}: packed rows are isolated with a mask of {size}, kept for each layer"
            f"{unless}: this model's attention is none that the kernels without a mask compute. "
            "data.layout=padded needs no mask."
        )
    plan = dataclasses.replace(plan, warnings=(*plan.warnings, *found))
    return dataclasses.replace(composed, plan=plan)


def cached_result(
    model: ModelConfig, data: DataConfig, task: TaskConfig, *, accelerator: str
) -> dict[str, Any] | None:
    """``packs``, ``dense``, ``why``, ``problem`` of an earlier trial of the same; None where there
    is none."""
    try:
        result = json.loads(_cached(model, data, task, accelerator).read_text(encoding="utf-8"))
        return {name: result[name] for name in ("packs", "dense", "why", "problem")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _cached(model: ModelConfig, data: DataConfig, task: TaskConfig, accelerator: str) -> Path:
    """Named after all that the result depends on: the config, its switches, packages, our code."""
    models = Path(llmx.__file__).parent / "models"
    parts = {
        "kind": model.kind,
        "path": model.path,
        "revision": model.revision,
        # A branch of the Hub moves: the trial reads the commit that is in the cache.
        "commit": model.path and hub_commit(model.path, kind="models", revision=model.revision),
        "trust_remote_code": model.trust_remote_code,
        "config": model.config,
        "files": config_file(model.path),
        "attention": model.attention,
        "task": [task.kind, task.options, _code_of(task)],
        "layout": data.layout,
        "seq_len": data.seq_len,
        "accelerator": accelerator,
        "packages": {name: package_version(name) for name in PACKAGES},
        "code": hash_of(models / f"{name}.py" for name in CODE),
    }
    return cache_file("trials", parts)


def _code_of(task: TaskConfig) -> dict[str, str]:
    """Of a task of the user's own, which says what the network ends in."""
    found = user_task(task)
    return {} if found is None else code_hashes(found)


def _run_trial(exp: Experiment, *, accelerator: str) -> dict[str, Any] | None:
    """The trial in a process of its own; None where it gives no result."""
    given = snapshot.dump_config(exp)
    result: dict[str, Any] | None = ask(exp, PROGRAM, given, accelerator, timeout_s=TIME_LIMIT_S)
    if result is None or result.get("unknown"):
        return None
    keep(_cached(exp.model, exp.data, exp.task, accelerator), result)
    return result
