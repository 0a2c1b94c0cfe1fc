"""Documents to tokens, on all cores.

Of a byte-level BPE each different word is tokenized once, by tiktoken, where that is proven to give
the same ids (``byte_level``). Every other tokenizer encodes whole texts in batches, by its own
library.

    encoder = DocumentEncoder(tokenizer, bos=[])
    encoder.choose(texts)  # a sample; proves and decides, encoder.description says how
    block = encoder.encode(documents)

Threads may encode at the same time: both libraries let go of Python's lock while they work, and
threads need no copies of the texts and no open files.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmx.data.examples import Column
from llmx.data.format.templates import closing_token
from llmx.data.source.records import Document
from llmx.data.tokenize.byte_level import BytePairs, NotConvertible, PretokenCache
from llmx.errors import ConfigError

PROOF_BYTES = 200_000
"""Bytes of the user's own text on which both encoders must agree, 0.1 core-seconds."""


@dataclass(frozen=True)
class TokenBlock:
    """Tokens of several examples, one after the other."""

    tokens: np.ndarray
    """uint32 [sum of lengths]"""
    targets: np.ndarray
    """bool [sum of lengths]: True where the token is to be predicted; or float32, its weight."""
    lengths: np.ndarray
    """int64 [number of sequences]"""
    sizes: np.ndarray | None = None
    """int64 [number of examples]: how many sequences each has; None: one each."""
    columns: Mapping[Column, np.ndarray] = field(default_factory=dict)
    """The task's columns by token, by sequence or by example."""


class DocumentEncoder:
    """Encodes documents of one tokenizer: BOS token, text, EOS token (or what stands in their
    places).

    Special tokens in a text are the plain text that they are.
    """

    def __init__(self, tokenizer: Any, *, bos: list[int], eos: list[int] | None = None) -> None:
        """``eos``: the tokens that end a document; None: the EOS token."""
        from tokenizers import Tokenizer

        end = closing_token(tokenizer)
        if eos is None and end is None:
            raise ConfigError(
                f"The tokenizer of {tokenizer.name_or_path!r} has no EOS token to put "
                "between documents. Set eos_token in its tokenizer_config.json."
            )
        self.description = "tokenizers"
        """The library that encodes texts, with the reason or the proof."""
        self._tokenizer = tokenizer
        self._bos = np.array(bos, np.uint32)
        self._eos = np.array([end] if eos is None else eos, np.uint32)
        # A copy of its own: settings of the caller's are neither used nor changed.
        self._slow = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._slow.encode_special_tokens = True
        self._slow.no_truncation()
        self._slow.no_padding()
        self._fast: BytePairs | None = None
        self._thread = threading.local()
        self._slow_lock = threading.Lock()

    def choose(self, texts: Iterable[str]) -> None:
        """Encode by tiktoken if the tokenizer allows it and the ids of these texts are equal."""
        try:
            fast = BytePairs.of(self._tokenizer)
        except NotConvertible as reason:
            self.description = f"tokenizers ({reason})"
            return
        self._fast = fast
        sample = [text for text in _beginning(texts, PROOF_BYTES) if fast.takes(text)]
        ids, sizes = self._cache().encode([fast.prepared(text) for text in sample])
        slow_ids, slow_sizes = _concatenated(self._slow_ids(sample))
        if len(slow_ids) and np.array_equal(ids, slow_ids) and np.array_equal(sizes, slow_sizes):
            self.description = f"tiktoken (equal to tokenizers on {len(ids):,} tokens of this data)"
            return
        self._fast = None
        problem = "gave other ids on this data" if len(slow_ids) else "fits none of the first texts"
        self.description = f"tokenizers (tiktoken {problem})"

    @property
    def is_fast(self) -> bool:
        """Whether tiktoken encodes the texts."""
        return self._fast is not None

    def encode(self, documents: list[Document]) -> TokenBlock:
        """Tokens of documents, each of them a target."""
        ids, sizes = self.ids([document.text for document in documents])
        lengths = len(self._bos) + sizes + len(self._eos)
        stops = np.cumsum(lengths)
        tokens = np.empty(int(lengths.sum()), np.uint32)
        shift = stops - lengths + len(self._bos) - (np.cumsum(sizes) - sizes)
        tokens[np.arange(len(ids)) + np.repeat(shift, sizes)] = ids
        for place, token in enumerate(self._bos):
            tokens[stops - lengths + place] = token
        for place, token in enumerate(self._eos[::-1], start=1):
            tokens[stops - place] = token
        return TokenBlock(tokens, np.ones(len(tokens), np.bool_), lengths)

    def ids(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """(uint32 ids of all texts, one after the other; int64 number of ids of each text),
        without begin and end. Threads may call this at the same time."""
        fast = self._fast
        if fast is None:
            return _concatenated(self._slow_ids(texts))
        are_fast = [fast.takes(text) for text in texts]
        ids, sizes = self._cache().encode(
            [fast.prepared(text) for text, good in zip(texts, are_fast, strict=True) if good]
        )
        if all(are_fast):
            return ids, sizes
        slow_ids = iter(
            self._slow_ids([text for text, good in zip(texts, are_fast, strict=True) if not good])
        )
        fast_ids = iter(np.split(ids, np.cumsum(sizes)[:-1]))
        return _concatenated([next(fast_ids) if good else next(slow_ids) for good in are_fast])

    def _cache(self) -> PretokenCache:
        """The cache of this thread."""
        if self._fast is None:
            raise AssertionError("no fast encoder was chosen")
        if not hasattr(self._thread, "cache"):
            self._thread.cache = PretokenCache(self._fast.encode_pretokens)
        cache: PretokenCache = self._thread.cache
        return cache

    def _slow_ids(self, texts: list[str]) -> list[np.ndarray]:
        # tokenizers has threads of its own: several calls at once take memory, not less time.
        with self._slow_lock:
            encodings = self._slow.encode_batch_fast(texts, add_special_tokens=False)
            return [np.array(encoding.ids, np.uint32) for encoding in encodings]


def _beginning(texts: Iterable[str], size: int) -> Iterator[str]:
    """The first texts, of so many bytes together; the last may be cut."""
    for text in texts:
        content = text.encode()
        yield text if len(content) <= size else content[:size].decode("utf-8", "ignore")
        size -= len(content)
        if size <= 0:
            return


def _concatenated(parts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    sizes = np.array([len(part) for part in parts], np.int64)
    return np.concatenate([np.zeros(0, np.uint32), *parts]), sizes


# Cores


def worker_count(requested: int) -> int:
    """``data.num_workers``, at most the cores of this process; a line on stderr says so."""
    cores = len(os.sched_getaffinity(0))
    if requested > cores:
        print(
            f"data.num_workers={requested}, but this process may use {cores} cores: {cores} are "
            "used. More would only wait for each other.",
            file=sys.stderr,
            flush=True,
        )
    return min(requested or cores, cores)


@contextlib.contextmanager
def parallel_tokenizers(workers: int) -> Iterator[None]:
    """Let ``tokenizers`` use its threads here; ranks switch them off for everything else."""
    names = ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(TOKENIZERS_PARALLELISM="true", RAYON_NUM_THREADS=str(workers))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
