"""The facts of a run, read from the files of its run directory and from nothing else.

What the facts mean is decided elsewhere (``view.py``).

    python -m llmx status RUN --json          prints them
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import socket
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmx.run.rundir import RunDir, read_mapping
from llmx.run.tail import LineTail, read_records, records_of

if TYPE_CHECKING:
    from llmx.observe.status.mirror import Machine

Facts = dict[str, Any]
MAX_LOSSES = 240
MAX_EVENTS = 12
MAX_ATTEMPTS = 50
BRIEF_BYTES, BRIEF_LINES = 1 << 16, 32
DEEPEST = 4


class Observer:
    """Facts of one run, again and again; of ``metrics.jsonl`` only what is new is read.

    ``brief`` reads its end and a few lines before: enough for a row of a table, whatever its size.
    """

    def __init__(self, root: str | Path, brief: bool = False) -> None:
        self.run = RunDir(Path(root).expanduser())
        self.tail = LineTail(self.run.metrics)
        self.metrics = Metrics()
        self.brief = brief
        self.head: tuple[str, int | None] | None = None
        self.damage: list[str] = []
        self.unreadable = 0

    def facts(self, far: Machine | None = None, name: str = "") -> Facts:
        """Everything that can be shown; what is not there is None or empty.

        ``far``: the machine that the directory is a copy of, where it is called ``name``.
        """
        run, self.damage = self.run, []
        supervisor = self._read(run.supervisor)
        result = self._read(run.result)
        if result:
            result.pop("traceback", None)
        if self.head is None:
            self.head = _name_and_stop(run.config)
        self._read_metrics()
        path = Path(os.path.normpath(Path(far.root) / name)) if far else run.root
        return {
            "path": str(path),
            "name": self.head[0] or path.name,
            "stop_at_step": self.head[1],
            "host": far.host if far else socket.gethostname(),
            "now": far.now if far else time.time(),
            "identity": self._read(run.identity),
            "supervisor": supervisor,
            "supervisor_alive": is_alive(supervisor, far),
            "attempts": read_records(run.attempts, self.damage)[-MAX_ATTEMPTS:],
            "lock": read_mapping(run.supervisor_lock) or None,
            "result": result,
            "started": _mtime(run.config),
            "launched": run.ranks.is_dir(),
            "disk_free_bytes": far.free_bytes if far else _free_bytes(run.root),
            "hosts": self._hosts(),
            "ranks": self._ranks(),
            "checkpoints": self._checkpoints(),
            "report": run.report.exists(),
            "metrics": self.metrics.facts(),
            "damage": self.damage,
        }

    def _read(self, path: Path) -> Facts | None:
        return read_mapping(path, self.damage) or None

    def _hosts(self) -> list[Facts]:
        """Host names of the plan, each with its ranks."""
        plan = self._read(self.run.plan) or {}
        hosts = [{"name": host["name"], "ranks": []} for host in plan.get("hosts") or []]
        for rank in plan.get("ranks") or []:
            if rank["host"] < len(hosts):
                hosts[rank["host"]]["ranks"].append(rank["rank"])
        return hosts

    def _ranks(self) -> list[Facts]:
        ranks = []
        for name in _listed(self.run.ranks):
            if re.fullmatch(r"rank-\d+\.json", name) and (
                status := self._read(self.run.ranks / name)
            ):
                (status.get("error") or {}).pop("traceback", None)
                ranks.append(status)
        return ranks

    def _checkpoints(self) -> Facts:
        names = _listed(self.run.checkpoints)
        steps = sorted(int(name[5:]) for name in names if re.fullmatch(r"step-\d+", name))
        writing = [int(n[6:-8]) for n in names if re.fullmatch(r"\.step-\d+\.partial", n)]
        newest = None
        if steps:
            path = self.run.checkpoint(steps[-1])
            manifest = self._read(path / "manifest.json") or {}
            files = (manifest.get("files") or {}).values()
            newest = {
                "step": steps[-1],
                "time": manifest.get("created") or _mtime(path),
                "bytes": sum(entry.get("bytes") or 0 for entry in files),
            }
        return {"steps": steps, "newest": newest, "writing": max(writing, default=None)}

    def _read_metrics(self) -> None:
        if self.brief:
            self.metrics = Metrics()
            for record in _head_and_end(self.run.metrics):
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


def find_runs(base: Path) -> list[Path]:
    """Run directories at or under ``base``, the newest first."""
    runs = []
    for directory, names, files in os.walk(base):
        path = Path(directory)
        if "config.yaml" in files and "plan.json" in files:
            runs.append(((path / "config.yaml").lstat().st_mtime, path))
            names.clear()
        elif len(path.relative_to(base).parts) >= DEEPEST:
            names.clear()
    return [path for _, path in sorted(runs, reverse=True)]


def chosen_runs(base: Path, limit: int) -> tuple[list[Path], int]:
    """At most ``limit`` runs under ``base``: all that may be alive, then the newest; and how many
    there are."""
    runs = find_runs(base)
    live = [run for run in runs if not is_over(run)]
    return (live + [run for run in runs if run not in live])[:limit], len(runs)


def is_run(path: str | Path) -> bool:
    """Whether ``path`` itself is a run directory."""
    return RunDir(Path(path).expanduser()).config.is_file()


def is_over(root: Path) -> bool:
    """Quickly: nothing of this run can be alive."""
    run = RunDir(root)
    return run.result.exists() or not read_mapping(run.supervisor)


def is_alive(supervisor: Facts | None, far: Machine | None = None) -> bool | None:
    """Whether the supervisor's process is there; None where it is on another host.

    The pid may be used again by another process; then ``time`` in the file grows old.
    """
    if not supervisor or supervisor.get("host") != (far.host if far else socket.gethostname()):
        return None
    pid = int(supervisor.get("pid") or 0)
    if far is not None:
        return str(pid) in far.processes
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state not in (b"Z", b"X")


def _head_and_end(path: Path) -> list[Facts]:
    """The first line of a file that may be long, some of its middle, and the last ones."""
    try:
        with path.open("rb") as stream:
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
    parts = [losses[begin:end] for begin, end in itertools.pairwise(edges)]
    return [next((pair for pair in part if pair[1] is None), part[-1]) for part in parts]


def _name_and_stop(config: Path) -> tuple[str, int | None]:
    """Two values of ``config.yaml``, without a YAML parser: it is written in one style, and there
    may be a thousand."""
    try:
        text = config.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", None
    name = re.search(r"^name: (.*)$", text, re.M)
    stop = re.search(r"^  stop_at_step: (\d+)$", text, re.M)
    word = name.group(1).strip().strip("'\"") if name else ""
    return ("" if word == "null" else word), (int(stop.group(1)) if stop else None)


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _free_bytes(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _listed(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in path.iterdir())
    except OSError:
        return []
