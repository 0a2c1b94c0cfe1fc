"""What the facts of a run mean: what it is doing, how far it is, how long it will take. Pure.

``observe.py`` gathers the facts, here or on another host; ``show.py`` prints this.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from llmx.observe.status.observer import Facts
from llmx.run.metrics import declared_in, measured, metric_of
from llmx.text import duration, plural

MAX_COUNTS = 16
"""Ranks whose samples are listed."""
SILENT_S = 30.0
"""A supervisor writes every 3 s, a rank every 5 s; after so long without one it is gone."""

LIVE = frozenset({"preparing", "starting", "loading", "training", "saving", "waiting", "ending"})
FINAL = frozenset({"finished", "failed", "interrupted", "dead"})


@dataclass(frozen=True)
class View:
    """One run as a person wants to see it. None is: not known."""

    name: str
    path: str
    state: str
    """``planned``, one of LIVE or one of FINAL."""
    why: str = ""
    """One sentence more: the cause of a failure, what is waited for."""
    fix: str = ""
    step: int | None = None
    total: int | None = None
    left_s: float | None = None
    took_s: float | None = None
    """Seconds from the start to now, or to the end."""
    started: float | None = None
    now: float = 0.0
    loss: float | None = None
    lost: bool = False
    """The last logged loss is not finite."""
    first_loss: float | None = None
    losses: list[float | None] = field(default_factory=list)
    eval_loss: float | None = None
    eval_step: int | None = None
    eval_metrics: list[tuple[str, str]] = field(default_factory=list)
    """Title and value of what the last evaluation measured besides the loss."""
    train_metrics: list[tuple[str, str]] = field(default_factory=list)
    """The same of the last logged step."""
    tokens_per_s: float | None = None
    mfu: float | None = None
    step_time_s: float | None = None
    waited_for_data: float | None = None
    """The part of the time since the last logged step but one, 0 to 1."""
    memory_gib: list[float] = field(default_factory=list)
    """Peak of every rank."""
    saved_step: int | None = None
    saved_ago_s: float | None = None
    saved_bytes: int | None = None
    kept: int = 0
    saving_step: int | None = None
    disk_free_bytes: int | None = None
    restarts: int = 0
    attempts: list[Facts] = field(default_factory=list)
    hosts: list[tuple[str, str]] = field(default_factory=list)
    """Name of a host, and what its ranks do."""
    events: list[tuple[float, str]] = field(default_factory=list)
    """Time and words, the oldest first."""
    report: bool = False
    damage: list[str] = field(default_factory=list)
    """A sentence for each file that cannot be read."""

    @property
    def is_over(self) -> bool:
        return self.state in FINAL


def interpret(facts: Facts) -> View:
    """The view of one run at the moment ``facts["now"]``, by the clock of its host."""
    metrics, now = facts["metrics"], float(facts["now"])
    state, why, fix = _state(facts)
    last = metrics["last"] or {}
    total = _total(facts)
    step = _step(facts, state)
    pace = metrics["step_time_s"]
    moving = state in ("training", "saving") and step is not None and not why
    left = (total - step) * pace if moving and step is not None and total and pace else None
    newest = facts["checkpoints"]["newest"] or {}
    attempts = facts["attempts"]
    return View(
        name=facts["name"],
        path=facts["path"],
        state=state,
        why=why,
        fix=fix,
        step=step,
        total=total,
        left_s=left,
        took_s=_took(facts, state),
        started=_started(facts),
        now=now,
        loss=last.get("loss"),
        lost=bool(last.get("nonfinite") and last.get("loss") is None),
        first_loss=metrics["first_loss"],
        losses=[loss for _, loss in metrics["losses"]],
        eval_loss=(metrics["eval"] or {}).get("loss"),
        eval_step=(metrics["eval"] or {}).get("step"),
        eval_metrics=_shown_metrics(metrics["eval"], metrics["start"]),
        train_metrics=_shown_metrics(last, metrics["start"]),
        tokens_per_s=last.get("tokens_per_s"),
        mfu=last.get("mfu"),
        step_time_s=pace,
        waited_for_data=_waited(metrics),
        memory_gib=list(last.get("memory_gib") or []),
        saved_step=newest.get("step"),
        saved_ago_s=max(0.0, now - newest["time"]) if newest.get("time") else None,
        saved_bytes=newest.get("bytes"),
        kept=len(facts["checkpoints"]["steps"]),
        saving_step=facts["checkpoints"]["writing"] if state in LIVE else None,
        disk_free_bytes=facts["disk_free_bytes"],
        restarts=sum(line.get("decision") == "restart" for line in attempts),
        attempts=attempts,
        hosts=[_host(host, facts, state) for host in facts["hosts"]],
        events=[(float(e.get("time") or 0.0), event_text(e)) for e in metrics["events"]],
        report=facts["report"],
        damage=facts["damage"],
    )


def _shown_metrics(line: Facts | None, start: Facts | None) -> list[tuple[str, str]]:
    """Title and value of every metric of a line, as the run declares them."""
    declared = declared_in(start or {})
    metrics = {
        name: metric_of(name, declared) for name in measured(line or {}, declared, shown=True)
    }
    return [(metric.title, metric.shown((line or {})[name])) for name, metric in metrics.items()]


def _state(facts: Facts) -> tuple[str, str, str]:
    """The state of a run, the reason for it, and what a user can do."""
    supervisor, result = facts["supervisor"], facts["result"]
    live = (supervisor or {}).get("state") not in (None, "finished")
    if result and (not live or not _supervisor_lives(facts)):
        outcome = result.get("outcome")
        state = {"ok": "finished", "interrupted": "interrupted"}.get(str(outcome), "failed")
        why = "" if outcome == "ok" else f"{outcome}: {result.get('cause') or 'no cause known'}"
        return state, why, result.get("fix") or ""
    resume = f"python -m llmx resume {facts['path']}"
    if supervisor is None:
        return _without_supervisor(facts, resume)
    if not _supervisor_lives(facts):
        ago = max(0.0, facts["now"] - float(supervisor.get("time") or 0.0))
        where = f"process {supervisor.get('pid')} on {supervisor.get('host')}"
        reason = (
            f"its supervisor ({where}) exited without a result, last seen {duration_text(ago)} ago"
        )
        return "dead", reason, resume
    state = supervisor.get("state")
    if state == "waiting":
        why = supervisor.get("why") or "waiting to restart"
        if supervisor.get("until"):
            why += f" (in {duration_text(max(0.0, supervisor['until'] - facts['now']))})"
        return "waiting", why, ""
    if state in ("preparing", "ending"):
        return str(state), supervisor.get("why") or "", ""
    if state == "finished":
        return "ending", "the report is being written", ""
    return _of_ranks(facts), supervisor.get("why") or "", ""  # that no step ends


def _supervisor_lives(facts: Facts) -> bool:
    """Whether the supervisor is alive: its process is there and has written lately."""
    supervisor = facts["supervisor"]
    if not supervisor or facts["supervisor_alive"] is False:
        return False
    return bool(facts["now"] - float(supervisor.get("time") or 0.0) < SILENT_S)


def _without_supervisor(facts: Facts, resume: str) -> tuple[str, str, str]:
    """A run that was only planned, or one that was started by hand."""
    if not facts["launched"]:
        return "planned", "never started", f"to start it: {resume}"
    newest = max((float(status.get("time") or 0.0) for status in facts["ranks"]), default=0.0)
    if facts["now"] - newest < SILENT_S:
        return _of_ranks(facts), "", ""
    if facts["metrics"]["end"]:
        return "finished", "started by hand: there is no result.json", ""
    return "dead", "no rank or supervisor is running, and there is no result.json", resume


def _of_ranks(facts: Facts) -> str:
    """The state that the slowest rank is in."""
    order = ("starting", "loading", "training", "evaluating", "saving")
    planned = sum(len(host["ranks"]) for host in facts["hosts"])
    states = [status.get("state") for status in facts["ranks"]]
    if len(states) < planned or not states:
        return "starting"
    reached = [order.index(state) for state in states if state in order]
    slowest = order[min(reached)] if reached else "ending"
    return "training" if slowest == "evaluating" else slowest


def _total(facts: Facts) -> int | None:
    total = (facts["metrics"]["start"] or {}).get("total_steps")
    stop = facts["stop_at_step"]
    return min(total, stop) if total and stop else total


def _step(facts: Facts, state: str) -> int | None:
    """The newest step that is known: of the ranks while they train, else of the last line."""
    metrics = facts["metrics"]
    lines = [metrics["last"], *metrics["events"][-1:], metrics["end"]]
    steps = [int(line.get("step") or 0) for line in lines if line]
    if state in ("training", "saving", "ending"):
        at_work = ("training", "evaluating", "saving", "interrupted")
        ranks = [int(s.get("step") or 0) for s in facts["ranks"] if s.get("state") in at_work]
        steps += [min(ranks)] if ranks else []
    return max(steps) if steps else None


def _started(facts: Facts) -> float | None:
    created = (facts["identity"] or {}).get("created")
    begun = created or (facts["result"] or {}).get("started") or facts["started"]
    return None if begun is None else float(begun)


def _took(facts: Facts, state: str) -> float | None:
    """Seconds from the first start to now or to the end, restarts included."""
    begun = _started(facts)
    if not begun:
        return None
    if state in LIVE:
        return float(facts["now"] - begun) - _idle_s(facts)
    ends = [(facts["result"] or {}).get("ended"), (facts["metrics"]["last"] or {}).get("time")]
    last = max((float(end) for end in ends if end), default=0.0)
    return last - begun - _idle_s(facts) if last > begun else None


def _idle_s(facts: Facts) -> float:
    """Seconds between the end of a supervisor and the next ``resume``, as far as is known."""
    lines = [line for line in facts["attempts"] if line.get("ended")]
    begins = [float(line.get("started") or 0.0) for line in lines[1:]]
    # Of the attempt that goes on now there is no line yet, but its supervisor has the lock.
    begins.append(float((facts.get("lock") or {}).get("time") or 0.0))
    gaps = [
        begin - float(line["ended"])
        for line, begin in zip(lines, begins, strict=False)
        if line.get("decision") != "restart"
    ]
    return sum(gap for gap in gaps if gap > 0)


def _waited(metrics: Facts) -> float | None:
    last, before = metrics["last"], metrics["before"]
    if not last or last.get("data_wait_s") is None or not last.get("step_time_s"):
        return None
    steps = int(last["step"]) - int((before or {}).get("step") or 0)
    return min(1.0, last["data_wait_s"] / (steps * last["step_time_s"])) if steps > 0 else None


def _host(host: Facts, facts: Facts, state: str) -> tuple[str, str]:
    """Summarize the ranks of one host in one line."""
    statuses = {status.get("rank"): status for status in facts["ranks"]}
    groups: dict[tuple[str, str], list[tuple[int, int | None]]] = {}
    for rank in host["ranks"]:
        status, note = statuses.get(rank), ""
        words = "no status yet" if status is None else str(status.get("state"))
        step = None
        if status and words in ("training", "interrupted", "saving"):
            step = int(status.get("step") or 0)
        if status and words == "failed" and status.get("error"):
            note += f": {status['error'].get('type')}"
        ago = facts["now"] - float((status or {}).get("time") or facts["now"])
        if status and state in LIVE and status.get("state") in LIVE and ago > SILENT_S:
            note += f", silent for {duration_text(ago)}"
        groups.setdefault((words, note), []).append((rank, step))
    parts = [
        f"{_ranks([rank for rank, _ in group])} {words}{_at([step for _, step in group])}{note}"
        for (words, note), group in groups.items()
    ]
    return str(host["name"]), "; ".join(parts) or "no rank"


def _at(steps: list[int | None]) -> str:
    """Ranks tell their steps every few seconds, so those of one host differ a little."""
    reached = [step for step in steps if step is not None]
    if not reached:
        return ""
    low, high = min(reached), max(reached)
    return f" at step {low:,}" if low == high else f" at steps {low:,} to {high:,}"


def _ranks(ranks: list[int]) -> str:
    """``rank 3``, ``ranks 0-3``, ``ranks 0, 2``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


def event_text(event: Facts) -> str:
    """An ``event`` line of ``metrics.jsonl`` in words."""
    kind, step, reason = event.get("event"), event.get("step") or 0, event.get("reason")
    if kind == "saved":
        stall = event.get("stall_s")
        pause = "" if stall is None else f", training paused for {stall:.2g} s"
        return f"saved step {step:,}{pause}"
    if kind == "resumed":
        return f"resumed from step {step:,}, attempt {event.get('attempt', '?')}"
    if kind == "damaged":
        return f"The checkpoint of step {event.get('checkpoint') or 0:,} is damaged: {reason}"
    if kind == "save_failed":
        return f"The checkpoint of step {step:,} could not be saved: {reason}"
    if kind == "passed_over":
        return f"No checkpoint at step {step:,}: the one before was still being written."
    if kind == "early_stopped":
        return f"Training ended early at step {step:,}: {reason}."
    if kind == "straggler":
        rank = f"Rank {event.get('rank')} ({event.get('host')})"
        times = f"{event.get('factor')} times as long as the others"
        return f"{rank} computed {times} for its share, at step {step:,}."
    if kind == "rebalanced":
        counts = [str(sum(sizes)) for sizes in event.get("sizes") or ()]
        listed = ", ".join([*counts[:MAX_COUNTS], *(["..."] if len(counts) > MAX_COUNTS else [])])
        return (
            f"Samples were redistributed after step {step:,} (batch.rebalance), by rank: {listed}."
        )
    if kind == "skipped":
        first, end = event.get("samples") or (0, 0)
        samples = plural(end - first, "sample")
        return f"Step {step:,} was not trained: training diverged there ({samples})."
    return f"{str(kind).replace('_', ' ')} step {step:,}"


def duration_text(seconds: float) -> str:
    """A span of time: ``8 s``, ``3 min 20 s``, ``2 h 5 min``."""
    return duration(seconds) if seconds >= 9.5 else f"{seconds:.0f} s"
