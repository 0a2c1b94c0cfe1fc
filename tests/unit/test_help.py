"""``--help`` is worth reading: every group and option with its line, commands, five examples."""

from __future__ import annotations

import pytest

from llmx.catalogue import GROUPS, first_comment, options
from llmx.help import COMMANDS, EXAMPLES, help_text
from tests.composing import composed


def test_help_is_the_golden_one(golden) -> None:
    golden("help.txt", help_text() + "\n")


def test_help_names_everything() -> None:
    text = help_text()
    for name in COMMANDS:
        assert f"  {name} " in text
    for group in GROUPS:
        for option, line in options(group).items():
            assert f"  {option} " in text
            assert line, f"{group}={option} has no line"
    assert len(EXAMPLES) >= 5
    assert max(len(line) for line in text.splitlines()) <= 100


@pytest.mark.parametrize("command", [command for command, _ in EXAMPLES])
def test_examples_compose(command: str) -> None:
    words = command.removeprefix("python -m llmx").split()
    sweep = "-m" in words
    words = [word.split(",")[0] if sweep else word for word in words if word != "-m"]
    if "--config-dir" in words:  # the reader's own cluster: any other stands for it
        at = words.index("--config-dir")
        words = [*words[:at], *words[at + 2 :]]
        words = [word.replace("hardware=mine", "hardware=a100x8") for word in words]
    words = [word.replace("chats.jsonl", "/data/chats.jsonl") for word in words]
    assert composed(words).plan.world_size >= 1


def test_first_comment_skips_directives(tmp_path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("# @package _global_\n# What it is.\na: 1\n")
    assert first_comment(path) == "What it is."
