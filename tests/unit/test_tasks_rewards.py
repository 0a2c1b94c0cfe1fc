"""Rewards: built-in ones, functions of the user's own, and what they do wrong."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from llmx.errors import ConfigError
from llmx.tasks.rewards import (
    MATH,
    NO_VALUE,
    Outcome,
    Scored,
    all_outcomes,
    outcome,
    reward_functions,
    reward_problems,
)
from llmx.tasks.rollout_options import RolloutOptions

SLOW = ("sleeps", "swallows", "backtracks")


def functions(*names: str, pattern: str | None = None) -> Any:
    return reward_functions(
        RolloutOptions(rewards=list(names), max_new_tokens=20, overlong_buffer=10, format=pattern)
    )


def value(name: str, completion: str = "", *, reference: str = "", tokens: int = 0, **more: Any):
    (function,) = functions(name, **more).values()
    return outcome(function, Scored("", completion, reference, tokens), limit_s=5)


def test_built_in_rewards() -> None:
    assert value("exact_match", " 42\n", reference="42").value == 1
    assert value("exact_match", "43", reference="42").value == 0
    pattern = "<think>.*</think>.+"
    assert value("format", "<think>a\nb</think>c", pattern=pattern).value == 1
    assert value("format", "x<think>a</think>c", pattern=pattern).value == 0
    assert value("length", tokens=5).value == 0.25


def test_overlong_is_that_of_trl() -> None:
    rewards = pytest.importorskip("trl.rewards")
    theirs = rewards.get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=10)
    lengths = range(1, 21)
    wanted = theirs(completion_ids=[[0] * length for length in lengths])
    assert [value("overlong", tokens=length).value for length in lengths] == wanted


def test_functions_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(
        "import time, re, numpy\n"
        "def right(prompt, completion, reference):\n"
        "    return (prompt, completion, reference) == ('p', 'c', 'r')\n"
        "def array(prompt, completion, reference): return numpy.float32(0.5)\n"
        "def raises(prompt, completion, reference): return 1 / 0\n"
        "def none(prompt, completion, reference): return None\n"
        "def nan(prompt, completion, reference): return float('nan')\n"
        "def leaves(prompt, completion, reference): raise SystemExit(3)\n"
        "def sleeps(prompt, completion, reference): time.sleep(600)\n"
        "def swallows(prompt, completion, reference):\n"
        "    while True:\n"
        "        try: time.sleep(600)\n"
        "        except Exception: pass\n"
        "def backtracks(prompt, completion, reference):\n"
        "    return re.fullmatch('(a|a)*b', 'a' * 60) is None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    names = re.findall(r"def (\w+)", (tmp_path / "my_rewards.py").read_text())
    rewards, by_name = functions(*(f"my_rewards:{name}" for name in names)), {}
    for name, reward in rewards.items():
        limit_s = 0.2 if name in SLOW else 60
        ((by_name[name],),) = all_outcomes(
            {name: reward}, [Scored("p", "c", "r", 1)], limit_s=limit_s
        )
    assert (by_name["right"].value, by_name["array"].value) == (1.0, 0.5)
    problems = {name: each.problem for name, each in by_name.items() if each.value is None}
    raised = r"it raised ZeroDivisionError: division by zero \(.*my_rewards.py, line 5\)"
    assert re.match(raised, problems.pop("raises"))
    assert "SystemExit: 3" in problems.pop("leaves")
    assert problems == {
        "none": NO_VALUE,
        "nan": "it returned nan, which is not a finite number.",
        **dict.fromkeys(SLOW, "it took more than 0.2 s (task.options.reward_timeout_s)."),
    }
    sys.modules.pop("my_rewards")
    with pytest.raises(ConfigError, match="my_rewards:absent cannot be imported: AttributeError"):
        functions("my_rewards:absent")


def two(prompt: str, completion: str) -> float:
    return 1.0


async def later(prompt: str, completion: str, reference: str) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("name", "problem"),
    [("two", r"two\(prompt.*too many positional arguments"), ("later", "later is async")],
)
def test_functions_that_cannot_be_rewards_are_refused(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        functions(f"{__name__}:{name}")


def test_none_of_one_among_several_is_no_failure() -> None:
    rewards = {
        "a": lambda row: 1.0 if "list" in row.prompt else None,
        "b": lambda row: 2.0 if "poem" in row.prompt else None,
    }
    rows = [Scored(prompt, "", "", 1) for prompt in ("list", "poem", "none")]
    none, of_a, of_b = Outcome(None), Outcome(1.0), Outcome(2.0)
    silent = [Outcome(None, NO_VALUE)] * 2
    assert all_outcomes(rewards, rows, limit_s=60) == [[of_a, none], [none, of_b], silent]
    assert all_outcomes(rewards, rows[2:], limit_s=60, may_abstain=True) == [[none, none]]


def test_math_verify_is_needed_where_it_is_used() -> None:
    if importlib.util.find_spec(MATH) is None:
        (problem,) = reward_problems(RolloutOptions(rewards=[MATH]))
        assert "pip install math-verify" in problem
        return
    assert value(MATH, "so the answer is $\\boxed{0.5}$", reference="$\\frac{1}{2}$").value == 1
    assert value(MATH, "so the answer is $\\boxed{0.6}$", reference="$\\frac{1}{2}$").value == 0
    assert value(MATH, "1", reference="no number").value is None
