"""Trackers: W&B, TensorBoard and CSV, fed from ``metrics.jsonl`` by a process of its own.

``python -m llmx.tracking.process RUN_DIR`` sends a run to them while it trains;
``python -m llmx.tracking.process RUN_DIR --replay`` builds the same again later.
"""

from llmx.tracking.base import CompositeTracker, RunMeta, Status, Tracker

__all__ = [
    "CompositeTracker",
    "RunMeta",
    "Status",
    "Tracker",
]
