"""From composed values to a complete, validated experiment with its plan.

The one road from a config to a run, used by the command line and by the launcher plugin:
type the values, make the hardware explicit, make local paths absolute, check the rules,
plan. What a snapshot holds is the result, so it means the same on another machine.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmx.compose.local_paths import (
    absolute,
    absolute_store,
    is_directory,
    local_paths,
    missing_here,
    model_place,
)
from llmx.compose.short_trial import shortened
from llmx.compose.task_defaults import with_task_defaults
from llmx.compose.task_rules import (
    frozen_specs,
    loss_logits,
    model_sources,
    specs,
    task_problems,
    task_warnings,
)
from llmx.config import (
    DataConfig,
    Experiment,
    ModelConfig,
    TaskConfig,
    experiment_from_dict,
    to_dict,
)
from llmx.config.model_rules import as_typed, head_problem, model_config_problems
from llmx.config.user_code import with_code_path
from llmx.config.validate import validate
from llmx.errors import ConfigError
from llmx.hardware.detect import local_names
from llmx.hardware.resolve import resolve_hardware
from llmx.plan import Plan, ds_config, make_plan
from llmx.plan.adapter import freeze_problems, target_problems
from llmx.plan.choices import (
    KnownFor,
    auto_keys,
    choose,
    first_allowed,
    no_runs,
    size_of_a_step,
)
from llmx.plan.geometry import geometry, model_geometry, position_limit
from llmx.plan.memory import frozen_network
from llmx.plan.trace import Traces
from llmx.plan.types import FrozenNetwork, KnownSpeeds


@dataclass(frozen=True)
class Composed:
    """An experiment ready to be written down and launched."""

    experiment: Experiment
    """With plain values in the place of every ``auto``."""
    plan: Plan
    ds_config: dict[str, Any]
    asked: Experiment | None = None
    """As it was before the plan chose; None where nothing was left to it."""


def compose(values: dict[str, Any]) -> Composed:
    """Type, complete, validate and plan; raises ConfigError with all that is wrong."""
    return compose_experiment(experiment_from_dict(values))


def compose_experiment(exp: Experiment) -> Composed:
    """Complete, validate and plan; raises ConfigError with all that is wrong."""
    return plan_experiment(*complete(exp))


def plan_experiment(
    exp: Experiment,
    problems: Sequence[str] = (),
    *,
    is_checked: bool = False,
    known: KnownSpeeds | None = None,
) -> Composed:
    """Validate and plan an experiment that is complete already (a snapshot).

    ``problems``: what completing it has found, to be reported with the rest. ``is_checked``: plan
    alone. ``known``: what ranks have measured there before.
    """
    if auto_keys(exp):
        return chosen_experiment(exp, problems)
    if not is_checked:
        check(exp, problems)
    plan = make_plan(
        exp,
        local_names=local_names(),
        frozen=_frozen(exp),
        logits=loss_logits(exp),
        known=known,
    )
    plan = dataclasses.replace(plan, notes=(*plan.notes, *task_warnings(exp)))
    return Composed(exp, plan, ds_config(exp.model, exp.zero, exp.optim, plan))


def chosen_experiment(
    exp: Experiment,
    problems: Sequence[str] = (),
    *,
    traces: Traces | None = None,
    without: Sequence[Experiment] = (),
    known: KnownFor = no_runs,
) -> Composed:
    """With the fastest values that fit in the place of ``auto``, and planned.

    ``traces``: of the real micro step; without them by the formula. ``without``: variants that do
    not fit after all. ``known``: what finished runs have shown; without them by assumptions.
    """

    def allows(one: Experiment) -> str:
        return refusal(one, problems, is_typed=True)

    experiment_from_dict(to_dict(exp))  # once for all variants
    size_of_a_step(exp)
    first = plan_experiment(first_allowed(exp, allows), is_checked=True)
    taken, why = choose(
        exp, first.plan, traces or Traces({}), allows=allows, without=without, known=known
    )
    found = plan_experiment(taken, is_checked=True)
    plan = dataclasses.replace(found.plan, chosen=why)
    return dataclasses.replace(found, plan=plan, asked=exp)


def refusal(exp: Experiment, problems: Sequence[str] = (), *, is_typed: bool = False) -> str:
    """What ``check`` says; empty where nothing is wrong."""
    try:
        check(exp, problems, is_typed=is_typed)
    except ConfigError as error:
        return str(error)
    return ""


def check(exp: Experiment, problems: Sequence[str] = (), *, is_typed: bool = False) -> None:
    """Every rule of an experiment that is complete: of its values, of the names in its model, and
    those of its task. Raises ConfigError with all that is wrong, ``problems`` included.
    ``is_typed``: every value has been checked by its field already."""
    if auto_keys(exp):
        first_allowed(exp, lambda one: refusal(one, problems, is_typed=is_typed))
        return
    of_task = task_problems(exp)
    found = [*problems, *of_task]
    if not of_task:  # else it does not say which networks it has
        found += _network_problems(exp)
    validate(exp, found, position_limit=position_limit(exp.model.config), is_typed=is_typed)


def complete(exp: Experiment) -> tuple[Experiment, list[str]]:
    """Make explicit what the config leaves to this machine: hardware, paths, geometry.

    Also returns one message for each path that cannot be used.
    """
    hardware = resolve_hardware(exp.hardware)
    zero = exp.zero
    if zero.hpz_partition_size == 0 and hardware.hosts:
        zero = dataclasses.replace(zero, hpz_partition_size=hardware.hosts[0].slots)
    names = local_names()
    all_here = exp.launch.sync == "rsync" or all(
        {host.name, host.address} & names for host in hardware.hosts
    )
    data, model, problems = local_paths(exp.data, exp.model, all_here=all_here)
    # Groups bring epochs and warmup_fraction; a user who types steps means steps.
    task, optim = with_code_path(exp.task), exp.optim
    task, about = _with_model_sources(task, seq_len=data.seq_len, all_here=all_here)
    problems += about
    if task.steps is not None:
        task = dataclasses.replace(task, epochs=None)
    if optim.warmup_steps is not None:
        optim = dataclasses.replace(optim, warmup_fraction=None)
    # What a local model says of itself wins over nothing, and loses to what the user set.
    found, about = _local_model_config(model, all_here=all_here)
    problems += about
    if model.kind == "hf" and found:
        model = dataclasses.replace(model, config={**found, **model.config})
    model = dataclasses.replace(model, config=as_typed(model.config))
    run_dir = absolute(exp.run_dir) if exp.run_dir else ""
    name = exp.name or (Path(run_dir).name if run_dir else "")
    exp = dataclasses.replace(
        exp,
        name=name,
        run_dir=run_dir,
        model=model,
        data=data,
        task=task,
        zero=zero,
        hardware=hardware,
        optim=optim,
        tracking=dataclasses.replace(exp.tracking, uri=absolute_store(exp.tracking.uri)),
    )
    return shortened(with_task_defaults(exp)), problems


def check_paths(data: DataConfig, model: ModelConfig, task: TaskConfig, plan: Plan) -> None:
    """Raise ConfigError for an absolute path that is not here, when all ranks are.

    A path of other hosts may be missing on this machine; their agents see to it.
    """
    if not all(host.is_local for host in plan.hosts):
        return
    missing = list(missing_here(data, model, task))
    if missing:
        raise ConfigError("\n".join(missing))


def _network_problems(exp: Experiment) -> Iterator[str]:
    """Of the networks of the task: weights that end in another head than it needs, and names of
    the adapter that the trained one does not have."""
    trained_head = ""
    options = {path: f"task.options.{name}" for name, path in model_sources(exp.task).items()}
    for name, spec in specs(exp).items():
        if spec.trained:
            trained_head = trained_head or spec.head
        key, path = options.get(spec.source, name), spec.source
        if path is None and spec.trained and exp.model.init == "pretrained":
            key, path = "model.path", exp.model.path
        config, _ = _model_directory(path, key, weights=False, config=False)
        if problem := head_problem(config, spec.head, f"{key}={path}", trained=spec.trained):
            yield problem
    if not any(model_config_problems(exp.model)):
        yield from target_problems(exp.model, exp.adapter, head=trained_head)
        yield from freeze_problems(exp.model, head=trained_head)


def _frozen(exp: Experiment) -> tuple[FrozenNetwork, ...]:
    """The networks that the task has beside the one that it trains, as far as they are known."""
    found = []
    for name, spec in frozen_specs(exp).items():
        shape = model_geometry(exp.model)
        if spec.source is not None:
            config, _ = _model_directory(spec.source, name, weights=False, config=False)
            shape = geometry(str(config.get("model_type", "")), config)
        found.append(
            frozen_network(
                name,
                shape,
                precision=spec.precision,
                before_training=spec.precomputes,
                source=spec.source,
                revision=spec.revision,
            )
        )
    return tuple(found)


def _with_model_sources(
    task: TaskConfig, *, seq_len: int, all_here: bool
) -> tuple[TaskConfig, list[str]]:
    """The task with absolute paths of the models that its options name; and what is wrong."""
    problems: list[str] = []
    options = dict(task.options)
    for name, path in model_sources(task).items():
        where = f"task.options.{name}"
        options[name], about = model_place(path, where, all_here=all_here)
        config, more = _model_directory(options[name], where, weights=all_here, config=True)
        limit = position_limit(config)
        if limit is not None and seq_len > limit:
            more.append(
                f"data.seq_len={seq_len}, but {where}={path} takes at most {limit} positions. Set "
                f"data.seq_len={limit}."
            )
        problems += [*about, *more]
    return dataclasses.replace(task, options=options), problems


def _local_model_config(model: ModelConfig, *, all_here: bool) -> tuple[dict[str, Any], list[str]]:
    """``config.json`` of a model directory on this machine, else empty; and what is wrong."""
    return _model_directory(
        model.path,
        "model.path",
        weights=model.init == "pretrained" and all_here,
        config=model.kind == "hf",
    )


def _model_directory(
    path: str | None, where: str, *, weights: bool, config: bool
) -> tuple[dict[str, Any], list[str]]:
    """``config.json`` of a directory on this machine, else empty; and what is wrong. ``weights``,
    ``config``: what must be in it."""
    if not path or not is_directory(path):
        return {}, []
    problems = []
    directory = Path(path)
    found_weights = any(any(directory.glob(pattern)) for pattern in ("*.safetensors", "*.bin"))
    if weights and not found_weights:
        scratch = (
            "Set model.init=scratch to train from its config alone."
            if where == "model.path"
            else "Give the directory that has them."
        )
        problems.append(
            f"{where}={directory}: no weights there (*.safetensors or *.bin). {scratch}"
        )
    file = directory / "config.json"
    if not file.is_file():
        if config and (directory / "adapter_config.json").is_file():
            problems.append(
                f"{where}={directory}: holds an adapter, not a model. Merge it first (of a run "
                "of llmx: python -m llmx export RUN --to merged), and give the directory that is "
                "written."
            )
        elif config:
            problems.append(
                f"{where}={directory}: no config.json there, so it is no Hugging Face model. "
                "Give the directory that has one."
            )
        return {}, problems
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        return {}, [*problems, f"{file}: is not valid JSON ({error}). Is the download complete?"]
    if not isinstance(found, dict):
        return {}, [*problems, f"{file}: must be a JSON object. Is it a model's config?"]
    return found, problems
