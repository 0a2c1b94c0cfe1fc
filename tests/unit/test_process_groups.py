"""Every process group of llmx has all ranks: with a bound device, one of some ranks is a hang."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import llmx

SOURCES = sorted(Path(llmx.__file__).parent.rglob("*.py"))


def new_groups() -> Iterator[tuple[Path, ast.Call]]:
    """Every call of ``new_group`` in the package."""
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "new_group" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("new_group"):
                yield path, node


def test_no_group_of_some_ranks() -> None:
    calls = list(new_groups())
    assert calls
    for path, call in calls:
        names = {keyword.arg for keyword in call.keywords}
        assert not call.args, f"{path}:{call.lineno}"
        assert "ranks" not in names, f"{path}:{call.lineno}"
        assert "timeout" in names, f"{path}:{call.lineno}: the default is half an hour"


def test_the_time_out_of_collectives_is_the_configured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's own is 10 minutes, in which rank 0 may still be writing a model."""
    import deepspeed

    from llmx.plan import make_plan
    from llmx.train.engine.process_group import join_process_group
    from tests.rundirs import experiment

    given: dict[str, object] = {}
    monkeypatch.setattr(deepspeed, "init_distributed", lambda **keywords: given.update(keywords))
    monkeypatch.setenv("LOCAL_RANK", "0")
    exp = experiment(Path("/runs/test"), ranks=1)
    join_process_group(make_plan(exp), timeout_s=exp.launch.comm_timeout_s)
    assert given["timeout"] == timedelta(hours=4)
    join_process_group(make_plan(exp), timeout_s=90)
    assert given["timeout"] == timedelta(seconds=90)
