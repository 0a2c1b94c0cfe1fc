"""What kind of model a Hugging Face directory holds, from its ``config.json`` alone."""

from __future__ import annotations

from pathlib import Path

from llmx.run.rundir import read_mapping

WITHOUT_TEXT = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMaskedLM",
)
"""Endings of the classes that generate no text."""

ADAPTER_CONFIG = "adapter_config.json"
"""The config of an adapter in peft's format."""


def generates_no_text(directory: Path) -> str | None:
    """The class of a model that generates no text (a classifier, a backbone), or what an adapter
    is for; None of any other, and where it is not known."""
    adapter = read_mapping(directory / ADAPTER_CONFIG)
    if kind := adapter.get("task_type"):
        return None if kind == "CAUSAL_LM" else str(kind)
    if base := adapter.get("base_model_name_or_path"):  # of a kind that peft has no word for
        return generates_no_text(Path(str(base))) if str(base) != str(directory) else None
    config = read_mapping(directory / "config.json")
    architectures = config.get("architectures")
    if not architectures or "AutoModelForCausalLM" in (config.get("auto_map") or ()):
        return None  # not known, or code of its own
    name = str(architectures[0])
    is_backbone = name.endswith("Model") and not name.endswith("LMHeadModel")  # BERT's, not GPT-2's
    return name if name.endswith(WITHOUT_TEXT) or is_backbone else None
