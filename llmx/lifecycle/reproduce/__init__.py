"""``python -m llmx reproduce RUN``: a new run from the snapshot of an old one, compared with it.

A run always starts from its snapshot, so this is the normal path, entered one step later.
Before the start it says what differs from then; at the end, whether the numbers are the same.
``reproduction.json`` in the new run has that outcome, the first and the largest difference.
"""

from llmx.lifecycle.reproduce.command import main

__all__ = ["main"]
