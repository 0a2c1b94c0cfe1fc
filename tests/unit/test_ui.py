"""``python -m llmx ui``: who may read it, what it sends, and the live page in a real browser."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from llmx.cli.main import run_here
from llmx.errors import ConfigError
from llmx.observe.ui import Server, Views
from llmx.run.rundir import RunDir, write_json, write_text
from tests import sweepdirs, tracked_run
from tests.chromium import PHONE, Browser

LONG_NAME = "a-run-with-a-name-that-is-70-characters-long-and-ends-with-what-differs"


def write_finished(root: Path) -> RunDir:
    run = tracked_run.write_start(root)
    tracked_run.append(run, tracked_run.lines())
    write_json(run.result, tracked_run.result())
    write_text(run.rank_log(0), "first line\nDB_PASS=secret\nlast line\n")
    return run


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """A run that is done, one whose supervisor is gone, one that failed before its first step,
    and a sweep."""
    base = tmp_path / "outputs"
    write_finished(base / "done")
    config = (base / "done" / "config.yaml").read_text()
    tags = "  tags:\n  - first try\n  - '1'\n"
    write_text(base / "done" / "config.yaml", config.replace("  tags: []\n", tags))
    run = tracked_run.write_start(base / "going")
    tracked_run.append(run, tracked_run.lines()[:7])
    failed = tracked_run.write_start(base / LONG_NAME)
    write_json(failed.result, tracked_run.result("data", cause="row 3 has no prompt", steps=0))
    sweepdirs.rates(base / "sweeps" / "rates")
    return base


@pytest.fixture
def server(outputs: Path) -> Iterator[Server]:
    with Server(outputs) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: Server, path: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.request("GET", path)
    return connection.getresponse()


def events(response: http.client.HTTPResponse) -> Iterator[Any]:
    while line := response.readline():
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


# --- What is shown ---------------------------------------------------------------------------


def test_the_table_has_every_run_with_its_sweep(outputs: Path) -> None:
    content = Views(outputs).view({})
    assert content["title"] == "9 runs in outputs, 0 running"
    rows = content["runs"]
    assert (rows["done"]["state"], rows["done"]["step"]) == ("finished", ["40/40", 40])
    assert rows["done"]["evaluation"] == ["exact match 96.9 %", 0.96875]
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(tracked_run.START_S))
    assert (rows["done"]["started"][0], rows["done"]["name"]) == (began, "tiny-演示")
    assert (rows["done"]["curve"][0][0], rows["done"]["curve"][-1][0]) == (2, 40)
    assert (rows[LONG_NAME]["state"], rows[LONG_NAME]["curve"]) == ("failed", [])
    assert rows[LONG_NAME]["why"] == "data: row 3 has no prompt"
    assert (rows["done"]["hosts"], rows["done"]["sweep"]) == ("localhost", "")
    assert rows["sweeps/rates/0_optim.lr-1e-4"]["sweep"] == "sweeps/rates"
    assert (rows["done"]["tags"], rows["going"]["tags"]) == ("first try, 1", "")


def test_a_run_has_its_page_its_state_and_its_logs(outputs: Path) -> None:
    content = Views(outputs).view({"run": ["done"], "log": ["rank-000.log"]})
    assert content["title"] == "done (tiny-演示): trained 40 steps in 1 min"
    assert content["order"][:2] == ["Summary", "Curves"]
    assert "Checkpoints, hosts and events" in content["folded"]
    going = Views(outputs).view({"run": ["going"]})
    assert going["order"][:3] == ["Now", "Summary", "Curves"]
    assert dict(going["sections"]["Now"][0]["table"]["rows"])["step"].startswith("10 of 40")
    assert "Checkpoints, hosts and events" not in going["folded"]
    failed = Views(outputs).view({"run": [LONG_NAME]})
    assert "failed (data) after 0 steps" in failed["title"]
    assert failed["order"][:2] == ["Outcome", "Summary"]
    assert content["logs"] == ["rank-000.log"]
    assert content["log"] == "first line\nDB_PASS=***\nlast line\n"
    assert "log" not in Views(outputs).view({"run": ["done"], "log": ["../config.yaml"]})


def test_two_runs_are_drawn_together_and_compared(outputs: Path) -> None:
    content = Views(outputs).view({"run": ["done", "going"]})
    assert content["title"] == "A: done, B: going"
    assert list(content["curves"]) == ["done", "going"]
    assert content["order"][:2] == ["Curves", "Difference of config"]
    rows = content["sections"]["Difference of outcome"][0]["table"]["rows"]
    assert next(row for row in rows if row[0] == "train loss")[1].startswith("4.7")
    empty = Views(outputs).view({"run": ["done", LONG_NAME, "going"]})
    assert empty["title"] == "3 runs"
    (said,) = empty["sections"]["Not drawn"]
    assert said["text"].endswith(f"no curve is drawn: {LONG_NAME}")


def test_a_sweep_links_to_its_runs(outputs: Path) -> None:
    content = Views(outputs).view({"sweep": ["sweeps/rates"]})
    first = content["sections"]["Trials"][0]["table"]["rows"][0][1]
    href = "#run=sweeps%2Frates%2F3_optim.lr-3e-3"
    assert first == {"text": "3_optim.lr-3e-3", "href": href}


def test_nothing_outside_of_the_directory_is_shown(outputs: Path) -> None:
    write_finished(outputs.parent / "elsewhere")
    (outputs / "link").symlink_to(outputs.parent / "elsewhere")
    for name in ("..", "../elsewhere", "/etc", "sweeps", "nothing", "link"):
        for query in ({"run": [name]}, {"sweep": [name]}, {"run": [name, "done"]}):
            content = Views(outputs).view(query)
            assert "there is no such run or sweep" in content["title"], query
            assert content["sections"] == {}, query


@pytest.mark.parametrize("name", ["logs/x.log", "samples.json", "history/001/changes.json"])
def test_links_out_of_a_run_are_not_followed(outputs: Path, name: str) -> None:
    (outputs.parent / "secret").write_text('{"why": "root:x:0"}\n')
    link = outputs / "done" / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(outputs.parent / "secret")
    for query in ({"run": ["done"]}, {"run": ["done"], "log": ["x.log"]}):
        content = Views(outputs).view(query)
        assert f"{link} is a link that leads out of {outputs}" in content["title"]
        assert "root:x" not in json.dumps(content)
    content = Views(outputs).view({})
    assert "done" not in content["runs"]
    (refusal,) = content["sections"]["Not shown"][0]["list"]
    assert refusal == f"{link} is a link that leads out of {outputs}. Remove the link."
    link.unlink()
    link.symlink_to(link)
    content = Views(outputs).view({"run": ["done"]})
    assert "Summary" in content["sections"]
    assert "done" in Views(outputs).view({})["runs"]
    for file in outputs.glob("*/config.yaml"):
        file.unlink()
        file.symlink_to("nowhere")
    assert "sweeps/rates/3_optim.lr-3e-3" in Views(outputs).view({})["runs"]


# --- The server ------------------------------------------------------------------------------


def test_without_the_token_nothing_is_said(server: Server) -> None:
    for path in ("/", "/?token=wrong", "/events", "/events?run=done&token=", "/done/config.yaml"):
        response = get(server, path)
        assert (response.status, b"tiny" in response.read()) == (403, False)
    page = get(server, f"/?token={server.token}")
    assert page.status == 200
    assert page.headers["X-Frame-Options"] == "DENY"
    assert get(server, f"/done/config.yaml?token={server.token}").status == 404


def test_only_what_is_new_is_sent(server: Server, outputs: Path) -> None:
    stream = events(get(server, f"/events?run=going&token={server.token}"))
    content = next(stream)
    assert len(content["curves"]["tiny-演示"]["train"]["loss"]) == 5
    tracked_run.append(RunDir(outputs / "going"), [tracked_run.train_line(12)])
    curve = next(patch for patch in stream if "curves" in patch)["curves"]["tiny-演示"]
    assert curve["train"]["step"] == {"from": 5, "rest": [12]}
    assert "charts" not in curve


def test_what_cannot_be_shown_is_refused(outputs: Path, server: Server, capsys) -> None:
    port = str(server.server_address[1])
    for words, says in (
        (["me@node-a:outputs"], "ssh -t -L 8170:localhost:8170 me@node-a python -m llmx ui"),
        ([f"{outputs}/nothing"], "no such directory"),
        ([str(outputs), "--port", port], f"{port}: cannot listen there (Address already in use)"),
    ):
        assert run_here("ui", words) == ConfigError.exit_code
        assert says in capsys.readouterr().err


# --- In a browser ----------------------------------------------------------------------------


def test_the_page_is_live(browser: Browser, server: Server, outputs: Path) -> None:
    """From the table to a run, whose new step is drawn, to its log, and to two runs together."""
    browser.open(server.url, width=PHONE, dark=True)
    browser.wait("document.querySelectorAll('tbody tr').length == 11")  # with two heads of groups
    assert browser.evaluate("document.documentElement.scrollWidth") == PHONE
    cells = "document.querySelectorAll('tr.run td:is(.of-state, .of-step, .of-loss)')"
    ends = browser.evaluate(f"[...{cells}].map(cell => cell.getBoundingClientRect().right)")
    assert len(ends) == 27
    assert 0 < min(ends) <= max(ends) <= PHONE, "state, step and loss are on a phone"
    browser.evaluate("location.hash = 'run=going'")
    browser.wait("document.querySelectorAll('canvas').length >= 3")
    opened = "document.querySelector('details').open"
    browser.evaluate(f"{opened} = true")
    tracked_run.append(RunDir(outputs / "going"), [tracked_run.train_line(12)])
    steps = "charts.values().next().value.plot.data[0]"
    browser.wait(f"{steps}.at(-1) == 12")
    browser.wait("document.body.innerText.includes('steps 2 → 12')")
    assert browser.evaluate(opened), "what has not changed stays as it was left"
    browser.evaluate("location.hash = 'run=done&log=rank-000.log'")
    browser.wait("document.querySelector('.log')?.textContent.includes('last line')")
    browser.evaluate("location.hash = 'run=done&run=going'")
    browser.wait("document.body.innerText.includes('Difference of outcome')")
    assert browser.errors == []


def test_the_table_is_used_by_keys_alone(browser: Browser, server: Server, outputs: Path) -> None:
    """Typed into the filter while rows change, from row to row, ticked, shown together."""
    browser.open(server.url)
    browser.wait("document.querySelectorAll('tr.run').length == 9")
    focus = "document.activeElement.closest('tr')?.querySelector('a').title"
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.type") == "search"
    browser.press(*"first 1")
    browser.wait("document.querySelectorAll('tr.run').length == 1")
    assert browser.evaluate("document.activeElement.value") == "first 1"
    for _ in "first 1":
        browser.press("Backspace")
    browser.wait("document.querySelectorAll('tr.run').length == 9")
    for _ in range(20):  # grouping, the button, the columns, the heads, the sweep, the first box
        if not browser.evaluate("Boolean(document.activeElement.closest('tr.run'))"):
            browser.press("Tab")
    first, second, *_ = browser.evaluate(
        "[...document.querySelectorAll('tr.run a')].map(link => link.title)"
    )
    assert browser.evaluate(focus) == first
    outline = browser.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "the focus is visible"
    browser.press(" ", "ArrowDown", " ")
    assert browser.evaluate("[...chosen]") == [first, second]
    browser.press("k", "Tab")
    assert browser.evaluate("document.activeElement.title") == first
    browser.press("j")
    assert browser.evaluate(focus) == second
    # A changed row is drawn anew, and has the focus still.
    run = RunDir(outputs / "going")
    tracked_run.append(run, [tracked_run.train_line(34)])
    browser.wait("document.body.innerText.includes('34/40')")
    assert browser.evaluate(focus) == second
    browser.press("Enter")
    browser.wait(f"location.hash == {json.dumps('#' + urlencode({'run': second}))}")
    assert browser.errors == []


def test_the_table_is_sorted_and_shows_what_is_chosen(browser: Browser, server: Server) -> None:
    browser.open(server.url)
    browser.wait("document.querySelectorAll('tr.run').length == 9")
    names = "[...document.querySelectorAll('tr.run a')].map(link => link.textContent)"
    assert "0_optim.lr-1e-4" in browser.evaluate(names), "without the name of the sweep above it"
    (cut,) = [name for name in browser.evaluate(names) if "…" in name]
    assert len(cut) < 50
    assert LONG_NAME.startswith(cut.partition("…")[0])
    assert LONG_NAME.endswith(cut.partition("…")[2])
    click = "document.querySelector('th.of-loss button').click()"
    losses = "[...document.querySelectorAll('tr.run .of-loss')].map(cell => cell.innerText)"
    browser.evaluate("options.group = false; render()")
    for sign in (1, -1):
        browser.evaluate(click)
        shown = "document.querySelector('th.of-loss').ariaSort"
        browser.wait(f"{shown} == '{'ascending' if sign > 0 else 'descending'}'")
        values = [float(text) for text in browser.evaluate(losses)[:7]]
        assert values == sorted(values, key=lambda value: sign * value)
        assert browser.evaluate(losses)[7:] == ["nan", ""] or sign < 0, "those without a loss last"
    before = browser.evaluate(losses)
    browser.evaluate(click)
    browser.wait(f"JSON.stringify({losses}) != {json.dumps(json.dumps(before))}")
    browser.evaluate(
        "(() => { const filter = document.querySelector('input[type=search]');"
        " filter.value = 'rates lr-1e-4'; filter.dispatchEvent(new Event('input')); })()"
    )
    browser.wait("document.querySelectorAll('tr.run').length == 1")
    browser.evaluate("options.filter = ''; render()")
    box = "[...document.querySelectorAll('details label')].find(l => l.innerText.includes('hosts'))"
    browser.evaluate("document.querySelector('.controls details').open = true")
    browser.evaluate(f"{box}.querySelector('input').click()")
    browser.wait("document.querySelector('td.of-hosts')?.innerText == 'localhost'")
    browser.evaluate(f"{box}.querySelector('input').click()")
    browser.wait("!document.querySelector('td.of-hosts')")
    assert browser.errors == []
