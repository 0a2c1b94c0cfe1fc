"""Trackers (W&B, MLflow, SwanLab, TensorBoard, CSV), fed from ``metrics.jsonl``.

``python -m llmx.tracking.process RUN_DIR`` sends a run to them while it trains;
``python -m llmx.tracking.process RUN_DIR --replay`` builds the same again later. ``tracking.json``
has, by tracker, what it does, where it writes, and the command that uploads what lies here only
(``base.Status``).
"""

from llmx.tracking.base import RunMeta, Status, Tracker

__all__ = ["RunMeta", "Status", "Tracker"]
