"""Stages that build on each other: what each is started with, and what is refused before the
first."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from llmx.cli import pipeline
from llmx.cli.pipeline import (
    PIPELINES,
    Stage,
    check_all,
    check_unchanged,
    read_recipe,
    stages_of,
    table,
)
from llmx.cli.words import parse
from llmx.errors import ConfigError
from llmx.run.rundir import RunDir, write_json
from tests.rundirs import experiment, write_run

NAMES = sorted(path.stem for path in PIPELINES.glob("*.yaml"))
TWO = """
values: {file: null, rate: 1e-3}
stages:
  first: model=tiny data.path=${file} optim.lr=${rate}
  second: model.path=${stage.first}/model data.path=demo launch.env.HOME=${oc.env:HOME}
"""


def recipe(tmp_path: Path, text: str = TWO) -> str:
    path = tmp_path / "two.yaml"
    path.write_text(text)
    return str(path)


def staged(tmp_path: Path, *overrides: str, text: str = TWO) -> list[Stage]:
    return stages_of(recipe(tmp_path, text), overrides, tmp_path / "runs")


def test_values_words_for_all_and_words_for_one_stage(tmp_path: Path) -> None:
    stages = staged(tmp_path, "file=a b.jsonl", "seed=3", "second.optim.lr=0.5", "first.seed=4")
    assert {stage.name: shlex.join(stage.words) for stage in stages} == {
        "first": "model=tiny 'data.path=a b.jsonl' optim.lr=1e-3 seed=4",
        "second": "'model.path=${stage.first}/model' data.path=demo "
        "'launch.env.HOME=${oc.env:HOME}' seed=3 optim.lr=0.5",
    }
    # A value is the text of the file.
    text = (
        "values: {revision: 1.10, part: 007}\nstages: {a: 'model.revision=${revision} x=${part}'}"
    )
    assert list(staged(tmp_path, text=text)[0].words) == ["model.revision=1.10", "x=007"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stages: []", "has no stages"),
        ("[1", r"two\.yaml, line 1: the \[ is not closed"),
        ("stages: {a: [x]}", "has no stages"),
        ("stages: {../a: x}", "has no stages.*a name of letters"),
        (TWO, r"pipeline two needs file=\.\.\."),
    ],
)
def test_a_file_that_is_no_recipe_or_lacks_a_value(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        staged(tmp_path, text=text)
    with pytest.raises(ConfigError, match=r'no such stage\. Did you mean "second"\? Stages: first'):
        staged(tmp_path, "file=a", "secnd.optim.lr=1")
    with pytest.raises(ConfigError, match=r"no pipeline rlfh\. Did you mean .rlhf"):
        read_recipe("rlfh")


@pytest.mark.parametrize("name", NAMES)
def test_every_committed_recipe_can_be_started(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = yaml.safe_load((PIPELINES / f"{name}.yaml").read_text())
    for value in content.get("values") or {}:
        Path(f"{value}.jsonl").write_text("{}\n")
    given = [
        f"{value}={'some/model' if value == 'model' else f'{value}.jsonl'}"
        for value in content.get("values") or {}
    ]
    assert pipeline.run(parse("pipeline", [name, *given, "dry_run=true", "run_dir=runs"])) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:-1]] == list(content["stages"])
    assert f"model.path={tmp_path}/runs/sft/model" in lines[1]
    assert not Path("runs").exists()


ADAPTER = """stages:
    a: model.path=some/model adapter=lora data.path=demo
    b: model.path=${stage.a}/model data.path=demo"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stages: {a: model=tiny, b: 'model.path=${stage.a}/model task=grpo optim.lr=-1'}",
         r"stage b: optim\.lr=-1"),
        (ADAPTER, r"stage b: \$\{stage\.a\} is no stage .*an adapter has"),
        ("stages: {a: 'model.path=${stage.b}', b: y}", r"stage a: .*stage\.b.*there are: none"),
        ("stages: {a: model=tiny, b: 'model.path=${stage.c}'}", r"b: .*stage\.c.*there are: a\)"),
        # It would end before its run does.
        ("stages: {a: launch.detach=true}", r"stage a: launch\.detach"),
    ],
)  # fmt: skip
def test_what_a_stage_cannot_start_with_is_found_before_the_first(
    text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_all(staged(tmp_path, text=text))


def begun(stages: list[Stage], root: Path, *, name: str, outcome: str) -> None:
    """Leave what a run of this stage leaves."""
    run = RunDir(root / name)
    write_run(experiment(run.root))
    write_json(run.result, {"outcome": outcome, "cause": "Ctrl-C", "started": 1, "ended": 61})
    run.metrics.write_text(
        '{"kind": "start", "step": 0, "time": 1}\n'
        '{"kind": "eval", "step": 9, "time": 60, "loss": 0.25}\n'
    )
    words = {stage.name: list(stage.words) for stage in stages}
    write_json(root / pipeline.RECORD, {"stages": words})


def test_the_same_command_continues(tmp_path: Path) -> None:
    stages, root = staged(tmp_path, "file=demo"), tmp_path / "runs"
    begun(stages, root, name="first", outcome="ok")
    check_unchanged(stages, root)
    assert [stage.is_finished() for stage in stages] == [True, False]
    command = stages[1].command()
    assert (command[0], command[-1]) == (f"model.path={root}/first/model", f"run_dir={root}/second")
    begun(stages, root, name="second", outcome="interrupted")
    check_unchanged(stages, root)
    assert stages[1].command() == ["resume", f"{root}/second"]
    lines = list(table(stages))
    assert [line.split()[:2] for line in lines[1:]] == [
        ["first", "finished"], ["second", "interrupted"],
    ]  # fmt: skip
    assert lines[1].endswith("loss 0.2500")


def test_other_words_are_refused_for_a_stage_that_has_begun(tmp_path: Path) -> None:
    stages, root = staged(tmp_path, "file=demo"), tmp_path / "runs"
    begun(stages, root, name="first", outcome="interrupted")
    assert not (root / "first" / "model").exists()
    check_all(stages)  # that of the second stage is not there yet
    check_unchanged(staged(tmp_path, "file=demo", "second.seed=1"), root)
    with pytest.raises(ConfigError, match=r"first: the stage has begun with other words \(seed=1"):
        check_unchanged(staged(tmp_path, "file=demo", "seed=1"), root)
    # A stage on the model of one that is gone.
    (root / "first").rename(tmp_path / "gone")
    begun(stages, root, name="second", outcome="ok")
    with pytest.raises(ConfigError, match="second: the stage has begun, and first before it"):
        check_unchanged(stages, root)
