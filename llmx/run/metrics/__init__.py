"""Metrics by name: how a task declares them, and how every reader of a run shows them.

A task declares what it measures beside the loss (``declared.Metric``); rank 0 writes the
declaration into the ``start`` line of ``metrics.jsonl``. The console, ``status``, the report,
sweep tables and trackers show every metric that a run has, with the declared title and format.
Standard library only; every room may import it.
"""

from __future__ import annotations

from llmx.run.metrics.declared import Metric, declared_in, declared_of, measured, metric_of

__all__ = ["Metric", "declared_in", "declared_of", "measured", "metric_of"]
