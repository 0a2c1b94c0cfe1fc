"""``python -m llmx resume RUN [overrides] [step=N]``: a run goes on in its own directory.

From its newest usable checkpoint, on other hosts too, with whatever may change (see
``changes.py``). Everything is composed, checked and planned before a file is touched.

``history/NNN/`` keeps what a resume replaces, where it changes something or goes back to an earlier
step: the former ``config.yaml``, ``plan.json``, ``ds_config.json``, ``overrides.yaml``,
``provenance.json``, ``result.json``, ``resume.json`` and ``metrics.jsonl``; ``changes.json``
(``{"time", "step", "words", "changes": {key: [old, new]}, "effects", "differs"}``); and
``checkpoints/`` with those that are newer than ``step=N``.
"""

from llmx.lifecycle.resume.command import run

__all__ = ["run"]
