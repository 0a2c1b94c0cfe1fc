"""What kind of model a Hugging Face directory holds, from its ``config.json`` alone."""

from __future__ import annotations

import json
from pathlib import Path

WITHOUT_TEXT = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMaskedLM",
)
"""Endings of the classes that generate no text."""


def generates_no_text(directory: Path) -> str | None:
    """The class of a model that generates no text (a classifier, a backbone); None of any other,
    and where it is not known."""
    try:
        values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        named = str((values.get("architectures") or [""])[0])
        if "AutoModelForCausalLM" in (values.get("auto_map") or {}):  # code of its own
            return None
    except (OSError, ValueError, AttributeError, LookupError, TypeError):
        return None
    backbone = named.endswith("Model") and not named.endswith("LMHeadModel")  # BERT's, not GPT-2's
    return named if named.endswith(WITHOUT_TEXT) or backbone else None
