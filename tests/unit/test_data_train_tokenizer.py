"""Training a tokenizer: it loads, gives text back, and learns from a sample of bounded size."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from llmx.__main__ import main
from llmx.config import Experiment, SourceConfig
from llmx.data.format.rows import Conversation, Message
from llmx.data.source.files import DEMO_DIRECTORY
from llmx.data.source.records import Document, Where
from llmx.data.tokenize.conversations import Renderer
from llmx.data.tokenize.train import TEXT_CHARS, TextSample, texts_of, train_tokenizer
from llmx.errors import ConfigError, DataError

WHERE = Where(Path("rows.jsonl"), 1, "line")
STRANGE = "tabs\tand  spaces\n\n  ünïcode 春天 🙂 <|im_end|> 12345"


def experiment(tmp_path: Path, **options) -> Experiment:
    exp = Experiment()
    exp.data.path = str(DEMO_DIRECTORY / "train.jsonl")
    exp.tokenizer.output, exp.tokenizer.vocab_size = str(tmp_path / "made"), 700
    for name, value in options.items():
        setattr(exp.tokenizer, name, value)
    return exp


@pytest.mark.parametrize("kind", ["bbpe", "sentencepiece"])
def test_it_loads_and_gives_text_back(tmp_path: Path, kind: str):
    exp = experiment(tmp_path, kind=kind)
    trained = train_tokenizer(exp.tokenizer, exp.data, exp.seed)
    tokenizer = AutoTokenizer.from_pretrained(trained.path)
    assert len(tokenizer) == trained.vocab_size == 700
    assert "700; 704 when padded to a multiple of 64" in str(trained)
    assert 2 < trained.bytes_per_token < 5
    ids = tokenizer(STRANGE, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(ids) == STRANGE
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in ids
    assert None not in (tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    # A chat is rendered with its special tokens, of which the end is learned.
    chat = Conversation((Message("user", "Who?"), Message("assistant", "Anna.")), WHERE)
    (row,) = Renderer(tokenizer).conversations([chat])
    assert tokenizer.decode(row.tokens) == (
        "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nAnna.<|im_end|>"
    )
    assert tokenizer.decode(row.tokens[row.targets]) == "Anna.<|im_end|>"
    assert list(tmp_path.iterdir()) == [trained.path]


def test_two_trainings_are_the_same(tmp_path: Path):
    paths = []
    for name in "ab":
        exp = experiment(tmp_path, output=str(tmp_path / name), max_bytes=1 << 16)
        paths.append(train_tokenizer(exp.tokenizer, exp.data, exp.seed).path)
    assert len({(path / "tokenizer.json").read_bytes() for path in paths}) == 1


def test_another_template_brings_its_control_tokens(tmp_path: Path):
    exp = experiment(tmp_path)
    exp.data.template = "llama3"
    tokenizer = AutoTokenizer.from_pretrained(
        train_tokenizer(exp.tokenizer, exp.data, exp.seed).path
    )
    chat = [{"role": "user", "content": "Who?"}]
    ids = tokenizer.apply_chat_template(chat, return_dict=False)
    for token in ("<|start_header_id|>", "<|eot_id|>"):
        assert tokenizer.convert_tokens_to_ids(token) in ids


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"vocab_size": 200}, ConfigError, "vocab_size=200: 260 are taken"),
        ({"max_bytes": 5}, ConfigError, "max_bytes=5: at least 65536"),
        (
            {"kind": "sentencepiece", "vocab_size": 64000},
            ConfigError,
            r"not enough text for so many tokens.*tokenizer\.vocab_size=\d+ or less",
        ),
        ({"max_memory_gib": 0.1}, ConfigError, "max_memory_gib=0.1: at least 0.5"),
        ({"output": "{tmp_path}"}, ConfigError, "exists already"),
        ({"output": "/proc/none/made"}, DataError, r"Set tokenizer\.output"),
    ],
)
def test_what_cannot_be_is_said(tmp_path: Path, options: dict, error: type, message: str):
    options = {
        key: value.format(tmp_path=tmp_path) if isinstance(value, str) else value
        for key, value in options.items()
    }
    exp = experiment(tmp_path, **options)
    with pytest.raises(error, match=message):
        train_tokenizer(exp.tokenizer, exp.data, exp.seed)
    assert list(tmp_path.iterdir()) == []


def test_a_small_vocabulary_of_little_text_is_reported_as_it_is(tmp_path: Path):
    exp = experiment(tmp_path, vocab_size=64000)
    (tmp_path / "a.txt").write_text("so few words " * 50)
    exp.data.path, exp.data.form = str(tmp_path / "a.txt"), "auto"
    trained = train_tokenizer(exp.tokenizer, exp.data, exp.seed)
    assert 260 < trained.vocab_size < 300
    assert "asked for 64,000" in str(trained)


def test_a_source_without_a_row_beside_another(tmp_path: Path):
    """Its form is asked of no record; with the other alone the tokenizer is the same."""
    full, empty = tmp_path / "full.jsonl", tmp_path / "empty.jsonl"
    full.write_text('{"text": "so few words"}\n' * 50)
    empty.write_text("")
    exp = experiment(tmp_path, vocab_size=64000)
    exp.data.form, exp.data.path = "auto", ""
    exp.data.sources = [SourceConfig(path=str(path)) for path in (empty, full)]
    trained = train_tokenizer(exp.tokenizer, exp.data, exp.seed)
    assert 260 < trained.vocab_size < 300


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
    everything = sampled(tmp_path / "all", texts, max_bytes=1 << 20)
    assert everything == texts
    few = sampled(tmp_path / "few", texts, max_bytes=40_000)
    assert 15_000 < sum(map(len, few)) <= 40_000
    assert sampled(tmp_path / "again", texts, max_bytes=40_000) == few
    assert sampled(tmp_path / "other", texts, max_bytes=40_000, seed=1) != few
    assert few == sorted(few)
    thousands = Counter(int(text[5:]) // 5000 for text in few)
    assert min(thousands.values()) > 0.7 * len(few) / 4


def test_a_sample_is_bounded_by_its_different_words(tmp_path: Path):
    few = TextSample(tmp_path, max_bytes=1 << 20, seed=0)
    for _ in range(3000):
        few.add("the same five words again")
    few.fit_words(100)
    assert few.bytes == few.bytes_read
    (tmp_path / "many").mkdir()
    many = TextSample(tmp_path / "many", max_bytes=1 << 20, seed=0)
    for number in range(3000):
        many.add(f"word{number:04}")
    many.fit_words(8000)
    assert 3000 < many.bytes <= 8000
    for sample in (few, many):
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


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """As a user writes it, with a data group and no model."""
    monkeypatch.chdir(tmp_path)
    words = [f"data.path={DEMO_DIRECTORY}/train.jsonl", "tokenizer.kind=bbpe"]
    words += ["tokenizer.vocab_size=500"]
    code, said = main(["tokenizer", "data=file", *words]), capfd.readouterr()
    assert code == 0, said.err
    made = tmp_path / "tokenizers" / "file-bbpe-500"
    assert f"model.tokenizer={made}" in said.out
    assert len(AutoTokenizer.from_pretrained(made)) == 500
