"""``python -m llmx pipeline NAME|FILE.yaml``: runs that build on each other, one after another.

Each stage is an ordinary run in a directory of its own; a recipe is a file of ``conf/pipeline``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yaml import MappingNode
from yaml.constructor import BaseConstructor

from llmx.cli.hydra_app import outputs_dir
from llmx.cli.main import main as run_command
from llmx.cli.plan import composed_line
from llmx.cli.words import parse
from llmx.compose.words import Words
from llmx.config.build import shown
from llmx.config.groups import PIPELINES, key_problem
from llmx.config.yaml_files import read_yaml
from llmx.data.source.files import DEMO_DIRECTORY
from llmx.errors import ConfigError, LlmxError, did_you_mean
from llmx.lifecycle.knowledge import informed
from llmx.observe.run import Run
from llmx.observe.status.show import evaluated
from llmx.run.rundir import RunDir, read_mapping, write_json
from llmx.text import duration

RECORD = "pipeline.json"  # the words of each stage
_VALUE = re.compile(r"\$\{(\w+)\}")
_STAGE = re.compile(r"\$\{stage\.(\w+)\}")
_UNSEEN = re.compile(r"(?<![\w/])stage/(\w+)/model\b")


@dataclass(frozen=True)
class Stage:
    """One run of a pipeline. ``words``: what follows ``python -m llmx``, without ``run_dir``."""

    name: str
    words: tuple[str, ...]
    run: RunDir

    def is_finished(self) -> bool:
        return read_mapping(self.run.result).get("outcome") == "ok"

    def command(self) -> list[str]:
        """What starts or continues it."""
        root = self.run.root
        if self.run.config.exists():
            return ["resume", str(root)]
        words = (_STAGE.sub(lambda match: f"{root.parent}/{match[1]}", word) for word in self.words)
        return [*words, f"run_dir={root}"]


def run(words: Words) -> int:
    """Run, or continue, the stages of a recipe; returns the exit code."""
    recipe = words.bare[0] if words.bare else ""
    root = Path(words.own.get("run_dir") or outputs_dir() / "pipelines" / Path(recipe).stem)
    root = root.expanduser().absolute()
    config_dir = ["--config-dir", words.config_dir] if words.config_dir else []
    overrides = [*words.bare[1:], *words.overrides, *config_dir]
    stages = stages_of(recipe, overrides, root)
    check_unchanged(stages, root)
    check_all(stages)
    unfinished = [stage for stage in stages if not stage.is_finished()]
    if words.flag("dry_run"):
        for stage in unfinished:
            print(f"{stage.name}: python -m llmx {shlex.join(stage.command())}")
        print("nothing was started (dry_run=true)")
        return 0
    root.mkdir(parents=True, exist_ok=True)
    write_json(root / RECORD, {"stages": {stage.name: stage.words for stage in stages}})
    code = 0
    for stage in unfinished:
        position = stages.index(stage) + 1
        print(f"[{position}/{len(stages)}] {shlex.join(stage.command())}", flush=True)
        if code := run_command(stage.command()):
            break
    print("\n".join(table(stages)))
    if code:
        print(f"The same command continues it ({root}).")
    return code


def read_recipe(word: str) -> tuple[dict[str, str], dict[str, str]]:
    """The values (``null``: must be given) and the stages of a committed recipe, or of a file."""
    path = Path(word) if word.endswith((".yaml", ".yml")) else PIPELINES / f"{word}.yaml"
    if not path.is_file():
        names = sorted(path.stem for path in PIPELINES.glob("*.yaml"))
        hint = did_you_mean(word, names)
        raise ConfigError(f"no pipeline {shown(word)}.{hint} There are: {', '.join(names)}.")
    node = read_yaml(path)
    # With the text of each value: 1.10 stays 1.10.
    read: Any = BaseConstructor().construct_document(node) if isinstance(node, MappingNode) else {}
    values, stages = read.get("values") or {}, read.get("stages")
    texts = stages.items() if isinstance(stages, dict) else ()
    good = [name for name, line in texts if isinstance(line, str) and name.isidentifier()]
    if not good or len(good) < len(stages) or not isinstance(values, dict):
        raise ConfigError(
            f"{path}: has no stages. Write `stages:` and below it a line for each, e.g. "
            "`sft: task=sft data.path=answers.jsonl` (a name of letters, digits and _, a letter "
            "first); `values:` are names and their defaults."
        )
    return values, stages


def stages_of(recipe: str, overrides: Sequence[str], root: Path) -> list[Stage]:
    """The stages with the words of the command line: ``NAME=VALUE`` of the recipe's values,
    ``STAGE.KEY=VALUE`` for one stage, every other word for all of them."""
    defaults, lines = read_recipe(recipe)
    values = {"demo": str(DEMO_DIRECTORY), **defaults}
    shared: list[str] = []
    for word in overrides:
        key, _, value = word.partition("=")
        if key in defaults:
            values[key] = value
        elif not word.startswith(tuple(f"{name}." for name in lines)):
            stage, _, inside = key.partition(".")
            if key_problem(key) and inside and not key_problem(inside):
                raise ConfigError(
                    f"{word}: no such stage.{did_you_mean(stage, lines)} Stages: "
                    f"{', '.join(lines)}."
                )
            shared.append(word)
    if missing := [f"{name}=..." for name, value in values.items() if value == "null"]:
        raise ConfigError(f"pipeline {Path(recipe).stem} needs {' '.join(missing)}")

    def filled(match: re.Match[str]) -> str:
        return str(values.get(match[1], match[0]))  # a name that is no value is the config's

    stages = []
    for name, line in lines.items():
        filled_in = [_VALUE.sub(filled, word) for word in shlex.split(line)]
        prefix = f"{name}."
        of_stage = [word.removeprefix(prefix) for word in overrides if word.startswith(prefix)]
        last_of_key = {word.partition("=")[0]: word for word in (*filled_in, *shared, *of_stage)}
        stages.append(Stage(name, tuple(last_of_key.values()), RunDir(root / name)))
    return stages


def check_unchanged(stages: Sequence[Stage], root: Path) -> None:
    """ConfigError where a stage has begun with other words, or on a model that is gone."""
    recorded = read_mapping(root / RECORD).get("stages") or {}
    unfinished = ""
    for stage in stages:
        has_begun = stage.run.config.exists()
        differing = sorted({*(recorded.get(stage.name) or ())} ^ {*stage.words})
        if has_begun and differing:
            raise ConfigError(
                f"{stage.run.root}: the stage has begun with other words "
                f"({' '.join(differing)[:300]}). Type the same command, set run_dir=DIR for "
                "another pipeline, or remove the directories of this stage and those after it."
            )
        if has_begun and unfinished:
            raise ConfigError(
                f"{stage.run.root}: the stage has begun, and {unfinished} before it has not "
                "finished. Remove its directory: it was trained on another model."
            )
        unfinished = unfinished or ("" if stage.is_finished() else stage.name)


def check_all(stages: Sequence[Stage]) -> None:
    """Compose and plan every stage; ConfigError for the first one that could not be started."""
    places: dict[str, str] = {}
    for stage in stages:
        named = _STAGE.findall(" ".join(stage.words))
        if missing := [name for name in named if name not in places]:
            raise ConfigError(
                f"stage {stage.name}: ${{stage.{missing[0]}}} is no stage before it with a whole "
                f"model (there are: {', '.join(places) or 'none'}). One that trains an adapter has "
                "none: merge it (python -m llmx export RUN --to merged), and start from that."
            )
        typed = [_STAGE.sub(lambda match: places[match[1]], word) for word in stage.words]
        # Of a model that is still to be trained: the name of one that nobody has seen.
        words = [_UNSEEN.sub(r"stage/\1", word) for word in typed]
        try:
            composed = composed_line(parse("train", words))
            exp = composed.experiment
            # The network itself knows the names of its layers, where it is there already.
            if words == typed and (exp.adapter.kind != "none" or exp.model.freeze):
                informed(composed)
        except LlmxError as error:
            raise type(error)(f"stage {stage.name}: {error}") from error
        if exp.launch.detach or exp.launch.slurm.submit or exp.launch.transport == "external":
            raise ConfigError(
                f"stage {stage.name}: launch.detach, launch.slurm.submit and launch=external end "
                "the command before the run. Leave them out, and use tmux or nohup."
            )
        if exp.adapter.kind == "none":
            root = str(stage.run.root)
            places[stage.name] = root if stage.is_finished() else f"stage/{stage.name}"


def table(stages: Sequence[Stage]) -> Iterator[str]:
    """A line for each stage: its state, how long it took, what its last evaluation measured."""
    yield f"{'stage':<12}  {'state':<12}  {'time':<12}  last evaluation"
    for stage in stages:
        run = Run(stage.run.root)
        took = "-" if run.took_s is None else duration(run.took_s)
        last = ", ".join(evaluated(run)) or run.standing.why
        yield f"{stage.name:<12}  {run.state:<12}  {took:<12}  {last}".rstrip()
