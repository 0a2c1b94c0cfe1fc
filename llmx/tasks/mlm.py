"""``task=mlm``: masked language modelling of text, from scratch or continued (BERT and its like).

Which tokens are hidden is drawn anew at each step, as a function of (seed, step, sample): the same
on any number of ranks and after a resume, and always the same for held-out samples.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from llmx.config import Experiment
from llmx.config.fields import number
from llmx.config.tasks import TaskDefaults
from llmx.data import IGNORE
from llmx.data.source.records import Document
from llmx.errors import ConfigError
from llmx.models.spec import MASKED_LM, ModelSpec
from llmx.tasks.base import NATS, Loss, SampleKey, Task, next_token_loss

if TYPE_CHECKING:
    from llmx.data.store.samples import Sample
    from llmx.models.model import Batch, Models


@dataclass
class Options:
    """``task.options`` of ``task=mlm``."""

    mask_probability: float = number(0.15, above=0, below=1)
    """Part of the tokens that are to be predicted; special tokens never are."""
    mask_token_part: float = number(0.8, minimum=0, maximum=1)
    """Part of those that become ``[MASK]``."""
    random_token_part: float = number(0.1, minimum=0, maximum=1)
    """Part of those that become any token of the vocabulary. The rest stays as it is."""
    whole_words: bool = False
    """Words are chosen instead of tokens: all tokens of one, or none. Where a tokenizer makes a
    token of each Chinese character, each character is a word."""


class Mlm(Task):
    """The hidden tokens of a document are predicted from all the others."""

    defaults = TaskDefaults(full=5e-5, scratch=1e-4, batch=64, scratch_batch=256)
    Options = Options
    takes: ClassVar[tuple[type, ...]] = (Document,)
    loss_on = "all"
    verbatim = True
    asks_tokenizer = True
    splits_documents = True
    normaliser = "batch"
    loss_unit = NATS

    def __init__(self, exp: Experiment, tokenizer: Any) -> None:
        super().__init__(exp, tokenizer)
        if tokenizer is not None and tokenizer.mask_token_id is None:
            raise ConfigError(
                f"task=mlm: the tokenizer of {tokenizer.name_or_path!r} has no mask "
                "token. Train one with `python -m llmx tokenizer kind=wordpiece ...`, set "
                "mask_token in its tokenizer_config.json, or use task=pretrain."
            )

    def problems(self) -> Iterator[str]:
        mask, other = self.options.mask_token_part, self.options.random_token_part
        if mask + other > 1:
            yield (
                f"task.options.random_token_part={other}: the sum with mask_token_part={mask} is "
                f"over 1. Set it to {1 - mask:.3g}, for example."
            )

    def encoding_identity(self) -> dict[str, Any]:
        """Nothing of its own: what is hidden is not stored."""
        return {}

    def models(self) -> dict[str, ModelSpec]:
        """One masked language model, which is trained."""
        return {"policy": ModelSpec(head=MASKED_LM)}

    def transform(self, sample: Sample, key: SampleKey) -> Sample:
        """The sample with some tokens hidden, and the labels at their places."""
        return masked(sample, key, self.options, self._vocabulary)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        whole_words = self.options.whole_words
        return Vocabulary(
            self.tokenizer, whole_words=whole_words, num_embeddings=self.num_embeddings
        )

    def weight(self, batch: Batch) -> float:
        """The number of hidden tokens in the batch."""
        return float((batch["labels"] != IGNORE).sum())

    def loss(self, models: Models, batch: Batch) -> Loss:
        """Cross entropy of the hidden tokens."""
        return next_token_loss(models.main, batch)


class Vocabulary:
    """The ids of a tokenizer by their role in masking."""

    def __init__(
        self, tokenizer: Any, *, whole_words: bool, num_embeddings: int | None = None
    ) -> None:
        self.mask_id = int(tokenizer.mask_token_id)
        ids = tokenizer.get_vocab()
        size = max(len(tokenizer), max(ids.values()) + 1)
        self.is_special = np.zeros(size, np.bool_)
        self.is_special[list(tokenizer.all_special_ids)] = True
        used = np.zeros(size, np.bool_)
        used[list(ids.values())] = True
        self.ordinary = np.flatnonzero((used & ~self.is_special)[:num_embeddings])
        """Ids that may take the place of another."""
        self.continues = np.zeros(size, np.bool_)
        """bool [ids]: whether a token continues the word before it."""
        if whole_words:
            self.continues[_continuing(tokenizer, ids)] = True
            self.continues &= ~self.is_special


def _continuing(tokenizer: Any, ids: dict[str, int]) -> list[int]:
    """The tokens that do not begin a word. Raises ConfigError where the vocabulary does not say."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    prefix = model.get("continuing_subword_prefix")
    if model["type"] == "WordPiece" and prefix:
        return [index for token, index in ids.items() if token.startswith(prefix)]
    for mark in ("\u0120", "\u2581"):  # of byte-level BPE; of SentencePiece
        if any(token.startswith(mark) for token in ids):
            return [index for token, index in ids.items() if not token.startswith(mark)]
    raise ConfigError(
        f"task.options.whole_words=true: the vocabulary of {tokenizer.name_or_path!r} does not "
        "mark where words begin (no ##, \u0120 or \u2581). Set it to false."
    )


def masked(sample: Sample, key: SampleKey, options: Options, vocabulary: Vocabulary) -> Sample:
    """``sample`` with hidden tokens, and labels at their places alone."""
    tokens = sample.tokens.astype(np.int64)
    units = _units(tokens, sample.sequence_starts, vocabulary)
    draws = key.uniform(int(units.max(initial=-1)) + 1, "choice")
    # The last entry stands for special tokens, whose unit is -1: they are never hidden.
    hidden = np.append(draws < options.mask_probability, False)[units]
    labels = np.where(hidden, tokens, IGNORE)
    fate, other = key.uniform(len(tokens), "fate"), key.uniform(len(tokens), "token")
    ordinary = vocabulary.ordinary
    replacement = ordinary[(other * len(ordinary)).astype(np.int64)]
    becomes_mask = fate < options.mask_token_part
    becomes_any = ~becomes_mask & (fate < options.mask_token_part + options.random_token_part)
    tokens = np.where(hidden & becomes_mask, vocabulary.mask_id, tokens)
    tokens = np.where(hidden & becomes_any, replacement, tokens)
    return dataclasses.replace(sample, tokens=tokens.astype(sample.tokens.dtype), labels=labels)


def _units(tokens: np.ndarray, starts: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    """int64 [n]: the number of the token or word that each token is of; -1 of special tokens."""
    begins = ~vocabulary.continues[tokens]
    begins[starts] = True
    special = vocabulary.is_special[tokens]
    after = np.zeros(len(tokens), np.bool_)
    after[1:] = special[:-1]
    begins = (begins | after) & ~special
    return np.where(special, -1, np.cumsum(begins) - 1)
