"""``python -m llmx resume RUN [overrides] [step=N]``: a run goes on in its own directory.

From its newest usable checkpoint, on other hosts too, with whatever may change (see
``rules.py``). Everything is composed, checked and planned before a file is touched.
"""

from llmx.lifecycle.resume.command import help_text, main

__all__ = ["help_text", "main"]
