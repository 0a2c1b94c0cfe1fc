"""Tests of llmx; ``make test`` runs them all."""
