"""The tracker process as the supervisor runs it: a process, a pipe, a run directory being written.

pytest tests/integration/test_tracking_process.py
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from llmx.run.metrics.lines import scalars
from llmx.run.rundir import RunDir, read_json, write_json, write_text
from tests import tracked_run
from tests.wandb_file import WandbFile
from tests.wandb_server import WandbServer

KEY = "0123456789abcdef0123456789abcdef01234567"
NOTHING_LISTENS = "http://127.0.0.1:9"


class TrackerProcess:
    """A tracker process with the supervisor's end of its pipe."""

    def __init__(self, run: RunDir, *, env: dict[str, str], args: tuple[str, ...] = ()) -> None:
        self.run = run
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llmx.tracking.process", str(run.root), *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )

    def wait(self, timeout_s: float = 60.0) -> str:
        """Wait for the end with the pipe still open; returns stdout. A server that hangs would not
        let it end: after ``finish_timeout_s`` it must."""
        assert self.process.stdout is not None
        self.process.wait(timeout_s)
        return self.process.stdout.read()


@pytest.fixture
def tracker(tmp_path: Path) -> Iterator[Callable[..., TrackerProcess]]:
    """Starts tracker processes without a W&B account; ends what is left of them."""
    started: list[TrackerProcess] = []

    def start(run: RunDir, *args: str, **variables: str) -> TrackerProcess:
        env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
        env["HOME"] = str(tmp_path)
        started.append(TrackerProcess(run, env={**env, **variables}, args=args))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait()
        for stream in (one.process.stdin, one.process.stdout, one.process.stderr):
            assert stream is not None
            stream.close()
    until(lambda: not cores_of([one.process.pid for one in started]), what="wandb-core's end")


def cores_of(pids: list[int]) -> list[int]:
    """wandb-core processes that were started by one of ``pids``."""
    found = []
    for process in psutil.process_iter(["pid", "name", "cmdline"]):
        arguments = process.info["cmdline"] or []
        if process.info["name"] == "wandb-core" and arguments[-1:] in [[str(pid)] for pid in pids]:
            found.append(process.info["pid"])
    return found


def until(condition: Callable[[], Any], *, what: str, timeout_s: float = 30.0) -> Any:
    """Wait for a condition; returns what it gave."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.02)
    return value


def tracker_state(run: RunDir, tracker: str) -> str:
    """What ``tracking.json`` says of one tracker."""
    path = run.root / "tracking.json"
    return read_json(path).get(tracker, {}).get("state", "") if path.exists() else ""


def only_wandb_file(run: RunDir, *, prefix: str) -> WandbFile:
    """The one transaction log of the run that counts."""
    (path,) = (run.root / "wandb").glob(f"{prefix}run-*-{tracked_run.RUN_ID}/*.wandb")
    return WandbFile(path)


def assert_whole(file: WandbFile, run: RunDir, records: list[dict[str, Any]]) -> None:
    """The file holds the config key by key and every value of every line."""
    assert_history(file.history, records)
    assert_config(file.config, expected_config(run))
    assert file.run.project == "llmx-tests"
    assert file.run.run_group == "group-1"
    assert list(file.run.tags) == ["one", "two"]
    assert file.run.display_name == "tiny-演示"


def assert_config(config: dict[str, Any], expected: dict[str, Any]) -> None:
    for key, value in expected.items():
        assert config[key] == value, key


def expected_config(run: RunDir) -> dict[str, Any]:
    """Everything that W&B is given: the resolved config, and what was made of it."""
    return {
        **yaml.safe_load(run.config.read_text(encoding="utf-8")),
        "ds_config": read_json(run.ds_config),
        "provenance": read_json(run.provenance),
        "plan": read_json(run.plan),
    }


def without_empty(value: Any) -> Any:
    """wandb-core keeps empty mappings in its file and leaves them out of what it sends."""
    if not isinstance(value, dict):
        return value
    return {key: without_empty(item) for key, item in value.items() if item != {}}


def assert_history(history: list[dict[str, Any]], records: list[dict[str, Any]]) -> None:
    rows = {row["_step"]: row for row in history}
    metrics = [record for record in records if scalars(record)]
    assert len(metrics) >= 4
    for record in metrics:
        row = rows[record["step"]]
        assert row[f"{record['kind']}/step"] == record["step"]
        assert row["_timestamp"] == pytest.approx(record["time"])
        for name, value in scalars(record).items():
            assert float(row[name]) == pytest.approx(value, nan_ok=True), (record["step"], name)


def start_run(root: Path, **tracking: Any) -> RunDir:
    values: dict[str, Any] = {
        "kinds": ["wandb"],
        "project": "llmx-tests",
        "group": "group-1",
        "tags": ["one", "two"],
        "finish_timeout_s": 12.0,
    }
    return tracked_run.write_start(root / "run", **{**values, **tracking})


def test_offline_without_a_key(tmp_path: Path, tracker: Callable[..., TrackerProcess]) -> None:
    run = start_run(tmp_path, kinds=["wandb", "csv", "tensorboard"])
    records = tracked_run.lines()
    records[5]["loss"], records[5]["nonfinite"] = None, True
    one = tracker(run)
    for record in records:
        tracked_run.append(run, [record])
    write_json(run.result, tracked_run.result())
    out = one.wait()

    file = only_wandb_file(run, prefix="offline-")
    assert_whole(file, run, records)
    assert math.isnan(float({r["_step"]: r for r in file.history}[8]["train/loss"]))
    assert file.exit_code == 0
    assert file.summary["outcome"] == "ok"
    assert file.summary["exact_match"] == 0.96875
    assert file.summary["best_eval_loss"] == 0.4
    assert one.process.returncode == 0
    sync = read_json(run.root / "tracking.json")["wandb"]["sync"]
    (line,) = [text for text in out.splitlines() if text.startswith("wandb")]
    assert "no API key" in line
    assert "wandb login" in line
    assert line.endswith(sync)
    assert Path(sync.removeprefix("wandb sync ")).is_dir()
    assert len((run.root / "metrics.csv").read_text().splitlines()) == 1 + len(records) - 2
    assert list((run.root / "tensorboard").glob("events*"))


def test_online(tmp_path: Path, tracker: Callable[..., TrackerProcess]) -> None:
    run = start_run(tmp_path)
    records = tracked_run.lines()
    with WandbServer() as server:
        one = tracker(run, WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url)
        tracked_run.append(run, records)
        write_json(run.result, tracked_run.result())
        out = one.wait()
    assert_history(server.history, records)
    unwrapped = {k: v["value"] for k, v in server.config.items() if isinstance(v, dict)}
    assert_config(unwrapped, without_empty(expected_config(run)))
    assert list(server.runs) == [tracked_run.RUN_ID], "one W&B run for one run"
    assert server.runs[tracked_run.RUN_ID]["tags"] == ["one", "two"]
    assert server.exit_codes == [0]
    assert server.url in out
    assert tracker_state(run, "wandb") == "finished"
    leaked = [
        path for path in run.root.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()
    ]
    assert leaked == []


@pytest.mark.parametrize("again", [False, True], ids=["one process", "one process after the other"])
def test_one_online_run_over_restarts(
    tmp_path: Path, tracker: Callable[..., TrackerProcess], again: bool
) -> None:
    """The ranks restart from a checkpoint; perhaps the supervisor, and so its tracker, was killed
    too. The server has every step once, from first to last, in one run."""
    run = start_run(tmp_path)
    records = tracked_run.lines()
    first = [record for record in records if record.get("step", 0) <= 24]
    resumed = {"kind": "event", "event": "resumed", "step": 20, "attempt": 2, "time": 1.9e9}
    kept = [record for record in first if record.get("step", 0) <= 20]
    later = [record for record in records if record.get("step", 0) > 20]
    with WandbServer() as server:
        environment = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
        one = tracker(run, **environment)
        tracked_run.append(run, first)
        until(lambda: [r for r in server.history if r["_step"] == 22], what="step 22 there")
        if again:
            assert one.process.stdin is not None
            one.process.stdin.close()
            one.wait(20)
        text = "".join(json.dumps(record) + "\n" for record in [*kept, resumed])
        write_text(run.metrics, text)
        if again:
            one = tracker(run, **environment)
        tracked_run.append(run, later)
        write_json(run.result, tracked_run.result())
        out = one.wait()
    assert "online" in out
    steps = [row["_step"] for row in server.history]
    assert steps == sorted(set(steps)), "every step once"
    assert_history(server.history, records)
    rows = [row for row in server.history if row.get("resumed/step") == 20]
    assert [row["resumed/attempt"] for row in rows] == [2]
    assert list(server.runs) == [tracked_run.RUN_ID]


def test_sync_of_an_offline_run(tmp_path: Path, tracker: Callable[..., TrackerProcess]) -> None:
    run = start_run(tmp_path)
    records = tracked_run.lines()
    tracked_run.append(run, records)
    one = tracker(run)
    write_json(run.result, tracked_run.result())
    one.wait()
    sync = read_json(run.root / "tracking.json")["wandb"]["sync"].split()
    with WandbServer() as server:
        env = {**os.environ, "WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
        program = str(Path(sys.executable).with_name(sync[0]))
        subprocess.run(
            [program, *sync[1:]],
            env=env,
            cwd=tmp_path,
            check=True,
            capture_output=True,
            timeout=60,
        )
        assert_history(server.history, records)


@pytest.mark.parametrize("fault", ["unreachable", "hangs", "hangs_after_the_first_answer"])
def test_server_that_is_not_there(
    tmp_path: Path, tracker: Callable[..., TrackerProcess], fault: str
) -> None:
    run = start_run(tmp_path)
    records = tracked_run.lines()
    tracked_run.append(run, records)
    with WandbServer() as server:
        url = NOTHING_LISTENS if fault == "unreachable" else server.url
        if fault == "hangs":
            server.hang()
        if fault == "hangs_after_the_first_answer":
            # The probe is answered, W&B's own questions are not.
            server._graphql = lambda *_: server._answers.clear() or server._answers.wait() or {}  # type: ignore[method-assign]
        write_json(run.result, tracked_run.result())
        one = tracker(run, WANDB_API_KEY=KEY, WANDB_BASE_URL=url)
        out = one.wait()
    assert_whole(only_wandb_file(run, prefix="offline-"), run, records)
    (line,) = out.splitlines()
    assert line.startswith("wandb: offline: ")
    assert "wandb sync " in line
    assert one.process.returncode == 0


@pytest.mark.parametrize("fault", ["die", "hang"])
def test_server_lost_during_the_run(
    tmp_path: Path, tracker: Callable[..., TrackerProcess], fault: str
) -> None:
    run = start_run(tmp_path)
    records = tracked_run.lines()
    with WandbServer() as server:
        one = tracker(run, WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url)
        tracked_run.append(run, records[:6])
        until(lambda: tracker_state(run, "wandb") == "online", what="the online run")
        getattr(server, fault)()
        tracked_run.append(run, records[6:])
        write_json(run.result, tracked_run.result())
        out = one.wait()
    assert_whole(only_wandb_file(run, prefix=""), run, records)
    first, last = out.splitlines()
    assert first.startswith("wandb: online: ")
    assert "did not accept everything" in last
    assert "wandb sync " in last


def test_replay_after_a_kill(tmp_path: Path, tracker: Callable[..., TrackerProcess]) -> None:
    run = start_run(tmp_path, kinds=["wandb", "tensorboard", "csv"])
    records = tracked_run.lines()
    tracked_run.append(run, records[:8])
    one = tracker(run)
    until(lambda: tracker_state(run, "wandb") == "offline", what="the offline run")
    one.process.kill()
    one.process.wait(30)
    tracked_run.append(run, records[8:])
    write_json(run.result, tracked_run.result())

    again = tracker(run, "--replay")
    again.wait()
    assert again.process.returncode == 0
    # Only the whole one is left for `wandb sync`; the partial one is out of its way.
    assert_whole(only_wandb_file(run, prefix="offline-"), run, records)
    assert len(list((run.root / "wandb" / "superseded").iterdir())) == 1
    assert len(list((run.root / "tensorboard").glob("events*"))) == 1
    assert len((run.root / "metrics.csv").read_text().splitlines()) == 1 + len(records) - 2


def test_death_of_the_supervisor(tmp_path: Path, tracker: Callable[..., TrackerProcess]) -> None:
    run = start_run(tmp_path)
    records = tracked_run.lines()[:9]
    tracked_run.append(run, records)
    one = tracker(run)
    until(lambda: tracker_state(run, "wandb") == "offline", what="the offline run")
    assert one.process.stdin is not None
    one.process.stdin.close()
    one.wait(20)
    file = only_wandb_file(run, prefix="offline-")
    assert_history(file.history, records)
    assert file.exit_code == 1


def test_ctrl_c_is_for_the_supervisor(
    tmp_path: Path, tracker: Callable[..., TrackerProcess]
) -> None:
    run = start_run(tmp_path)
    records = tracked_run.lines()
    tracked_run.append(run, records[:6])
    one = tracker(run)
    until(lambda: tracker_state(run, "wandb") == "offline", what="the offline run")
    one.process.send_signal(signal.SIGINT)
    tracked_run.append(run, records[6:])
    write_json(run.result, tracked_run.result("interrupted"))
    one.wait()
    file = only_wandb_file(run, prefix="offline-")
    assert_whole(file, run, records)
    assert file.summary["outcome"] == "interrupted"


def test_a_result_of_an_earlier_run_is_not_the_end(
    tmp_path: Path, tracker: Callable[..., TrackerProcess]
) -> None:
    run = start_run(tmp_path, kinds=["csv"])
    write_json(run.result, {**tracked_run.result(), "run_id": "an-earlier-run"})
    records = tracked_run.lines()
    one = tracker(run)
    tracked_run.append(run, records[:6])
    csv = run.root / "metrics.csv"
    until(lambda: csv.exists() and len(csv.read_text().splitlines()) == 1 + 5, what="5 rows")
    assert one.process.poll() is None
    tracked_run.append(run, records[6:])
    write_json(run.result, tracked_run.result())
    one.wait()
    assert len(csv.read_text().splitlines()) == 1 + len(records) - 2


def test_a_tracker_that_cannot_write_stops_nobody(
    tmp_path: Path, tracker: Callable[..., TrackerProcess]
) -> None:
    run = start_run(tmp_path, kinds=["csv", "tensorboard"])
    (run.root / "metrics.csv").mkdir()
    records = tracked_run.lines()
    tracked_run.append(run, records)
    write_json(run.result, tracked_run.result())
    one = tracker(run)
    out = one.wait()
    assert one.process.returncode == 1
    (line,) = [text for text in out.splitlines() if text.startswith("csv")]
    assert "IsADirectoryError" in line
    assert line.endswith(f"python -m llmx.tracking.process {run.root} --replay")
    assert tracker_state(run, "tensorboard") == "finished"


def test_not_a_run_directory(tmp_path: Path, tracker: Callable[..., TrackerProcess]) -> None:
    one = tracker(RunDir(tmp_path))
    one.wait()
    assert one.process.returncode == 2
    assert one.process.stderr is not None
    error = one.process.stderr.read()
    assert "not a run directory" in error
    assert "Traceback" not in error


def test_metrics_of_the_ranks_need_no_wandb(tmp_path: Path) -> None:
    """What the report imports of this room is the standard library."""
    code = "import llmx.tracking, sys; print(json.dumps(sorted(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", f"import json; {code}"], capture_output=True, check=True, text=True
    )
    heavy = {"wandb", "torch", "tensorboard", "matplotlib", "yaml", "numpy"}
    assert heavy.isdisjoint(json.loads(found.stdout))
