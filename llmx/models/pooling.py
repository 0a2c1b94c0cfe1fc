"""Networks that end in one vector of each sequence: an embedding, or the scores of classes.

A published embedding model says which hidden states make its vector. Of a causal backbone the
classification head (``score``) looks at the last token of each sequence, so sequences are packed as
ever. Every other architecture (BERT and its like) pools a sequence in its own way: it gets one
sequence per line, with the mask of its padding, as its authors run it.

Shown by ``python -m pytest tests/unit/test_models_pooling.py
tests/unit/test_models_classification.py``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from llmx.models.loss import to_device, without_rows
from llmx.models.tiny import tiny_config

MEAN, CLS, LAST = POOLINGS = ("mean", "cls", "last")
"""The mean over a sequence's tokens, its first token, its last one."""

POOLING_FILE = "1_Pooling/config.json"
"""The file in which sentence-transformers records the pooling of a model."""
_PUBLISHED = {
    "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_cls_token": CLS,
    "pooling_mode_lasttoken": LAST,
}
_NAMES = {"mean": MEAN, "cls": CLS, "lasttoken": LAST}


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


def pooled(hidden: torch.Tensor, segment_ids: torch.Tensor, pooling: str) -> torch.Tensor:
    """fp32 [sequences, H]: a vector for each sequence, line by line, as they lie.

    Args:
        hidden: [B, T, H], or [1, B * T, H] where the lines lie one after the other.
        segment_ids: int [B, T], on the CPU: 1, 2, ... for the sequences of a line, 0 in the
            padding.
        pooling: of ``POOLINGS``.
    """
    lines, length = segment_ids.shape
    flat = hidden.reshape(lines * length, -1)
    real = segment_ids.reshape(-1) > 0
    if not bool(real.any()):
        return without_rows(flat.float())
    # Each sequence is a stretch of the tokens that are no padding.
    of_line = segment_ids.to(torch.long) + torch.arange(lines)[:, None] * (length + 1)
    _, counts = torch.unique_consecutive(of_line.reshape(-1)[real], return_counts=True)
    places = torch.nonzero(real).squeeze(1)
    stops = torch.cumsum(counts, 0)
    if pooling == MEAN:
        tokens = flat[to_device(places, flat.device)].float()
        counts = to_device(counts, flat.device)
        # Not index_add, whose order of additions differs from run to run on CUDA.
        sums = torch.segment_reduce(tokens, "sum", lengths=counts, unsafe=True)
        means: torch.Tensor = sums / counts.float()[:, None]
        return means
    chosen = places[stops - counts] if pooling == CLS else places[stops - 1]
    return flat[to_device(chosen, flat.device)].float()


def published_pooling(path: str | None, *, revision: str | None = None) -> str | None:
    """The pooling that the model at ``path``, a directory or a Hub id, was published with
    (``1_Pooling/config.json`` of sentence-transformers); None if it names none.

    Raises:
        ValueError: it pools in a way that is none of ``POOLINGS``; the text says which.
    """
    file = _published_file(path, revision)
    if file is None:
        return None
    values = json.loads(file.read_text(encoding="utf-8"))
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


def _published_file(path: str | None, revision: str | None) -> Path | None:
    if not path:
        return None
    local = Path(path).expanduser()
    if local.is_dir():
        file = local / POOLING_FILE
        return file if file.is_file() else None
    from transformers.utils.hub import cached_file

    try:
        cached = cached_file(path, POOLING_FILE, revision=revision)
    except OSError:  # not there, or no network
        return None
    return Path(cached) if cached else None


def pooling_config(pooling: str, *, width: int) -> dict[str, Any]:
    """The content of ``POOLING_FILE``, for every version of sentence-transformers."""
    return {
        "word_embedding_dimension": width,
        **{key: name == pooling for key, name in _PUBLISHED.items()},
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


def is_of_another_head(network: Any, name: str) -> bool:
    """Whether a weight of a checkpoint belongs to a head (of a language model, say)."""
    return not name.startswith(f"{network.base_model_prefix}.") or ".pooler." in name


def pooled_tokens(
    segment_ids: torch.Tensor, input_ids: torch.Tensor | None = None, pad_id: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, columns) of the token of each sequence that a ``score`` looks at, line by line.

    As in transformers: the last that is not ``pad_id``, the ``pad_token_id`` of the config; the
    last one where the config has none.
    """
    by_line = segment_ids.max(dim=1).values.to(torch.long)
    before = torch.cumsum(by_line, 0) - by_line
    numbers = (before[:, None] + segment_ids - 1).reshape(-1)
    places, count = torch.arange(len(numbers)), int(by_line.sum())
    real = counted = segment_ids.reshape(-1) > 0
    if input_ids is not None and pad_id is not None:
        counted = real & (input_ids.reshape(-1) != pad_id)
    ends = torch.full((count,), len(numbers)), torch.full((count,), -1)
    first = ends[0].scatter_reduce(0, numbers[real], places[real], "amin")
    last = ends[1].scatter_reduce(0, numbers[counted], places[counted], "amax")
    last = torch.where(last < 0, first, last)  # nothing but padding tokens
    return last // segment_ids.shape[1], last % segment_ids.shape[1]


def pools_itself(config: Any, *, trust_remote_code: bool = False) -> str | None:
    """The class of the classification network, where it pools a sequence in its own way; None
    where its head is a ``score``, or where transformers has no such network."""
    network = _empty(config, trust_remote_code=trust_remote_code)
    return None if network is None or has_score(network) else type(network).__name__


def _empty(config: Any, *, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForSequenceClassification

    try:
        with torch.device("meta"):
            return AutoModelForSequenceClassification.from_config(
                tiny_config(config), trust_remote_code=trust_remote_code
            )
    except Exception:  # building the real one says what is wrong
        return None


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
