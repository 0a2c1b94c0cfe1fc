"""Tokenizers made from the real vocabularies in the folder of real data."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}


def real_tokenizer_dir(real_data: Path, target: Path) -> Path:
    """The real 50k byte-level BPE of ``real_data/gpt2_bpe`` (RoBERTa's ids: ``<s>`` 0,
    ``<pad>`` 1, ``</s>`` 2, ``<unk>`` 3) as a directory for ``AutoTokenizer``; no chat template."""
    source = real_data / "gpt2_bpe"
    model = models.BPE.from_file(str(source / "vocab.json"), str(source / "merges.txt"))
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL_TOKENS)
    tokenizer.save_pretrained(target)
    return target
