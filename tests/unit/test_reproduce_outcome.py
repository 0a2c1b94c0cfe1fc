"""Two runs compared value by value: nothing that differs may pass as identical."""

from __future__ import annotations

import copy
import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmx.lifecycle.reproduce import print_outcome
from llmx.run.metrics.equality import DIFFER, EQUAL, UNKNOWN, Outcome, compare
from llmx.run.provenance.differences import BREAKS, MAY, Difference


def lines(steps: int = 40, every: int = 10, **more: object) -> list[dict]:
    found: list[dict] = [{"kind": "start", "total_steps": steps, "time": 1.0}]
    for step in [1, *range(every, steps + 1, every)]:
        found.append(
            {"kind": "train", "step": step, "time": float(step), "loss": 3.0 / step,
             "grad_norm": 0.5, "lr": 1e-3, "loss_scale": 1.0, "samples": step * 8, "tokens": 99,
             "target_tokens": 9, "tokens_per_s": 1e4, "memory_gib": [1.0], **more}
        )  # fmt: skip
    found.append({"kind": "eval", "step": steps, "loss": 1.25, "exact_match": None})
    found.append({"kind": "end", "step": steps})
    return found


def test_identical_up_to_times_and_speeds() -> None:
    other = lines(tokens_per_s=2.0, memory_gib=[9.0])
    outcome = compare(lines(), other)
    assert outcome.identical
    assert (outcome.lines, outcome.last_step, outcome.weights) == (6, 40, UNKNOWN)
    assert outcome.summary().startswith("equal over the 6 logged lines up to step 40. The weights")
    assert "no proof that they are equal" in outcome.summary()
    assert not outcome.is_proven
    outcome = compare(lines(), other, hashes_then={40: "a"}, hashes_now={40: "a"})
    assert outcome.weights == EQUAL
    assert outcome.is_proven
    assert outcome.summary() == (
        "bitwise identical: 6 logged lines up to step 40, and the hash of the weights at step 40."
    )


def test_the_summary_says_over_how_much_of_the_first_run_it_holds() -> None:
    short = [line for line in lines() if line.get("step", 0) <= 20]
    outcome = compare(lines(), short)
    assert outcome.summary().startswith(
        "equal over the 3 of 6 logged lines up to step 20 of 40. The weights were not compared"
    )
    weights = {10: "a"}
    outcome = compare(lines(), short, hashes_then=weights, hashes_now=weights)
    assert outcome.summary() == (
        "bitwise identical: 3 of 6 logged lines up to step 20 of 40, and the hash of the weights "
        "at step 10. Later weights were not compared."
    )


@pytest.mark.parametrize("name", ["loss", "grad_norm", "lr", "loss_scale", "samples", "tokens"])
def test_one_value_that_differs_is_the_first_difference(name: str) -> None:
    other = lines()
    other[3][name] = math.nextafter(float(other[3][name]), 1e9)
    outcome = compare(lines(), other)
    assert not outcome.identical
    assert outcome.first is not None
    assert (outcome.first.step, outcome.first.name) == (20, name)
    assert f"differs first at step 20: {name}" in outcome.summary()


def test_the_largest_is_of_a_loss_and_said_with_its_step() -> None:
    other = lines()
    other[2]["grad_norm"] *= 3
    other[4]["loss"] *= 1.01
    other[5]["loss"] *= 1.5
    outcome = compare(lines(), other)
    assert outcome.first is not None
    assert outcome.largest is not None
    assert (outcome.first.step, outcome.first.name) == (10, "grad_norm")
    assert (outcome.largest.step, outcome.largest.name) == (40, "loss")
    assert outcome.largest.relative == pytest.approx(1 / 3)
    assert "Largest difference, at step 40" in outcome.summary()
    assert outcome.gaps == 3


def test_a_run_cut_short_is_compared_as_far_as_it_went() -> None:
    short = [line for line in lines() if line.get("step", 0) <= 20 and line["kind"] != "end"]
    short.append({**lines()[2], "step": 25, "loss": 9.0})  # its own last step, not logged then
    outcome = compare(lines(), short, hashes_then={40: "a", 25: "b"}, hashes_now={25: "b"})
    assert outcome.identical
    assert (outcome.last_step, outcome.weights) == (20, EQUAL)


def test_a_step_without_a_line_is_missing() -> None:
    other = [line for line in lines() if not (line["kind"] == "train" and line["step"] == 20)]
    outcome = compare(lines(), other)
    assert outcome.missing == (20,)
    assert not outcome.identical
    assert "The second run logged nothing at step 20." in outcome.summary()


def test_weights_that_differ_count_although_all_losses_agree() -> None:
    outcome = compare(lines(), lines(), hashes_then={40: "a"}, hashes_now={40: "b"})
    assert outcome.weights == DIFFER
    assert not outcome.identical
    assert "the weights at step 40 are not" in outcome.summary()


def test_nothing_in_common_is_not_identical() -> None:
    outcome = compare([], lines())
    assert not outcome.identical
    assert "nothing to compare" in outcome.summary()


def test_a_loss_that_is_no_number_is_only_equal_to_another() -> None:
    nan = lines(loss=None, nonfinite=True)
    assert compare(nan, copy.deepcopy(nan)).identical
    outcome = compare(lines(), nan)
    assert outcome.first is not None
    assert math.isnan(outcome.first.relative)
    assert "no number now" in outcome.summary()
    assert outcome.to_dict()["first_difference"]["relative"] is None


def test_a_step_that_was_trained_again_counts_as_it_was_last() -> None:
    other = lines()
    other.insert(3, {**other[3], "loss": 99.0})
    assert compare(lines(), other).identical


@given(
    then=st.floats(allow_nan=False, allow_infinity=False),
    now=st.floats(allow_nan=False, allow_infinity=False),
)
def test_identical_means_bit_for_bit(then: float, now: float) -> None:
    same = then.hex() == now.hex()
    one = [{"kind": "train", "step": 1, "loss": then}]
    assert compare(one, [{"kind": "train", "step": 1, "loss": now}]).identical is same


def said(outcome: Outcome, other: list[str], found: list[Difference]) -> str:
    stream = io.StringIO()
    print_outcome(outcome, other, found, stream=stream, where="/runs/b/reproduction.json")
    return stream.getvalue()


def test_what_breaks_equality_is_repeated_beside_the_result() -> None:
    """The table of what differs is hours up by then."""
    weights = {40: "a"}
    outcome = compare(lines(), lines(), hashes_then=weights, hashes_now=weights)
    assert said(outcome, [], []).startswith("\n✓ reproduction: bitwise identical")
    rows = [
        Difference(BREAKS, "model", "1111", "2222", "restore /m"),
        Difference(MAY, "Python", "3.10", "3.11"),
    ]
    text = said(outcome, [], rows)
    assert text.startswith("\n= reproduction: bitwise identical")
    assert "break bitwise equality:\n    model: 1111 then, 2222 now\n" in text
    assert "no effect on what was compared" in text
    assert "Python" not in text


def test_marks() -> None:
    assert said(compare(lines(), lines()), [], []).startswith("\n= ")
    assert said(compare(lines(), lines(loss=1.0)), [], []).startswith("\n≠ ")
    assert said(compare(lines(), []), [], []).startswith("\n? reproduction: nothing to compare")
    assert "read other inputs than those of the first run: data" in said(
        compare(lines(), lines()), ["data"], []
    )
