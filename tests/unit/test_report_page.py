"""``report.html`` in a real browser, on a phone and on a desk: nothing overflows or breaks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmx.observe.report.chart import scale_of
from llmx.observe.report.page import page
from llmx.observe.report.run_data import load_run
from llmx.run.rundir import RunDir, read_json, write_json, write_text
from tests import tracked_run
from tests.chromium import measured

PHONE, DESK = 390, 1280

SAMPLES = {
    "rows": [
        {
            "prompt": f"Question {i}: where is 1,234,567.89 in /usr/share/some/long/path/file.txt?",
            "expected": "2026-11-22, 12:30:59",
            "before": "llow" * 40 + " 三十六計走為上計" * 6,
            "after": "def f(x):\n    return x" if i % 2 else "2026-11-22, 12:30:59",
        }
        for i in range(30)
    ],
    "exact_match_before": 0.0,
    "exact_match_after": 0.5,
}


def attempt(number: int, **values: Any) -> dict[str, Any]:
    start = tracked_run.START_S + 100 * number
    return {
        "attempt": number, "started": start, "ended": start + 90, "outcome": "crash",
        "cause": "the process was killed (SIGKILL) without a traceback", "rank": 1,
        "host": "node-b.cluster.example", "first_step": 10 * (number - 1),
        "last_step": 10 * number + 3, "saved_step": 10 * number, "decision": "restart",
        "wait_s": 10.0, **values,
    }  # fmt: skip


def finished(root: Path) -> RunDir:
    run = tracked_run.write_start(root)
    tracked_run.append(run, tracked_run.lines())
    write_json(run.samples, SAMPLES)
    write_json(run.result, tracked_run.result())
    write_json(
        run.data,
        {
            "train": [
                ["sources", "/data/" + "long/" * 20 + "train.jsonl"],
                ["truncated", "3 rows"],
            ],
            "eval": [["sources", "eval.jsonl"]],
        },
    )
    return run


def failed(root: Path) -> RunDir:
    """After three restarts, with a long name and a traceback, resumed with something changed."""
    run = finished(root)
    lines = [attempt(1), attempt(2), attempt(3, decision="stop", first_step=None, last_step=None)]
    write_text(run.attempts, "".join(json.dumps(line) + "\n" for line in lines))
    resumed = [
        {"kind": "event", "event": "resumed", "step": step, "time": tracked_run.START_S + step}
        for step in (10, 20)
    ]
    damaged = {"kind": "event", "event": "damaged", "step": 20, "checkpoint": 30,
               "reason": "rank-00001.safetensors: 100 bytes are missing"}  # fmt: skip
    tracked_run.append(run, [*resumed, damaged])
    write_json(
        run.root / "history" / "001" / "changes.json",
        {"step": 20, "changes": {"optim.lr": [0.001, 0.0005], "launch.env": [{}, {"A": "b"}]}},
    )
    write_json(
        run.result,
        tracked_run.result(
            "crash", cause="SIGKILL\nnot started again", fix="see /var/log/" + "deep/" * 20 + "x",
            failed_rank=1, host="node-b.cluster.example", traceback="Traceback\n" + "x = y\n" * 30,
        ),
    )  # fmt: skip
    return run


def long_config(root: Path) -> RunDir:
    """Hundreds of keys and thousands of steps."""
    run = tracked_run.write_start(root)
    config = yaml.safe_load(run.config.read_text())
    config["name"] = "a-name-without-a-single-space-" * 4
    config["model"]["config"] = {f"key_{i}": list(range(40)) for i in range(120)}
    config["launch"]["env"] = {"LONG": "/opt/" + "lib/" * 60}
    write_text(run.config, yaml.safe_dump(config, sort_keys=False))
    write_text(run.overrides, yaml.safe_dump([f"model.config.key_{i}={i}" for i in range(60)]))
    plan = read_json(run.plan)
    write_json(run.plan, {**plan, "warnings": ["no such file: /" + "directory/" * 30 + "x"]})
    tracked_run.append(run, [tracked_run.train_line(step) for step in range(10, 250_000, 97)])
    return run


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Any]]:
    root = tmp_path_factory.mktemp("pages")
    pages = {
        make.__name__: page(load_run(make(root / make.__name__).root))
        for make in (finished, failed, long_config)
    }
    places = [(name, width) for name in pages for width in (PHONE, DESK)]
    results = measured(root, [(pages[name], width) for name, width in places])
    return dict(zip(places, results, strict=True))


NAMES = ["finished", "failed", "long_config"]


@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("name", NAMES)
def test_the_page_is_as_wide_as_the_screen(found: Any, name: str, width: int) -> None:
    assert found[name, width]["window"] == width
    assert found[name, width]["page"] == width


def test_tables_scroll_on_a_phone(found: Any) -> None:
    assert found["failed", PHONE]["scrolling"] >= 3


@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("name", NAMES)
def test_labels_of_an_axis_do_not_lie_over_each_other(found: Any, name: str, width: int) -> None:
    assert found[name, width]["labels"] == []


def test_all_parts_are_there(found: Any) -> None:
    assert found["failed", PHONE]["headings"] == [
        "Summary", "Loss", "Completions", "Warnings", "Attempts", "Data", "Config", "Plan",
        "Files and commands", "Evaluations",
    ]  # fmt: skip
    assert "Attempts" not in found["finished", DESK]["headings"]


def test_what_the_page_says_of_a_run_that_was_restarted(tmp_path: Path) -> None:
    text = page(load_run(failed(tmp_path / "run").root))
    for words in (
        "rank 1 on ", "restart after 10 s", "step 20", "11 to 23",
        "The checkpoint of step 30 could not be used", "Changed by resume", "optim.lr",
        "3 rows", "training split", "task.steps",
    ):  # fmt: skip
        assert words in text, words


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.1, 7.9], (0, 8, ["0", "2", "4", "6", "8"])),
        ([3.0, 3.0], (1.0, 5.0, ["1", "2", "3", "4", "5"])),
        ([15_612, 15_630], (15_610, 15_630, ["15,610", "15,615", "15,620", "15,625", "15,630"])),
        ([0.0009, 7.1], (1e-4, 10, ["0.0001", "0.001", "0.01", "0.1", "1", "10"])),
    ],
)
def test_scales(values: list[float], expected: Any) -> None:
    scale = scale_of(values)
    assert (scale.low, scale.high) == pytest.approx(expected[:2])
    assert [text for _, text in scale.ticks] == expected[2]
    assert scale.is_log == (values[0] == 0.0009)


def test_tables_of_an_evaluation_are_shown(tmp_path: Path) -> None:
    run = finished(tmp_path / "run")
    table = {
        "title": "Confusion matrix: actual by predicted", "rows": ["好", "<bad>"],
        "columns": ["好", "<bad>"], "values": [[9.0, 1.0], [0.0, 0.0]],
    }  # fmt: skip
    damaged = [{**table, "rows": ["good"]}, {**table, "values": [[None, 1.0], [0.0, 0.0]]}]
    write_json(run.tables, {"step": 600, "tables": [table, *damaged]})
    html = page(load_run(run.root))
    assert "&lt;bad&gt;" in html
    assert '<td class="number">9</td>' in html
    assert "tables.json: a table with a missing value, or with rows of" in html
