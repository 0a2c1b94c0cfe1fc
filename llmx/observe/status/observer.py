"""The facts of a run, read from the files of its run directory and from nothing else.

Standard library and ``llmx.run.tail`` only: both are sent over ssh to a host that has neither llmx
nor its packages. What the facts mean is decided on this side (``view.py``).

    python -m llmx status RUN --json          prints them
"""

# os instead of pathlib, whose import would be a third of the start on a far host.
# ruff: noqa: PTH110, PTH111, PTH112, PTH113, PTH116, PTH118, PTH119, PTH123, PTH208, RUF007, B905
from __future__ import annotations

import json
import os
import re
import select
import shutil
import socket
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

from llmx.run.tail import LEFT_OUT, LineTail, read_checked, read_records, records_of

if TYPE_CHECKING:
    Facts = dict[str, Any]  # at run time an old Python on a host must do
MAX_LOSSES = 240
MAX_EVENTS = 12
BRIEF_BYTES, BRIEF_LINES = 1 << 16, 32
DEEPEST = 4


class Observer:
    """Facts of one run, again and again; of ``metrics.jsonl`` only what is new is read.

    ``brief`` reads its end and a few lines before: enough for a row of a table, whatever its size.
    """

    def __init__(self, root: str, brief: bool = False) -> None:
        self.root = os.path.abspath(os.path.expanduser(root))
        self.tail = LineTail(self._path("metrics.jsonl"))
        self.metrics = Metrics()
        self.brief = brief
        self.head: tuple[str, int | None] | None = None
        self.damage: list[str] = []
        self.unreadable = 0

    def facts(self) -> Facts:
        """Everything that can be shown; what is not there is None or empty."""
        self.damage = []
        supervisor = self._json("supervisor.json")
        result = self._json("result.json")
        if result:
            result.pop("traceback", None)
        if self.head is None:
            self.head = _name_and_stop(self._path("config.yaml"))
        self._read_metrics()
        return {
            "path": self.root,
            "name": self.head[0] or os.path.basename(self.root),
            "stop_at_step": self.head[1],
            "host": socket.gethostname(),
            "now": time.time(),
            "identity": self._json("run.json"),
            "supervisor": supervisor,
            "supervisor_alive": _is_alive(supervisor),
            "attempts": read_records(self._path("attempts.jsonl"), self.damage)[-50:],
            "lock": read_checked(self._path("supervisor.lock"))[0] or None,
            "result": result,
            "started": self._mtime("config.yaml"),
            "launched": os.path.isdir(self._path("ranks")),
            "disk_free_bytes": _free_bytes(self.root),
            "hosts": self._hosts(),
            "ranks": self._ranks(),
            "checkpoints": self._checkpoints(),
            "report": os.path.exists(self._path("report.html")),
            "metrics": self.metrics.facts(),
            "damage": self.damage,
        }

    def _path(self, *names: str) -> str:
        return os.path.join(self.root, *names)

    def _json(self, *names: str) -> Facts | None:
        values, fault = read_checked(self._path(*names))
        if fault:
            self.damage.append(f"{fault} {LEFT_OUT}")
        return values or None

    def _mtime(self, *names: str) -> float | None:
        try:
            return os.stat(self._path(*names)).st_mtime
        except OSError:
            return None

    def _hosts(self) -> list[Facts]:
        """Host names of the plan, each with its ranks."""
        plan = self._json("plan.json") or {}
        hosts = [{"name": host["name"], "ranks": []} for host in plan.get("hosts") or []]
        for rank in plan.get("ranks") or []:
            if rank["host"] < len(hosts):
                hosts[rank["host"]]["ranks"].append(rank["rank"])
        return hosts

    def _ranks(self) -> list[Facts]:
        ranks = []
        for name in _listed(self._path("ranks")):
            if re.match(r"rank-\d+\.json$", name):
                status = self._json("ranks", name)
                if status:
                    error = status.get("error") or {}
                    error.pop("traceback", None)
                    ranks.append(status)
        return ranks

    def _checkpoints(self) -> Facts:
        names = _listed(self._path("checkpoints"))
        steps = sorted(int(name[5:]) for name in names if re.match(r"step-\d+$", name))
        writing = [int(n[6:-8]) for n in names if re.match(r"\.step-\d+\.partial$", n)]
        newest = None
        if steps:
            name = f"step-{steps[-1]:08d}"
            manifest = self._json("checkpoints", name, "manifest.json") or {}
            files = (manifest.get("files") or {}).values()
            newest = {
                "step": steps[-1],
                "time": manifest.get("created") or self._mtime("checkpoints", name),
                "bytes": sum(entry.get("bytes") or 0 for entry in files),
            }
        return {"steps": steps, "newest": newest, "writing": max(writing) if writing else None}

    def _read_metrics(self) -> None:
        if self.brief:
            self.metrics = Metrics()
            for record in _head_and_end(self._path("metrics.jsonl")):
                self.metrics.add(record)
            return
        lines = self.tail.read()
        if self.tail.began_anew:
            self.metrics, self.unreadable = Metrics(), 0
        records = records_of(lines)
        self.unreadable += sum(bool(line.strip()) for line in lines) - len(records)
        if self.unreadable:
            self.damage.append(f"metrics.jsonl: unreadable lines are left out ({self.unreadable}).")
        for record in records:
            self.metrics.add(record)


class Metrics:
    """Collects the lines of ``metrics.jsonl`` that a viewer needs."""

    def __init__(self) -> None:
        self.start: Facts | None = None
        self.eval: Facts | None = None
        self.end: Facts | None = None
        self.train: list[Facts] = []
        self.losses: list[tuple[int, float | None]] = []
        self.events: list[Facts] = []

    def add(self, record: Facts) -> None:
        kind = record.get("kind")
        if kind == "start":
            self.start = record
        elif kind == "train":
            self.losses.append((record.get("step", 0), record.get("loss")))
            self.train = [*self.train[-29:], record]
        elif kind == "eval":
            self.eval = record
        elif kind == "end":
            self.end = record
        elif kind == "event":
            self.events = [*self.events[1 - MAX_EVENTS :], record]
            if self.start and record.get("event") == "resumed":
                declared = {k: record[k] for k in ("total_steps", "metrics") if record.get(k)}
                self.start = dict(self.start, **declared)

    def facts(self) -> Facts:
        paces = [r["step_time_s"] for r in self.train[1:] or self.train if r.get("step_time_s")]
        return {
            "start": self.start,
            "last": self.train[-1] if self.train else None,
            "before": self.train[-2] if len(self.train) > 1 else None,
            "eval": self.eval,
            "end": self.end,
            "events": self.events,
            "step_time_s": statistics.median(paces) if paces else None,
            "first_loss": self.losses[0][1] if self.losses else None,
            "losses": _thinned(self.losses),
        }


def find_runs(base: str) -> list[str]:
    """Run directories at or under ``base``, the newest first."""
    base = os.path.abspath(os.path.expanduser(base))
    runs = []
    for directory, names, files in os.walk(base):
        if "config.yaml" in files and "plan.json" in files:
            runs.append((os.lstat(os.path.join(directory, "config.yaml")).st_mtime, directory))
            names.clear()
        elif directory[len(base) :].count(os.sep) >= DEEPEST:
            names.clear()
    return [directory for _, directory in sorted(runs, reverse=True)]


def is_run(path: str) -> bool:
    """Whether ``path`` itself is a run directory."""
    return os.path.isfile(os.path.join(os.path.expanduser(path), "config.yaml"))


def is_over(root: str) -> bool:
    """Quickly: nothing of this run can be alive."""
    if os.path.exists(os.path.join(root, "result.json")):
        return True
    return Observer(root)._json("supervisor.json") is None


def table(base: str, limit: int) -> Facts:
    """Facts of at most ``limit`` runs under ``base``: all that may be alive, then the newest."""
    runs = find_runs(base)
    live = [run for run in runs if not is_over(run)]
    chosen = (live + [run for run in runs if run not in live])[:limit]
    facts = [Observer(run, brief=True).facts() for run in chosen]
    return {"base": os.path.abspath(os.path.expanduser(base)), "found": len(runs), "runs": facts}


def main(argv: list[str]) -> int:
    """``PATH LIMIT EVERY_S``: JSON lines on stdout, one, or one every so often until stdin ends."""
    path, limit, every_s = argv[0], int(argv[1]), float(argv[2])
    if not os.path.isdir(os.path.expanduser(path)):
        print(json.dumps({"error": "no such directory: " + path}), flush=True)
        return 2
    observer = Observer(path) if is_run(path) else None
    while True:
        print(json.dumps(observer.facts() if observer else table(path, limit)), flush=True)
        if not every_s or select.select([0], [], [], every_s)[0]:
            return 0


def _head_and_end(path: str) -> list[Facts]:
    """The first line of a file that may be long, some of its middle, and the last ones."""
    try:
        with open(path, "rb") as stream:
            lines = [stream.readline()]
            skipped = max(0, os.fstat(stream.fileno()).st_size - len(lines[0]) - BRIEF_BYTES)
            for part in range(1, BRIEF_LINES + 1) if skipped else ():
                begin = len(lines[0]) + skipped * part // BRIEF_LINES
                if begin > stream.tell():
                    stream.seek(begin)
                    stream.readline()
                if part < BRIEF_LINES:
                    lines.append(stream.readline())
            lines += stream.read().split(b"\n")[:-1]
    except OSError:
        return []
    return records_of(lines)


def _thinned(losses: list[tuple[int, float | None]]) -> list[tuple[int, float | None]]:
    """At most MAX_LOSSES of them, evenly; one that is not finite wins over its neighbours."""
    if len(losses) <= MAX_LOSSES:
        return losses
    edges = [len(losses) * i // MAX_LOSSES for i in range(MAX_LOSSES + 1)]
    chosen = []
    for begin, end in zip(edges, edges[1:]):  # an older Python on a host must do
        part = losses[begin:end]
        not_finite = [pair for pair in part if pair[1] is None]
        chosen.append(not_finite[0] if not_finite else part[-1])
    return chosen


def _name_and_stop(config: str) -> tuple[str, int | None]:
    """Two values of ``config.yaml``, without a YAML parser: it is written in one style."""
    try:
        with open(config, encoding="utf-8", errors="replace") as stream:
            text = stream.read()
    except OSError:
        return "", None
    name = re.search(r"^name: (.*)$", text, re.M)
    stop = re.search(r"^  stop_at_step: (\d+)$", text, re.M)
    word = name.group(1).strip().strip("'\"") if name else ""
    return ("" if word == "null" else word), (int(stop.group(1)) if stop else None)


def _is_alive(supervisor: Facts | None) -> bool | None:
    """Whether the supervisor's process is there; None where it is on another host.

    The pid may be used again by another process; then ``time`` in the file grows old.
    """
    if not supervisor or supervisor.get("host") != socket.gethostname():
        return None
    pid = int(supervisor.get("pid") or 0)
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            return stream.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def _free_bytes(path: str) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _listed(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
