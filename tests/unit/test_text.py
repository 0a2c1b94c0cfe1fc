"""Numbers with their nouns, and text for terminals."""

from __future__ import annotations

import re

import pytest

from llmx.text import file_name, one_line, plural, printable, wrapped


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (1200, "1,200 rows"), (1.0, "1 row"),
     (0.5, "0.5 rows"), (8890.0, "8,890 rows")],
)  # fmt: skip
def test_a_number_agrees_with_its_noun(count: float, words: str) -> None:
    assert plural(count, "row") == words


def test_a_terminal_is_not_steered() -> None:
    text = "a\x1b[2J\x1b]0;title\x07b\r\x9bc\u202ed\ud800\ufeff"
    assert printable(text) == r"a\x1b[2J\x1b]0;title\x07b\x0d\x9bc\u202ed\ud800\ufeff"
    printable(text).encode()


def test_writing_of_the_world_stays() -> None:
    text = "中文\n\t\u05d9\u05d5\u05dd العربية 👩\u200d🚀 naïve\u00a0é"
    assert printable(text) == text
    assert printable("a\nb", keep="") == r"a\x0ab"
    assert one_line("a\x1b[2J\n b\u202e", limit=40) == r"a\x1b[2J b\u202e"


def test_a_long_name_is_that_of_a_file_and_still_tells_two_apart() -> None:
    assert file_name("zero-stage1") == "zero-stage1"
    one, two = file_name("中" * 100 + "1"), file_name("中" * 100 + "2")
    assert one != two
    assert one.startswith("中" * 63)
    assert len(one.encode()) <= 200


@pytest.mark.parametrize(
    ("text", "name"),
    [("data.path-../../a.jsonl", "data.path--a.jsonl"), ("..", "-"), ("a/..", "a-"),
     ("data.path-/x/a.jsonl", "data.path--x-a.jsonl"), ("a\x1b[2J\nb", "a-[2J-b")],
)  # fmt: skip
def test_a_name_made_from_a_value_stays_in_its_directory(text: str, name: str) -> None:
    assert re.fullmatch(rf"{re.escape(name)}-[0-9a-f]{{8}}", file_name(text))
    assert file_name(name) == name, "and is not that of another value"


def test_no_line_breaks_inside_a_word_or_a_number() -> None:
    text = "  Data (train): 145,774 tokens in /a/long/path/that/no/line/has/room/for  next\nstep  0"
    lines = wrapped(text, width=24).split("\n")
    assert [line for line in lines if line.strip() not in text] == []
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())
    assert [len(line) > 24 for line in lines].count(True) == 1
    assert lines[-1] == "step  0"
    assert all(line.startswith("  ") for line in lines[:-1])
