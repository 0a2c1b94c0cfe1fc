"""Specifications of the networks that a task needs: plain values, without torch.

The control process plans with them (``llmx.compose.task_rules``), the ranks build by them
(``llmx.train.engine.build``). Shown by ``python -m pytest tests/unit/test_models_model.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from llmx.config import AdapterConfig, ModelConfig
from llmx.config.model_rules import added_tokens

CAUSAL_LM, CLASSIFICATION = "causal_lm", "sequence_classification"
MASKED_LM, BACKBONE = "masked_lm", "backbone"
HEADS = (CAUSAL_LM, MASKED_LM, CLASSIFICATION, BACKBONE)
"""The last part of a network; a backbone ends in its hidden states."""
LANGUAGE_MODELS = (CAUSAL_LM, MASKED_LM)
"""Heads that score the tokens of the vocabulary."""


@dataclass(frozen=True)
class ModelSpec:
    """A network that a task needs. All are in one DeepSpeed engine, with one ZeRO config and one
    optimizer; what is not said here is as in the ``model`` group."""

    trained: bool = True
    """Else frozen: no gradients, no optimizer state, no place in checkpoints."""
    source: str | None = None
    """Pretrained weights of its own, a directory or a Hub id: another architecture or size, with
    the run's tokenizer. None: as the ``model`` group says, from ``model.path`` or from scratch;
    beside a network with an adapter a frozen one is then that network with its adapter off."""
    revision: str | None = None
    """A commit, tag or branch of ``source`` on the Hub."""
    precision: str | None = None
    """``bf16`` or ``fp16`` of a frozen network in a run with ``precision=fp32``: half its memory.
    None: the run's."""
    head: str = CAUSAL_LM
    num_labels: int = 0
    """Outputs of a classification head; 1 for a score."""
    labels: tuple[str, ...] = ()
    """Names of the outputs, which the exported config keeps."""
    problem: str = ""
    """The ``problem_type`` of a classification head, as in transformers' configs:
    ``single_label_classification``, ``multi_label_classification`` or ``regression``."""
    precomputes: bool = False
    """Whether only ``Task.precompute`` needs a frozen model. It is freed before the others are
    built, and not built if its values are stored already."""

    dropout: bool = True
    """False: trained without the dropout of its config and of its adapter."""

    def __post_init__(self) -> None:
        if self.trained and self.precomputes:
            raise ValueError("precomputes=True is for a frozen model: set trained=False too")
        if self.head not in HEADS:
            raise ValueError(f"head={self.head!r} is none of {', '.join(HEADS)}")
        if (self.head == CLASSIFICATION) != (self.num_labels > 0):
            raise ValueError(f"head={self.head} with num_labels={self.num_labels}")
        if self.revision is not None and self.source is None:
            raise ValueError(f"revision={self.revision!r} is of a source, and there is none")
        if self.precision is not None and self.trained:
            raise ValueError(
                f"precision={self.precision!r} of a trained network: all that one optimizer trains "
                "have the precision of the run"
            )


def are_bases(
    specs: Mapping[str, ModelSpec], adapter: AdapterConfig, model: ModelConfig
) -> set[str]:
    """Names of the frozen networks that are the trained one without its adapter.

    Not where modules are trained whole beside the adapter (``adapter.modules_to_save``, embeddings
    of added tokens, a classification head): what they were is kept nowhere.
    """
    trained = [spec for spec in specs.values() if spec.trained]
    if adapter.kind == "none" or not trained:
        return set()
    if adapter.modules_to_save or added_tokens(model):
        return set()
    main = trained[0]
    if main.source is not None or main.head == CLASSIFICATION:
        return set()
    alike = replace(main, trained=False, dropout=True)
    return {
        name
        for name, spec in specs.items()
        if not spec.trained and replace(spec, precomputes=False, dropout=True) == alike
    }
