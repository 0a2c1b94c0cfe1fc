"""``task.eval_metrics``: what of completions is measured while training, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmx.config import TaskConfig
from llmx.config.schema import COMPLETION_METRICS
from llmx.config.user_code import code_hashes, user_code
from llmx.data import EvalPrompt
from llmx.errors import ConfigError
from llmx.lifecycle.resume.changes import SAME, rule_of
from llmx.run.metrics.completions import DECLARED, METRICS
from llmx.tasks.pretrain import Pretrain
from llmx.tasks.sft import Sft
from tests.composing import composed

OWN = "own_eval_metrics_of_a_test"
PROMPTS = [EvalPrompt((1,), "?", "a b c", 3), EvalPrompt((1,), "?", "d", 1)]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of the user's, in the directory where the command is typed."""
    (tmp_path / f"{OWN}.py").write_text(
        "def length(completions, references):\n"
        "    return sum(map(len, completions)) / len(completions)\n"
        "def two(completions, references):\n"
        "    return {'one': 1, 'other': 2}\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_names_are_those_of_the_metrics() -> None:
    assert tuple(METRICS) == COMPLETION_METRICS == tuple(DECLARED)
    assert rule_of("task.eval_metrics").effect == SAME


def test_what_is_measured_and_how_it_is_called(own: Path) -> None:
    exp = composed(["hardware=cpu2"]).experiment

    def sft(**values: Any) -> Sft:
        return Sft(replace(exp, task=TaskConfig(**values)), None)

    task = sft(eval_generate=2, eval_metrics=["rougeL", f"{OWN}:length"])
    found = task.score(PROMPTS, ["a b", "d"])
    assert found == {"rougeL": pytest.approx(0.9), "length": 2.0}
    assert found.keys() == task.metrics.keys()
    assert sft().score(PROMPTS, ["a b", "d"]) == {"exact_match": 0.5}
    assert task.score([], []) == {}
    assert sft(eval_metrics=["rougeL"]).metrics == {}
    task = sft(eval_generate=2, eval_metrics=[f"{OWN}:two"])
    with pytest.raises(ConfigError, match=r"returned several numbers \(one, other\)"):
        task.score(PROMPTS, ["a b", "d"])


def test_code_of_ones_own_is_found_while_composing_and_not_imported(own: Path) -> None:
    metric = f"{OWN}:length"
    words = ["hardware=cpu2", "task.eval_generate=8", f"task.eval_metrics=[rougeL,'{metric}']"]
    (own / f"{OWN}.py").write_text("raise RuntimeError('imported')\n")
    exp = composed(words).experiment
    assert exp.task.code_path == str(own)
    (code,) = user_code(exp.task)
    assert (code.root, list(code_hashes(code))) == (own, [f"{OWN}.py"])
    with pytest.raises(ConfigError, match="does not say which direction is better"):
        composed([*words, "checkpoint.metric=eval/length"])
    assert composed([*words, "checkpoint.metric=eval/length", "checkpoint.mode=max"]).plan
    assert composed([*words, "checkpoint.metric=eval/rougeL"]).plan


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["task.eval_metrics=[rouge]"], "must be exact_match, rouge1, rouge2, rougeL, or a func"),
        (["task.eval_metrics=['no_such:f']"], "eval_metrics: no_such:f: there is no module"),
        (["task.eval_metrics=[rougeL]", "task.eval_generate=0"], "Set task.eval_generate=32"),
        (["task.eval_metrics=[rougeL,rougeL]"], "two are called rougeL"),
        (["task=pretrain", "task.eval_metrics=[rougeL]"], "task pretrain completes no prompts"),
        (["checkpoint.metric=eval/rougeL"], "task sft does not measure it here"),
    ],
)
def test_what_cannot_be_measured_is_said(words: list[str], message: str, own: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        composed(["hardware=cpu2", "task.eval_generate=8", *words])
    assert message in str(caught.value)


def test_completions_of_a_task_that_makes_none_are_a_warning(monkeypatch) -> None:
    """Where they were asked for: the demo asks for its own task alone."""

    def warnings(*words: str) -> list[str]:
        plan = composed(["hardware=cpu2", *words]).plan
        return [text for text in plan.warnings if "eval_generate" in text]

    own = ["model=tiny", "data=demo", "batch.global_batch=8", "batch.micro_batch=2"]
    assert warnings(*own, "task=pretrain", "task.eval_generate=8") == [
        "task.eval_generate=8 has no effect: task pretrain completes no prompts. Set "
        "task.eval_generate=0."
    ]
    assert not warnings("experiment=demo", "task=pretrain")
    assert not warnings(*own, "task=sft", "task.eval_generate=8")
    monkeypatch.setattr(Pretrain, "eval_prompts", lambda self: [])
    assert not warnings(*own, "task=pretrain", "task.eval_generate=8")


def test_code_in_two_directories_is_refused(
    own: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "own_task_of_a_test.py").touch()
    monkeypatch.syspath_prepend(other)
    words: list[Any] = [
        "hardware=cpu2",
        "task.kind=own_task_of_a_test:Task",
        "task.eval_generate=8",
    ]
    with pytest.raises(ConfigError, match="Put it into one directory, task.code_path"):
        composed([*words, f"task.eval_metrics=['{OWN}:length']"])
