"""Trackers, read back; those that hang or fail beside one that works."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from llmx.config import TrackingConfig
from llmx.errors import ConfigError
from llmx.run.metrics.lines import MetricsTail, scalars
from llmx.run.rundir import RunDir, write_text
from llmx.tracking import RunMeta, Status, Tracker
from llmx.tracking.base import check_packages
from llmx.tracking.csv_file import CsvTracker
from llmx.tracking.mlflow_run import MlflowTracker
from llmx.tracking.process import Feed, finish
from llmx.tracking.tensorboard import TensorBoardTracker
from llmx.tracking.wandb_run import WandbTracker
from tests import tracked_run
from tests.agents import wait_until


def test_wandb_has_a_table_of_the_generated_samples(tmp_path: Path, monkeypatch) -> None:
    """Once for each step that has some; the newest at the end."""
    monkeypatch.setenv("WANDB_MODE", "offline")

    def generate(step: int) -> None:
        row = {"step": step, "attempt": 1, "prompt": "2 + 2", "completion": str(step)}
        row |= {"rewards": {"exact_match": None, "reward": 1.0}, "advantage": 0.5}
        with (tmp_path / "rollouts.jsonl").open("a") as stream:
            stream.write(json.dumps(row) + "\n")

    tracker = WandbTracker(lambda status: None)
    tracker.start(RunMeta("id", "name", tmp_path, TrackingConfig(mode="offline")))
    generate(1)
    for step in (1, 2):
        tracker.log({"kind": "train", "step": step, "loss": 0.5})
    generate(2)
    tracker.finish(tracked_run.result())
    tables = [json.loads(path.read_text()) for path in tmp_path.rglob("samples_*.table.json")]
    assert {tuple(table["columns"]) for table in tables} == {
        ("step", "prompt", "completion", "exact_match", "reward", "advantage")
    }
    assert sorted(table["data"] for table in tables) == [
        [[step, "2 + 2", str(step), None, 1, 0.5]] for step in (1, 2)
    ]


def test_a_restart_leaves_every_step_once(tmp_path: Path) -> None:
    """Metrics up to step 16, cut back to 10 by a resume, then on to 20: through the tail."""
    records = tracked_run.lines()
    first = [record for record in records if record.get("step", 0) <= 16]
    later = [record for record in records if 10 < record.get("step", 0) <= 20]
    final = [record for record in records if record.get("step", 0) <= 10]
    final.append({"kind": "event", "event": "resumed", "step": 10, "attempt": 2, "time": 1.0})
    final += [{**record, "time": record["time"] + 100} for record in later]
    path = tmp_path / "metrics.jsonl"
    trackers = [CsvTracker(lambda status: None), TensorBoardTracker(lambda status: None)]
    config = {"model": {"name": "tiny"}, "seed": 7}
    meta = RunMeta("id", "name", tmp_path, config=config, ds_config={"stage": 2})
    for tracker in trackers:
        tracker.start(meta)
    tail = MetricsTail(path)
    for records in (first, final):
        write_text(path, "".join(json.dumps(record) + "\n" for record in records))
        new = tail.read()
        for tracker in trackers:
            if tail.cut_to is not None:
                tracker.rewind(tail.cut_to)
            for record in new:
                tracker.log(record)
    for tracker in trackers:
        tracker.finish(None)
    # A second tracker process of the same run must not show every point twice.
    again = TensorBoardTracker(lambda status: None)
    again.start(meta)
    for record in final:
        again.log(record)
    again.finish(tracked_run.result())

    metrics = [record for record in final if scalars(record)]
    with (tmp_path / "metrics.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    for row, record in zip(rows, metrics, strict=True):
        place = (row.pop("kind"), int(row.pop("step")), float(row.pop("time")))
        assert place == (record["kind"], record["step"], record["time"])
        assert {name: float(value) for name, value in row.items() if value} == scalars(record)
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for name in {name for record in metrics for name in scalars(record)}:
        expected = [
            (r["step"], r["time"], pytest.approx(scalars(r)[name], rel=1e-6))
            for r in metrics
            if name in scalars(r)
        ]
        assert [(e.step, e.wall_time, e.value) for e in events.Scalars(name)] == expected, name
    assert [(e.step, e.value) for e in events.Scalars("resumed/attempt")] == [(10, 2.0)]
    assert json.loads(events.Tensors("config")[0].tensor_proto.string_val[0]) == config
    assert b"| outcome | ok |" in events.Tensors("result")[-1].tensor_proto.string_val[0]


@pytest.mark.filterwarnings("ignore")  # of classes that processes without mlflow cannot read
def test_mlflow(tmp_path: Path, monkeypatch) -> None:
    """A store in the run directory, first because no server answers: config, tags, each step once
    after a restart and another tracker process, the outcome."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(sys.prefix) / "trackers")])
    pytest.importorskip("mlflow", reason="mlflow is not installed; make venv puts it aside")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = {"model": {"name": "tiny", "task/odd": None}, "seed": 7, "long": "x" * 9000}
    settings = TrackingConfig(project="tests", group="g", tags=["one", "two:2@x"])
    meta = RunMeta("run-1", "name-演示", tmp_path, settings, config, {"zero": {"stage": 2}})
    records = tracked_run.lines()
    records[5]["loss"], records[5]["nonfinite"], records[5]["recall@1"] = None, True, 0.5
    tracked_run.append(RunDir(tmp_path), records)
    said: list[Status] = []
    off = dataclasses.replace(settings, uri="http://127.0.0.1:9")
    there = dataclasses.replace(meta, settings=off)
    for about, part, result in ((there, records[:12], None), (meta, records, tracked_run.result())):
        tracker = MlflowTracker(said.append)
        tracker.start(about)
        for record in part:
            tracker.log(record)
        tracker.rewind(8)
        for record in records[8:12]:
            tracker.log({**record, "time": record["time"] + 100})
        tracker.finish(result)

    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    number = client.get_experiment_by_name("tests").experiment_id
    (run,) = client.search_runs([number])
    assert (run.info.run_name, run.info.status) == ("name-演示", "FINISHED")
    assert run.data.params.items() >= {"model.name": "tiny", "ds_config.zero.stage": "2"}.items()
    assert len(run.data.params["long"]) == 500
    tags = {"two_2_x": "true", "one": "true", "summary.outcome": "ok"}
    assert run.data.tags.items() >= {**tags, "summary.best_eval_loss": "0.4"}.items()
    metrics = [record for record in records if scalars(record)]
    for name in {name for record in metrics for name in scalars(record)}:
        expected = {r["step"]: scalars(r)[name] for r in metrics if name in scalars(r)}
        history = client.get_metric_history(run.info.run_id, name.replace("@", "_"))
        assert len(history) == len(expected), name
        for point in history:
            assert point.value == pytest.approx(expected[point.step], nan_ok=True), name
    away, again, over = said
    assert away.state == "offline"
    assert "http://127.0.0.1:9 cannot be reached" in away.message
    assert away.sync == f"python -m llmx.tracking.process {tmp_path} --replay"
    assert again.message == f"mlflow ui --backend-store-uri sqlite:///{tmp_path}/mlflow/mlflow.db"
    assert over.state == "finished"


def test_swanlab(tmp_path: Path, monkeypatch) -> None:
    """Without a key: its file has the config, and each step of a metric once."""
    pytest.importorskip("swanlab", reason="swanlab is not installed (it wants protobuf below 7)")
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record as SwanlabRecord
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    from llmx.tracking.swanlab_run import SwanlabTracker

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
    said: list[Status] = []
    records = tracked_run.lines()
    settings, config = TrackingConfig(project="tests"), {"model": {"name": "tiny"}}
    meta = RunMeta("run-1", "name", tmp_path, settings, config)
    for _ in range(2):  # another tracker process of the run: the whole anew, the earlier set aside
        tracker = SwanlabTracker(said.append)
        tracker.start(meta)
        for record in [*records[:12], *records[8:]]:
            tracker.log(record)
        tracker.finish(tracked_run.result())
    (directory,) = (tmp_path / "swanlab").glob("run-*")
    assert len(list((tmp_path / "swanlab").glob("superseded-run-*"))) == 1
    assert "no API key" in said[-1].message
    assert said[-1].sync == f"swanlab sync --project tests --id run-1 {directory}"
    written = (directory / "files" / "config.yaml").read_text()
    assert "name: tiny" in written
    assert "summary.outcome" in written
    reader = DataStoreReader()
    reader.open(next(directory.glob("*.swanlab")))
    points = [point for data in reader if (point := SwanlabRecord.FromString(data).scalar).key]
    expected = {(n, record["step"]): v for record in records for n, v in scalars(record).items()}
    assert len(points) == len(expected)
    for point in points:
        assert point.value.number == pytest.approx(expected[point.key, point.step])


def test_a_tracker_without_its_package_is_named_before_the_start(
    tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "only_a_directory").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    needs = ("nowhere_to_be_found", "only_a_directory", "json")
    monkeypatch.setattr(MlflowTracker, "needs", needs)
    check_packages(TrackingConfig(kinds=["wandb", "csv"]))
    with pytest.raises(ConfigError) as raised:
        check_packages(TrackingConfig(kinds=["csv", "mlflow"]))
    assert str(raised.value) == (
        "tracking.kinds has mlflow, which needs a package that is not installed on this machine "
        "(nowhere_to_be_found, only_a_directory). Run `pip install llmx[mlflow]`, or leave it out "
        "(tracking=csv)."
    )


class Kept(Tracker):
    """A tracker that keeps what it gets."""

    name = "kept"

    def __init__(self) -> None:
        super().__init__(lambda status: None)
        self.records: list[dict[str, Any]] = []
        self.result: dict[str, Any] | None = None

    def start(self, meta: RunMeta) -> None:
        """Nothing to open."""

    def rewind(self, step: int) -> None:
        self.records = [record for record in self.records if record.get("step", 0) <= step]

    def log(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def finish(self, result: dict[str, Any] | None) -> None:
        self.result = result


class Hanging(Kept):
    """A tracker that never comes back from ``start``."""

    name = "hanging"

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def start(self, meta: RunMeta) -> None:
        self.release.wait()


class Failing(Kept):
    """A tracker whose server says no at every line."""

    name = "failing"
    calls = 0

    def log(self, record: dict[str, Any]) -> None:
        self.calls += 1
        raise RuntimeError("quota exceeded\nsecond line")


def test_one_that_hangs_and_one_that_fails_hold_up_nobody(tmp_path: Path) -> None:
    said: list[Status] = []
    hanging, failing, kept, records = Hanging(), Failing(), Kept(), tracked_run.lines()
    RunDir(tmp_path).metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    meta = RunMeta("id", "name", tmp_path, TrackingConfig(finish_timeout_s=3))
    feeds = [Feed(each, meta, said.append) for each in (hanging, failing, kept)]
    finish(feeds, tracked_run.result())
    hanging.release.set()
    assert (kept.records, kept.result) == (records, tracked_run.result())
    assert failing.calls == 1, "a tracker that failed is left alone"
    by_name = {status.tracker: status.message for status in said}
    assert len(said) == 2, "each failure is said once"
    assert "not finished within 3 s" in by_name["hanging"]
    assert "RuntimeError: quota exceeded (while it should log)" in by_name["failing"]
    assert {each.fix for each in said} == {f"python -m llmx.tracking.process {tmp_path} --replay"}


def test_what_a_restart_takes_back_is_taken_back(tmp_path: Path) -> None:
    """The file is written anew without the steps that come again."""
    kept, metrics = Kept(), RunDir(tmp_path).metrics
    first = [{"kind": "train", "step": step, "loss": 1.0} for step in range(1, 5)]
    again = [*first[:2], {"kind": "train", "step": 3, "loss": 2.0}]
    feed = Feed(kept, RunMeta("id", "name", tmp_path), lambda status: None)
    for records in (first, again):
        partial = tmp_path / "partial"
        partial.write_text("".join(json.dumps(record) + "\n" for record in records))
        partial.rename(metrics)
        wait_until(lambda: kept.records == records, timeout_s=30)  # noqa: B023
    finish([feed], None)
    assert kept.records == again
