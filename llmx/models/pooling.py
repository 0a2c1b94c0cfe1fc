"""Networks that end in one vector of each sequence: an embedding, or the scores of classes.

A published embedding model says which hidden states make its vector. Of a causal backbone the
classification head (``score``) looks at the last token of each sequence, so sequences are packed as
ever. Every other architecture (BERT and its like) pools a sequence in its own way: it gets one
sequence per line, with the mask of its padding, as its authors run it.

Shown by ``python -m pytest tests/unit/test_models_classification.py``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from llmx.models.attention import sequence_spans
from llmx.models.loss import to_device
from llmx.models.tiny import tiny_config

MEAN, CLS, LAST = POOLINGS = ("mean", "cls", "last")
"""The mean over a sequence's tokens, its first token, its last one."""

POOLING_FILE = "1_Pooling/config.json"
"""The file in which sentence-transformers records the pooling of a model."""
_NAMES = {"mean": MEAN, "cls": CLS, "lasttoken": LAST}
_FLAGS = {MEAN: "mean_tokens", CLS: "cls_token", LAST: "lasttoken"}
"""Names of a pooling there: as a value, and behind ``pooling_mode_`` in files of older versions."""


def sequence_numbers(segment_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The number of each token's sequence in the micro batch, int64 [B, T], -1 in the padding; and
    the number of sequences. They are numbered line by line, in their order.

    Args:
        segment_ids: int [B, T]: 1, 2, ... for the sequences of a line, 0 in the padding.
    """
    by_line = segment_ids.max(dim=1).values.to(torch.long)
    first = torch.cumsum(by_line, 0) - by_line
    numbers = first[:, None] + segment_ids - 1
    return numbers.where(segment_ids > 0, -1), int(by_line.sum())


def without_rows(values: torch.Tensor) -> torch.Tensor:
    """No row of ``values``, with the graph of all of them: a rank that has nothing to learn takes
    part in the collectives of ZeRO."""
    return values[:0] + values.sum() * 0.0


def pooled(hidden: torch.Tensor, segment_ids: torch.Tensor, pooling: str) -> torch.Tensor:
    """fp32 [sequences, H]: a vector for each sequence, line by line, as they lie.

    Args:
        hidden: [B, T, H], or [1, B * T, H] where the lines lie one after the other.
        segment_ids: int [B, T], on the CPU: 1, 2, ... for the sequences of a line, 0 in the
            padding.
        pooling: of ``POOLINGS``.
    """
    flat = hidden.reshape(segment_ids.numel(), -1)
    spans = np.array(sequence_spans(segment_ids), np.int64).reshape(-1, 2)
    if not len(spans):
        return without_rows(flat.float())
    starts, ends = to_device(torch.from_numpy(spans), flat.device).unbind(1)
    if pooling != MEAN:
        return flat[starts if pooling == CLS else ends - 1].float()
    real = torch.from_numpy(np.flatnonzero(segment_ids.reshape(-1).numpy()))
    tokens, counts = flat[to_device(real, flat.device)].float(), ends - starts
    # Not index_add, whose order of additions differs from run to run on CUDA.
    sums = torch.segment_reduce(tokens, "sum", lengths=counts, unsafe=True)
    means: torch.Tensor = sums / counts.float()[:, None]
    return means


def published_pooling(path: str | None, *, revision: str | None = None) -> str | None:
    """The pooling that the model at ``path``, a directory or a Hub id, was published with
    (``1_Pooling/config.json`` of sentence-transformers); None if it names none.

    Raises:
        ValueError: it pools in a way that is none of ``POOLINGS``; the text says which.
    """
    from transformers.utils.hub import cached_file

    try:
        file = cached_file(Path(path).expanduser(), POOLING_FILE, revision=revision) if path else ""
    except OSError:  # not there, or no network
        file = ""
    if not file:
        return None
    values = json.loads(Path(file).read_text(encoding="utf-8"))
    modes = values.get("pooling_mode")
    modes = [modes] if isinstance(modes, str) else modes
    if modes is None:
        modes = [
            key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
            for key, on in values.items()
            if key.startswith("pooling_mode_") and on
        ]
    if len(modes) == 1 and modes[0] in _NAMES:
        return _NAMES[modes[0]]
    raise ValueError(" and ".join(map(str, modes)) or "nothing")


def pooling_config(pooling: str, *, width: int) -> dict[str, Any]:
    """The content of ``POOLING_FILE``, for every version of sentence-transformers."""
    return {
        "word_embedding_dimension": width,
        **{f"pooling_mode_{flag}": name == pooling for name, flag in _FLAGS.items()},
        "include_prompt": True,
    }


def has_score(network: nn.Module) -> bool:
    """Whether its head is a ``score`` over the last hidden state, which can be put anywhere."""
    score = getattr(network, "score", None)
    return isinstance(score, nn.Module) and hasattr(network, "base_model")


def give_pooled_forward(network: Any) -> None:
    """Let the forward of a classification network take ``pool_at``: (rows, columns) of the tokens
    that its head looks at, so that packed sequences are classified each by itself. Its head is a
    ``score`` (``has_score``)."""
    score = network.score

    def forward(*, pool_at: tuple[torch.Tensor, torch.Tensor], **inputs: Any) -> torch.Tensor:
        hidden = network.base_model(**inputs).last_hidden_state
        logits: torch.Tensor = score(hidden[pool_at[0], pool_at[1]])
        return logits

    network.forward = forward  # of this instance: ZeRO-3 gathers its weights as ever


def head_names(network: Any) -> set[str]:
    """The parameters that a pretrained language model may lack: those of the head, and the dense
    layer before it (``pooler``)."""
    inside = f"{network.base_model_prefix}."
    return {
        name
        for name, _ in network.named_parameters(remove_duplicate=False)
        if not name.startswith(inside) or ".pooler." in name
    }


def pooler_names(network: Any) -> set[str]:
    """Parameters of the dense layer (``pooler``) that a backbone has behind its hidden states, and
    that a pretrained language model may lack."""
    return {
        name
        for name, _ in network.named_parameters(remove_duplicate=False)
        if "pooler" in name.split(".")
    }


def pooled_tokens(
    segment_ids: torch.Tensor, input_ids: torch.Tensor | None = None, pad_id: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, columns) of the token of each sequence that a ``score`` looks at, line by line.

    As in transformers: the last that is not ``pad_id``, the ``pad_token_id`` of the config; the
    last one where the config has none.
    """
    ends = []
    for first, end in sequence_spans(segment_ids):
        if input_ids is not None and pad_id is not None:
            tokens = np.flatnonzero(input_ids.reshape(-1)[first:end].numpy() != pad_id)
            end = first + int(tokens[-1]) + 1 if len(tokens) else first + 1
        ends.append(end - 1)
    places = torch.tensor(ends, dtype=torch.long)
    return places // segment_ids.shape[1], places % segment_ids.shape[1]


def pools_itself(config: Any, *, trust_remote_code: bool = False) -> str | None:
    """The class of the classification network, where it pools a sequence in its own way; None
    where its head is a ``score``, or where transformers has no such network."""
    from transformers import AutoModelForSequenceClassification

    try:
        with torch.device("meta"):
            network = AutoModelForSequenceClassification.from_config(
                tiny_config(config), trust_remote_code=trust_remote_code
            )
    except Exception:  # building the real one says what is wrong
        return None
    return None if has_score(network) else type(network).__name__


def take_config(
    config: Any, *, num_labels: int, labels: Sequence[str], problem: str, tokenizer: Any
) -> None:
    """Write into the config what its classification head is: how many outputs, their names, the
    kind of problem, and the token that pads (batches of transformers need it)."""
    config.num_labels = num_labels
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {name: number for number, name in enumerate(labels)}
    config.problem_type = problem or None
    text = config.get_text_config()
    pad = tokenizer.pad_token_id
    alone = pad not in (tokenizer.eos_token_id, tokenizer.bos_token_id)
    if text.pad_token_id is None and alone and (pad is None or pad < text.vocab_size):
        text.pad_token_id = pad


def has_other_labels(published: Any, config: Any) -> bool:
    """Whether the head of a published classifier, if it has one, is for other labels than those of
    ``config``. Labels without names (``LABEL_0``) are taken as they are."""
    names = [published.id2label[number] for number in sorted(published.id2label)]
    if len(names) != config.num_labels:
        return True
    plain = all(name == f"LABEL_{number}" for number, name in enumerate(names))
    return not plain and names != [config.id2label[number] for number in sorted(config.id2label)]
