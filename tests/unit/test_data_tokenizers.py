"""Tokenizers: trained from a sample of bounded size; of a directory with a vocabulary alone."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers import ByteLevelBPETokenizer, pre_tokenizers
from transformers import AutoTokenizer, BertTokenizerFast

from llmx.cli.main import run_here
from llmx.config import Experiment, SourceConfig
from llmx.data.format.rows import Conversation, Message
from llmx.data.source.files import DEMO_DIRECTORY
from llmx.data.source.records import Document
from llmx.data.tokenize.conversations import Renderer
from llmx.data.tokenize.tokenizer import tokenizer_fingerprint
from llmx.data.tokenize.train import TEXT_CHARS, TextSample, texts_of, train_tokenizer
from llmx.errors import ConfigError, DataError
from llmx.tasks import tokenizer_of
from tests.data_rows import WHERE, write_rows

STRANGE = "tabs\tand  spaces\n\n  ünïcode 春天 🙂 <|im_end|> 12345"


def experiment(directory: Path, **options: Any) -> Experiment:
    exp = Experiment()
    exp.data.path = str(DEMO_DIRECTORY / "train.jsonl")
    options = {
        "output": str(directory / "made"),
        "vocab_size": 700,
        "max_bytes": 1 << 16,
        **options,
    }
    for name, value in options.items():
        setattr(exp.tokenizer, name, value)
    return exp


def train(exp: Experiment) -> tuple[Path, str]:
    return train_tokenizer(exp.tokenizer, exp.data, exp.seed)


def test_it_loads_and_gives_text_back(tmp_path: Path):
    trained, summary = train(experiment(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(trained)
    assert len(tokenizer) == 700
    assert "700; 704 when padded to a multiple of 64" in summary
    assert re.search(r"[234]\.\d\d bytes per token", summary)
    ids = tokenizer(STRANGE, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(ids) == STRANGE
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in ids
    assert None not in (tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    # A chat is rendered with its special tokens, of which the end is learned.
    chat = Conversation((Message("user", "Who?"), Message("assistant", "Anna.")), WHERE)
    (row,) = Renderer(tokenizer).conversations([chat])
    answer = "Anna.<|im_end|>"
    asked = f"<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n{answer}"
    assert tokenizer.decode(row.tokens) == asked
    assert tokenizer.decode(row.tokens[row.targets]) == answer
    assert list(tmp_path.iterdir()) == [trained]
    again, _ = train(experiment(tmp_path, output=str(tmp_path / "again")))
    assert len({(path / "tokenizer.json").read_bytes() for path in (trained, again)}) == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"vocab_size": 200}, ConfigError, "vocab_size=200: 260 are taken"),
        ({"output": "{tmp_path}"}, ConfigError, "exists already"),
        ({"output": "/proc/none/made"}, DataError, r"Set tokenizer\.output"),
    ],
)
def test_what_cannot_be_is_said(tmp_path: Path, options: dict, error: type, message: str):
    exp = experiment(tmp_path, **options)
    exp.tokenizer.output = exp.tokenizer.output.format(tmp_path=tmp_path)
    with pytest.raises(error, match=message):
        train(exp)
    assert list(tmp_path.iterdir()) == []


def test_a_small_vocabulary_of_little_text_is_reported_as_it_is(tmp_path: Path):
    """Of a source beside it without a row, the form is asked of no record."""
    paths = [
        str(write_rows(tmp_path / "full.jsonl", [{"text": "so few words"}] * 50)),
        str(write_rows(tmp_path / "empty.jsonl", [])),
    ]
    exp = experiment(tmp_path, vocab_size=64000)
    exp.data.form, exp.data.path, exp.data.template = "auto", "", "llama3"
    exp.data.sources = [SourceConfig(path=path) for path in reversed(paths)]
    trained, summary = train(exp)
    assert "asked for 64,000" in summary
    # Another template brings its control tokens.
    tokenizer = AutoTokenizer.from_pretrained(trained)
    assert 260 < len(tokenizer) < 300
    chat = [{"role": "user", "content": "Who?"}]
    ids = tokenizer.apply_chat_template(chat, return_dict=False)
    control = tokenizer.convert_tokens_to_ids(["<|start_header_id|>", "<|eot_id|>"])
    assert {*control} <= {*ids} - {tokenizer.unk_token_id}


def test_the_command_takes_a_data_group_and_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    made = tmp_path / "tokenizers" / "file-bbpe-500"
    path = f"data.path={DEMO_DIRECTORY}/train.jsonl"
    words = [path, "tokenizer.kind=bbpe", "tokenizer.vocab_size=500"]
    code, said = run_here("tokenizer", ["data=file", *words]), capfd.readouterr()
    assert code == 0, said.err
    assert f"model.tokenizer={made}" in said.out
    assert len(AutoTokenizer.from_pretrained(made)) == 500


# The sample


def sampled(directory: Path, texts: list[str], *, max_bytes: int, seed: int = 0) -> list[str]:
    directory.mkdir()
    sample = TextSample(directory, max_bytes=max_bytes, seed=seed)
    for text in texts:
        sample.add(text)
    found = list(sample)
    assert sample.bytes == sum(len(text.encode()) for text in found) <= max_bytes
    assert sample.bytes_read == sum(len(text.encode()) for text in texts)
    assert sum(path.stat().st_size for path in directory.iterdir()) <= max_bytes + 12 * len(found)
    sample.close()
    return found


def test_a_sample_is_bounded_even_and_the_same_again(tmp_path: Path):
    texts = [f"text {number:05}" for number in range(20_000)]
    assert sampled(tmp_path / "all", texts, max_bytes=1 << 20) == texts
    few = sampled(tmp_path / "few", texts, max_bytes=40_000)
    assert 15_000 < sum(map(len, few)) <= 40_000
    assert sampled(tmp_path / "again", texts, max_bytes=40_000) == few
    assert sampled(tmp_path / "other", texts, max_bytes=40_000, seed=1) != few
    assert few == sorted(few)
    thousands = Counter(int(text[5:]) // 5000 for text in few)
    assert min(thousands.values()) > 0.7 * len(few) / 4


@pytest.mark.parametrize(
    ("text", "words", "kept"),
    [("the same five words again", 100, range(75_000, 75_001)), ("word{:04}", 8000, range(8001))],
)
def test_a_sample_is_bounded_by_its_different_words(
    tmp_path: Path, text: str, words: int, kept: range
):
    sample = TextSample(tmp_path, max_bytes=1 << 20, seed=0)
    for number in range(3000):
        sample.add(text.format(number))
    sample.fit_words(words)
    assert sample.bytes in kept
    assert sample.bytes > 3000
    sample.close()


def test_texts_are_cut_at_lines():
    long = "".join(f"line {i}\n" for i in range(10_000))
    pieces = list(texts_of([Document(long, WHERE), None]))
    assert "".join(pieces) == long
    assert max(map(len, pieces)) <= TEXT_CHARS
    assert all(piece.endswith("\n") for piece in pieces)
    assert "".join(texts_of([Document("x" * 40_000, WHERE)])) == "x" * 40_000
    chat = Conversation((Message("user", "a"), Message("assistant", "b")), WHERE, tools="[1]")
    assert list(texts_of([chat])) == ["a", "b", "[1]"]


# A directory with a vocabulary alone

TEXT = "Hello, wörld! 你好 \U0001f600  two  spaces\nA line\u2028more"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "##s", "\u2028", "你", "好"]


def loaded(directory: Path) -> Any:
    exp = Experiment()
    exp.model.tokenizer = str(directory)
    return tokenizer_of(exp)


def write(directory: Path, **files: str | None) -> Path:
    """A directory of these files; ``vocab_json`` is ``vocab.json``."""
    directory.mkdir()
    for name, content in files.items():
        if content is not None:
            (directory / name.replace("_", ".")).write_bytes(content.encode())
    return directory


def numbered(*tokens: str) -> str:
    return json.dumps({token: index for index, token in enumerate(tokens)})


@pytest.mark.parametrize(
    ("special", "end", "begin"),
    [
        (["<|endoftext|>"], "<|endoftext|>", None),
        (["<s>", "<pad>", "</s>", "<unk>", "<|endoftext|>"], "</s>", "<s>"),
        (["</s>"], "</s>", None),
    ],
)
def test_a_byte_level_vocabulary(tmp_path: Path, special: list[str], end: str, begin: str | None):
    vocab, merges = numbered(*special, *BYTES, "Ġt"), "#version: 0.2\nĠ t\n"
    tokenizer = loaded(write(tmp_path / "bpe", vocab_json=vocab, merges_txt=merges))
    assert (tokenizer.eos_token, tokenizer.bos_token) == (end, begin)
    ids = tokenizer(TEXT)["input_ids"]
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == TEXT
    assert tokenizer(end)["input_ids"] == [special.index(end)]
    tokenizer.save_pretrained(tmp_path / "saved")
    again = loaded(tmp_path / "saved")
    assert again(TEXT)["input_ids"] == ids
    assert tokenizer_fingerprint(again) == tokenizer_fingerprint(tokenizer)


def test_a_wordpiece_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tokenizer = loaded(write(tmp_path / "lower", vocab_txt="\n".join(WORDS) + "\n"))
    assert tokenizer.get_vocab() == {word: index for index, word in enumerate(WORDS)}
    assert tokenizer("HELLO 你好", add_special_tokens=False)["input_ids"] == [5, 8, 9]
    assert tokenizer.eos_token == "[SEP]"
    assert "a WordPiece like BERT's, EOS [SEP]" in capsys.readouterr().err
    tokenizer = loaded(write(tmp_path / "cased", vocab_txt="\r\n".join([*WORDS, "Hello"])))
    assert tokenizer("Hello hello", add_special_tokens=False)["input_ids"] == [10, 5]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((numbered(*BYTES), "Ġ t\n"), r"no EOS token: neither <\|endoftext\|> nor </s>"),
        (
            (numbered("</s>", "a"), "a b\n"),
            "as a byte-level BPE .*25[0-9] of 256 bytes have no token",
        ),
        (
            (numbered("</s>", *BYTES), "x yz\n"),
            r"cannot read vocab\.json and merges\.txt as .*`yz` out of vocabulary",
        ),
        ((numbered("</s>", *BYTES), None), r"can be loaded .*: there is vocab\.json"),
        (("[1]", ""), "256 of 256 bytes have no token"),
        ((None, None, "a\nb\n"), r"read vocab\.txt as .*has no \[PAD\], \[UNK\]"),
        ((), "model.tokenizer=.*made is a directory.*: it is empty"),
    ],
)
def test_a_directory_that_is_none_of_these_is_said(tmp_path: Path, files: tuple, message: str):
    names = ("vocab_json", "merges_txt", "vocab_txt")
    with pytest.raises(ConfigError, match=message):
        loaded(write(tmp_path / "made", **dict(zip(names, files, strict=False))))


def test_names_of_no_directory_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(ConfigError, match=r"vocab\.txt is a file\. Give its directory"):
        loaded(tmp_path / "vocab.txt")
    with pytest.raises(ConfigError, match="no such directory"):
        loaded(tmp_path / "missing")
    # As HF_HUB_OFFLINE=1 sets it, when the client is imported.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"'nobody/none' cannot be loaded.*hf download"):
        loaded(Path("nobody/none"))


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
