"""Warnings of rewards and lengths that collapse: once, and not for a few steps alone."""

from __future__ import annotations

from llmx.tasks.collapse import STEPS, CollapseWatch


def seen(steps: list[tuple[float, float]]) -> dict[int, list[str]]:
    """The warnings by step, from 1, of (share without signal, tokens)."""
    watch = CollapseWatch()
    warnings = {
        number: watch.see(no_signal=no_signal, reward=0.25, tokens=tokens)
        for number, (no_signal, tokens) in enumerate(steps, start=1)
    }
    return {number: texts for number, texts in warnings.items() if texts}


def test_equal_rewards_are_named_once() -> None:
    silent, other = (1.0, 50.0), (0.9, 50.0)
    assert seen([*[silent] * (STEPS - 1), other] * 3) == {}
    warnings = seen([other, *[silent] * 3 * STEPS])
    assert [*warnings] == [STEPS + 1]
    assert "the same reward in each of the last 10 steps (mean reward now 0.25)" in str(warnings)


def test_completions_that_become_short_are_named_once() -> None:
    long, short = (0.0, 100.0), (0.0, 15.0)
    assert seen([*[long] * 20, *[short] * 3, *[long] * 20]) == {}
    assert seen([(0.0, 25.0 if number > 20 else 100.0) for number in range(60)]) == {}
    assert seen([short] * 40) == {}, "short from the beginning"
    warnings = seen([*[long] * 20, *[short] * 40])
    assert [*warnings] == [20 + STEPS]
    assert "averaged 15.0 tokens over the last 10 steps, and 100.0 at first" in str(warnings)
