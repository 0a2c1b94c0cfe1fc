"""The one page as ``report.html``: its JSON, and in a real browser on a phone and on a desk."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmx.observe.page import changes, document, thinned
from llmx.observe.page.run import MAX_POINTS, curves, run_page
from llmx.observe.page.sweep import report_sweep, sweep_page
from llmx.observe.report.sweep_data import load_sweep
from llmx.observe.run import load_run
from llmx.run.rundir import RunDir, read_json, write_json, write_text
from tests import sweepdirs, tracked_run
from tests.chromium import DESK, PHONE, Browser

ROW = {
    "prompt": "Where is 1,234,567.89 in /usr/share/some/long/path/to/a/file/with/a/name.txt?",
    "expected": "2026-11-22, 12:30:59",
    "before": "llow" * 40 + " 三十六計走為上計" * 6,
    "after": "def f(x):\n    return x",
}
SAMPLES = {"rows": [ROW] * 30, "exact_match_before": 0.0, "exact_match_after": 0.5}


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
    train = [["sources", "/data/" + "long/" * 20 + "train.jsonl"], ["truncated", "3 rows"]]
    write_json(run.data, {"train": train, "eval": [["sources", "eval.jsonl"]]})
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


HOSTILE = "</script><script>hacked=1</script><img src=x onerror=hacked=1><!-- \u202e"


def hostile(root: Path) -> RunDir:
    """Markup wherever a run has text."""
    run = finished(root)
    config = yaml.safe_load(run.config.read_text())
    write_text(run.config, yaml.safe_dump({**config, "name": HOSTILE}))
    rows = [{"prompt": HOSTILE, "expected": HOSTILE, "before": HOSTILE, "after": HOSTILE}]
    write_json(run.samples, {"rows": rows})
    write_json(run.data, {HOSTILE: [[HOSTILE, HOSTILE]], "train": [["a", "b"]]})
    write_json(run.result, tracked_run.result("crash", cause=HOSTILE, traceback=HOSTILE))
    measured = {**tracked_run.evaluation(40, 1.0, 0.5), HOSTILE: 1.0, "__proto__": 2.0}
    tracked_run.append(run, [measured])
    return run


def saved(make: Any, root: Path) -> str:
    """The address of the report of a run."""
    run = make(root)
    data = load_run(run.root)
    write_text(run.report, document(data.name, run_page(data)))
    return str(run.report.as_uri())


# --- The JSON --------------------------------------------------------------------------------


def test_what_the_page_says_of_a_run_that_was_restarted(tmp_path: Path) -> None:
    content = run_page(load_run(failed(tmp_path / "run").root))
    assert content["order"] == [
        "Outcome", "Summary", "Curves", "Warnings", "Traceback", "Completions", "Attempts", "Data",
        "Config", "Plan", "Files and commands", "Evaluations", "Files",
    ]  # fmt: skip
    text = json.dumps(content)
    for words in (
        "rank 1 on ", "restart after 10 s", "step 20", "11 to 23",
        "The checkpoint of step 30 is damaged", "Changed by resume", "optim.lr",
        "3 rows", "training split", "task.steps", "= 32 samples of 128", "optimizer, master",
    ):  # fmt: skip
        assert words in text, words
    assert content["curves"]["tiny-演示"]["marks"] == {"resumed": [10, 20]}
    assert "Attempts" not in run_page(load_run(finished(tmp_path / "other").root))["order"]


def test_tables_of_an_evaluation_are_shown(tmp_path: Path) -> None:
    run = finished(tmp_path / "run")
    table = {
        "title": "Confusion matrix: actual by predicted", "rows": ["好", "<bad>"],
        "columns": ["好", "<bad>"], "values": [[9.0, 1.0], [0.0, 0.0]],
    }  # fmt: skip
    damaged = [{**table, "rows": ["good"]}, {**table, "values": [[None, 1.0], [0.0, 0.0]]}]
    write_json(run.tables, {"step": 600, "tables": [table, *damaged]})
    content = run_page(load_run(run.root))
    title, blocks, *_ = content["sections"]["Evaluation"]
    assert title == {"text": "Confusion matrix: actual by predicted, step 600"}
    assert blocks["table"]["rows"] == [["好", "9", "1"], ["<bad>", "0", "0"]]
    assert json.dumps(content).count("not shown, since values of it are missing") == 2


def test_curves_have_a_column_for_each_value() -> None:
    lines = [*tracked_run.lines(), {**tracked_run.train_line(42), "loss": None, "nonfinite": True}]
    columns = curves(lines)
    assert columns["train"]["step"][-2:] == [40, 42]
    assert columns["train"]["time"][-1] == 42.0
    assert columns["train"]["loss"][-1] is None
    assert columns["marks"] == {"loss is NaN": [42]}
    assert columns["title"] == "loss (nats per target token)"
    assert [entry["title"] for entry in columns["charts"]] == [
        "Learning rate", "Gradient norm", "Tokens/s",
    ]  # fmt: skip


def test_a_spike_survives_thinning_and_a_longer_run_keeps_its_points() -> None:
    values: list[float | None] = [1.0 + 0.001 * (at % 7) for at in range(12_000)]
    values[5_000], values[7_000] = 9.0, None
    points = list(enumerate(values))
    chosen = thinned(points, lambda point: point[1], MAX_POINTS)
    assert len(chosen) <= MAX_POINTS
    assert (5_000, 9.0) in chosen
    assert (7_000, None) in chosen
    longer = thinned([*points, (12_000, 1.0)], lambda point: point[1], MAX_POINTS)
    assert longer[: len(chosen) - 2] == chosen[:-2]
    assert thinned(points[:900], lambda point: point[1], MAX_POINTS) == points[:900]


def test_no_text_of_a_run_ends_the_data_of_its_page(tmp_path: Path) -> None:
    """The policy names the page's own two scripts; "<" is nowhere in the data."""
    data = load_run(hostile(tmp_path / "run").root)
    text = document(data.name, run_page(data))
    (content,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert "<" not in content
    assert "hacked=1" in json.loads(content)["title"]
    assert "\u202e" not in text
    (policy,) = re.findall(r'Content-Security-Policy" content="(.*?)"', text)
    assert policy.count("'sha256-") == 3
    assert "unsafe" not in policy
    assert len(re.findall("<script>", text)) == 2


# --- In a browser ----------------------------------------------------------------------------


GEOMETRY = """({
  page: document.documentElement.scrollWidth, window: document.documentElement.clientWidth,
  headings: [...document.querySelectorAll('h2')].map(h => h.textContent),
  scrolling: [...document.querySelectorAll('.scroll')]
    .filter(e => e.scrollWidth > e.clientWidth).length,
  charts: document.querySelectorAll('canvas').length,
})"""


FIRST_SCREEN = """(() => {
  const charts = [...document.querySelectorAll('.chart')];
  const [large, next] = charts.map(chart => chart.getBoundingClientRect());
  const loss = document.querySelector('.large canvas').getBoundingClientRect();
  return [document.documentElement.scrollHeight, loss.bottom, Number(next.top === large.top)];
})()"""


@pytest.mark.parametrize("make", [failed, long_config])
def test_the_page_is_as_wide_as_the_screen(browser: Browser, tmp_path: Path, make: Any) -> None:
    address = saved(make, tmp_path / "run")
    assert (tmp_path / "run" / "report.html").stat().st_size < 1_000_000
    for width, dark in ((PHONE, True), (DESK, False)):
        browser.open(address, width=width, dark=dark)
        browser.wait("document.querySelectorAll('canvas').length >= 4")
        height, loss, beside = browser.evaluate(FIRST_SCREEN)
        assert width == PHONE or (loss <= 900 and beside == 1), "the loss, and a chart beside it"
        assert height < (3000 if width == PHONE else 2000), "the sections are folded"
        browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        geometry = browser.evaluate(GEOMETRY)
        assert (geometry["page"], geometry["window"]) == (width, width)
        assert "Curves" in geometry["headings"]
        assert width == DESK or make is not failed or geometry["scrolling"] >= 3
        assert browser.errors == []


def test_a_sweep_is_drawn(browser: Browser, tmp_path: Path) -> None:
    directory = sweepdirs.grid(tmp_path / "sweep")
    sweep = load_sweep(directory)
    report_sweep(sweep, directory)
    for width in (PHONE, DESK):
        browser.open((directory / "sweep.html").as_uri(), width=width)
        browser.wait("document.querySelectorAll('canvas').length == 3")
        assert browser.evaluate(GEOMETRY)["page"] == width
        assert browser.errors == []
    lines = browser.evaluate("document.querySelectorAll('polyline').length")
    assert lines == 1 + len([trial for trial in sweep.trials if trial.outcome != "same"])
    # By keys alone: the picture, from the best trial to the next.
    browser.evaluate("document.querySelector('svg').focus()")
    browser.press("ArrowRight")
    readout = "document.querySelector('[aria-live]').textContent"
    assert browser.evaluate(readout).startswith(sweep.best.label)
    browser.press("ArrowRight")
    assert not browser.evaluate(readout).startswith(sweep.best.label)
    first = browser.evaluate("document.querySelector('tr.best a').href")
    assert first == (sweep.best.run_dir / "report.html").as_uri()
    # The heat map has the median of each cell.
    cells = "[...document.querySelectorAll('.heat tbody tr')].map(r => r.innerText.split('\\t'))"
    assert browser.evaluate(cells) == [
        ["1", "912", "743", "659"],
        ["2", "1,474", "1,200", "crash"],
        ["4", "oom", "* 1,941", "1,720"],
        ["8", "pruned", "pruned", "oom"],
    ]
    # Another metric by keys; the menu keeps the focus.
    browser.evaluate("document.querySelector('[data-keep=\"trials metric\"]').focus()")
    browser.press("p")
    assert browser.evaluate("document.activeElement.value") == "peak memory (GiB)"
    browser.wait("document.querySelector('.heat tbody').innerText.includes('* 2.433')")
    assert browser.errors == []


def test_many_numbers_of_a_key_are_put_together(browser: Browser, tmp_path: Path) -> None:
    directory = sweepdirs.grid(tmp_path / "sweep", batches=tuple(range(1, 13)))
    content = sweep_page(load_sweep(directory), link=lambda trial: "")
    ((kind, trials),) = content["sections"]["Settings and metrics"][0].items()
    assert kind == "trials"
    assert trials["metrics"][trials["objective"]]["name"] == "tokens/s"
    zero, batch = trials["keys"]
    assert (zero["name"], batch["name"]) == ("zero", "batch.micro_batch")
    assert (len(batch["values"]), len(batch["labels"]), max(batch["groups"])) == (12, 6, 5)
    assert batch["labels"][0] == "1 to 2"
    directory = sweepdirs.rates(tmp_path / "rates", tuple(f"{n}e-4" for n in range(1, 11)))
    sweep = load_sweep(directory)
    assert "Settings and metrics" not in sweep_page(sweep, link=lambda _: "")["order"]
    # With a second key: ten of its combinations with a rate have dots, and no line each.
    for trial in sweep.trials:
        trial.overrides.append(f"seed={trial.index % 2}")
    _, shown = sweep_page(sweep, link=lambda _: "")["sections"]["Objective"]
    kinds = [chart["series"][0]["kind"] for chart in shown["charts"]]
    assert kinds == ["line dots", "dots"]
    report_sweep(sweep, directory)
    browser.open((directory / "sweep.html").as_uri(), width=PHONE)
    browser.wait("document.querySelectorAll('canvas').length == 3")
    assert browser.evaluate(GEOMETRY)["page"] == PHONE
    assert browser.errors == []


def test_nothing_that_a_run_contains_is_run(browser: Browser, tmp_path: Path) -> None:
    browser.open(saved(hostile, tmp_path / "run"))
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.text().count("onerror=hacked=1") >= 8, "shown as text"
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert browser.evaluate("typeof hacked") == "undefined"
    assert browser.errors == []
    # And the policy holds where the page would fail to: an inline script is refused.
    browser.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), "
        "{textContent: 'hacked=1'}))"
    )
    assert browser.evaluate("typeof hacked") == "undefined"
    assert any("Content Security Policy" in text for text in browser.errors)


PAIRS: list[tuple[Any, Any]] = [
    ({}, {"a": [1, 2], "b": {"c": "x"}}),
    ({"a": [1, 2], "b": {"c": "x", "d": 1}}, {"a": [1, 2, 3], "b": {"c": "y"}}),
    ({"a": [1, 2, 3, 4]}, {"a": [1, 2, 9]}),
    ({"a": [1, 2]}, {"a": [5]}),
    ({"a": [1, 2]}, {"a": {"b": 1}}),
    ({"a": {"b": 1}}, {"a": []}),
    ({"a": [1, 2]}, {"a": []}),
    ({"__proto__": [1]}, {"__proto__": [1, 2], "constructor": 1}),
]


def test_the_page_merges_what_has_changed(browser: Browser, tmp_path: Path) -> None:
    browser.open(saved(finished, tmp_path / "run"))
    for old, new in PAIRS:
        before, patch = (json.dumps(value) for value in (old, changes(old, new)))
        # As text, since an object literal would take "__proto__" for its prototype.
        merged = browser.evaluate(
            f"JSON.stringify(merge(merge({{}}, JSON.parse({json.dumps(before)})), "
            f"JSON.parse({json.dumps(patch)})))"
        )
        assert json.loads(merged) == new
    grown = changes({"loss": list(range(1000))}, {"loss": list(range(1002))})
    assert grown == {"loss": {"from": 1000, "rest": [1000, 1001]}}
    assert changes(PAIRS[0][1], PAIRS[0][1]) is None
