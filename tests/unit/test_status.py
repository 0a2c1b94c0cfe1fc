"""``status`` and ``watch`` on run directories as runs leave them, at every state of a run."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from llmx.__main__ import main
from llmx.errors import ConfigError
from llmx.observe.report.wording import event_text, summary_rows
from llmx.observe.run import BRIEF_BYTES, FINAL, Run
from llmx.observe.source import Source, parse_location
from llmx.observe.status.show import host_rows, plain_line, sparkline
from llmx.run.rundir import RunDir, read_json, write_json, write_text
from tests import tracked_run

HERE = socket.gethostname()


def supervised(run: RunDir, state: str = "running", **values: Any) -> None:
    """``supervisor.json`` of a living supervisor: this process."""
    now = {"state": state, "attempt": 1, "pid": os.getpid(), "host": HERE, "time": time.time()}
    write_json(run.supervisor, {**now, "until": None, "why": "", **values})


def ranks(run: RunDir, state: str = "training", step: int = 24, **values: Any) -> None:
    for rank in range(2):
        status = {"rank": rank, "host": HERE, "pid": 1, "state": state, "step": step}
        write_json(run.rank_status(rank), {**status, "time": time.time(), "error": None, **values})


def recent(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines as if the last of them had just been written."""
    shift_s = time.time() - records[-1]["time"]
    return [{**record, "time": record["time"] + shift_s} for record in records]


def training(root: Path, *, steps: int = 20) -> RunDir:
    """A run in the middle: 40 steps in all, metrics to ``steps``, a checkpoint at 16."""
    run = tracked_run.write_start(root)
    records = [r for r in tracked_run.lines() if r["kind"] != "end" and r.get("step", 0) <= steps]
    tracked_run.append(run, recent(records))
    supervised(run)
    ranks(run)
    files = {"rank-00000.safetensors": {"bytes": 3_000_000, "blake2b": "", "host": HERE}}
    for step in (8, 16):
        manifest = {"step": step, "files": files, "created": time.time() - 100}
        write_json(run.checkpoint(step) / "manifest.json", manifest)
    return run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return training(tmp_path / "run")


def view_of(run: RunDir, *, now: float | None = None) -> Run:
    """The run as it would be at ``now``."""
    view = Run(run.root)
    view.now = now or view.now
    return view


def ended(**values: Any) -> dict[str, Any]:
    return {**tracked_run.result(), "started": time.time() - 90, "ended": time.time(), **values}


def test_training(run: RunDir, capsys) -> None:
    view = view_of(run)
    assert (view.state, view.standing.why, view.is_live) == ("training", "", True)
    assert (view.name, view.step, view.total) == ("tiny-演示", 24, 40)
    assert view.left_s == pytest.approx(16 * 0.25)
    assert view.last["loss"] == tracked_run.train_line(20)["loss"]
    assert len(view.losses) == 10
    assert view.waited_for_data == pytest.approx(0.001 / (2 * 0.25))
    newest = view.checkpoints["newest"]
    assert (newest["step"], view.checkpoints["steps"], newest["bytes"]) == (16, [8, 16], 3_000_000)
    assert host_rows(view) == [("localhost", "ranks 0-1 training at step 24")]
    main(["status", str(run.root)])
    printed = capsys.readouterr().out
    assert re.search(r"step 16, 1 min 4\d s ago, 2.9 MiB; 2 kept", printed)
    assert "0.43 GiB on the fullest rank (1), 0.41 on the emptiest" in printed
    main(["status", str(run.root), "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert facts["supervisor"]["state"] == "running"
    assert facts["metrics"]["last"]["step"] == 20
    assert [rank["step"] for rank in facts["ranks"]] == [24, 24]
    write_json(run.rank_status(1), {**read_json(run.rank_status(1)), "step": 26})
    assert host_rows(view_of(run)) == [("localhost", "ranks 0-1 training at steps 24 to 26")]
    supervised(run, "ending")
    assert (view_of(run).state, view_of(run).step) == ("ending", 24)  # not back at the last line
    # A step is overdue: when the run ends is not known then.
    why = "no step for 50 s (usually 0.25 s); waiting for gpu-2"
    supervised(run, why=why)
    view = view_of(run)
    assert (view.state, view.standing.why, view.left_s) == ("training", why, None)
    assert why in plain_line(view)


def test_the_time_between_an_end_and_a_resume_does_not_count(run: RunDir) -> None:
    now = time.time()
    write_json(run.identity, {"run_id": "r", "created": now - 10_000})
    attempts = [
        {"attempt": 1, "started": now - 10_000, "ended": now - 9_000, "decision": "restart"},
        {"attempt": 2, "started": now - 8_900, "ended": now - 8_000, "decision": "stop"},
        {"attempt": 3, "started": now - 6_000, "ended": now - 5_000, "decision": "finished"},
    ]
    write_text(run.attempts, "".join(json.dumps(line) + "\n" for line in attempts))
    write_json(run.supervisor_lock, {"host": HERE, "pid": os.getpid(), "time": now - 1_000})
    assert view_of(run).took_s == pytest.approx(10_000 - 2_000 - 4_000, abs=5)
    write_json(run.result, ended())
    supervised(run, "finished")
    write_json(run.supervisor_lock, {"host": HERE, "pid": os.getpid(), "time": now - 6_000})
    assert view_of(run).took_s == pytest.approx(10_000 - 2_000, abs=5)


def test_what_the_slowest_rank_does(run: RunDir) -> None:
    now = time.time()
    status = {"rank": 1, "state": "loading", "step": 0, "time": now - 50, "error": None}
    write_json(run.rank_status(1), status)
    view = view_of(run, now=now)
    assert view.state == "loading"
    assert view.left_s is None
    assert host_rows(view) == [
        ("localhost", "rank 0 training at step 24; rank 1 loading, silent for 50 s")
    ]
    run.rank_status(1).unlink()
    assert view_of(run).state == "starting"
    ranks(run, "evaluating")
    assert (view_of(run).state, view_of(run).step) == ("training", 24)


def test_waiting_and_restarts(run: RunDir) -> None:
    now = time.time()
    supervised(run, "waiting", why="restart 1 of 3", until=now + 20.5)
    line = {"attempt": 1, "outcome": "crash", "cause": "rank 1 was killed", "last_step": 24}
    line |= {"decision": "restart", "ended": time.time(), "first_step": 0, "wait_s": 20}
    write_text(run.attempts, json.dumps(line) + "\n" + '{"torn')
    view = view_of(run, now=now)
    assert (view.state, len(view.restarts)) == ("waiting", 1)
    assert view.standing.why == "restart 1 of 3 (in 20 s)"
    attempts = dict(summary_rows(view, is_brief=True))["attempts"]
    assert attempts == "1 ended   (crash at step 24: rank 1 was killed)"
    assert view.left_s is None


def test_dead(run: RunDir, capsys) -> None:
    """The supervisor was killed: no result, and its process is no more."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    supervised(run, pid=gone.pid)
    view = view_of(run)
    assert view.state == "dead"
    assert f"process {gone.pid} on {HERE}" in view.standing.why
    assert view.standing.fix == f"python -m llmx resume {run.root}"
    # On another host there is no process to look at: its silence tells.
    supervised(run, host="elsewhere", pid=1)
    assert view_of(run).state == "training"
    supervised(run, host="elsewhere", pid=1, time=time.time() - 300)
    assert view_of(run).state == "dead"
    assert main(["status", str(run.root)]) == 1
    said = capsys.readouterr().out
    assert "exited without a result, last seen 5 min ago" in said
    assert main(["watch", str(run.root)]) == 1


@pytest.mark.parametrize(
    ("outcome", "state", "code"),
    [("ok", "finished", 0), ("interrupted", "interrupted", 0), ("oom", "failed", 1)],
)
def test_the_end(run: RunDir, capsys, outcome: str, state: str, code: int) -> None:
    write_json(run.result, ended(outcome=outcome, cause="rank 1 took too much", fix="batch=1"))
    assert view_of(run).state == "training", "the result is of an earlier attempt"
    supervised(run, "finished", pid=os.getppid())
    view = view_of(run)
    assert (view.state, view.state in FINAL, view.left_s) == (state, True, None)
    assert main(["status", str(run.root)]) == code
    said = capsys.readouterr().out
    assert state in said
    assert ("oom: rank 1 took too much" in said) == (outcome == "oom")


def test_planned_only(tmp_path: Path) -> None:
    run = tracked_run.write_start(tmp_path / "run")
    view = view_of(run)
    assert (view.state, view.step, view.state in FINAL) == ("planned", None, False)
    assert view.standing.fix == f"to start it: python -m llmx resume {run.root}"
    # Nobody starts it any more: there is nothing to watch.
    os.utime(run.config, (time.time() - 60,) * 2)
    assert main(["watch", str(run.root)]) == 1


def test_metrics_after_a_resume(run: RunDir) -> None:
    """The file is cut back and written anew: no step twice, the events named."""
    before = Run(run.root)
    assert len(before.losses) == 10
    kept = [r for r in tracked_run.lines() if r["kind"] != "end" and r.get("step", 0) <= 16]
    kept.append({"kind": "event", "event": "resumed", "step": 16, "attempt": 2, "time": 5.0})
    kept.append({"kind": "event", "event": "damaged", "checkpoint": 18, "reason": "bit"})
    kept.append({**tracked_run.train_line(18), "loss": None, "nonfinite": True})
    write_text(run.metrics, "".join(json.dumps(record) + "\n" for record in kept))
    ranks(run, "loading", step=0)
    view = Run(run.root, before=before)
    losses = [loss for _, loss in view.losses]
    assert len(losses) == 9
    assert losses[-1] is None
    assert view.is_lost
    words = [event_text(event) for event in view.events]
    assert words == ["resumed from step 16, attempt 2", "The checkpoint of step 18 is damaged: bit"]
    assert sparkline(losses).endswith("x")
    assert (sparkline([]), sparkline([1.0, 1.0])) == ("", "▁▁")
    assert sparkline([8.0, 4.0, None, 0.0]) == "█▅x▁"
    assert sparkline([float(n) for n in range(1000)], width=8) == "▁▂▃▄▅▆▇█"


def test_table(tmp_path: Path, capsys, monkeypatch) -> None:
    """All runs, of sweeps too; what lives first, then the newest; long files only at their ends."""
    monkeypatch.chdir(tmp_path)
    old = training(tmp_path / "outputs" / "old")
    write_json(old.result, ended())
    supervised(old, "finished")
    alive = training(tmp_path / "outputs" / "sweeps" / "today" / "0_zero-stage2")
    for index in range(2):
        new = training(tmp_path / "outputs" / f"new-{index}")
        write_json(new.result, ended(outcome="crash"))
        supervised(new, "finished")
    long = new.metrics.read_text().splitlines()
    new.metrics.write_text("\n".join([long[0], *long[2:] * 200, long[-1]]) + "\n")
    assert new.metrics.stat().st_size > 4 * BRIEF_BYTES
    for age_s, run in ((300, old), (200, alive), (100, new)):
        os.utime(run.config, (time.time() - age_s,) * 2)
    assert main(["status"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines[::2]]
    assert [line.removeprefix("  outputs/") for line in lines[1::2]] == [
        "sweeps/today/0_zero-stage2", "new-0", "new-1", "old",
    ]  # fmt: skip
    assert [row[:2] for row in rows[:2]] == [["training", "24/40"], ["failed", "20/40"]]
    runs, found = Source(parse_location("outputs")).runs(2)
    assert (found, len(runs), runs[0].dir) == (4, 2, alive)


@pytest.mark.parametrize("count", [100, 160, 170, 200, 5000])
def test_a_long_file_is_read_in_parts(tmp_path: Path, count: int) -> None:
    """Some lines of the whole run, none twice or torn, and all of the newest."""
    run = tracked_run.write_start(tmp_path / "run")
    tracked_run.append(run, [tracked_run.train_line(step) for step in range(1, count + 1)])
    steps = [record["step"] for record in Run(run.root, is_brief=True).train]
    assert steps == sorted(set(steps))
    assert steps[-20:] == list(range(count - 19, count + 1))
    assert len([step for step in steps if step <= count / 2]) >= 14


def test_watch_follows_to_the_end(run: RunDir) -> None:
    argv = [sys.executable, "-m", "llmx", "watch", str(run.root), "--every", "0.1"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert "training  step 24/40  loss 1.282" in watching.stdout.readline()
        saved = {"kind": "event", "event": "saved", "step": 26, "stall_s": 0.25}
        tracked_run.append(run, [{**saved, "time": time.time()}])
        assert watching.stdout.readline().endswith("saved step 26, training paused for 0.25 s\n")
        tracked_run.append(run, recent([tracked_run.train_line(38)]))
        ranks(run, step=38)
        assert "step 38/40" in watching.stdout.readline()
        write_json(run.result, ended())
        supervised(run, "finished", pid=1)
        assert "finished  step 38/40" in watching.stdout.readline()
        assert watching.wait(10) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["status"], "no such directory: outputs"),
        (["status", "."], "no runs under"),
        (["status", "a", "b"], "too many words: b"),
        (["watch"], "no run under outputs"),
        (["watch", "--evry", "2"], 'Did you mean "--every"'),
        (["watch", "--every=often"], "--every: often is not a number of at least 0.1"),
    ],
)
def test_what_cannot_be(tmp_path: Path, monkeypatch, capsys, words: list[str], says: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error


def test_places(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:b").mkdir()
    for word, host, path in (
        ("me@gpu:runs/a b", "me@gpu", "runs/a b"),
        ("gpu:", "gpu", "."),
        ("/a/b:c", "", "/a/b:c"),
        ("a:b", "", "a:b"),  # a directory here
    ):
        place = parse_location(word)
        assert (place.host, place.path) == (host, path)
    with pytest.raises(ConfigError, match="begin with a dash"):
        parse_location("-oProxyCommand=x:y")


def test_the_start_is_light() -> None:
    code = "import llmx.observe.watch, sys, json; print(json.dumps(sorted(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    heavy = {"torch", "yaml", "rich", "numpy", "hydra", "wandb", "matplotlib"}
    assert heavy.isdisjoint(json.loads(found.stdout))
