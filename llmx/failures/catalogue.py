"""The catalogue of known failures: one table. In the order in which rows are tried on a text."""

from __future__ import annotations

from llmx.failures import cluster, machine, training

ROWS = (*machine.ROWS, *training.ROWS, *cluster.ROWS)
