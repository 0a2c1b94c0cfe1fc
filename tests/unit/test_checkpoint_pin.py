"""What is being copied elsewhere is not pruned."""

from __future__ import annotations

from pathlib import Path

from llmx.checkpoint.pointers import pin, pinned


def test_pins_are_replaced_as_a_whole(tmp_path: Path) -> None:
    assert pinned(tmp_path) == set()
    pin(tmp_path, [120, 80])
    assert pinned(tmp_path) == {80, 120}
    pin(tmp_path, [160])
    assert pinned(tmp_path) == {160}
    assert [path.name for path in tmp_path.iterdir()] == ["pinned"]


def test_words_that_are_no_steps_are_nothing(tmp_path: Path) -> None:
    (tmp_path / "pinned").write_text("step-00000040\nlatest\n\n")
    assert pinned(tmp_path) == {40}
    (tmp_path / "pinned").write_bytes(b"\xff\xfe")
    assert pinned(tmp_path) == set()
