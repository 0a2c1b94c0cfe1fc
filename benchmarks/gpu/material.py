"""Tokenizer and text for the benchmark, made here: a machine behind a wall has no Hub.

The words are random, their frequencies are Zipf's, so that a model has something to learn; a
word is one token of a byte-level BPE of realistic size.
"""

from __future__ import annotations

import itertools
import json
import random
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import Context

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def vocab_size(context: Context) -> int:
    return 512 if context.pretend else 64_000


def tokenizer(context: Context) -> Path:
    """A directory with a fast tokenizer; made at the first call."""
    directory = context.root / "tokenizer"
    if not directory.is_dir():
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        merges, _ = _trie(vocab_size(context) - 256 - len(SPECIAL))
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {piece: index for index, piece in enumerate(alphabet)}
        for left, right in merges:
            vocab[left + right] = len(vocab)
        backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
        fast = PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
        )
        fast.chat_template = CHATML
        fast.save_pretrained(str(directory))
    return directory


def _trie(nodes: int) -> tuple[list[tuple[str, str]], list[str]]:
    """``nodes`` merges that each lengthen a word by a letter, and the words they lead to.

    Every word begins with the mark of a space and merges join from the left only, so each merge
    is reached in one way.
    """
    merges: list[tuple[str, str]] = []
    words: list[str] = []
    level = ["Ġ"]
    while True:
        longer = []
        for stem, letter in itertools.product(level, string.ascii_lowercase):
            if len(merges) == nodes:
                return merges, words
            merges.append((stem, letter))
            longer.append(stem + letter)
            words.append((stem + letter)[1:])
        level = longer


def _sentence(words: list[str], count: int, source: random.Random) -> str:
    # Zipf: the rank of the word that is drawn is log-uniform.
    picked = (int(len(words) ** source.random()) - 1 for _ in range(count))
    return " ".join(words[index] for index in picked)


def text(context: Context, *, tokens: int) -> Path:
    """JSON lines with at least so many tokens, in documents of 200 to 2,000; made once."""
    path = context.root / f"text-{tokens}.jsonl"
    if not path.is_file():
        _, words = _trie(vocab_size(context) - 256 - len(SPECIAL))
        source, written = random.Random(0), 0
        with path.open("w", encoding="utf-8") as stream:
            while written < tokens:
                count = source.randint(20, 60) if context.pretend else source.randint(200, 2000)
                stream.write(json.dumps({"text": _sentence(words, count, source)}) + "\n")
                written += count
    return path


def chats(context: Context, *, rows: int) -> Path:
    """Prompt and response rows whose lengths vary as instructions do (median about 300)."""
    _, words = _trie(vocab_size(context) - 256 - len(SPECIAL))
    source = random.Random(1)
    longest = 40 if context.pretend else 3000
    lengths = [
        (
            min(longest // 4, 5 + int(source.lognormvariate(4.0, 0.8))),
            min(longest, 5 + int(source.lognormvariate(5.3, 0.9))),
        )
        for _ in range(rows)
    ]
    found = [
        {"prompt": _sentence(words, asked, source), "response": _sentence(words, answered, source)}
        for asked, answered in lengths
    ]
    return _written(context.root / f"chats-{rows}.jsonl", found)


def labelled(context: Context) -> Path:
    """Texts of two kinds that differ in their words."""
    rows = [{"prompt": f"{n} {'odd' if n % 2 else 'even'}", "label": n % 2} for n in range(256)]
    return _written(context.root / "labelled.jsonl", rows)


def experts(context: Context) -> Path:
    """The directory of a small mixture of experts, whose weights are drawn."""
    directory = context.root / "experts"
    directory.mkdir(exist_ok=True)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    config = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **shape, **heads}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def _written(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
