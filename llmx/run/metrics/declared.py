"""What a metric is: its title and format for readers, and which direction is better.

    Metric("exact match", "percent", higher_is_better=True)

A metric is a flat key of the lines of ``metrics.jsonl``, so its name must not be a key that those
lines have anyway (``RESERVED``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from llmx import text as human
from llmx.errors import ConfigError

Record = Mapping[str, Any]

FORMATS = ("percent", "number", "integer")
KINDS = ("train", "eval")
"""Kinds of lines of ``metrics.jsonl`` that have metrics."""

TRAIN_KEYS = (
    *("samples", "tokens", "target_tokens", "epoch", "loss", "loss_mean", "lr", "grad_norm"),
    *("loss_scale", "skipped_steps", "step_time_s", "tokens_per_s", "mfu", "memory_gib"),
    *("context_gib", "data_wait_s", "forward_s", "backward_s", "update_s", "idle_share", "probe_s"),
    *("aux_loss", "expert_load_max", "experts_idle"),
)
"""What the training loop writes into every ``train`` line, whatever the task."""
SPEEDS = ("tokens_per_s", "mfu")
"""Metrics of which more is better."""
EVAL_KEYS = ("loss", "target_tokens", "weight")
LINE_KEYS = ("kind", "step", "time", "nonfinite", "extra")

_NAME = re.compile(r"[A-Za-z][\w./@-]*", re.ASCII)
_SUFFIXES = ("_before", "_after")
RESERVED = frozenset(
    {
        *(*LINE_KEYS, *TRAIN_KEYS, *EVAL_KEYS),
        # result.json and the summary of a tracker have the metrics beside these.
        *("attempts", "cause", "ended", "exit_code", "failed_rank", "fix", "host", "launched"),
        *("log", "model", "outcome", "restarts", "run_id", "started", "steps", "traceback"),
        *("warnings", "first_loss", "final_loss", "first_eval_loss", "final_eval_loss"),
        *("best_eval_loss", "best_eval_step", "checkpoints", "last_checkpoint", "num_parameters"),
        *("num_trained", "loss_unit"),
        *("memory_gib_max", "resumed_from", "total_steps", "train_time_s", "world_size", "rows"),
    }
)


@dataclass(frozen=True)
class Metric:
    """One metric, as a task declares it."""

    title: str
    """The name for readers: ``exact match``."""
    format: str = "number"
    """``percent`` (0.97 is shown as 97 %), ``number`` or ``integer``."""
    higher_is_better: bool | None = None
    """None where neither direction is better (the length of a completion, say)."""
    kinds: tuple[str, ...] = ("eval",)
    """Kinds of lines of ``metrics.jsonl`` that have it: ``eval``, ``train`` or both."""

    def shown(self, value: float, *, decimals: int | None = None) -> str:
        """``value`` for a reader. ``decimals``: of a percentage; default: three digits in all."""
        if not math.isfinite(value):
            return "nan" if math.isnan(value) else str(value)
        if self.format == "percent":
            return human.percent(value, decimals=decimals)
        is_whole = self.format == "integer" or abs(value) >= 9999.5
        return f"{value:,.0f}" if is_whole else human.number(value)

    def to_dict(self) -> dict[str, Any]:
        """The metric as it is written in a ``start`` line."""
        return {**asdict(self), "kinds": list(self.kinds)}


def declared_in(record: Record) -> dict[str, Metric]:
    """Name -> metric, as a ``start`` line or a ``resumed`` event declares them.

    Entries that cannot be read are left out.
    """
    stated = record.get("metrics")
    if not isinstance(stated, Mapping):
        return {}
    metrics = {}
    for name, entry in stated.items():
        if isinstance(entry, Mapping):
            better, kinds = entry.get("higher_is_better"), entry.get("kinds")
            metrics[str(name)] = Metric(
                title=str(entry.get("title") or _title(str(name))),
                format=str(entry.get("format") or "number"),
                higher_is_better=better if isinstance(better, bool) else None,
                kinds=tuple(map(str, kinds)) if isinstance(kinds, list) else ("eval",),
            )
    return metrics


def declared_of(records: Iterable[Record]) -> dict[str, Metric]:
    """The newest declaration among the lines of a run."""
    declared: dict[str, Metric] = {}
    for record in records:
        if is_declaration(record):
            declared = declared_in(record)
    return declared


def loss_title(runs: Iterable[Iterable[Record]]) -> str:
    """``loss (nats per target token)``, by the ``start`` lines of runs; without the unit where they
    have none, or different ones."""
    units = {
        str(next((r.get("loss_unit") or "" for r in records if r.get("kind") == "start"), ""))
        for records in runs
    }
    (unit,) = units if len(units) == 1 else [""]
    return f"loss ({unit})" if unit else "loss"


def is_declaration(record: Record) -> bool:
    """Whether a line says which metrics the run has."""
    resumed = record.get("event") == "resumed" and "metrics" in record
    return record.get("kind") == "start" or resumed


def metric_of(name: str, declared: Mapping[str, Metric]) -> Metric:
    """The declared metric, else one with a plain number format."""
    return declared.get(name) or Metric(_title(name))


def measured(
    record: Record, declared: Mapping[str, Metric], *, shown: bool = False
) -> dict[str, float]:
    """The metrics of one line besides the loss, by name, in the order of the declaration.

    Of an ``eval`` line every number; of a ``train`` line, which has numbers of the training loop
    too, only what is declared for it. ``shown``: without a loss (``plain_loss``) that equals it.
    """
    kind = str(record.get("kind"))
    names = [name for name, metric in declared.items() if kind in metric.kinds]
    if kind == "eval":
        names += [name for name in record if name not in RESERVED and name not in names]
    values: dict[str, Any] = {name: record.get(name) for name in names}
    numbers = {name: float(value) for name, value in values.items() if is_number(value)}
    loss = record.get("loss")
    if shown and isinstance(loss, int | float):  # a reward of 0 beside a loss of 0 is shown
        equal_names = [n for n, v in numbers.items() if math.isclose(v, loss, rel_tol=1e-6)]
        return {n: v for n, v in numbers.items() if n not in equal_names or not n.endswith("loss")}
    return numbers


def is_number(value: Any) -> bool:
    """Whether a value of a line is a number (``true`` is none)."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_declared(metrics: Mapping[str, Metric], *, task: str) -> None:
    """ConfigError where a task declares what readers could not show."""
    for name, metric in metrics.items():
        rule = ""
        if not _NAME.fullmatch(name):
            rule = "the name must begin with a letter and have only letters, digits and _ . / @ -"
        elif name in RESERVED or name.endswith(_SUFFIXES):
            rule = f"the name is reserved; choose another, e.g. task_{name}"
        elif metric.format not in FORMATS:
            rule = f"the format must be one of {', '.join(FORMATS)}, not {metric.format!r}"
        elif not metric.kinds or not set(metric.kinds) <= set(KINDS):
            rule = f"kinds must be of {', '.join(KINDS)}, not {', '.join(metric.kinds) or 'none'}"
        if rule:
            raise ConfigError(f"Task {task} declares the metric {name!r}: {rule}.")


def check_checkpoint_metric(
    selected: str,
    mode: str,
    metrics: Mapping[str, Metric],
    *,
    task: str,
    key: str = "checkpoint.metric",
    evaluates_loss: bool = True,
) -> str:
    """``min`` or ``max`` for ``checkpoint.metric``; ConfigError for a metric that is not measured.

    Args:
        selected: ``checkpoint.metric``, e.g. ``eval/loss``.
        mode: ``checkpoint.mode``; ``auto`` takes the direction that the task declares.
        metrics: what the task declares.
        key: that ``selected`` is the value of, for messages.
        evaluates_loss: whether evaluations of the task measure a loss.
    """
    kind, _, name = selected.partition("/")
    measurable = ["train/loss", *(["eval/loss"] if evaluates_loss else [])]
    measurable += [
        f"{line_kind}/{name}" for name, declared in metrics.items() for line_kind in declared.kinds
    ]
    if selected in measurable and name in metrics:
        better = metrics[name].higher_is_better
    elif selected in measurable or (kind == "train" and name in TRAIN_KEYS):
        better = name in SPEEDS
    else:
        raise ConfigError(
            f"{key}={selected}: task {task} does not measure it here. "
            f"It measures {', '.join(sorted(measurable))}."
        )
    if mode != "auto":
        return mode
    if better is None:
        raise ConfigError(
            f"{key}={selected}: task {task} does not say which direction is better. "
            f"Set {'' if key == 'checkpoint.metric' else f'checkpoint.metric={selected} and '}"
            "checkpoint.mode=min or checkpoint.mode=max."
        )
    return "max" if better else "min"


def _title(name: str) -> str:
    return name.replace("_", " ")
