"""A run as its directory tells it: for ``status``, ``watch``, ``report``, ``compare`` and ``ui``.

Reads files and writes nothing. A damaged file is left out, and named. What is read and what follows
from it stands here; how it is worded stands with those who show it.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from llmx.errors import ConfigError
from llmx.observe.page import thinned
from llmx.redact import redacted
from llmx.run.metrics import Metric, declared_of, measured
from llmx.run.metrics.lines import Record, step_of, summary
from llmx.run.rundir import RunDir, no_run, read_file, read_mapping
from llmx.run.tail import LineTail, newest_samples, read_records, records_of
from llmx.text import duration

MAX_LOSSES = 240
MAX_EVENTS = 12
MAX_ATTEMPTS = 50
BRIEF_BYTES, BRIEF_LINES = 1 << 16, 32
DEEPEST = 4
SILENT_S = 30.0
"""A supervisor writes every 3 s, a rank every 5 s; after so long without one it is gone."""
LIVE = frozenset({"preparing", "starting", "loading", "training", "saving", "waiting", "ending"})
FINAL = frozenset({"finished", "failed", "interrupted", "dead"})
Points = list[tuple[int, float | None]]


class _File:
    """The content of a file of the run directory: read when it is asked for, empty where the file
    is missing or damaged."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, run: Run, owner: type) -> Any:
        content = redacted(read_file(getattr(run.dir, self.name), run.damage))
        run.__dict__[self.name] = content  # found before this descriptor from now on
        return content


@dataclass(frozen=True)
class Standing:
    """What a run is doing."""

    state: str
    """``planned``, one of LIVE or one of FINAL."""
    why: str = ""
    """One sentence more: the cause of a failure, what is waited for."""
    fix: str = ""


@dataclass(frozen=True)
class Machine:
    """The machine that a run is on, at one moment."""

    root: str
    """The directory that the copy is of."""
    host: str
    now: float
    free_bytes: int | None
    processes: frozenset[str] | None
    """The numbers of those that run there; None for this machine, which is asked for one."""


class Run:
    """A run at one moment.

    Args:
        is_brief: reads the end of ``metrics.jsonl`` and a few lines before: enough for a row of a
            table, whatever its size.
        machine: another one that the directory was copied from, where it is ``name`` below its
            ``root``.
        before: the run as it was; only what is new in ``metrics.jsonl`` is read.
    """

    config, overrides, plan, result = _File(), _File(), _File(), _File()
    identity, supervisor, supervisor_lock = _File(), _File(), _File()
    samples, tables, data, tracking = _File(), _File(), _File(), _File()

    def __init__(
        self,
        root: str | Path,
        *,
        is_brief: bool = False,
        machine: Machine | None = None,
        name: str = "",
        before: Run | None = None,
    ) -> None:
        self.dir = RunDir(Path(root).expanduser())
        self.is_far = machine is not None
        self.machine = machine or _this_machine(self.dir.root)
        self.now = self.machine.now
        self.path = Path(os.path.normpath(f"{machine.root}/{name}")) if machine else self.dir.root
        self.damage: list[str] = []
        """A sentence for each file that cannot be read, as far as files were asked for."""
        self._tail: LineTail = before._tail if before else LineTail(self.dir.metrics)
        self._unreadable = 0
        self.records: list[Record] = []
        if is_brief:
            self.records = _head_and_end(self.dir.metrics)
            return
        lines = self._tail.read()
        if before and not self._tail.began_anew:
            self.records, self._unreadable = before.records, before._unreadable
        new = records_of(lines)
        self.records = [*self.records, *new]
        self._unreadable += sum(bool(line.strip()) for line in lines) - len(new)
        if self._unreadable:
            self.damage.append(
                f"metrics.jsonl: unreadable lines are left out ({self._unreadable})."
            )

    # --- Files -----------------------------------------------------------------------------------

    @cached_property
    def settings(self) -> dict[str, Any]:
        """``name``, ``stop_at_step``, ``metric`` and ``tags`` of the config. Only their lines are
        parsed: a table may have 1,000 runs."""
        import yaml

        try:
            text = self.dir.config.read_text(encoding="utf-8", errors="replace")
            lines = re.findall(
                r"^(name: .*|  stop_at_step: \d+|  metric: eval/\S+|  tags:\n(?:  - .*\n)+)",
                text,
                re.MULTILINE,
            )
            return dict(redacted(yaml.safe_load("\n".join(map(str.strip, lines))) or {}))
        except (OSError, ValueError, yaml.YAMLError):
            return {}

    @property
    def name(self) -> str:
        """The run's name, else that of its directory."""
        return str(self.settings.get("name") or self.path.name)

    @cached_property
    def attempts(self) -> list[dict[str, Any]]:
        """The lines of ``attempts.jsonl``: the attempts that have ended."""
        return list(redacted(read_records(self.dir.attempts, self.damage)))

    @cached_property
    def rollouts(self) -> list[Record]:
        """Some of the samples that the task has generated for its newest step."""
        return list(redacted(newest_samples(self.dir.rollouts, self.damage)))

    @cached_property
    def changes(self) -> list[dict[str, Any]]:
        """What ``resume`` changed, oldest first (``history/NNN/changes.json``)."""
        paths = sorted(self.dir.root.glob("history/*/changes.json"))
        return [values for path in paths if (values := redacted(read_mapping(path, self.damage)))]

    @cached_property
    def ranks(self) -> list[dict[str, Any]]:
        """The status of each rank that has written one."""
        paths = [self.dir.ranks / name for name in _listed(self.dir.ranks, r"rank-\d+\.json")]
        return [status for path in paths if (status := read_mapping(path, self.damage))]

    @cached_property
    def hosts(self) -> list[tuple[str, list[int]]]:
        """Host names of the plan, each with its ranks."""
        ranks = self.plan.get("ranks") or []
        return [
            (host["name"], [rank["rank"] for rank in ranks if rank["host"] == number])
            for number, host in enumerate(self.plan.get("hosts") or [])
        ]

    @cached_property
    def checkpoints(self) -> dict[str, Any]:
        """``steps`` of those that are kept, the ``newest`` of them, and the step that is being
        written (``writing``)."""
        steps = [int(name[5:]) for name in _listed(self.dir.checkpoints, r"step-\d+")]
        partial = [int(n[6:-8]) for n in _listed(self.dir.checkpoints, r"\.step-\d+\.partial")]
        newest = None
        if steps:
            path = self.dir.checkpoint(steps[-1])
            manifest = read_mapping(path / "manifest.json", self.damage)
            num_bytes = sum(
                file.get("bytes") or 0 for file in (manifest.get("files") or {}).values()
            )
            saved = manifest.get("created") or modified(path)
            newest = {"step": steps[-1], "time": saved, "bytes": num_bytes}
        return {"steps": steps, "newest": newest, "writing": max(partial, default=None)}

    @property
    def was_started(self) -> bool:
        """Whether anything of a launch is there; False after ``dry_run=true``."""
        paths = (self.dir.metrics, self.dir.supervisor, self.dir.ranks, self.dir.result)
        return any(path.exists() for path in paths)

    @property
    def warnings(self) -> list[str]:
        """The warnings of the plan, and what could not be read."""
        return [*(self.plan.get("warnings") or []), *self.damage]

    # --- Metrics ---------------------------------------------------------------------------------

    @cached_property
    def train(self) -> list[Record]:
        """The ``train`` lines; of a step that was repeated after a restart, the last."""
        return last_of_each_step(self.records, "train")

    @cached_property
    def evals(self) -> list[Record]:
        """The ``eval`` lines; of a step that was repeated after a restart, the last."""
        return last_of_each_step(self.records, "eval")

    @cached_property
    def events(self) -> list[Record]:
        """The ``event`` lines, in order."""
        return [record for record in self.records if record.get("kind") == "event"]

    @cached_property
    def declared(self) -> dict[str, Metric]:
        """The metrics that the task of the run declares."""
        return declared_of(self.records)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Numbers of the whole run."""
        return summary(self.records, self.result)

    @property
    def last(self) -> Record:
        """The last logged step; empty where there is none."""
        return self.train[-1] if self.train else {}

    @property
    def is_lost(self) -> bool:
        """Whether the last logged loss is not finite."""
        return bool(self.last.get("nonfinite") and self.last.get("loss") is None)

    @property
    def losses(self) -> Points:
        """Step and loss of the logged steps, about MAX_LOSSES of them."""
        losses: Points = [(step_of(record), record.get("loss")) for record in self.train]
        return thinned(losses, lambda point: point[1], MAX_LOSSES)

    @property
    def step_time_s(self) -> float | None:
        """The median of the last logged steps, the first of the run left out."""
        train = self.train[-30:]
        times = [line["step_time_s"] for line in train[1:] or train if line.get("step_time_s")]
        return statistics.median(times) if times else None

    @property
    def waited_for_data(self) -> float | None:
        """The part of the time since the last logged step but one, 0 to 1."""
        wait_s, step_s = self.last.get("data_wait_s"), self.last.get("step_time_s")
        before = step_of(self.train[-2]) if len(self.train) > 1 else 0
        steps = step_of(self.last) - before
        if wait_s is None or not step_s or steps <= 0:
            return None
        return float(min(1.0, wait_s / (steps * step_s)))

    def eval_points(self) -> dict[str, list[tuple[int, float]]]:
        """Name -> step and value of each evaluation; also a metric that is declared and was not
        measured."""
        names = [name for name, metric in self.declared.items() if "eval" in metric.kinds]
        points: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
        for record in self.evals:
            for name, value in measured(record, self.declared).items():
                points.setdefault(name, []).append((step_of(record), value))
        return points

    @property
    def predicted_gib(self) -> float | None:
        """The peak memory of the fullest rank, as planned; None where the plan has none."""
        of_host = ("host_gib", "capacity_gib", "saves_host_gib")
        return max(
            (
                sum(size for key, size in part.items() if key[-4:] == "_gib" and key not in of_host)
                for part in self.plan.get("memory") or []
            ),
            default=None,
        )

    @property
    def resumed_at(self) -> int | None:
        """The step at which the last supervisor resumed; None where it began at step 0.

        ``result.json`` and its times are of that one; the metrics are of the whole run.
        """
        begun = [r for r in self._of_last_supervisor() if r.get("kind") in ("start", "event")]
        first = next((r for r in begun if r.get("event", "resumed") == "resumed"), {})
        return step_of(first) if first.get("kind") == "event" else None

    @property
    def train_time_s(self) -> float:
        """Seconds from the first to the last metric of the last supervisor; 0 without two."""
        times = [
            record["time"]
            for record in self._of_last_supervisor()
            if record.get("time") and record.get("kind") in ("start", "train", "eval", "end")
        ]
        return max(times) - min(times) if times else 0.0

    def _of_last_supervisor(self) -> list[Record]:
        began = self.result.get("started") or 0.0
        return [record for record in self.records if (record.get("time") or 0.0) >= began]

    # --- What it is doing ------------------------------------------------------------------------

    @cached_property
    def standing(self) -> Standing:
        """The state of the run, the reason for it, and what a user can do."""
        supervisor, result = self.supervisor, self.result
        is_live = supervisor.get("state") not in (None, "finished")
        if result and not (is_live and self._supervisor_is_heard()):
            outcome = result.get("outcome")
            state = {"ok": "finished", "interrupted": "interrupted"}.get(str(outcome), "failed")
            why = "" if outcome == "ok" else f"{outcome}: {result.get('cause') or 'no cause known'}"
            return Standing(state, why, result.get("fix") or "")
        resume = f"python -m llmx resume {self.path}"
        if not supervisor:
            return self._without_supervisor(resume)
        state, why = str(supervisor.get("state")), supervisor.get("why") or ""
        if not self._supervisor_is_heard():
            silent_s = max(0.0, self.now - float(supervisor.get("time") or 0.0))
            process = f"process {supervisor.get('pid')} on {supervisor.get('host')}"
            return Standing(
                "dead",
                f"its supervisor ({process}) exited without a result, last seen "
                f"{duration_text(silent_s)} ago",
                resume,
            )
        if state == "waiting":
            left_s = max(0.0, (supervisor.get("until") or 0.0) - self.now)
            until = f" (in {duration_text(left_s)})" if supervisor.get("until") else ""
            return Standing(state, f"{why or 'waiting to restart'}{until}")
        if state == "finished":
            return Standing("ending", "the report is being written")
        if state not in ("preparing", "ending"):
            state = self._state_of_ranks()  # ``why``: that no step ends
        return Standing(state, why)

    @property
    def state(self) -> str:
        """``planned``, one of LIVE or one of FINAL."""
        return self.standing.state

    @property
    def is_live(self) -> bool:
        return self.state in LIVE

    @cached_property
    def has_supervisor(self) -> bool | None:
        """Whether the supervisor's process is there; None where it is on another host."""
        return is_alive(self.supervisor, self.machine)

    def _supervisor_is_heard(self) -> bool:
        """Whether the supervisor's process is there and has written lately: its number may be that
        of another process now."""
        silent_s = self.now - float(self.supervisor.get("time") or 0.0)
        return self.has_supervisor is not False and silent_s < SILENT_S

    def _without_supervisor(self, resume: str) -> Standing:
        """A run that was only planned, or one that was started by hand."""
        if not self.dir.ranks.is_dir():
            return Standing("planned", "never started", f"to start it: {resume}")
        newest = max((float(status.get("time") or 0.0) for status in self.ranks), default=0.0)
        if self.now - newest < SILENT_S:
            return Standing(self._state_of_ranks())
        if any(record.get("kind") == "end" for record in self.records):
            return Standing("finished", "started by hand: there is no result.json")
        why = "no rank or supervisor is running, and there is no result.json"
        return Standing("dead", why, resume)

    def _state_of_ranks(self) -> str:
        """The state that the slowest rank is in."""
        order = ("starting", "loading", "training", "evaluating", "saving")
        states = [status.get("state") for status in self.ranks]
        if len(states) < len(self.plan.get("ranks") or []) or not states:
            return "starting"
        reached = [order.index(state) for state in states if state in order]
        slowest = order[min(reached)] if reached else "ending"
        return "training" if slowest == "evaluating" else slowest

    @property
    def total(self) -> int | None:
        """The steps of the run, or those after which it is to stop."""
        total, stop = self.summary.get("total_steps"), self.settings.get("stop_at_step")
        return min(total, stop) if total and stop else total

    @property
    def step(self) -> int | None:
        """The newest step that is known: of the ranks while they train, else of the last line."""
        ends = [record for record in self.records if record.get("kind") == "end"]
        lines = [*self.train[-1:], *self.events[-1:], *ends]
        steps = [int(line.get("step") or 0) for line in lines]
        if self.state in ("training", "saving", "ending"):
            at_work = ("training", "evaluating", "saving", "interrupted")
            ranks = [int(s.get("step") or 0) for s in self.ranks if s.get("state") in at_work]
            steps += [min(ranks)] if ranks else []
        return max(steps, default=None)

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step; None where that is not known."""
        is_moving = self.state in ("training", "saving") and not self.standing.why
        step, total, step_s = self.step, self.total, self.step_time_s
        if not is_moving or step is None or not total or not step_s:
            return None
        return (total - step) * step_s

    @property
    def started(self) -> float | None:
        """When the run was first started."""
        begun = self.identity.get("created") or self.result.get("started")
        return begun or modified(self.dir.config)

    @property
    def took_s(self) -> float | None:
        """Seconds from the first start to now or to the end, restarts included."""
        begun = self.started
        if not begun:
            return None
        ends = [self.result.get("ended"), self.last.get("time")]
        end = self.now if self.is_live else max(float(end or 0.0) for end in ends)
        return end - begun - self._idle_s() if end > begun else None

    def _idle_s(self) -> float:
        """Seconds between the end of a supervisor and the next ``resume``, as far as is known."""
        lines = [line for line in self.attempts if line.get("ended")]
        begins = [float(line.get("started") or 0.0) for line in lines[1:]]
        # Of the attempt that goes on now there is no line yet, but its supervisor has the lock.
        begins.append(float(self.supervisor_lock.get("time") or 0.0))
        gaps = [
            begin - float(line["ended"])
            for line, begin in zip(lines, begins, strict=False)
            if line.get("decision") != "restart"
        ]
        return sum(gap for gap in gaps if gap > 0)

    @property
    def restarts(self) -> list[dict[str, Any]]:
        """The attempts that were followed by a restart."""
        return [line for line in self.attempts if line.get("decision") == "restart"]

    # --- For scripts -----------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """What ``status --json`` prints; what is not there is null or empty."""
        start = next((line for line in self.records if line.get("kind") == "start"), None)
        for event in self.events:
            if start and event.get("event") == "resumed":
                new = {name: event[name] for name in ("total_steps", "metrics") if event.get(name)}
                start = {**start, **new}
        ends = [line for line in self.records if line.get("kind") == "end"]
        losses, evals = self.losses, self.evals
        return {
            "path": str(self.path),
            "name": self.name,
            "stop_at_step": self.settings.get("stop_at_step"),
            "host": self.machine.host,
            "now": self.now,
            "identity": self.identity or None,
            "supervisor": self.supervisor or None,
            "supervisor_alive": self.has_supervisor,
            "attempts": self.attempts[-MAX_ATTEMPTS:],
            "lock": self.supervisor_lock or None,
            "result": _without_traceback(self.result) or None,
            "started": modified(self.dir.config),
            "launched": self.dir.ranks.is_dir(),
            "disk_free_bytes": self.machine.free_bytes,
            "hosts": [{"name": name, "ranks": ranks} for name, ranks in self.hosts],
            "ranks": [
                {**rank, "error": _without_traceback(rank.get("error"))} for rank in self.ranks
            ],
            "checkpoints": self.checkpoints,
            "report": self.dir.report.exists(),
            "metrics": {
                "start": start,
                "last": self.last or None,
                "before": self.train[-2] if len(self.train) > 1 else None,
                "eval": evals[-1] if evals else None,
                "end": ends[-1] if ends else None,
                "events": self.events[-MAX_EVENTS:],
                "step_time_s": self.step_time_s,
                "first_loss": losses[0][1] if losses else None,
                "losses": losses,
            },
            "damage": self.damage,
        }


def load_run(root: Path) -> Run:
    """A run with all its files read, so that ``warnings`` has all that is damaged; ConfigError
    where the directory is none."""
    run = Run(root)
    if not run.dir.config.is_file():
        raise ConfigError(no_run(run.dir.root))
    for name, member in vars(Run).items():
        if isinstance(member, _File) or name in ("attempts", "changes", "rollouts"):
            getattr(run, name)
    return run


def last_of_each_step(records: Sequence[Record], kind: str) -> list[Record]:
    """The lines of one kind; of a step that was repeated after a restart, the last."""
    by_step = {step_of(record): record for record in records if record.get("kind") == kind}
    return [by_step[step] for step in sorted(by_step)]


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


def live_first(runs: Sequence[Path]) -> list[Path]:
    """All that may be alive, then the others."""
    return sorted(runs, key=lambda root: is_over(RunDir(root)))


def is_over(run: RunDir) -> bool:
    """Quickly: nothing of this run can be alive."""
    return run.result.exists() or not read_mapping(run.supervisor)


def is_run(path: str | Path) -> bool:
    """Whether ``path`` itself is a run directory."""
    return RunDir(Path(path).expanduser()).config.is_file()


def is_alive(process: dict[str, Any], machine: Machine | None = None) -> bool | None:
    """Whether a process (``pid``, ``host``) is there; None where it is on another host."""
    if not process or process.get("host") != (machine.host if machine else socket.gethostname()):
        return None
    pid = int(process.get("pid") or 0)
    if machine is not None and machine.processes is not None:
        return str(pid) in machine.processes
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state not in (b"Z", b"X")


def duration_text(seconds: float) -> str:
    """A span of time: ``8 s``, ``3 min 20 s``, ``2 h 5 min``."""
    return duration(seconds) if seconds >= 9.5 else f"{seconds:.0f} s"


def _this_machine(root: Path) -> Machine:
    try:
        free_bytes: int | None = shutil.disk_usage(root).free
    except OSError:
        free_bytes = None
    return Machine(str(root), socket.gethostname(), time.time(), free_bytes, None)


def _head_and_end(path: Path) -> list[Record]:
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


def _without_traceback(values: dict[str, Any] | None) -> dict[str, Any] | None:
    return values and {key: value for key, value in values.items() if key != "traceback"}


def modified(path: Path) -> float | None:
    """When a file was changed last; None where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _listed(path: Path, pattern: str) -> list[str]:
    """The names in a directory that a pattern describes, in order."""
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError:
        return []
    return [name for name in names if re.fullmatch(pattern, name)]
