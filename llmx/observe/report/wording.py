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
from llmx.observe.report.step_time import idle_text, steps_by_rank
from llmx.observe.run import Run
from llmx.observe.status.show import event_text
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


def headline(run: Run) -> Headline:
    """Say how the run ended, after how many steps and how long, or that it goes on."""
    # The last steps before an end are not all logged; a checkpoint tells of them.
    count = max(run.summary.get("steps", 0), run.summary.get("last_checkpoint", 0))
    total = run.summary.get("total_steps")
    of = f"{count:,} of {total:,} steps" if total not in (None, 0, count) else ""
    of = of or plural(count, "step")
    if not run.result and not run.was_started:
        return Headline("open", "planned, not started")
    if not run.result:
        last = max((record.get("time") or 0.0 for record in run.records), default=0.0)
        ago = f", last line {human.duration(max(0.0, run.now - last))} ago" if last else ""
        return Headline("open", f"no result.json yet ({of}{ago})")
    took_s = (run.result.get("ended") or 0.0) - (run.result.get("started") or 0.0)
    took = f" in {human.duration(took_s)}" if took_s > 0 else ""
    if took and run.resumed_at is not None:
        took = f" (resumed at step {run.resumed_at:,}, {human.duration(took_s)} since)"
    outcome = run.result.get("outcome", "crash")
    if outcome == "ok":
        return Headline("ok", f"trained {of}{took}")
    rank, host = run.result.get("failed_rank"), run.result.get("host")
    where = [] if rank is None else [f"rank {rank}"]
    where += [host] if host else []
    at = f" ({', '.join(where)})" if where else ""
    # The command that resumes an interrupted run is among the places.
    fix = run.result.get("other_fix" if outcome == "interrupted" else "fix") or ""
    word = outcome if outcome == "interrupted" else f"failed ({outcome})"
    return Headline(
        "failed",
        f"{word} after {of}{took}{at}",
        cause=run.result.get("cause") or "",
        fix=fix,
    )


def summary_rows(run: Run, *, is_brief: bool = False) -> list[tuple[str, str]]:
    """Name and value of loss, evaluation, speed, time, memory and size, as far as they are known.

    ``is_brief``: for a terminal; no prediction, and idle time only where it matters.
    """
    values, rows = run.summary, []
    if "first_loss" in values:
        first, last = human.number(values["first_loss"]), human.number(values["final_loss"])
        steps = [step_of(record) for record in run.train]
        text = f"{first} → {last}   (steps {steps[0]:,} → {steps[-1]:,}"
        mean, loss = run.train[-1].get("loss_mean"), run.train[-1].get("loss")
        if mean is not None and not (loss and math.isclose(mean, loss, rel_tol=1e-6)):
            text += f"; mean of the last steps {human.number(mean)}"
        rows.append(("train loss", f"{text})"))
    if "final_eval_loss" in values:
        first, last = values["first_eval_loss"], values["final_eval_loss"]
        text = human.number(last) if len(run.evals) == 1 else f"{human.number(first)} → "
        text += human.number(last) if len(run.evals) > 1 else ""
        if values["best_eval_loss"] < last:
            text += f"   (best {human.number(values['best_eval_loss'])}"
            text += f" at step {values['best_eval_step']:,})"
        rows.append(("eval loss", text))
    rows += _metrics(run)
    if "tokens_per_s" in values:
        text = f"{human.count(values['tokens_per_s'])} tokens/s"
        text += f", MFU {human.percent(values['mfu'])}" if "mfu" in values else ""
        rows.append(("speed", text))
    if not is_brief and (text := predicted(run)):
        rows.append(("predicted", text))
    steps_of_ranks = steps_by_rank(run)
    if steps_of_ranks and (steps_of_ranks.idle >= IDLE_MATTERS or not is_brief):
        rows.append(("idle", idle_text(steps_of_ranks)))
    if run.result.get("ended") and run.result.get("started"):
        took_s = run.result["ended"] - run.result["started"]
        text = human.duration(took_s)
        trained_s = run.train_time_s
        if trained_s:
            text += f" (training {human.duration(trained_s)})"
        if run.resumed_at is not None:
            text += f"   (since the resume at step {run.resumed_at:,})"
        rows.append(("time", text))
    if len(run.attempts) > 1:
        ends = [
            f"{line.get('outcome')} "
            + (f"at step {line['last_step']:,}" if line.get("last_step") else "before training")
            for line in run.attempts
            if line.get("outcome") != "ok"
        ]
        # Of many, the last few: those that a reader asks about.
        before = "..., " if len(ends) > SHOWN_ATTEMPTS else ""
        newest = before + ", ".join(ends[-SHOWN_ATTEMPTS:])
        rows.append(("attempts", f"{len(run.attempts)}" + (f"   ({newest})" if ends else "")))
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


def predicted(run: Run) -> str:
    """Time of a step and memory as the plan had them, against what was measured; empty where one
    of both is missing. On CPUs the process is measured, and not what its tensors take."""
    parts = []
    foreseen = (run.plan.get("time") or {}).get("step_s") or 0.0
    paces = [line["step_time_s"] for line in run.train if line.get("step_time_s")]
    if foreseen and paces:
        # The first line is of a warm-up.
        pace = statistics.median(paces[1:] or paces)
        parts.append(f"{_against(foreseen, pace, seconds)} a step")
    if text := _waiting_for_samples(run):
        parts.append(text)
    planned, peak = run.predicted_gib, run.summary.get("memory_gib_max")
    accelerator = ACCELERATORS.get(run.plan.get("accelerator") or "")
    if planned and peak and accelerator is not None and accelerator.is_gpu:
        parts.append(f"memory {_against(planned, peak, lambda size: f'{human.gib(size)} GiB')}")
    return "; ".join(parts)


def _waiting_for_samples(run: Run) -> str:
    """The part of a step in which ranks wait for rollout servers, as planned and as measured, with
    the direction in which to change ``rollout.hosts`` where they differ; empty without servers."""
    rollout = (run.plan.get("time") or {}).get("rollout") or {}
    shares: list[float] = [
        line["rollout_wait_share"]
        for line in run.train
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


def _metrics(run: Run) -> list[tuple[str, str]]:
    """Every metric of the evaluations: before and after training, and the best on the way."""
    declared, rows = run.declared, []
    displayed = {name for line in run.evals for name in measured(line, declared, shown=True)}
    for name, points in run.metric_points("eval").items():
        metric = metric_of(name, declared)
        of_samples = f"{name}_before" in run.samples
        before, after = (
            value if is_number(value := run.samples.get(f"{name}_{when}")) else None
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
        count = len(run.samples.get("rows") or []) if of_samples else 0
        if count:
            notes.append(plural(count, "eval prompt"))
        note = f"   ({'; '.join(notes)})" if notes else ""
        rows.append((metric.title, " → ".join(texts) + note))
    return rows


def locations(run: Run) -> list[tuple[str, str]]:
    """Name and path of each result, and the commands that go on from here."""
    rows = [("run directory", str(run.dir.root))]
    for name, path in (
        ("model", run.dir.final_model),
        ("loss curve", run.dir.loss_curve),
        ("report", run.dir.report),
        ("logs", run.dir.logs),
    ):
        if path.exists():
            rows.append((name, str(path)))
    failed = run.result.get("failed_rank")
    if failed is not None and run.dir.rank_log(failed).exists():
        rows.append((f"log of rank {failed}", str(run.dir.rank_log(failed))))
    for tracker, status in run.tracking.items():
        if status.get("sync"):
            rows.append((f"{tracker}, to upload", status["sync"]))
        elif status.get("state") != "failed" and status.get("message"):
            rows.append((tracker, status["message"]))
    model = run.dir.final_model
    if model.exists() and not generates_no_text(model):
        rows.append(("try it", _try_it(run)))
    here = shlex.quote(str(run.dir.root))
    if not run.was_started:
        return [*rows, ("start", f"python -m llmx resume {here}")]
    if run.result and run.result.get("outcome") != "ok":
        rows.append(("resume", f"python -m llmx resume {here}"))
    rows.append(("reproduce", f"python -m llmx reproduce {here}"))
    return rows


def _try_it(run: Run) -> str:
    """A command with a prompt that is short and needs no escapes in a shell, if there is one."""
    prompts = [(row.get("prompt") or "").strip() for row in run.samples.get("rows") or []]
    short = [text for text in prompts if 0 < len(text) <= 120 and "\n" not in text]
    short.sort(key=lambda text: bool(set(text) & set("'\"$`!\\")))
    words = ["python", "-m", "llmx", "generate", str(run.dir.root), *(short or ["Hello"])[:1]]
    return shlex.join(words)


def warnings(run: Run) -> list[str]:
    """The plan's warnings, what could not be read, and trackers that failed."""
    failed = [
        f"{tracker}: {status.get('message')}. To upload later: {status.get('fix')}"
        for tracker, status in run.tracking.items()
        if status.get("state") == "failed"
    ]
    return [*run.warnings, *failed]


def events(run: Run) -> list[str]:
    """What happened to a run besides saving: checkpoints that failed, steps not trained."""
    return [
        event_text(event) for event in run.events if event.get("event") not in ("saved", "resumed")
    ]


def traceback_excerpt(run: Run) -> str:
    """The end of the failing rank's traceback, which is where the reason stands."""
    lines = (run.result.get("traceback") or "").rstrip().splitlines()
    if len(lines) <= TRACEBACK_LINES:
        return "\n".join(lines)
    left_out = len(lines) - TRACEBACK_LINES
    before = f"... {plural(left_out, 'line')} before"
    return "\n".join([before, *lines[-TRACEBACK_LINES:]])
