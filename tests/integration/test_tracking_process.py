"""The tracker process as the supervisor runs it: a process, a pipe, a run directory that grows."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from llmx.run.metrics.lines import scalars
from llmx.run.rundir import RunDir, read_json, write_json, write_text
from tests import tracked_run
from tests.cluster.host import wait_until
from tests.wandb_file import WandbFile
from tests.wandb_server import WandbServer

KEY = "0123456789abcdef0123456789abcdef01234567"
NOTHING_LISTENS = "http://127.0.0.1:9"


class TrackerProcess:
    """A tracker process with the supervisor's end of its pipe."""

    def __init__(self, run: RunDir, *args: str, env: dict[str, str]) -> None:
        pipe = subprocess.PIPE
        words = [sys.executable, "-m", "llmx.tracking.process", str(run.root), *args]
        self.process = subprocess.Popen(
            words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env
        )

    def wait(self, timeout_s: float = 60.0) -> str:
        """Wait for the end with the pipe still open; returns stdout. A server that hangs would not
        let it end: after ``finish_timeout_s`` it must."""
        assert self.process.stdout is not None
        self.process.wait(timeout_s)
        return self.process.stdout.read()

    def leave(self) -> None:
        """As the supervisor does when it dies: the pipe is closed."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.wait(20)


Start = Callable[..., TrackerProcess]


@pytest.fixture
def tracker(tmp_path: Path) -> Iterator[Start]:
    """Starts tracker processes without a W&B account, or with that of a server; ends what is left
    of them."""
    started: list[TrackerProcess] = []

    def start(run: RunDir, *args: str, url: str = "") -> TrackerProcess:
        env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
        account = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": url} if url else {}
        env |= {"HOME": str(tmp_path), **account}
        started.append(TrackerProcess(run, *args, env=env))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait()
        for stream in (one.process.stdin, one.process.stdout, one.process.stderr):
            assert stream is not None
            stream.close()
    pids = [[str(one.process.pid)] for one in started]
    wait_until(lambda: not cores_of(pids), timeout_s=30, what="wandb-core's end")


def cores_of(pids: list[list[str]]) -> list[int]:
    """wandb-core processes that were started by one of ``pids``."""
    every = psutil.process_iter(["pid", "name", "cmdline"])
    cores = [process.info for process in every if process.info["name"] == "wandb-core"]
    return [info["pid"] for info in cores if (info["cmdline"] or [])[-1:] in pids]


def until_state(run: RunDir, state: str) -> None:
    """Wait until ``tracking.json`` says so of W&B."""
    wait_until(lambda: tracker_state(run) == state, timeout_s=30, what=f"W&B is {state}")


def tracker_state(run: RunDir, tracker: str = "wandb") -> str:
    path = run.root / "tracking.json"
    return read_json(path).get(tracker, {}).get("state", "") if path.exists() else ""


def assert_whole(run: RunDir, records: list[dict[str, Any]], *, prefix: str) -> WandbFile:
    """The one transaction log of the run that counts holds the config key by key and every value
    of every line."""
    (path,) = (run.root / "wandb").glob(f"{prefix}run-*-{tracked_run.RUN_ID}/*.wandb")
    file = WandbFile(path)
    assert_history(file.history, records)
    assert_config(file.config, expected_config(run))
    assert (file.run.project, file.run.run_group) == ("llmx-tests", "group-1")
    assert list(file.run.tags) == ["one", "two"]
    assert file.run.display_name == "tiny-演示"
    return file


def assert_config(config: dict[str, Any], expected: dict[str, Any]) -> None:
    for key, value in expected.items():
        assert config[key] == value, key


def expected_config(run: RunDir) -> dict[str, Any]:
    """Everything that W&B is given: the resolved config, and what was made of it."""
    made = {name: read_json(getattr(run, name)) for name in ("ds_config", "provenance", "plan")}
    return {**yaml.safe_load(run.config.read_text(encoding="utf-8")), **made}


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


def start_run(root: Path, *kinds: str) -> RunDir:
    about: dict[str, Any] = {"project": "llmx-tests", "group": "group-1", "tags": ["one", "two"]}
    kinds = kinds or ("wandb",)
    return tracked_run.write_start(root / "run", kinds=list(kinds), finish_timeout_s=12.0, **about)


def finish(run: RunDir, records: list[dict[str, Any]], outcome: str = "ok") -> None:
    """The last lines of a run, and its result."""
    tracked_run.append(run, records)
    write_json(run.result, tracked_run.result(outcome))


def num_rows(run: RunDir) -> int:
    path = run.root / "metrics.csv"
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


def test_offline_without_a_key_and_sent_later(tmp_path: Path, tracker: Start) -> None:
    run = start_run(tmp_path, "wandb", "csv", "tensorboard")
    records = tracked_run.lines()
    records[5]["loss"], records[5]["nonfinite"] = None, True
    one = tracker(run)
    for record in records:
        tracked_run.append(run, [record])
    finish(run, [])
    out = one.wait()

    file = assert_whole(run, records, prefix="offline-")
    assert math.isnan(float({r["_step"]: r for r in file.history}[8]["train/loss"]))
    assert (file.exit_code, one.process.returncode) == (0, 0)
    assert file.summary["outcome"] == "ok"
    assert file.summary["exact_match"] == 0.96875
    assert file.summary["best_eval_loss"] == 0.4
    sync = read_json(run.root / "tracking.json")["wandb"]["sync"]
    (line,) = [text for text in out.splitlines() if text.startswith("wandb")]
    assert "no API key" in line
    assert "wandb login" in line
    assert line.endswith(sync)
    assert num_rows(run) == len(records) - 2
    assert list((run.root / "tensorboard").glob("events*"))

    program, *words = sync.split()
    with WandbServer() as server:
        env = {**os.environ, "WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
        words = [str(Path(sys.executable).with_name(program)), *words]
        subprocess.run(words, env=env, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    assert_history(server.history, records)


def test_online(tmp_path: Path, tracker: Start) -> None:
    run = start_run(tmp_path)
    records = tracked_run.lines()
    with WandbServer() as server:
        one = tracker(run, url=server.url)
        finish(run, records)
        out = one.wait()
    assert_history(server.history, records)
    unwrapped = {k: v["value"] for k, v in server.config.items() if isinstance(v, dict)}
    assert_config(unwrapped, without_empty(expected_config(run)))
    assert list(server.runs) == [tracked_run.RUN_ID], "one W&B run for one run"
    assert server.runs[tracked_run.RUN_ID]["tags"] == ["one", "two"]
    assert server.exit_codes == [0]
    assert server.url in out
    assert tracker_state(run) == "finished"
    files = [path for path in run.root.rglob("*") if path.is_file()]
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def test_one_online_run_over_restarts(tmp_path: Path, tracker: Start) -> None:
    """The ranks restart from a checkpoint; then the supervisor, and so its tracker, is killed, too.
    The server has every step once, from first to last, in one run."""
    run = start_run(tmp_path)
    records = tracked_run.lines()

    def up_to(step: int) -> list[dict[str, Any]]:
        return [record for record in records if record.get("step", 0) <= step]

    def resumed(step: int, attempt: int) -> dict[str, Any]:
        known = {"kind": "event", "event": "resumed", "time": 1.9e9}
        return {**known, "step": step, "attempt": attempt}

    def write(*written: dict[str, Any]) -> None:
        write_text(run.metrics, "".join(f"{json.dumps(record)}\n" for record in written))

    with WandbServer() as server:
        first = tracker(run, url=server.url)
        tracked_run.append(run, up_to(24))
        wait_until(
            lambda: any(row["_step"] == 22 for row in server.history), timeout_s=30, what="step 22"
        )
        kept = [*up_to(20), resumed(20, 2)]
        write(*kept)
        kept += [record for record in up_to(28) if record.get("step", 0) > 20]
        tracked_run.append(run, kept[len(up_to(20)) + 1 :])
        first.leave()
        write(*kept, resumed(28, 3))
        second = tracker(run, url=server.url)
        finish(run, [record for record in records if record.get("step", 0) > 28])
        out = second.wait()
    assert "online" in out
    steps = [row["_step"] for row in server.history]
    assert steps == sorted(set(steps)), "every step once"
    assert_history(server.history, records)
    for step, attempt in ((20, 2), (28, 3)):
        rows = [row for row in server.history if row.get("resumed/step") == step]
        assert [row["resumed/attempt"] for row in rows] == [attempt]
    assert list(server.runs) == [tracked_run.RUN_ID]


@pytest.mark.parametrize("fault", ["unreachable", "hangs", "hangs_after_the_first_answer"])
def test_server_that_is_not_there(tmp_path: Path, tracker: Start, fault: str) -> None:
    run = start_run(tmp_path)
    records = tracked_run.lines()
    with WandbServer() as server:
        if fault == "hangs":
            server.hang()
        if fault == "hangs_after_the_first_answer":
            # The probe is answered, W&B's own questions are not.
            server._graphql = lambda *_: server._answers.clear() or server._answers.wait() or {}  # type: ignore[method-assign]
        finish(run, records)
        one = tracker(run, url=NOTHING_LISTENS if fault == "unreachable" else server.url)
        out = one.wait()
    assert_whole(run, records, prefix="offline-")
    (line,) = out.splitlines()
    assert line.startswith("wandb: offline: ")
    assert "wandb sync " in line
    assert one.process.returncode == 0


@pytest.mark.parametrize("fault", ["die", "hang"])
def test_server_lost_during_the_run(tmp_path: Path, tracker: Start, fault: str) -> None:
    run = start_run(tmp_path)
    records = tracked_run.lines()
    with WandbServer() as server:
        one = tracker(run, url=server.url)
        tracked_run.append(run, records[:6])
        until_state(run, "online")
        getattr(server, fault)()
        finish(run, records[6:])
        out = one.wait()
    assert_whole(run, records, prefix="")
    first, last = out.splitlines()
    assert first.startswith("wandb: online: ")
    assert "did not accept everything" in last
    assert "wandb sync " in last


def test_replay_after_a_kill(tmp_path: Path, tracker: Start) -> None:
    run = start_run(tmp_path, "wandb", "tensorboard", "csv")
    records = tracked_run.lines()
    tracked_run.append(run, records[:8])
    one = tracker(run)
    until_state(run, "offline")
    one.process.kill()
    one.process.wait(30)
    finish(run, records[8:])

    again = tracker(run, "--replay")
    again.wait()
    assert again.process.returncode == 0
    # Only the whole one is left for `wandb sync`; the partial one is out of its way.
    assert_whole(run, records, prefix="offline-")
    assert len(list((run.root / "wandb" / "superseded").iterdir())) == 1
    assert len(list((run.root / "tensorboard").glob("events*"))) == 1
    assert num_rows(run) == len(records) - 2


def test_ctrl_c_is_for_the_supervisor_whose_death_ends_it(tmp_path: Path, tracker: Start) -> None:
    run, other = start_run(tmp_path), start_run(tmp_path / "other")
    records = tracked_run.lines()
    one, orphan = tracker(run), tracker(other)
    for each in (run, other):
        tracked_run.append(each, records[:9])
        until_state(each, "offline")
    one.process.send_signal(signal.SIGINT)
    finish(run, records[9:], "interrupted")
    one.wait()
    assert assert_whole(run, records, prefix="offline-").summary["outcome"] == "interrupted"
    orphan.leave()
    assert assert_whole(other, records[:9], prefix="offline-").exit_code == 1


def test_a_result_of_an_earlier_run_is_not_the_end(tmp_path: Path, tracker: Start) -> None:
    run = start_run(tmp_path, "csv")
    write_json(run.result, {**tracked_run.result(), "run_id": "an-earlier-run"})
    records = tracked_run.lines()
    one = tracker(run)
    tracked_run.append(run, records[:6])
    wait_until(lambda: num_rows(run) == 5, timeout_s=30, what="5 rows")
    assert one.process.poll() is None
    finish(run, records[6:])
    one.wait()
    assert num_rows(run) == len(records) - 2


def test_a_tracker_that_cannot_write_stops_nobody(tmp_path: Path, tracker: Start) -> None:
    run = start_run(tmp_path, "csv", "tensorboard")
    (run.root / "metrics.csv").mkdir()
    finish(run, tracked_run.lines())
    one = tracker(run)
    out = one.wait()
    assert one.process.returncode == 1
    (line,) = [text for text in out.splitlines() if text.startswith("csv")]
    assert "IsADirectoryError" in line
    assert line.endswith(f"python -m llmx.tracking.process {run.root} --replay")
    assert tracker_state(run, "tensorboard") == "finished"


def test_not_a_run_directory(tmp_path: Path, tracker: Start) -> None:
    one = tracker(RunDir(tmp_path))
    one.wait()
    assert one.process.returncode == 2
    assert one.process.stderr is not None
    error = one.process.stderr.read()
    assert "not a run directory" in error
    assert "Traceback" not in error


def test_metrics_of_the_ranks_need_no_wandb() -> None:
    """What the report imports of this room is the standard library."""
    code = "import json, llmx.tracking, sys; print(json.dumps(sorted(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    heavy = {"wandb", "torch", "tensorboard", "matplotlib", "yaml", "numpy"}
    assert heavy.isdisjoint(json.loads(found.stdout))
