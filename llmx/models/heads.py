"""The class of transformers that a network with some head is built by."""

from __future__ import annotations

from typing import Any

from llmx.models.model import BACKBONE, CAUSAL_LM, CLASSIFICATION, MASKED_LM

AUTO_CLASSES = {
    CAUSAL_LM: "AutoModelForCausalLM",
    MASKED_LM: "AutoModelForMaskedLM",
    CLASSIFICATION: "AutoModelForSequenceClassification",
    BACKBONE: "AutoModel",
}
"""Head -> what others load an exported model with, too."""
_ENDINGS = {
    "LMHeadModel": CAUSAL_LM,
    "ForMaskedLM": MASKED_LM,
    "ForSequenceClassification": CLASSIFICATION,
    "Model": BACKBONE,
}


def head_of(config: Any) -> str:
    """The head of an exported network, by the ``architectures`` of its config."""
    named = (config.architectures or [""])[0]
    return next((head for ending, head in _ENDINGS.items() if named.endswith(ending)), CAUSAL_LM)


def auto_class(head: str) -> Any:
    """``AutoModelForCausalLM`` and its like."""
    import transformers

    return getattr(transformers, AUTO_CLASSES[head])
