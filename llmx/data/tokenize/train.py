"""Trains a tokenizer on an experiment's data.

    python -m llmx tokenizer data=text data.path=corpus.txt tokenizer.vocab_size=64000

``tokenizers`` does the work; here is what it is fed, a sample of bounded size, and what is proven
before the directory appears: that ``AutoTokenizer`` loads it, and that text comes back as it was
(but for ``wordpiece``, which keeps no white space).
"""

from __future__ import annotations

import json
import re
import struct
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from llmx.config import DataConfig, Experiment, TokenizerConfig
from llmx.data.format.templates import TEMPLATES, choose_template
from llmx.data.progress import PreparationProgress
from llmx.data.source.records import Row
from llmx.data.split import DatasetSplit
from llmx.data.tokenize.tokenizer import WORDPIECE
from llmx.errors import ConfigError, DataError

# A sample of texts of bounded size, drawn from rows of unknown number

TEXT_CHARS = 16_384
"""Longer texts are cut, at a line's end where there is one, and drawn part by part."""
_WORDS = re.compile(r"\w+|[^\w\s]+")
_HEAD = struct.Struct("<dI")


class TextSample:
    """Texts in one file of ``directory``; add all, then iterate as often as needed.

    Every text draws a number, a function of the seed and its place alone, and stays while that is
    below a threshold; whenever the sample outgrows its budget the threshold is halved and the
    sample is sieved. So each text had the same chance, memory stays flat and another reading gives
    the same.
    """

    def __init__(self, directory: Path, *, max_bytes: int, seed: int) -> None:
        self._path = directory / "texts"
        self._stream: IO[bytes] = self._path.open("w+b")
        self._max_bytes = max_bytes
        self._draws = np.random.Generator(np.random.Philox(seed))
        self._threshold = 1.0
        self.bytes = 0
        """UTF-8 bytes in the sample."""
        self.bytes_read = 0
        """UTF-8 bytes of all texts that were added."""

    def add(self, text: str) -> None:
        """Draw whether a text belongs to the sample, and keep it if so."""
        content = text.encode()
        self.bytes_read += len(content)
        draw = float(self._draws.random())
        if draw >= self._threshold:
            return
        self._stream.write(_HEAD.pack(draw, len(content)) + content)
        self.bytes += len(content)
        while self.bytes > self._max_bytes:
            self._halve()

    def fit_words(self, max_bytes: int) -> None:
        """Make the sample smaller until its different words have at most so many bytes, which
        is what the memory of a training grows with."""
        while self._word_bytes(at_most=max_bytes) > max_bytes:
            self._halve()

    def __iter__(self) -> Iterator[str]:
        self._stream.flush()
        return (content.decode("utf-8") for _, content in self._entries())

    def close(self) -> None:
        self._stream.close()

    def _entries(self) -> Iterator[tuple[float, bytes]]:
        with self._path.open("rb") as stream:
            while head := stream.read(_HEAD.size):
                draw, size = _HEAD.unpack(head)
                yield draw, stream.read(size)

    def _word_bytes(self, *, at_most: int) -> int:
        """UTF-8 bytes of the different words; counted no further than ``at_most``."""
        words: set[str] = set()
        total = 0
        for text in self:
            for word in _WORDS.findall(text):
                if word not in words:
                    words.add(word)
                    total += len(word.encode())
            if total > at_most:
                break
        return total

    def _halve(self) -> None:
        """Sieve with half the threshold: about every second text goes."""
        self._threshold /= 2
        self._stream.flush()
        sieved = self._path.with_suffix(".sieved")
        self.bytes = 0
        with sieved.open("wb") as stream:
            for draw, content in self._entries():
                if draw < self._threshold:
                    stream.write(_HEAD.pack(draw, len(content)) + content)
                    self.bytes += len(content)
        self._stream.close()
        sieved.replace(self._path)
        self._stream = self._path.open("ab")


def texts_of(rows: Iterable[Row | None]) -> Iterator[str]:
    """The texts of rows, the long ones in parts."""
    for row in rows:
        for text in row.texts if row is not None else ():
            yield from _cut(text)


def _cut(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > TEXT_CHARS:
        stop = text.rfind("\n", start + 1, start + TEXT_CHARS) + 1 or start + TEXT_CHARS
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]


# Tokenizers

PAD_TO = 64
PROOF_TEXTS = 200
BASE_BYTES = 300 << 20
"""Memory of the process before it learns."""
BYTES_A_WORD_BYTE = 90
"""Memory that the library takes for a byte of the different words (measured on Chinese)."""
END, PAD = "<|endoftext|>", "<|pad|>"
_MARKERS = re.compile(r"<\|\w+\|>")


def train_tokenizer(config: TokenizerConfig, data: DataConfig, seed: int) -> tuple[Path, str]:
    """Train, prove and write the tokenizer of ``config``; returns its directory and a summary.

    Raises ConfigError for a size that cannot be, or an output that exists; DataError for a
    source that is wrong or too small.
    """
    output = _output(config, data)
    special = _special_tokens(data.template, config.kind)
    smallest = len(special) + (256 if config.kind == "bbpe" else 0)
    if config.vocab_size <= smallest:
        raise ConfigError(
            f"tokenizer.vocab_size={config.vocab_size}: {smallest} are taken by bytes and special "
            "tokens; words need room too. 32000 to 128000 is usual."
        )
    started = time.monotonic()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as name,
            closing(TextSample(Path(name), max_bytes=config.max_bytes, seed=seed)) as sample,
        ):
            _fill(sample, config, data, seed)
            ready = Path(name) / "tokenizer"
            tokenizer = _learned(sample, config, data, special, ready)
            proof = list(islice(sample, PROOF_TEXTS))
            tokens = _proven(tokenizer, proof, exact=config.kind != "wordpiece")
            ready.rename(output)
    except OSError as error:
        raise DataError(
            f"Cannot write the tokenizer to {output}: {error}. Set tokenizer.output to a place "
            "with room."
        ) from error
    size, padded = len(tokenizer), -(-len(tokenizer) // PAD_TO) * PAD_TO
    bytes_per_token = sum(len(text.encode("utf-8", "replace")) for text in proof) / max(1, tokens)
    requested = sampled = ""
    if size < config.vocab_size:
        requested = f" (asked for {config.vocab_size:,}; there is too little text)"
    if sample.bytes != sample.bytes_read:
        sampled = f", sampled from {sample.bytes_read / 2**20:.1f} MiB"
    lines = [
        f"Tokenizer ({config.kind}) in {output}",
        f"  vocabulary  {size:,}{requested}; {padded:,} when padded to a multiple of {PAD_TO}, as "
        "llmx does from scratch",
        f"  learned     from {sample.bytes / 2**20:.1f} MiB{sampled}, "
        f"{time.monotonic() - started:.1f} s",
        f"  text        {bytes_per_token:.2f} bytes per token",
        f"  use it      model.tokenizer={output}",
    ]
    return output, "\n".join(lines)


def _output(config: TokenizerConfig, data: DataConfig) -> Path:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", data.name or Path(data.path).stem) or "data"
    default = f"tokenizers/{name}-{config.kind}-{config.vocab_size}"
    output = Path(config.output or default).expanduser().absolute()
    if output.exists():
        raise ConfigError(
            f"{output} exists already, and a tokenizer that models were trained with must not "
            "change. Remove it, or set tokenizer.output to another directory."
        )
    return output


def _fill(sample: TextSample, config: TokenizerConfig, data: DataConfig, seed: int) -> None:
    source = DatasetSplit(data, seed, "train")
    title, size = f"Reading {data.name or source.path}", source.total_bytes
    with PreparationProgress(title, total_bytes=size, meter=source.meter) as progress:
        for text in texts_of(source.rows()):
            sample.add(text)
            progress.add(size=len(text.encode("utf-8", "replace")))
    if not sample.bytes:
        raise DataError(f"{source.path}: there is no text in it. Check data.path and the columns.")
    room = config.max_memory_gib * 2**30 - BASE_BYTES
    sample.fit_words(int(room / BYTES_A_WORD_BYTE))


def _special_tokens(template: str, kind: str) -> list[str]:
    """The end of a document, padding, and what the chat template is made of; BERT's own."""
    if kind == "wordpiece":
        return WORDPIECE
    name = "chatml" if template == "auto" else template
    marker, jinja = TEMPLATES[name]
    markers = [*([marker] if marker else []), *_MARKERS.findall(jinja)]
    return list(dict.fromkeys([END, PAD, *markers]))


def _learned(
    sample: TextSample, config: TokenizerConfig, data: DataConfig, special: list[str], output: Path
) -> Any:
    """The tokenizer that the library learns from the sample, written to ``output`` with its chat
    template, and loaded as everybody will load it."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerFast

    limits: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "min_frequency": config.min_frequency,
        "special_tokens": special,
        "show_progress": sys.stderr.isatty(),
    }
    tokenizer: Any
    if config.kind == "bbpe":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **limits)
        backend.train_from_iterator(iter(sample), trainer)
        end, pad, *control_tokens = special
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            eos_token=end,
            pad_token=pad,
            additional_special_tokens=control_tokens,
            clean_up_tokenization_spaces=False,
        )
        tokenizer.chat_template = choose_template(tokenizer, data.template)[1]
    else:  # BERT's: words at white space and punctuation, a Chinese character is one
        backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        backend.normalizer = normalizers.BertNormalizer(lowercase=config.lowercase)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        # The rarest characters are unknown where the vocabulary has no room for all.
        limits["limit_alphabet"] = max(1, (config.vocab_size - len(special)) // 2)
        backend.train_from_iterator(iter(sample), trainers.WordPieceTrainer(**limits))
        tokenizer = BertTokenizer(
            vocab=backend.get_vocab(), do_lower_case=config.lowercase, eos_token="[SEP]"
        )
    tokenizer.save_pretrained(output)
    return AutoTokenizer.from_pretrained(output)


def _proven(tokenizer: Any, texts: Sequence[str], *, exact: bool = True) -> int:
    """Tokens of the texts, each of which must come back as it was (``exact``)."""
    tokens = 0
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        tokens += len(ids)
        if not exact:
            continue
        back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if back != text:
            raise DataError(
                f"The tokenizer does not restore a text exactly: {json.dumps(text[:80])} "
                f"became {json.dumps(back[:80])}."
            )
    return tokens


def run(exp: Experiment, _: Mapping[str, str]) -> int:
    """The command ``tokenizer``; returns the exit code."""
    print(train_tokenizer(exp.tokenizer, exp.data, exp.seed)[1])
    return 0
