"""``python -m llmx pipeline NAME|FILE.yaml``: runs that build on each other, one after another.

    python -m llmx pipeline rlhf_demo                         # conf/pipeline/rlhf_demo.yaml
    python -m llmx pipeline rlhf model=Qwen/Qwen3-0.6B sft=a.jsonl reward=b.jsonl ppo=c.jsonl

Each stage is an ordinary run in a directory of its own. The same command, typed again, skips the
stages that have finished, and resumes the one that was interrupted. All stages are composed and
planned before the first one starts.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from llmx.cli.arguments import read_line
from llmx.cli.plan import composed_line
from llmx.cli.queue import Entry, run_all
from llmx.config.build import shown
from llmx.config.groups import PIPELINES, split_config_dirs
from llmx.config.yaml_files import read_yaml
from llmx.data.source.files import DEMO_DIRECTORY
from llmx.errors import INTERRUPTED, ConfigError, LlmxError, did_you_mean
from llmx.observe.status.observer import Observer
from llmx.observe.status.view import View, interpret
from llmx.run.rundir import RunDir, read_mapping, write_json
from llmx.text import duration, number

RECORD = "pipeline.json"
"""In the directory of a pipeline: the words of each stage."""
_REFERENCE = re.compile(r"\$\{(stage\.)?(\w+)\}")
_UNSEEN = re.compile(r"(?<![\w/])stage/(\w+)/model\b")
FINISHED = "finished"


@dataclass(frozen=True)
class Stage:
    """One run of a pipeline."""

    name: str
    words: tuple[str, ...]
    """What follows ``python -m llmx``, without ``run_dir``; ``${stage.NAME}`` is in them."""
    run: RunDir

    def typed(self, directories: Mapping[str, str]) -> list[str]:
        """The words with a directory, or what stands for one, in the place of each stage."""
        return [_REFERENCE.sub(lambda match: directories[match[2]], word) for word in self.words]

    def view(self) -> View | None:
        """The state of its run; None where it has not begun."""
        return interpret(Observer(str(self.run.root)).facts()) if self.run.config.exists() else None


@dataclass(frozen=True)
class Recipe:
    """The file of a pipeline."""

    name: str
    values: dict[str, str | None]
    """What its words name as ``${NAME}``; None where it must be given."""
    stages: dict[str, list[str]]


def main(words: Sequence[str]) -> int:
    """Run, or continue, the stages of a recipe; returns the exit code."""
    names = sorted(path.stem for path in PIPELINES.glob("*.yaml"))
    if not words or "=" in words[0] or words[0].startswith("-"):
        raise ConfigError(f"pipeline needs a name or a YAML file. There are: {', '.join(names)}.")
    recipe = read_recipe(words[0], names)
    directories, overrides = split_config_dirs(words[1:])
    settings = dict(
        word.split("=", 1) for word in overrides if word.startswith(("run_dir=", "dry_run="))
    )
    overrides = [word for word in overrides if word.partition("=")[0] not in settings]
    outputs = Path(os.environ.get("LLMX_OUTPUTS") or "outputs")
    root = (
        Path(settings.get("run_dir") or outputs / "pipelines" / recipe.name).expanduser().absolute()
    )
    options = [word for path in directories for word in ("--config-dir", str(path))]
    stages = stages_of(recipe, overrides, root, options=options)
    check_unchanged(stages, root)
    check_all(stages)
    paths = {stage.name: str(stage.run.root) for stage in stages}
    entries = {stage.name: Entry(_command(stage, paths)) for stage in stages}
    if settings.get("dry_run") == "true":
        for stage in stages:
            words = entries[stage.name].words
            command = f"python -m llmx {shlex.join(words)}" if words else "has finished"
            print(f"{stage.name}: {command}")
        print("nothing was started (dry_run=true)")
        return 0
    root.mkdir(parents=True, exist_ok=True)
    record = {"recipe": recipe.name, "stages": {stage.name: stage.words for stage in stages}}
    write_json(root / RECORD, record)
    todo = [entry for entry in entries.values() if entry.words]
    stopped = run_all(todo, stop_at_failure=True)
    print("\n".join(table(stages, root)))
    codes = [entry.code for entry in todo if entry.code]
    if stopped or codes:
        print(f"The same command continues it ({root}).")
    return INTERRUPTED if stopped else next(iter(codes), 0)


def read_recipe(word: str, names: Sequence[str]) -> Recipe:
    """A committed recipe by its name, or a file; ConfigError for what is none."""
    path = Path(word) if word.endswith((".yaml", ".yml")) else PIPELINES / f"{word}.yaml"
    if not path.is_file():
        hint = did_you_mean(word, names)
        raise ConfigError(f"no pipeline {shown(word)}.{hint} There are: {', '.join(names)}.")
    node = read_yaml(path)
    sections = dict(_sections(node)) if isinstance(node, yaml.MappingNode) else {}
    values, stages = sections.get("values", {}), sections.get("stages", {})
    lines = {name: line for name, line in stages.items() if isinstance(line, str)}
    if not lines or lines != stages:
        raise ConfigError(
            f"{path}: has no stages. Write `stages:` and below it a line for each, e.g. "
            "`sft: task=sft data.path=answers.jsonl`; `values:` are names and their defaults."
        )
    words = {name: shlex.split(line) for name, line in lines.items()}
    for name in words:
        if not re.fullmatch(r"\w+", name):
            raise ConfigError(
                f"{path}: the stage {shown(name)} must have a name of letters, digits and _ (its "
                "directory has it)."
            )
    earlier: list[str] = []
    for name, of_stage in words.items():
        for is_stage, stage in _REFERENCE.findall(" ".join(of_stage)):
            if is_stage and stage not in earlier:
                raise ConfigError(
                    f"{path}: the stage {name} names ${{stage.{stage}}}, which is no stage before "
                    f"it. Stages before it: {', '.join(earlier) or 'none'}."
                )
        earlier.append(name)
    return Recipe(path.stem, values, words)


def _sections(node: yaml.MappingNode) -> Iterator[tuple[str, dict[str, Any]]]:
    """The mappings of a file with their values as they are written (``1.10``); None for null."""
    for section, pairs in node.value:
        if isinstance(pairs, yaml.MappingNode):
            yield (
                section.value,
                {
                    key.value: None if item.tag.endswith(":null") else item.value
                    for key, item in pairs.value
                },
            )


def stages_of(
    recipe: Recipe, overrides: Sequence[str], root: Path, *, options: Sequence[str] = ()
) -> list[Stage]:
    """The stages with the words of the command line: ``NAME=VALUE`` of the recipe's values,
    ``STAGE.KEY=VALUE`` for one stage, every other word for all of them."""
    values = {"demo": str(DEMO_DIRECTORY), **recipe.values}
    of_stage: dict[str, list[str]] = {name: [] for name in recipe.stages}
    shared: list[str] = []
    for word in overrides:
        key, equal, value = word.partition("=")
        stage, dot, word_of_stage = word.partition(".")
        if equal and key in recipe.values:
            values[key] = value
        elif dot and stage in of_stage and equal:
            of_stage[stage].append(word_of_stage)
        else:
            shared.append(word)
    if missing := [name for name, value in values.items() if value is None]:
        example = " ".join(f"{name}=..." for name in missing)
        raise ConfigError(f"pipeline {recipe.name} needs {example}")

    def given(match: re.Match[str]) -> str:
        """A value of the recipe; a stage, and what the config resolves, stay as they are."""
        value = None if match[1] else values.get(match[2])
        return match[0] if value is None else value

    stages = []
    for name, words in recipe.stages.items():
        filled_in = [_REFERENCE.sub(given, word) for word in words]
        last_of_key = {
            word.partition("=")[0]: word for word in (*filled_in, *shared, *of_stage[name])
        }
        run = RunDir(root / name)
        stages.append(Stage(name, (*options, *last_of_key.values()), run))
    return stages


def check_unchanged(stages: Sequence[Stage], root: Path) -> None:
    """ConfigError where a stage has begun with other words, or on the model of a stage that is no
    longer there."""
    recorded = read_mapping(root / RECORD).get("stages") or {}
    unfinished = ""
    for stage in stages:
        view = stage.view()
        then = recorded.get(stage.name) or []
        if view is not None and sorted(then) != sorted(stage.words):
            differing = sorted({*then} ^ {*stage.words})
            raise ConfigError(
                f"{stage.run.root}: the stage has begun with other words "
                f"({' '.join(differing)[:300]}). Type the same command, or set run_dir=DIR for "
                "another pipeline; to train this stage and those after it anew, remove their "
                "directories."
            )
        if view is not None and unfinished:
            raise ConfigError(
                f"{stage.run.root}: the stage has begun, and {unfinished} before it has not "
                "finished. Remove its directory: it was trained on another model."
            )
        if view is None or view.state != FINISHED:
            unfinished = unfinished or stage.name


def check_all(stages: Sequence[Stage]) -> None:
    """Compose and plan every stage; ConfigError for the first one that could not be started. In the
    place of a model that is still to be trained stands the name of one that nobody has seen."""
    adapters: set[str] = set()
    for stage in stages:
        words = [_UNSEEN.sub(r"stage/\1", word) for word in stage.typed(_places(stages))]
        for is_stage, name in _REFERENCE.findall(" ".join(stage.words)):
            if is_stage and name in adapters:
                raise ConfigError(
                    f"stage {stage.name}: builds on the model of {name}, which trains an adapter "
                    "and leaves no whole model. Train it without adapter=..., or merge it by hand "
                    "(python -m llmx export RUN --to merged) and start the next run from there."
                )
        try:
            exp = composed_line(read_line(words)).experiment
        except LlmxError as error:
            raise type(error)(f"stage {stage.name}: {error}") from error
        if exp.launch.detach or exp.launch.supervisor or exp.launch.slurm.submit:
            raise ConfigError(
                f"stage {stage.name}: launch.detach, launch.supervisor and launch.slurm.submit end "
                "the command before the run has. Leave them out, and start the pipeline in tmux or "
                "with nohup."
            )
        if exp.adapter.kind != "none":
            adapters.add(stage.name)


def _places(stages: Sequence[Stage]) -> dict[str, str]:
    """The directory of each stage; of one that is still to be trained a name without one."""
    views = {stage: stage.view() for stage in stages}
    return {
        stage.name: str(stage.run.root)
        if view and view.state == FINISHED
        else f"stage/{stage.name}"
        for stage, view in views.items()
    }


def _command(stage: Stage, paths: Mapping[str, str]) -> list[str]:
    """What starts or continues a stage; empty where it has finished."""
    view = stage.view()
    if view is None:
        return [*stage.typed(paths), f"run_dir={stage.run.root}"]
    return [] if view.state == FINISHED else ["resume", str(stage.run.root)]


def table(stages: Sequence[Stage], root: Path) -> list[str]:
    """A line for each stage: its state, how long it took, what its last evaluation measured."""
    rows = [("stage", "state", "time", "last evaluation")]
    for stage in stages:
        view = stage.view()
        if view is None:
            rows.append((stage.name, "not started", "-", ""))
            continue
        measured = [] if view.eval_loss is None else [f"loss {number(view.eval_loss)}"]
        measured += [f"{title} {value}" for title, value in view.eval_metrics]
        took = "-" if view.took_s is None else duration(view.took_s)
        rows.append((stage.name, view.state, took, ", ".join(measured) or view.why))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join([*(f"{row[i]:<{widths[i]}}" for i in range(3)), row[3]]) for row in rows]
    return [line.rstrip() for line in lines]
