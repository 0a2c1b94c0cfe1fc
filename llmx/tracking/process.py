"""The tracker process: sends a run's ``metrics.jsonl`` to its trackers.

    python -m llmx.tracking.process RUN_DIR            started by the supervisor
    python -m llmx.tracking.process RUN_DIR --replay   builds everything again, by hand

The supervisor holds this process's standard input open: end of file means that the
supervisor died. It ends by itself when ``result.json`` of this run is there, within
``tracking.finish_timeout_s``; a restart of the ranks does not end it. It writes ``tracking.json``
(what every tracker is doing) and ``logs/tracking.log``; stdout gets one line a tracker. Nothing
here can slow training.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from llmx.config import Experiment, TrackingConfig, experiment_from_dict
from llmx.config.plugins import TRACKERS
from llmx.errors import ConfigError, LlmxError
from llmx.redact import redacted
from llmx.run.metrics.lines import MetricsTail, Record
from llmx.run.rundir import RunDir, load_yaml, read_mapping, write_json
from llmx.tracking.base import Notify, RunMeta, Status, Tracker, replay_command

POLL_S = 0.5


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 1 where a tracker failed."""
    parser = argparse.ArgumentParser(
        prog="python -m llmx.tracking.process",
        description="Send RUN_DIR/metrics.jsonl to the trackers of its tracking.kinds.",
    )
    parser.add_argument("run_dir", type=Path, help="a run directory of llmx")
    parser.add_argument(
        "--replay",
        action="store_true",
        help="send what is there from its first line and end (after a killed run)",
    )
    options = parser.parse_args(argv)
    run = RunDir(options.run_dir)
    try:
        experiment, config = _read_config(run)
    except LlmxError as error:
        print(f"tracking: {error}", file=sys.stderr)
        return error.exit_code
    if not options.replay:
        _become_independent(run)
    return send(run, experiment, config, lifeline=None if options.replay else sys.stdin)


def send(
    run: RunDir, experiment: Experiment, config: dict[str, Any], *, lifeline: TextIO | None
) -> int:
    """Send lines until ``result.json`` is there or ``lifeline`` ends; without one, those that are
    there."""
    started, statuses = time.time(), TrackerStatuses(run)
    meta = run_meta(run, experiment.name, experiment.tracking, config)
    kinds = dict.fromkeys(experiment.tracking.kinds)
    feeds = [Feed(TRACKERS.load(kind)(statuses), meta, statuses) for kind in kinds]
    result = None if lifeline else read_mapping(run.result) or None
    while lifeline and result is None:
        lifeline = None if _ended(lifeline, timeout_s=POLL_S) else lifeline
        result = fresh_result(run, started=started)
    finish(feeds, result)
    return statuses.exit_code


class Feed(threading.Thread):
    """Sends the lines of ``metrics.jsonl`` to one tracker, until the end is set. A tracker that
    hangs or fails holds up neither the others nor the run."""

    def __init__(self, tracker: Tracker, meta: RunMeta, notify: Notify) -> None:
        super().__init__(name=f"tracker-{tracker.name}", daemon=True)
        self.tracker, self.meta, self._notify = tracker, meta, notify
        self.end = threading.Event()
        """Set when all lines are there."""
        self.result: Record | None = None
        self.start()

    def run(self) -> None:
        """Start the tracker, send what is there and what comes, and finish."""
        tracker, tail, task = self.tracker, MetricsTail(RunDir(self.meta.run_dir).metrics), "start"
        try:
            tracker.start(self.meta)
            task, is_last = "log", False
            while not is_last:
                is_last = self.end.wait(POLL_S)
                records = tail.read()
                if tail.cut_to is not None:  # a restart took lines back
                    tracker.rewind(tail.cut_to)
                for record in records:
                    tracker.log(record)
            task = "finish"
            tracker.finish(self.result)
        except Exception as error:  # a tracker is foreign code: say it once and stop
            reason = str(error).strip().splitlines() or [type(error).__name__]
            self.failed(
                f"{type(error).__name__}: {reason[0]} (while it should {task}); training continues "
                "and metrics.jsonl has everything"
            )

    def failed(self, message: str) -> None:
        """Tell the user that this tracker has not everything, and how to send it again."""
        fix = replay_command(self.meta.run_dir)
        self._notify(Status(self.tracker.name, "failed", message, fix=fix))


def finish(feeds: Sequence[Feed], result: Record | None) -> None:
    """Wait for every tracker, within ``finish_timeout_s`` in all; name the late ones."""
    for feed in feeds:
        feed.result = result
        feed.end.set()
    began = time.monotonic()
    for feed in feeds:
        timeout_s = feed.meta.settings.finish_timeout_s
        # A little earlier than the supervisor loses patience: the late ones are to be named.
        feed.join(max(0.0, began + 0.95 * timeout_s - time.monotonic()))
        if feed.is_alive():
            feed.failed(
                f"not finished within {timeout_s:g} s (tracking.finish_timeout_s) and stopped; "
                "metrics.jsonl has everything"
            )


class TrackerStatuses:
    """Hears what the trackers notify: ``tracking.json``, ``logs/tracking.log``, one line out."""

    def __init__(self, run: RunDir) -> None:
        self.exit_code = 0
        self._run = run
        self._lock = threading.Lock()
        self._statuses: dict[str, dict[str, str]] = {}

    def __call__(self, status: Status) -> None:
        status = Status(status.tracker, **redacted(status.to_dict()))
        line = f"{status.tracker}: {status.state}: {status.message}"
        if status.fix:
            line += f". {'Upload later with' if status.sync else 'Then'}: {status.fix}"
        with self._lock:
            before = self._statuses.get(status.tracker, {})
            self._statuses[status.tracker] = status.to_dict()
            if status.state == "failed":
                self.exit_code = 1
            # A full disk or a reader that went away must not end the other trackers.
            with contextlib.suppress(OSError):
                write_json(self._run.tracking, self._statuses)
            with contextlib.suppress(OSError):
                self._log(line)
            if status.state != "finished" and before.get("message") != status.message:
                with contextlib.suppress(OSError, ValueError):
                    print(line, flush=True)

    def _log(self, line: str) -> None:
        self._run.logs.mkdir(exist_ok=True)
        with (self._run.logs / "tracking.log").open("a", encoding="utf-8") as stream:
            stream.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")


def run_meta(run: RunDir, name: str, tracking: TrackingConfig, config: dict[str, Any]) -> RunMeta:
    """The facts of the run that all trackers get besides its metrics."""
    identity = read_mapping(run.identity).get("run_id", "")
    return RunMeta(
        run_id=run_id(identity or f"{run.root}\n{run.config.stat().st_mtime_ns}"),
        name=name or run.root.name,
        run_dir=run.root,
        settings=tracking,
        config=redacted({**config, "plan": read_mapping(run.plan)}),
        ds_config=read_mapping(run.ds_config),
        provenance=redacted(read_mapping(run.provenance)),
    )


def run_id(identity: str) -> str:
    """A run id for trackers from that of the run: itself where W&B allows it."""
    if re.fullmatch(r"[A-Za-z0-9_-]{8,48}", identity):
        return identity
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def fresh_result(run: RunDir, *, started: float) -> Record | None:
    """``result.json`` of this run; None while there is none, or only an earlier run's."""
    result: Record | None = read_mapping(run.result) or None
    if result is None:
        return None
    identity = read_mapping(run.identity).get("run_id", "")
    if identity and result.get("run_id"):
        return result if result["run_id"] == identity else None
    return result if float(result.get("ended") or 0.0) >= started else None


def _read_config(run: RunDir) -> tuple[Experiment, dict[str, Any]]:
    try:
        values = load_yaml(run.config)
    except OSError as error:
        raise ConfigError(
            f"{run.root}: not a run directory ({error.strerror}: config.yaml); "
            "give the directory that a run was started in, e.g. outputs/2030-01-01/12-00-00."
        ) from None
    return experiment_from_dict(values), values


def _ended(lifeline: TextIO, *, timeout_s: float) -> bool:
    """Wait for ``timeout_s``; True as soon as the writing end of ``lifeline`` is closed."""
    ready, _, _ = select.select([lifeline], [], [], timeout_s)
    return bool(ready) and not os.read(lifeline.fileno(), 4096)


def _become_independent(run: RunDir) -> None:
    """Ctrl-C on the terminal is for the supervisor; libraries' chatter goes to the log."""
    with contextlib.suppress(OSError):
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run.logs.mkdir(exist_ok=True)
    log = os.open(run.logs / "tracking.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 2)


def _leave(code: int) -> None:
    """End at once: exit hooks of a tracker that was given up could wait for minutes."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main())
