"""Directories with a vocabulary alone are understood, or the message says what is there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer, pre_tokenizers
from transformers import BertTokenizerFast

from llmx.config import Experiment
from llmx.data.source.files import DEMO_DIRECTORY
from llmx.data.tokenize.tokenizer import tokenizer_fingerprint
from llmx.errors import ConfigError
from llmx.tasks import tokenizer_of

TEXT = "Hello, wörld! 你好 \U0001f600  two  spaces\nA line\u2028more"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "##s", "\u2028", "你", "好"]


def loaded(directory: Path):
    exp = Experiment()
    exp.model.tokenizer = str(directory)
    return tokenizer_of(exp)


def write(directory: Path, vocab: list[str], merges: str | None = "#version: 0.2\nĠ t\n") -> Path:
    directory.mkdir()
    numbers = {token: index for index, token in enumerate(vocab)}
    (directory / "vocab.json").write_text(json.dumps(numbers))
    if merges is not None:
        (directory / "merges.txt").write_text(merges)
    return directory


@pytest.mark.parametrize(
    ("special", "end", "begin"),
    [
        (["<|endoftext|>"], "<|endoftext|>", None),
        (["<s>", "<pad>", "</s>", "<unk>", "<|endoftext|>"], "</s>", "<s>"),
        (["</s>"], "</s>", None),
    ],
)
def test_a_byte_level_vocabulary(tmp_path: Path, special: list[str], end: str, begin: str | None):
    tokenizer = loaded(write(tmp_path / "bpe", [*special, *BYTES, "Ġt"]))
    assert (tokenizer.eos_token, tokenizer.bos_token) == (end, begin)
    ids = tokenizer(TEXT)["input_ids"]
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == TEXT
    assert tokenizer(end)["input_ids"] == [special.index(end)]
    tokenizer.save_pretrained(tmp_path / "saved")
    again = loaded(tmp_path / "saved")
    assert again(TEXT)["input_ids"] == ids
    assert tokenizer_fingerprint(again) == tokenizer_fingerprint(tokenizer)


def test_a_wordpiece_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "lower").mkdir()
    (tmp_path / "lower" / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    tokenizer = loaded(tmp_path / "lower")
    assert tokenizer.get_vocab() == {word: index for index, word in enumerate(WORDS)}
    assert tokenizer("HELLO 你好", add_special_tokens=False)["input_ids"] == [5, 8, 9]
    assert tokenizer.eos_token == "[SEP]"
    assert "a WordPiece like BERT's (in lower case), EOS [SEP]" in capsys.readouterr().err
    (tmp_path / "cased").mkdir()
    text = "\r\n".join([*WORDS, "Hello"])
    (tmp_path / "cased" / "vocab.txt").write_bytes(text.encode())
    tokenizer = loaded(tmp_path / "cased")
    assert tokenizer("Hello hello", add_special_tokens=False)["input_ids"] == [10, 5]


@pytest.mark.parametrize(
    ("vocab", "merges", "message"),
    [
        (BYTES, "Ġ t\n", r"neither <\|endoftext\|> nor </s> is in vocab\.json"),
        (["</s>", "a", "b"], "a b\n", "no byte-level BPE .25[0-9] of 256 bytes have no token"),
        (["</s>", *BYTES], "x yz\n", r"merges\.txt does not fit vocab\.json"),
        (
            ["</s>", *BYTES],
            None,
            r"no tokenizer can be loaded .*: there is vocab\.json",
        ),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, vocab: list[str], merges: str, message: str):
    with pytest.raises(ConfigError, match=message):
        loaded(write(tmp_path / "bpe", vocab, merges))


def test_a_directory_that_is_none_of_these(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="model.tokenizer=.*empty is a directory.*: it is empty"):
        loaded(tmp_path / "empty")
    (tmp_path / "empty" / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(ConfigError, match=r"vocab\.txt has no \[UNK\]"):
        loaded(tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"vocab\.txt is a file\. Give its directory"):
        loaded(tmp_path / "empty" / "vocab.txt")
    with pytest.raises(ConfigError, match="no such directory"):
        loaded(tmp_path / "missing")
    (tmp_path / "empty" / "vocab.txt").unlink()
    (tmp_path / "empty" / "vocab.json").write_text("[1]")
    (tmp_path / "empty" / "merges.txt").write_text("")
    with pytest.raises(ConfigError, match="no vocabulary, which is an object"):
        loaded(tmp_path / "empty")


def test_a_tokenizer_that_fails_on_a_text_is_named(tmp_path: Path):
    shutil.copytree(DEMO_DIRECTORY / "tokenizer", tmp_path / "odd")
    settings = tmp_path / "odd" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "model_max_length": "x"}))
    with pytest.raises(ConfigError, match=r"odd: its tokenizer fails on .*tokenizer_config\.json"):
        loaded(tmp_path / "odd")


def test_real_vocabularies(real_data: Path, tmp_path: Path):
    """Ids are those of the libraries' own readers."""
    folder = real_data / "gpt2_bpe"
    tokenizer = loaded(folder)
    reference = ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    texts = (real_data / "tinyshakespeare.txt").read_text()[:20_000].split("\n\n")
    texts += (real_data / "CLUECorpusSmall_sampled.txt").read_text()[:10_000].split("\n")
    for text in [*texts, TEXT]:
        assert tokenizer(text)["input_ids"] == reference.encode(text).ids
    assert tokenizer.eos_token_id == 2
    (tmp_path / "bert").mkdir()
    shutil.copy(real_data / "bert_zh_vocab.txt", tmp_path / "bert" / "vocab.txt")
    tokenizer = loaded(tmp_path / "bert")
    bert = BertTokenizerFast.from_pretrained(tmp_path / "bert")
    # The library's reader strips tokens that are line breaks, which no text can give.
    assert {token.rstrip(): i for token, i in tokenizer.get_vocab().items()} == bert.get_vocab()
    for text in [*texts, TEXT]:
        assert tokenizer(text)["input_ids"] == bert(text)["input_ids"]
