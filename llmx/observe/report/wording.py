"""What a run comes to, in words: the result line, the summary, where everything lies.

Pure; the terminal and the HTML show the same rows.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Callable

from llmx import text as human
from llmx.observe.report.step_time import idle_text, steps_by_rank
from llmx.observe.run import Run
from llmx.run.exported import generates_no_text
from llmx.run.metrics import measured, metric_of
from llmx.run.metrics.declared import is_number
from llmx.run.metrics.lines import Record, step_of
from llmx.text import plural

SHOWN_ATTEMPTS = 4
LONGEST_CAUSE = 54
"""Characters of the cause of an attempt's end."""
MAX_COUNTS = 16
"""Ranks whose samples are listed."""
TRACEBACK_LINES = 12
WAITS_OTHERWISE = 0.2
"""Difference of the part of a step in which ranks wait for samples from the plan's, beyond which
the division of the hosts is worth a change."""
IDLE_MATTERS = 0.1
"""Part of the ranks' computing time."""


def headline(run: Run) -> tuple[str, str]:
    """Whether the run ended well (``ok``, ``failed``, or ``open`` without a result yet), and one
    line without its name: how it ended, after how many steps and how long."""
    # The last steps before an end are not all logged; a checkpoint tells of them.
    count = max(run.summary.get("steps", 0), run.summary.get("last_checkpoint", 0))
    total = run.summary.get("total_steps")
    steps = plural(count, "step")
    if total not in (None, 0, count):
        steps = f"{count:,} of {total:,} steps"
    if not run.result and not run.was_started:
        return "open", "planned, not started"
    if not run.result:
        last = max((record.get("time") or 0.0 for record in run.records), default=0.0)
        ago = f", last line {human.duration(max(0.0, run.now - last))} ago" if last else ""
        return "open", f"no result.json yet ({steps}{ago})"
    took_s = (run.result.get("ended") or 0.0) - (run.result.get("started") or 0.0)
    took = f" in {human.duration(took_s)}" if took_s > 0 else ""
    if took and run.resumed_at is not None:
        took = f" (resumed at step {run.resumed_at:,}, {human.duration(took_s)} since)"
    outcome = run.result.get("outcome", "crash")
    if outcome == "ok":
        return "ok", f"trained {steps}{took}"
    rank, host = run.result.get("failed_rank"), run.result.get("host")
    where = [] if rank is None else [f"rank {rank}"]
    where += [host] if host else []
    at = f" ({', '.join(where)})" if where else ""
    word = outcome if outcome == "interrupted" else f"failed ({outcome})"
    return "failed", f"{word} after {steps}{took}{at}"


def reasons(run: Run) -> list[tuple[str, str]]:
    """Cause and fix of a run that did not end well, as far as they are known."""
    outcome = run.result.get("outcome", "crash")
    if not run.result or outcome == "ok":
        return []
    # The command that resumes an interrupted run is among the places.
    fix = run.result.get("other_fix" if outcome == "interrupted" else "fix")
    rows = (("cause", run.result.get("cause")), ("fix", fix))
    return [(name, text) for name, text in rows if text]


def summary_rows(run: Run, *, is_brief: bool = False) -> list[tuple[str, str]]:
    """Name and value of loss, evaluation, speed, time, memory and size, as far as they are known.

    ``is_brief``: for a terminal, with the causes of attempts; without a prediction, and idle time
    only where it matters.
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
        losses = [first, last] if len(run.evals) > 1 else [last]
        text = " → ".join(map(human.number, losses))
        if values["best_eval_loss"] < last:
            text += f"   (best {human.number(values['best_eval_loss'])}"
            text += f" at step {values['best_eval_step']:,})"
        rows.append(("eval loss", text))
    rows += _metrics(run)
    if "tokens_per_s" in values:
        rows.append(("speed", _speed(run)))
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
    if len(run.attempts) > 1 or run.restarts:
        length = LONGEST_CAUSE if is_brief else 0
        ends = [_attempt(line, length) for line in run.attempts if line.get("outcome") != "ok"]
        # Of many, the last few: those that a reader asks about.
        before = "..., " if len(ends) > SHOWN_ATTEMPTS else ""
        newest = before + ", ".join(ends[-SHOWN_ATTEMPTS:])
        rows.append(("attempts", f"{len(run.attempts)} ended" + (f"   ({newest})" if ends else "")))
    measured_gib = [line["memory_gib"] for line in run.train if line.get("memory_gib")]
    if measured_gib:
        peaks: list[float] = max(measured_gib, key=max)
        text = f"{human.gib(max(peaks))} GiB on the fullest rank"
        if len(peaks) > 1:
            text += f" ({peaks.index(max(peaks))}), {human.gib(min(peaks))} on the emptiest"
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


def _speed(run: Run) -> str:
    """The speed now of a run that goes on; of one that has ended, that of the whole run."""
    values = run.last if run.is_live else run.summary
    parts = [f"{human.count(values.get('tokens_per_s') or 0.0)} tokens/s"]
    if values.get("mfu") is not None:
        parts.append(f"MFU {human.percent(values['mfu'])}")
    if run.is_live and run.step_time_s:
        parts.append(f"{run.step_time_s:.3g} s a step")
    if run.is_live and run.waited_for_data is not None:
        parts.append(f"{run.waited_for_data:.1%} waiting for data")
    return ", ".join(parts)


def _attempt(line: Record, length: int) -> str:
    """The end of an attempt: outcome, step, and so many characters of the cause."""
    at = f"at step {line['last_step']:,}" if line.get("last_step") else "before training"
    cause = human.one_line(line.get("cause") or "", limit=length) if length else ""
    return f"{line.get('outcome')} {at}" + (f": {cause}" if cause else "")


def predicted(run: Run) -> str:
    """Time of a step and memory as the plan had them, against what was measured; empty where one
    of both is missing. On CPUs the process is measured, and not what its tensors take."""
    from llmx.config.accelerators import ACCELERATORS
    from llmx.observe.report.plan_table import seconds

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
    for name, points in run.eval_points().items():
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
    root = shlex.quote(str(run.dir.root))
    if not run.was_started:
        return [*rows, ("start", f"python -m llmx resume {root}")]
    if run.result and run.result.get("outcome") != "ok":
        rows.append(("resume", f"python -m llmx resume {root}"))
    rows.append(("reproduce", f"python -m llmx reproduce {root}"))
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


EVENTS = {
    "resumed": "resumed from step {step:,}, attempt {attempt}",
    "damaged": "The checkpoint of step {checkpoint:,} is damaged: {reason}",
    "save_failed": "The checkpoint of step {step:,} could not be saved: {reason}",
    "passed_over": "No checkpoint at step {step:,}: the one before was still being written.",
    "early_stopped": "Training ended early at step {step:,}: {reason}.",
    "straggler": "Rank {rank} ({host}) computed {factor} times as long as the others for its "
    "share, at step {step:,}.",
}


def event_text(event: Record) -> str:
    """An ``event`` line of ``metrics.jsonl`` in words."""
    kind, step = str(event.get("event")), event.get("step") or 0
    if kind in EVENTS:
        unknown = dict.fromkeys(("reason", "rank", "host", "factor"))
        values = {key: value for key, value in event.items() if value is not None}
        return EVENTS[kind].format_map(
            {**unknown, "step": 0, "checkpoint": 0, "attempt": "?", **values}
        )
    if kind == "saved":
        stall = event.get("stall_s")
        pause = "" if stall is None else f", training paused for {stall:.2g} s"
        return f"saved step {step:,}{pause}"
    if kind == "rebalanced":
        counts = [str(sum(sizes)) for sizes in event.get("sizes") or ()]
        omission = ", ..." if len(counts) > MAX_COUNTS else ""
        return (
            f"Samples were redistributed after step {step:,} (batch.rebalance), by rank: "
            f"{', '.join(counts[:MAX_COUNTS])}{omission}."
        )
    if kind == "skipped":
        first, end = event.get("samples") or (0, 0)
        samples = human.plural(end - first, "sample")
        return f"Step {step:,} was not trained: training diverged there ({samples})."
    return f"{kind.replace('_', ' ')} step {step:,}"


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
