"""From a composed experiment to a complete, validated one with its plan.

    plan_experiment(*complete(experiment_from_dict(values)))

The command line and the launcher plugin both make the hardware explicit, make local paths absolute
and look at them, shorten a trial, check the rules, and plan. A snapshot has the result, so it means
the same on another machine.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmx.compose.networks import network_of, with_network
from llmx.compose.task_rules import (
    drawn_samples,
    model_sources,
    specs,
    specs_beside,
    task_problems,
    task_warnings,
    training_notes,
    with_task_defaults,
)
from llmx.config import (
    EarlyStoppingConfig,
    Experiment,
    HardwareConfig,
    KeepConfig,
    LaunchConfig,
    TaskConfig,
    experiment_from_dict,
    to_dict,
)
from llmx.config.build import shown
from llmx.config.file_formats import files_in, is_saved, known_suffixes, name_problem, type_of
from llmx.config.model_rules import head_problem, length_problem, position_limit
from llmx.config.rollout_rules import with_rollout_hosts
from llmx.config.user_code import with_code_path
from llmx.config.validate import validate
from llmx.errors import ConfigError, did_you_mean
from llmx.hardware.detect import local_names
from llmx.hardware.resolve import resolve_hardware
from llmx.plan import Plan, ds_config, make_plan
from llmx.plan.choices import auto_keys, choose, first_allowed, size_of_a_step
from llmx.plan.knowledge import NO_KNOWLEDGE, Knowledge
from llmx.plan.types import NetworkBeside


@dataclass(frozen=True)
class Composed:
    """An experiment ready to be written down and launched."""

    experiment: Experiment
    """The experiment with plain values in the place of every ``auto``."""
    plan: Plan
    ds_config: dict[str, Any]
    asked: Experiment | None = None
    """The experiment before the plan chose; None where nothing was left to it."""
    knowledge: Knowledge = NO_KNOWLEDGE
    """The facts that the plan rests on."""


def plan_experiment(
    exp: Experiment,
    problems: Sequence[str] = (),
    *,
    is_checked: bool = False,
    knowledge: Knowledge = NO_KNOWLEDGE,
    without: Sequence[Experiment] = (),
) -> Composed:
    """Validate an experiment that is complete already (a snapshot), replace each ``auto`` by the
    fastest value that fits, and plan.

    ``problems``: what completing it has found, to be reported with the rest. ``is_checked``: plan
    alone. ``knowledge``: what this machine and earlier runs have shown; the task adds its own.
    ``without``: variants that ``auto`` must not choose, since they do not fit after all.
    """
    asked = chosen = None
    if auto_keys(exp):

        def allows(variant: Experiment) -> str:
            return refusal(variant, problems, is_typed=True)

        experiment_from_dict(to_dict(exp))  # once for all variants
        size_of_a_step(exp)
        knowledge = _with_task(knowledge, first_allowed(exp, allows))
        asked, (exp, chosen) = exp, choose(exp, knowledge, allows=allows, without=without)
    elif not is_checked:
        check(exp, problems)
    knowledge = _with_task(knowledge, exp)
    plan = make_plan(exp, knowledge)
    notes = (*plan.notes, *task_warnings(exp), *training_notes(exp))
    plan = replace(plan, notes=notes, chosen=chosen)
    return Composed(exp, plan, ds_config(exp.model, exp.zero, exp.optim, plan), asked, knowledge)


def _with_task(knowledge: Knowledge, exp: Experiment) -> Knowledge:
    """The knowledge with the facts of the experiment's task and hosts."""
    return replace(
        knowledge,
        local_names=local_names([*exp.hardware.hosts, *exp.rollout.servers]),
        beside=tuple(
            NetworkBeside(name, spec.precision, spec.precomputes, spec.source, spec.revision)
            for name, spec in specs_beside(exp).items()
        ),
        drawn=drawn_samples(exp),
    )


def refusal(exp: Experiment, problems: Sequence[str] = (), *, is_typed: bool = False) -> str:
    """The message of ``check``; empty where nothing is wrong."""
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
    all_problems = [*problems, *of_task]
    if not of_task:  # else it does not say which networks it has
        all_problems += _network_problems(exp)
    validate(exp, all_problems, position_limit=position_limit(exp.model.network), is_typed=is_typed)


def complete(exp: Experiment) -> tuple[Experiment, list[str]]:
    """Make explicit what the config leaves to this machine: hardware, paths, geometry.

    Also returns one message for each path that cannot be used.
    """
    if exp.hardware.kind == "slurm" and exp.launch.transport == "auto":
        launch = replace(exp.launch, transport="slurm")
        exp = replace(exp, launch=launch)
    hardware = exp.hardware
    if exp.launch.transport == "external":
        if hardware.kind not in ("local", "external"):
            raise ConfigError(
                f"hardware={hardware.name} with launch=external: the hosts are those of the "
                "processes that were started. Leave hardware out."
            )
        hardware = replace(hardware, kind="external", name="external")
    hardware, rollout = with_rollout_hosts(resolve_hardware(hardware), exp.rollout)
    all_here = _all_here(exp.launch, hardware)
    exp, problems = _local_paths(exp, all_here=all_here)
    task, of_task = _with_model_sources(
        with_code_path(exp.task), seq_len=exp.data.seq_len, all_here=all_here
    )
    model = exp.model
    needs_weights, needs_config = model.init == "pretrained" and all_here, model.kind == "hf"
    _, of_model = _model_directory(
        model.path, "model.path", weights=needs_weights, config=needs_config
    )
    if not of_model:
        model, of_model = with_network(model)
    problems += [*of_task, *of_model]
    run_dir = absolute(exp.run_dir) if exp.run_dir else ""
    name = exp.name or (Path(run_dir).name if run_dir else "")
    exp = replace(
        exp,
        name=name,
        run_dir=run_dir,
        model=model,
        task=task,
        hardware=hardware,
        rollout=rollout,
    )
    return with_task_defaults(shortened(with_implied_values(exp))), problems


def _all_here(launch: LaunchConfig, hardware: HardwareConfig) -> bool:
    """Whether every path must exist on this machine: all ranks run here, or its files are brought
    from here."""
    names = local_names(hardware.hosts)
    return launch.sync == "rsync" or all(
        {host.name, host.address} & names for host in hardware.hosts
    )


def with_moved_paths(exp: Experiment, former: Experiment) -> Experiment:
    """The experiment of a run that goes on or is repeated with absolute paths: relative ones start
    in the directory of this command. ``former``: its snapshot, whose paths stay as they are.

    ConfigError for a new path that cannot be used.
    """
    all_here = _all_here(exp.launch, exp.hardware)
    exp, problems = _local_paths(exp, all_here=all_here, former=former)
    if problems:
        raise ConfigError("\n".join(problems))
    code_path = exp.task.code_path and absolute(exp.task.code_path)
    return replace(exp, task=replace(exp.task, code_path=code_path))


def with_implied_values(exp: Experiment) -> Experiment:
    """Set values that follow from others. Groups bring epochs and warmup_fraction; a user who types
    steps means steps."""
    zero, task, optim = exp.zero, exp.task, exp.optim
    if zero.hpz_partition_size == 0 and exp.hardware.hosts:
        zero = replace(zero, hpz_partition_size=exp.hardware.hosts[0].slots)
    if task.steps is not None:
        task = replace(task, epochs=None)
    if optim.warmup_steps is not None:
        optim = replace(optim, warmup_fraction=None)
    return replace(exp, zero=zero, task=task, optim=optim)


def check_paths(exp: Experiment, plan: Plan) -> None:
    """Raise ConfigError for each absolute path that is not here, when all ranks are.

    A path of other hosts may be missing on this machine; their agents see to it.
    """
    missing = [
        _missing(where, path)
        for where, path in _input_paths(exp).items()
        if path and os.path.isabs(path) and not glob.has_magic(path) and not os.path.exists(path)
    ]
    if missing and all(host.is_local for host in plan.hosts):
        raise ConfigError("\n".join(missing))


def _input_paths(exp: Experiment) -> dict[str, str | None]:
    """Key -> the path or the name of each input."""
    data, model = exp.data, exp.model
    return {
        "model.path": model.path,
        "model.tokenizer": model.tokenizer,
        "data.path": None if data.sources else data.path,
        "data.eval_path": data.eval_path,
        **{f"data.sources[{i}].path": source.path for i, source in enumerate(data.sources)},
        **{f"task.options.{name}": path for name, path in model_sources(exp.task).items()},
    }


def _network_problems(exp: Experiment) -> Iterator[str]:
    """Yield a message for each model whose weights end in another head than the task needs."""
    options = {path: f"task.options.{name}" for name, path in model_sources(exp.task).items()}
    for name, spec in specs(exp).items():
        key, path = options.get(spec.source, name), spec.source
        if path is None and spec.trained and exp.model.init == "pretrained":
            key, path = "model.path", exp.model.path
        config, _ = _model_directory(path, key, weights=False, config=False)
        if problem := head_problem(config, spec.head, f"{key}={path}", trained=spec.trained):
            yield problem


def _with_model_sources(
    task: TaskConfig, *, seq_len: int, all_here: bool
) -> tuple[TaskConfig, list[str]]:
    """The task with absolute paths of the models that its options name; and what is wrong."""
    problems: list[str] = []
    options = dict(task.options)
    for name, path in model_sources(task).items():
        where = f"task.options.{name}"
        paths = _Paths(all_here)
        options[name] = paths.model(path, where)
        config, of_directory = _model_directory(options[name], where, weights=all_here, config=True)
        limit = position_limit((not of_directory and network_of(options[name])) or config)
        if problem := length_problem(seq_len, limit, f"{where}={path}"):
            of_directory.append(problem)
        problems += [*paths.problems, *of_directory]
    return replace(task, options=options), problems


def _model_directory(
    path: str | None, where: str, *, weights: bool, config: bool
) -> tuple[dict[str, Any], list[str]]:
    """``config.json`` of a directory on this machine, else empty; and what is wrong. ``weights``,
    ``config``: what must be in it."""
    if not path or not (os.path.isabs(path) and os.path.isdir(path)):
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
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        return {}, [*problems, f"{file}: is not valid JSON ({error}). Is the download complete?"]
    if not isinstance(values, dict):
        return {}, [*problems, f"{file}: must be a JSON object. Is it a model's config?"]
    return values, problems


# ruff: noqa: PTH110, PTH111, PTH112, PTH113, PTH117, PTH119, PTH120, PTH207 - os.path takes any text;
# pathlib raises for long names and for ~nobody


HUB = "hub:"
_DATASET_ID = re.compile(r"[\w.-]+/[\w.-]+")
_MODEL_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_MOST_FILES = 1000
"""Files of a directory or a glob whose names are looked at before a launch; ranks look at all."""


def _local_paths(
    exp: Experiment, *, all_here: bool, former: Experiment | None = None
) -> tuple[Experiment, list[str]]:
    """The experiment with absolute paths of data, model and tracker, and one message for each path
    that cannot be used.

    ``all_here``: every path must exist on this machine. Otherwise an absolute path may exist on the
    other hosts only. ``former``: a snapshot, whose paths are left as they are: a name of the Hub
    may be that of a directory here.
    """
    paths = _Paths(all_here, _input_paths(former).values() if former else ())
    data, model, tracking = exp.data, exp.model, exp.tracking
    data = replace(
        data,
        path=data.path if data.sources else paths.source(data.path, "data.path"),
        eval_path=data.eval_path and paths.source(data.eval_path, "data.eval_path"),
        sources=[
            replace(part, path=paths.source(part.path, f"data.sources[{index}].path"))
            for index, part in enumerate(data.sources)
        ],
        cache_dir=data.cache_dir and absolute(data.cache_dir),
    )
    model = replace(
        model,
        path=model.path and paths.model(model.path, "model.path"),
        tokenizer=model.tokenizer and paths.model(model.tokenizer, "model.tokenizer"),
    )
    tracking = replace(tracking, uri=absolute_store(tracking.uri))
    return replace(exp, data=data, model=model, tracking=tracking), paths.problems


def absolute(path: str) -> str:
    """The absolute path, with ``~`` expanded."""
    return os.path.abspath(os.path.expanduser(path))


def absolute_store(uri: str | None) -> str | None:
    """``tracking.uri``, absolute where it is a directory or a file of SQLite here."""
    if not uri:
        return None
    if uri.startswith("sqlite:///"):
        return f"sqlite:///{absolute(uri.removeprefix('sqlite:///'))}"
    return uri if ":" in uri else absolute(uri)


class _Paths:
    """Collects what is wrong while it makes paths absolute."""

    def __init__(self, all_here: bool, former: Collection[str | None] = ()) -> None:
        self.problems: list[str] = []
        self._all_here = all_here
        self._former = former

    def source(self, path: str, where: str) -> str:
        """Resolve a source of data: a file, a directory, a glob, ``demo``, or a data set of the
        Hub."""
        if path == "demo":
            return path
        if not path:
            self.problems.append(f"{where} is empty. Name a file, a directory or a Hub id.")
            return path
        full = absolute(path)
        if path not in self._former and glob.has_magic(path) and not os.path.exists(full):
            self._check_glob(path, where)
            return full
        resolved = self._resolved(path, where, _DATASET_ID, "data set")
        is_new = self._all_here and path not in self._former
        is_here = is_new and resolved == full and os.path.exists(full)
        if is_here and (problem := _unreadable(Path(full))):
            self.problems.append(f"{where}={shown(path)}: {problem}.")
        return resolved

    def model(self, path: str, where: str) -> str:
        """Resolve a model or a tokenizer: a directory, ``demo``, or an id of the Hub."""
        if path == "demo" and where == "model.tokenizer":
            return path
        resolved = self._resolved(path, where, _MODEL_ID, "model")
        if os.path.isabs(resolved) and os.path.isfile(resolved):
            self.problems.append(
                f"{where}={shown(path)}: is a file. Give the directory that it is in."
            )
        return resolved.removeprefix(HUB)

    def _resolved(self, path: str, where: str, hub_id: re.Pattern[str], noun: str) -> str:
        """The absolute path of what lies here; an id of the Hub as it was typed."""
        if path in self._former:
            return path
        full, name = absolute(path), path.removeprefix(HUB)
        if name != path:  # for an id whose first part is a directory here, too
            if not hub_id.fullmatch(name) and not (noun == "data set" and os.path.exists(name)):
                self.problems.append(
                    f"{where}={shown(path)}: a {noun} of the Hub is {HUB}owner/name."
                )
            return path
        if os.path.exists(full):
            return full
        is_id = hub_id.fullmatch(path) and not path.startswith((".", "~"))
        is_file = noun == "data set" and type_of(Path(path)) is not None
        if is_id and not is_file and ("/" not in path or not os.path.isdir(os.path.dirname(full))):
            return path
        if self._must_exist(path):
            hub = f" A {noun} of the Hub is {HUB}{path}." if is_id else ""
            self.problems.append(_missing(where, path) + hub)
        return full

    def _check_glob(self, path: str, where: str) -> None:
        matches = list(itertools.islice(glob.iglob(absolute(path), recursive=True), _MOST_FILES))
        files = [file for file in map(Path, matches) if file.is_file()]
        unread = next((file for file in files if name_problem(file)), None)
        if unread is not None and self._all_here:
            problem = f"{shown(unread.name)} matches it: {name_problem(unread)}."
        elif not files and self._must_exist(path) and len(matches) < _MOST_FILES:
            problem = f"no file matches it{_seen_from(path)}. Correct it."
        else:
            return
        self.problems.append(f"{where}={shown(path)}: {problem}")

    def _must_exist(self, path: str) -> bool:
        return self._all_here or not os.path.isabs(os.path.expanduser(path))


def _unreadable(place: Path) -> str:
    """The reason why nothing can be read from an existing file or directory, by the names in it."""
    if not place.is_dir():
        return name_problem(place)
    if is_saved(place):
        return ""
    files = list(itertools.islice(files_in(place), _MOST_FILES))
    if not files:
        suffixes = ", ".join(known_suffixes())
        return f"no file in it ends in {suffixes}. Give a directory with such files"
    return next((f"{shown(f.name)} in it: {why}" for f in files if (why := name_problem(f))), "")


def _missing(where: str, path: str) -> str:
    name, parent = os.path.basename(path.rstrip("/")), os.path.dirname(absolute(path))
    suggestion = ""
    if os.path.isdir(parent) and len(name) < 100:
        # What may not be listed suggests nothing.
        with contextlib.suppress(OSError), os.scandir(parent) as entries:
            suggestion = did_you_mean(
                name, [entry.name for entry in itertools.islice(entries, 10_000)]
            )
    at = _seen_from(path)
    word = re.sub(r"\[(\d+)\]", r".\1", where)
    return f"{where}={shown(path)}: no such file or directory{at}.{suggestion} Set {word}=PATH."


def _seen_from(path: str) -> str:
    if os.path.isabs(os.path.expanduser(path)):
        return " on this machine"
    return f" in {Path.cwd()}, where relative paths start"


LINES = 4
"""Lines of ``metrics.jsonl`` after the first: the median of their speeds is the trial's."""


def objective_of(exp: Experiment) -> str:
    """The metric that ranks the trials of a sweep."""
    if exp.sweep.objective is not None:
        return exp.sweep.objective
    if exp.sweep.trial_steps is not None:
        return "tokens_per_s"
    if exp.checkpoint.metric != "auto":
        return exp.checkpoint.metric
    # A task of the user's own is judged so, too (``Task.judged_by``).
    return "eval/loss" if exp.task.evaluate and exp.data.has_eval else "train/loss"


def shortened(exp: Experiment) -> Experiment:
    """The experiment as a short trial trains it; unchanged without ``sweep.trial_steps``.

    The same steps as the whole run has at its beginning: ``task.steps``, and with it the learning
    rates, stay. Shortening twice changes nothing more.
    """
    steps = exp.sweep.trial_steps
    if steps is None:
        return exp
    evaluates = objective_of(exp).startswith("eval/")
    task = replace(
        exp.task,
        stop_at_step=min(steps, exp.task.stop_at_step or steps),
        log_every_steps=max(1, min(exp.task.log_every_steps or steps, steps // LINES)),
        evaluate=evaluates,
        eval_every_steps=steps if evaluates else 0,
        eval_generate=exp.task.eval_generate if evaluates else 0,
        save_model=False,
        early_stopping=EarlyStoppingConfig(),
    )
    checkpoint = replace(
        exp.checkpoint,
        every_steps=None,
        every_minutes=None,
        at_end=False,
        on_signal=False,
        keep=KeepConfig(),
        metric="auto",  # it is not evaluated as the whole run is
        mode="auto",
    )
    # Without a checkpoint a restart begins anew, and what failed once mostly fails again.
    return replace(
        exp, task=task, checkpoint=checkpoint, launch=replace(exp.launch, max_restarts=0)
    )
