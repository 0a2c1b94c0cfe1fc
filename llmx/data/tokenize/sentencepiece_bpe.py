"""A BPE trained by SentencePiece, in the fast form that everybody loads, proven to be the same."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

from llmx.config import TokenizerConfig
from llmx.data.tokenize.text_sample import TextSample
from llmx.errors import ConfigError, DataError

SENTENCE_CHARS = 1000
"""SentencePiece learns from lines; longer ones are cut, for it would leave them out."""
PROOF_SENTENCES = 2000


def train_sentencepiece(sample: TextSample, config: TokenizerConfig, control: list[str]) -> Any:
    """A BPE by SentencePiece, as a ``tokenizers`` backend that is proven to give the same ids."""
    import sentencepiece

    model = io.BytesIO()
    begin_and_more = [token for token in control if token != "</s>"]
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(sample),
            model_writer=model,
            model_type="bpe",
            vocab_size=config.vocab_size,
            character_coverage=config.character_coverage,
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            max_sentence_length=8 * SENTENCE_CHARS,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            control_symbols=begin_and_more,
            minloglevel=2,
        )
    except RuntimeError as error:
        found = re.search(r"<= (\d+)", str(error))
        if found is None:
            raise DataError(f"SentencePiece cannot learn from this data: {error}") from error
        raise ConfigError(
            f"tokenizer.vocab_size={config.vocab_size}: there is not enough text for so many "
            f"tokens. Give more, or set tokenizer.vocab_size={found[1]} or less."
        ) from error
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    proof = list(islice(_sentences(sample), PROOF_SENTENCES))
    wanted = processor.encode(proof)
    for split in (True, False):
        backend = _backend_of(processor, split=split, control=control)
        found_ids = [item.ids for item in backend.encode_batch(proof, add_special_tokens=False)]
        if found_ids == wanted:
            return backend
    raise DataError(
        "The SentencePiece model gives other ids than its fast form, so neither can be trusted "
        "with this data. Use tokenizer.kind=bbpe."
    )


def _sentences(sample: TextSample) -> Iterator[str]:
    for text in sample:
        for line in text.splitlines():
            # SentencePiece writes spaces as U+2581 and ends at a zero byte.
            line = line.replace("\u2581", " ").replace("\0", " ")
            for start in range(0, len(line), SENTENCE_CHARS):
                if line[start : start + SENTENCE_CHARS].strip():
                    yield line[start : start + SENTENCE_CHARS]


def _backend_of(processor: Any, *, split: bool, control: list[str]) -> Any:
    """The same pieces and merges in ``tokenizers``; ``split``: word by word, which is faster."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces = [processor.id_to_piece(index) for index in range(processor.get_piece_size())]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    plain = [
        piece
        for index, piece in enumerate(pieces)
        if not (processor.is_control(index) or processor.is_byte(index))
        and not processor.is_unknown(index)
    ]
    known = set(plain)
    merges = [
        (piece[:cut], piece[cut:])
        for piece in plain  # in the order in which they were learned
        for cut in sorted(
            (cut for cut in range(1, len(piece)) if {piece[:cut], piece[cut:]} <= known),
            key=lambda cut, piece=piece: (vocab[piece[:cut]], vocab[piece[cut:]]),
        )
    ]
    backend = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    if split:
        backend.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<unk>", "<s>", *control])
    return backend
