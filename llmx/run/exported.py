"""What kind of model a Hugging Face directory holds, from its ``config.json`` alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WITHOUT_TEXT = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMaskedLM",
)
"""Endings of the classes that generate no text."""

ADAPTER_CONFIG = "adapter_config.json"
"""Of an adapter in peft's format."""


def generates_no_text(directory: Path) -> str | None:
    """The class of a model that generates no text (a classifier, a backbone), or what an adapter
    is for; None of any other, and where it is not known."""
    adapter = _values(directory / ADAPTER_CONFIG)
    if kind := adapter.get("task_type"):
        return None if kind == "CAUSAL_LM" else str(kind)
    if base := adapter.get("base_model_name_or_path"):  # of a kind that peft has no word for
        return generates_no_text(Path(str(base))) if str(base) != str(directory) else None
    try:
        values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        named = str((values.get("architectures") or [""])[0])
        if "AutoModelForCausalLM" in (values.get("auto_map") or {}):  # code of its own
            return None
    except (OSError, ValueError, AttributeError, LookupError, TypeError):
        return None
    backbone = named.endswith("Model") and not named.endswith("LMHeadModel")  # BERT's, not GPT-2's
    return named if named.endswith(WITHOUT_TEXT) or backbone else None


def _values(path: Path) -> dict[str, Any]:
    """Of a JSON file; empty where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
