"""Texts to token ids, on all cores.

Of a byte-level BPE each different word is tokenized once, by tiktoken, where that is proven to give
the same ids (``byte_level``). Every other tokenizer encodes whole texts in batches, by its own
library.

    encoder = TextEncoder(tokenizer)
    encoder.choose(texts)  # a sample; proves and decides, encoder.description tells how
    ids = encoder.ids(texts)

Threads may encode at the same time: both libraries let go of Python's lock while they work, and
threads need no copies of the texts and no open files.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from llmx.data.tokenize.byte_level import BytePairs, NotConvertible, PretokenCache

PROOF_BYTES = 200_000
"""Bytes of the user's own text on which both encoders must agree, 0.1 core-seconds."""


def own_backend(tokenizer: Any, *, plain: bool) -> Any:
    """A copy of the tokenizer's library object, whose settings are neither the caller's nor
    changed by others. Offsets are those of all characters of a token, spaces too. ``plain``:
    special tokens in a text are the text that they are."""
    from tokenizers import Tokenizer

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["truncation"] = state["padding"] = None
    processor = state["post_processor"] or {}
    for step in (processor, *processor.get("processors", [])):
        if "trim_offsets" in step:
            step["trim_offsets"] = False
    backend = Tokenizer.from_str(json.dumps(state))
    backend.encode_special_tokens = plain
    return backend


class TextEncoder:
    """Ids of texts by one tokenizer. Special tokens in a text are the plain text that they are."""

    def __init__(self, tokenizer: Any) -> None:
        self.description = "tokenizers"
        """The library that encodes texts, with the reason or the proof."""
        self._tokenizer = tokenizer
        self._slow = own_backend(tokenizer, plain=True)
        self._fast: BytePairs | None = None
        self._thread = threading.local()
        self._slow_lock = threading.Lock()

    def convert(self) -> BytePairs | None:
        """Encode by tiktoken, unproven, if the tokenizer allows it."""
        try:
            self._fast = BytePairs.of(self._tokenizer)
        except NotConvertible as reason:
            self.description = f"tokenizers ({reason})"
        return self._fast

    def choose(self, texts: Iterable[str]) -> None:
        """Encode by tiktoken if the tokenizer allows it and the ids of these texts are equal."""
        pairs = self.convert()
        if pairs is None:
            return
        sample = [text for text in _beginning(texts, PROOF_BYTES) if pairs.takes(text)]
        fast, slow = self.ids(sample), self._slow_ids(sample)
        num_tokens = sum(map(len, slow))
        if num_tokens and all(map(np.array_equal, fast, slow)):
            self.description = (
                f"tiktoken (equal to tokenizers on {num_tokens:,} tokens of this data)"
            )
            return
        self._fast = None
        problem = "gave other ids on this data" if num_tokens else "fits none of the first texts"
        self.description = f"tokenizers (tiktoken {problem})"

    def ids(self, texts: list[str]) -> list[np.ndarray]:
        """The uint32 ids of each text."""
        fast = self._fast
        if fast is None:
            return self._slow_ids(texts)
        are_fast = [fast.takes(text) for text in texts]
        pairs = list(zip(texts, are_fast, strict=True))
        if not hasattr(self._thread, "cache"):
            self._thread.cache = PretokenCache(fast.encode_pretokens)
        ids, sizes = self._thread.cache.encode(
            [fast.prepared(text) for text, is_fast in pairs if is_fast]
        )
        edges = np.cumsum(sizes).tolist()
        fast_ids = (ids[start:stop] for start, stop in zip([0, *edges], edges, strict=False))
        slow_ids = iter(self._slow_ids([text for text, is_fast in pairs if not is_fast]))
        return [next(fast_ids if is_fast else slow_ids) for is_fast in are_fast]

    def _slow_ids(self, texts: list[str]) -> list[np.ndarray]:
        if not texts:
            return []
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


# Cores


def worker_count(requested: int) -> int:
    """``data.num_workers``, at most the cores of this process; prints a line on stderr if fewer."""
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
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
