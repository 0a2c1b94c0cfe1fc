"""``task=pretrain``: next tokens of running text. Reports the loss; has no eval prompts."""

from __future__ import annotations

from llmx.tasks.base import Task


class Pretrain(Task):
    """Every token but a row's first is a target (``llmx.data`` marks them so)."""
