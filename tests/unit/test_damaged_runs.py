"""A run directory with a damaged file is one line, not a traceback; more by the fuzz."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmx.cli.main import run_here
from llmx.errors import ConfigError
from llmx.observe.page.run import run_page
from llmx.observe.report.run_data import load_run
from llmx.run.metrics.declared import RESERVED
from llmx.run.rundir import RunDir, read_json, write_json
from llmx.run.tail import SHAPES
from tests import tracked_run
from tests.rundirs import experiment, write_run
from tests.unit.test_serve_command import write_model


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = tracked_run.write_start(tmp_path / "run")
    tracked_run.append(run, tracked_run.lines())
    return run


def test_a_value_of_another_kind(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = read_json(run.plan)
    write_json(run.plan, {**plan, "batch": {**plan["batch"], "accumulation": "x"}})
    for command in ("report", "status", "compare"):
        other = [str(tracked_run.write_start(tmp_path / "other").root)] * (command == "compare")
        assert run_here(command, [str(run.root), *other]) in (0, 1)
        printed = " ".join(capsys.readouterr().out.split())
        assert "plan.json has a value that llmx does not write" in printed
        assert "batch.accumulation is 'x'" in printed


WRONG_KINDS = {
    "rows": 5, "outcome": 5, "hosts": 5, "tables": 5, "train": 5, "wandb": 5, "loss": "x",
    "cause": 5, "name": [], "rewards": 5,
}  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [b"{\n", bytes(range(256)), b"[1, 2]\n", b'"x"\n', json.dumps(WRONG_KINDS).encode() + b"\n"],
)
def test_each_damaged_file_is_named_in_one_line(run: RunDir, content: bytes) -> None:
    for path in (
        run.config, run.overrides, run.plan, run.samples, run.tables, run.result, run.data,
        run.tracking, run.metrics, run.attempts, run.rollouts,
    ):  # fmt: skip
        former = path.read_bytes() if path.exists() else b""
        path.write_bytes(content)
        data = load_run(run.root)
        named = [warning for warning in data.warnings if path.name in warning]
        assert len(named) == 1, (path.name, data.warnings)
        assert "\n" not in named[0]
        assert run_page(data)["title"]
        path.write_bytes(former) if former else path.unlink()


def test_no_metric_of_a_task_is_taken_for_damage() -> None:
    assert set(SHAPES["metrics.jsonl"]) <= RESERVED


def test_a_place_that_cannot_be_written(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    (run.root / "report.html").mkdir()
    assert run_here("report", [str(run.root)]) == 0
    assert "not written (Is a directory)" in " ".join(capsys.readouterr().out.split())
    assert run_here("compare", [str(run.root), str(run.root / "nowhere")]) == ConfigError.exit_code


def test_eval_looks_at_its_output_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(experiment(tmp_path / "run", ranks=1))
    write_model(run.final_model)
    words = [str(run.root), "--out", str(tmp_path)]
    assert run_here("eval", words) == ConfigError.exit_code
    assert "is a directory. Set --out FILE.json." in capsys.readouterr().err


def test_a_damaged_tokenizer_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(experiment(tmp_path / "run", ranks=1))
    write_model(run.final_model)
    (run.final_model / "tokenizer.json").write_text('{"version": 1, "added_tokens": 7}')
    (run.final_model / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    assert run_here("eval", [str(run.root), "data.path=demo"]) == ConfigError.exit_code
    assert "has no tokenizer that can be loaded" in capsys.readouterr().err
