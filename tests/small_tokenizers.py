"""Real fast tokenizers, built in a millisecond: one token a byte, plus special tokens."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(
    *control: str,
    begin: str | None = None,
    end: str | None = "</s>",
    chat_template: str | None = None,
    plain_added: tuple[str, ...] = (),
) -> PreTrainedTokenizerFast:
    """``begin`` is put before a text by the tokenizer itself, as Llama's do; ``plain_added`` are
    added tokens that are not special tokens, as Qwen's ``<think>``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [token for token in (begin, end, *control) if token]
    backend.add_special_tokens(special)
    backend.add_tokens(list(plain_added))
    if begin:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, backend.token_to_id(begin))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=begin,
        eos_token=end,
        additional_special_tokens=list(control),
    )
    tokenizer.chat_template = chat_template
    return tokenizer
