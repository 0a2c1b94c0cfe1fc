"""What a run comes to, in words: the result line, the summary, where everything lies.

Pure; the terminal and the HTML show the same rows.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from llmx import text as human
from llmx.config.accelerators import ACCELERATORS
from llmx.observe.report.plan_table import seconds
from llmx.observe.report.run_data import RunData
from llmx.observe.report.step_time import idle_text, steps_by_rank
from llmx.observe.status.view import event_text
from llmx.run.exported import generates_no_text
from llmx.run.metrics import measured, metric_of
from llmx.run.metrics.declared import is_number
from llmx.run.metrics.lines import step_of
from llmx.text import plural

SHOWN_ATTEMPTS = 4
TRACEBACK_LINES = 12
WAITS_OTHERWISE = 0.2
"""Difference of the part of a step in which ranks wait for samples from the plan's, beyond which
the division of the hosts is worth a change."""
IDLE_MATTERS = 0.1
"""Part of the ranks' computing time."""


@dataclass(frozen=True)
class Headline:
    """The end of a run in one line, with its cause and the fix."""

    state: str
    """``ok``, ``failed`` or ``open`` (no result yet)."""
    line: str
    """Without the name of the run."""
    cause: str = ""
    fix: str = ""

    @property
    def reasons(self) -> list[tuple[str, str]]:
        """Cause and fix as rows, as far as they are known."""
        rows = (("cause", self.cause), ("fix", self.fix))
        return [(name, text) for name, text in rows if text]


def headline(data: RunData) -> Headline:
    """Say how the run ended, after how many steps and how long, or that it goes on."""
    # The last steps before an end are not all logged; a checkpoint tells of them.
    count = max(data.summary.get("steps", 0), data.summary.get("last_checkpoint", 0))
    total = data.summary.get("total_steps")
    of = f"{count:,} of {total:,} steps" if total not in (None, 0, count) else ""
    of = of or plural(count, "step")
    if data.result is None and not data.was_started:
        return Headline("open", "planned, not started")
    if data.result is None:
        last = max((record.get("time") or 0.0 for record in data.records), default=0.0)
        ago = f", last line {human.duration(max(0.0, data.now - last))} ago" if last else ""
        return Headline("open", f"no result.json yet ({of}{ago})")
    took_s = (data.result.get("ended") or 0.0) - (data.result.get("started") or 0.0)
    took = f" in {human.duration(took_s)}" if took_s > 0 else ""
    if took and data.resumed_at is not None:
        took = f" (resumed at step {data.resumed_at:,}, {human.duration(took_s)} since)"
    outcome = data.result.get("outcome", "crash")
    if outcome == "ok":
        return Headline("ok", f"trained {of}{took}")
    rank, host = data.result.get("failed_rank"), data.result.get("host")
    where = [] if rank is None else [f"rank {rank}"]
    where += [host] if host else []
    at = f" ({', '.join(where)})" if where else ""
    # The command that resumes an interrupted run is among the places.
    fix = data.result.get("other_fix" if outcome == "interrupted" else "fix") or ""
    word = outcome if outcome == "interrupted" else f"failed ({outcome})"
    return Headline(
        "failed",
        f"{word} after {of}{took}{at}",
        cause=data.result.get("cause") or "",
        fix=fix,
    )


def summary_rows(data: RunData, *, is_brief: bool = False) -> list[tuple[str, str]]:
    """Name and value of loss, evaluation, speed, time, memory and size, as far as they are known.

    ``is_brief``: for a terminal; no prediction, and idle time only where it matters.
    """
    values, rows = data.summary, []
    if "first_loss" in values:
        first, last = human.number(values["first_loss"]), human.number(values["final_loss"])
        steps = [step_of(record) for record in data.train]
        text = f"{first} → {last}   (steps {steps[0]:,} → {steps[-1]:,}"
        mean, loss = data.train[-1].get("loss_mean"), data.train[-1].get("loss")
        if mean is not None and not (loss and math.isclose(mean, loss, rel_tol=1e-6)):
            text += f"; mean of the last steps {human.number(mean)}"
        rows.append(("train loss", f"{text})"))
    if "final_eval_loss" in values:
        first, last = values["first_eval_loss"], values["final_eval_loss"]
        text = human.number(last) if len(data.evals) == 1 else f"{human.number(first)} → "
        text += human.number(last) if len(data.evals) > 1 else ""
        if values["best_eval_loss"] < last:
            text += f"   (best {human.number(values['best_eval_loss'])}"
            text += f" at step {values['best_eval_step']:,})"
        rows.append(("eval loss", text))
    rows += _metrics(data)
    if "tokens_per_s" in values:
        text = f"{human.count(values['tokens_per_s'])} tokens/s"
        text += f", MFU {human.percent(values['mfu'])}" if "mfu" in values else ""
        rows.append(("speed", text))
    if not is_brief and (text := predicted(data)):
        rows.append(("predicted", text))
    steps_of_ranks = steps_by_rank(data)
    if steps_of_ranks and (steps_of_ranks.idle >= IDLE_MATTERS or not is_brief):
        rows.append(("idle", idle_text(steps_of_ranks)))
    if data.result and data.result.get("ended") and data.result.get("started"):
        took_s = data.result["ended"] - data.result["started"]
        text = human.duration(took_s)
        trained_s = data.train_time_s
        if trained_s:
            text += f" (training {human.duration(trained_s)})"
        if data.resumed_at is not None:
            text += f"   (since the resume at step {data.resumed_at:,})"
        rows.append(("time", text))
    if len(data.attempts) > 1:
        ends = [
            f"{line.get('outcome')} "
            + (f"at step {line['last_step']:,}" if line.get("last_step") else "before training")
            for line in data.attempts
            if line.get("outcome") != "ok"
        ]
        # Of many, the last few: those that a reader asks about.
        before = "..., " if len(ends) > SHOWN_ATTEMPTS else ""
        newest = before + ", ".join(ends[-SHOWN_ATTEMPTS:])
        rows.append(("attempts", f"{len(data.attempts)}" + (f"   ({newest})" if ends else "")))
    if "memory_gib_max" in values:
        text = f"{human.gib(values['memory_gib_max'])} GiB on the fullest rank"
        rows.append(("peak memory", text))
    if values.get("num_parameters") or values.get("tokens"):
        size = values.get("num_trained") or values.get("num_parameters")
        tokens = values.get("tokens")
        parts = [f"{human.count(size)} parameters"] if size else []
        parts += [f"{human.count(tokens)} tokens"] if tokens else []
        text = ", ".join(parts)
        if values.get("epoch"):
            text += f", {plural(float(format(values['epoch'], '.3g')), 'epoch')}"
        rows.append(("trained", text))
    return rows


def predicted(data: RunData) -> str:
    """Time of a step and memory as the plan had them, against what was measured; empty where one
    of both is missing. On CPUs the process is measured, and not what its tensors take."""
    parts = []
    foreseen = (data.plan.get("time") or {}).get("step_s") or 0.0
    paces = [line["step_time_s"] for line in data.train if line.get("step_time_s")]
    if foreseen and paces:
        # The first line is of a warm-up.
        pace = statistics.median(paces[1:] or paces)
        parts.append(f"{_against(foreseen, pace, seconds)} a step")
    if text := _waiting_for_samples(data):
        parts.append(text)
    planned, peak = data.predicted_gib, data.summary.get("memory_gib_max")
    accelerator = ACCELERATORS.get(data.plan.get("accelerator") or "")
    if planned and peak and accelerator is not None and accelerator.is_gpu:
        parts.append(f"memory {_against(planned, peak, lambda size: f'{human.gib(size)} GiB')}")
    return "; ".join(parts)


def _waiting_for_samples(data: RunData) -> str:
    """The part of a step in which ranks wait for rollout servers, as planned and as measured, with
    the direction in which to change ``rollout.hosts`` where they differ; empty without servers."""
    rollout = (data.plan.get("time") or {}).get("rollout") or {}
    shares: list[float] = [
        line["rollout_wait_share"]
        for line in data.train
        if is_number(line.get("rollout_wait_share"))
    ]
    if not rollout.get("drawing_idle") or not shares:
        return ""
    foreseen, share = rollout.get("training_idle") or 0.0, statistics.median(shares[1:] or shares)
    text = f"waiting for samples {human.percent(foreseen, decimals=0)} of a step, measured "
    text += human.percent(share, decimals=0)
    if abs(share - foreseen) < WAITS_OTHERWISE:
        return text
    return f"{text} (let {'more' if share > foreseen else 'fewer'} hosts draw: rollout.hosts)"


def _against(foreseen: float, measured: float, text: Callable[[float], str]) -> str:
    return f"{text(foreseen)}, measured {text(measured)} ({measured / foreseen - 1:+.0%})"


def _metrics(data: RunData) -> list[tuple[str, str]]:
    """Every metric of the evaluations: before and after training, and the best on the way."""
    declared, rows = data.declared, []
    displayed = {name for line in data.evals for name in measured(line, declared, shown=True)}
    for name, points in data.metric_points("eval").items():
        metric = metric_of(name, declared)
        of_samples = f"{name}_before" in data.samples
        before, after = (
            value if is_number(value := data.samples.get(f"{name}_{when}")) else None
            for when in ("before", "after")
        )
        if points and name not in displayed:
            continue
        trained = [(step, value) for step, value in points if step > 0]
        if before is None and points and points[0][0] == 0:
            before = points[0][1]
        if after is None and trained:
            after = trained[-1][1]
        texts = [metric.shown(value) for value in (before, after) if value is not None]
        if not texts:
            continue
        notes = []
        if trained and metric.higher_is_better is not None:
            sign = 1 if metric.higher_is_better else -1
            step, best = max(trained, key=lambda point: sign * point[1])
            if metric.shown(best) != metric.shown(trained[-1][1]):
                notes.append(f"best {metric.shown(best)} at step {step:,}")
        count = len(data.samples.get("rows") or []) if of_samples else 0
        if count:
            notes.append(plural(count, "eval prompt"))
        note = f"   ({'; '.join(notes)})" if notes else ""
        rows.append((metric.title, " → ".join(texts) + note))
    return rows


def locations(data: RunData) -> list[tuple[str, str]]:
    """Name and path of each result, and the commands that go on from here."""
    run = data.run
    rows = [("run directory", str(run.root))]
    for name, path in (
        ("model", run.final_model),
        ("loss curve", run.loss_curve),
        ("report", run.report),
        ("logs", run.logs),
    ):
        if path.exists():
            rows.append((name, str(path)))
    failed = (data.result or {}).get("failed_rank")
    if failed is not None and run.rank_log(failed).exists():
        rows.append((f"log of rank {failed}", str(run.rank_log(failed))))
    for tracker, status in data.tracking.items():
        if status.get("sync"):
            rows.append((f"{tracker}, to upload", status["sync"]))
        elif status.get("state") != "failed" and status.get("message"):
            rows.append((tracker, status["message"]))
    if run.final_model.exists() and not generates_no_text(run.final_model):
        rows.append(("try it", _try_it(data)))
    here = shlex.quote(str(run.root))
    if not data.was_started:
        return [*rows, ("start", f"python -m llmx resume {here}")]
    if data.result and data.result.get("outcome") != "ok":
        rows.append(("resume", f"python -m llmx resume {here}"))
    rows.append(("reproduce", f"python -m llmx reproduce {here}"))
    return rows


def _try_it(data: RunData) -> str:
    """A command with a prompt that is short and needs no escapes in a shell, if there is one."""
    prompts = [(row.get("prompt") or "").strip() for row in data.samples.get("rows") or []]
    short = [text for text in prompts if 0 < len(text) <= 120 and "\n" not in text]
    short.sort(key=lambda text: bool(set(text) & set("'\"$`!\\")))
    words = ["python", "-m", "llmx", "generate", str(data.run.root), *(short or ["Hello"])[:1]]
    return shlex.join(words)


def warnings(data: RunData) -> list[str]:
    """The plan's warnings, what could not be read, and trackers that failed."""
    failed = [
        f"{tracker}: {status.get('message')}. To upload later: {status.get('fix')}"
        for tracker, status in data.tracking.items()
        if status.get("state") == "failed"
    ]
    return [*data.warnings, *failed]


def events(data: RunData) -> list[str]:
    """What happened to a run besides saving: checkpoints that failed, steps not trained."""
    happened = (record for record in data.records if record.get("kind") == "event")
    return [
        event_text(event) for event in happened if event.get("event") not in ("saved", "resumed")
    ]


def traceback_excerpt(data: RunData) -> str:
    """The end of the failing rank's traceback, which is where the reason stands."""
    lines = ((data.result or {}).get("traceback") or "").rstrip().splitlines()
    if len(lines) <= TRACEBACK_LINES:
        return "\n".join(lines)
    left_out = len(lines) - TRACEBACK_LINES
    before = f"... {plural(left_out, 'line')} before"
    return "\n".join([before, *lines[-TRACEBACK_LINES:]])
